"""Faults put into what production runs, on purpose: the simulator must see each of them.

Each replaces a class of `paceline.control`, `paceline.placement` or `paceline.server`; none changes what the simulator
itself reads.
"""

from paceline.testing.joint.mutations.mutation import SOUND, Mutation
from paceline.testing.joint.mutations.of_control import OF_CONTROL
from paceline.testing.joint.mutations.of_servers import OF_SERVERS

MUTATIONS = [*OF_CONTROL, *OF_SERVERS]

__all__ = ["MUTATIONS", "SOUND", "Mutation"]
