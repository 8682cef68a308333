"""A run in one process without sockets or clocks: the real machines of `control`, a simulated network and time.

    world = World(seed=17)
    world.run()                                  # raises Violation, naming what was broken and how to replay it

From the seed follow the network's delays, losses and repetitions, who dies, stops, is cut off, joins and leaves, and
when the coordinator crashes. A member's training state is a digest that depends on every operation it applied and on
the generation in which each was computed (as rounding does), so two members that did not do the same differ.
"""

from paceline.testing.simulation.truth import Violation
from paceline.testing.simulation.world import World

__all__ = ["Violation", "World"]
