"""A parameter server as a Ray actor with a numpy array; workers are processes that call it. What a worker gets is a
read-only view of Ray's object store: copying it into a model is not counted."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np

from benchmarks.server.drivers.base import LEARNING_RATE
from benchmarks.server.plan import Plan

_NAME, _NAMESPACE = "server", "bench"


def _ray() -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Who starts a cluster turns this on for itself only; a driver without it finds no cluster, and is not told why.
    os.environ["RAY_AUTH_MODE"] = "token"
    return importlib.import_module("ray")


class RayDriver:
    def obstacle(self) -> str:
        return "" if importlib.util.find_spec("ray") else "Ray is not installed (pip install ray)"

    def serve(self, plan: Plan, told: Any) -> None:
        ray = _ray()
        context = ray.init(
            num_cpus=plan.num_workers + 1,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",  # nothing beyond loopback
            namespace=_NAMESPACE,
            log_to_driver=False,
            object_store_memory=max(2 << 30, 16 * 4 * plan.size),
        )

        class Server:
            def __init__(self, size: int) -> None:
                self._values = np.zeros(size, dtype=np.float32)

            def push_and_pull(self, gradient: Any) -> Any:
                self._values -= np.float32(LEARNING_RATE) * gradient
                return self._values

        server = ray.remote(num_cpus=0)(Server).options(name=_NAME).remote(plan.size)
        ray.get(server.push_and_pull.remote(np.zeros(plan.size, dtype=np.float32)))
        told.send(f"127.0.0.1:{context.address_info['address'].rpartition(':')[2]}")
        told.recv()
        ray.shutdown()

    def worker(self, plan: Plan, address: Any, number: int) -> _RayWorker:
        return _RayWorker(plan, address)


class _RayWorker:
    def __init__(self, plan: Plan, address: str) -> None:
        ray = _ray()
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, _node_ip_address="127.0.0.1")
        self._ray = ray
        self._server = ray.get_actor(_NAME)
        self._gradient = np.full(plan.size, 1e-3, dtype=np.float32)

    def do(self, measure: str, number: int) -> None:
        self._ray.get(self._server.push_and_pull.remote(self._gradient))

    def close(self) -> None:
        self._ray.shutdown()
