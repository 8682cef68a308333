"""A server group in one process without sockets, clocks or tensors: the real keepers, placements, errands and leases.

    ServingWorld(seed=17).run()                  # raises Violation, naming what was broken and how to replay it

From the seed follow the mode (steps, leases, bounded leases), how many servers, replicas and workers there are, the
delays of messages, who dies, comes and goes, and when the coordinator crashes. The state of a range is the list of what
was applied to it, so two replicas that did not do the same differ, and what counts twice, or not at all, is seen.
"""

from paceline.testing.serving.world import ServingWorld
from paceline.testing.simulation.truth import Violation

__all__ = ["ServingWorld", "Violation"]
