"""A contender: how its server is started, and what a worker does."""

from __future__ import annotations

from benchmarks.server.drivers.base import Driver
from benchmarks.server.plan import PACELINE, RAY, REDIS, RPC


def driver_of(name: str) -> Driver:
    """Its module is imported only now: not everybody has it installed."""
    if name == PACELINE:
        from benchmarks.server.drivers.paceline import PacelineDriver

        return PacelineDriver()
    if name == RPC:
        from benchmarks.server.drivers.rpc import RpcDriver

        return RpcDriver()
    if name == RAY:
        from benchmarks.server.drivers.ray import RayDriver

        return RayDriver()
    if name == REDIS:
        from benchmarks.server.drivers.redis import RedisDriver

        return RedisDriver()
    raise ValueError(f"there is no contender {name!r}")
