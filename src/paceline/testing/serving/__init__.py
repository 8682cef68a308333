"""A server group in one process without sockets, clocks or tensors: the real keepers, placements, errands and leases.

    ServingWorld(seed=17).run()                  # raises Violation, naming what was broken and how to replay it

From the seed follow the mode (steps, leases, bounded leases), how many servers, replicas and workers there are, the
delays of messages, who dies, stops, is evicted, comes and goes, which connections break, and when the coordinator
crashes. The state of a range is the list of what was applied to it, so two replicas that did not do the same differ,
and what counts twice, or not at all, is seen.

world.py       time, messages, who is there
chief.py       the coordinator's part
parts.py       servers: a keeper, a store of lists, links
workers.py     workers that do leases, and a crew that does steps
faults.py      what goes wrong, and when
checks.py      what must hold
mutations.py   faults in the machines that the simulator must see
"""

from paceline.testing.serving.world import ServingWorld
from paceline.testing.simulation.truth import Violation

__all__ = ["ServingWorld", "Violation"]
