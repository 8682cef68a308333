"""A parameter server on torch.distributed.rpc, written in the usual way: one tensor, or a dict from id to row number
beside a tensor of rows, on the server; workers call functions there."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.rpc as rpc

from benchmarks.common.ports import free_port
from benchmarks.server.drivers.base import LEARNING_RATE, batches, gradients, id_of
from benchmarks.server.plan import DENSE, Plan

_SERVER = "server"
_TIMEOUT_S = 120.0
_state: dict[str, Any] = {}


def _push_and_pull(gradient: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = _state["values"]
    return values.add_(gradient, alpha=-LEARNING_RATE)


def _pull(ids: torch.Tensor) -> torch.Tensor:
    index = _state["index"]
    slots = torch.tensor([index[key] for key in ids.tolist()])
    rows: torch.Tensor = _state["rows"]
    return rows[slots]


def _push(ids: torch.Tensor, values: torch.Tensor) -> None:
    index = _state["index"]
    slots = torch.tensor([index[key] for key in ids.tolist()])
    _state["rows"].index_add_(0, slots, values, alpha=-LEARNING_RATE)


class RpcDriver:
    def obstacle(self) -> str:
        return "" if rpc.is_available() else "this build of torch has no distributed.rpc"

    def serve(self, plan: Plan, told: Any) -> None:
        torch.set_num_threads(1)
        if plan.work == DENSE:
            _state["values"] = torch.zeros(plan.size)
        else:
            ids = id_of(torch.arange(plan.size).numpy())
            _state["index"] = {key: slot for slot, key in enumerate(ids.tolist())}
            _state["rows"] = torch.randn(plan.size, plan.dim)
        port = free_port()
        told.send(port)
        _join(_SERVER, 0, plan.num_workers + 1, port)
        told.recv()
        rpc.shutdown(graceful=False)

    def worker(self, plan: Plan, address: Any, number: int) -> _RpcWorker:
        torch.set_num_threads(1)
        _join(f"worker{number}", number + 1, plan.num_workers + 1, address)
        return _RpcWorker(plan, number)


class _RpcWorker:
    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        if plan.work == DENSE:
            self._gradient = torch.full((plan.size,), 1e-3)
        else:
            self._batches = [torch.from_numpy(ids) for ids in batches(plan, number)]
            self._gradient = torch.from_numpy(gradients(plan, number, plan.batch))

    def do(self, measure: str, number: int) -> None:
        if self._plan.work == DENSE:
            rpc.rpc_sync(_SERVER, _push_and_pull, args=(self._gradient,), timeout=_TIMEOUT_S)
            return
        ids = self._batches[number % len(self._batches)]
        if measure == "pull":
            rpc.rpc_sync(_SERVER, _pull, args=(ids,), timeout=_TIMEOUT_S)
        else:
            rpc.rpc_sync(_SERVER, _push, args=(ids, self._gradient), timeout=_TIMEOUT_S)

    def close(self) -> None:
        rpc.shutdown(graceful=False)


def _join(name: str, rank: int, size: int, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TP_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=_TIMEOUT_S)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
