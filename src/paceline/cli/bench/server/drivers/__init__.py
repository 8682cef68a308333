"""A contender: how its server is started, and what a worker does."""

from __future__ import annotations

from paceline.cli.bench.server.drivers.base import Driver
from paceline.cli.bench.server.plan import PACELINE, RAY, REDIS, RPC


def driver_of(name: str) -> Driver:
    """Its module is imported only now: not everybody has it installed."""
    if name == PACELINE:
        from paceline.cli.bench.server.drivers.paceline import PacelineDriver

        return PacelineDriver()
    if name == RPC:
        from paceline.cli.bench.server.drivers.rpc import RpcDriver

        return RpcDriver()
    if name == RAY:
        from paceline.cli.bench.server.drivers.ray import RayDriver

        return RayDriver()
    if name == REDIS:
        from paceline.cli.bench.server.drivers.redis import RedisDriver

        return RedisDriver()
    raise ValueError(f"there is no contender {name!r}")
