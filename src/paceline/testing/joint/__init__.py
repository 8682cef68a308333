"""A whole run in one process without sockets, clocks or tensors: all real machines together, from one seed.

World(seed=17).run()                         # raises Violation, naming what was broken and how to replay it
"""

from paceline.testing.joint.truth import Violation
from paceline.testing.joint.world import World

__all__ = ["Violation", "World"]
