"""Faults put into what production runs, on purpose: the simulator must see each of them.

Each replaces a class of `paceline.control`, `paceline.placement` or `paceline.server`; none changes what the simulator
itself reads.
"""

from tests.control.mutations.of_control import OF_CONTROL
from tests.control.mutations.of_servers import OF_SERVERS

MUTATIONS = [*OF_CONTROL, *OF_SERVERS]
