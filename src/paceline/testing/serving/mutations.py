"""Faults put into the machines of the server group on purpose: the simulator must see each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.control.leases import Desk
from paceline.control.serving import ServerManager
from paceline.server.keeper import Keeper


class Mutation(NamedTuple):
    name: str
    keeper: Callable[..., Keeper] = Keeper
    manager: Callable[..., ServerManager] = ServerManager
    desk: Callable[..., Desk] = Desk


SOUND = Mutation("sound")
MUTATIONS: list[Any] = []
