"""Redis as a store of rows: MGET and MSET of a whole batch; a push overwrites, it adds nothing up."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server.drivers.base import batches, gradients, id_of
from benchmarks.server.plan import Plan

_FILL = 100_000
_START_S = 20.0


class RedisDriver:
    def obstacle(self) -> str:
        if not shutil.which("redis-server"):
            return "redis-server is not installed (apt install redis-server)"
        return "" if importlib.util.find_spec("redis") else "its client is not installed (pip install redis)"

    def serve(self, plan: Plan, told: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-redis-") as folder:
            path = str(Path(folder) / "redis.sock")
            quiet = ["--port", "0", "--save", "", "--appendonly", "no"]
            command = ["redis-server", *quiet, "--unixsocket", path, "--dir", folder]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                client = _connect(path)
                random = np.random.default_rng(0)
                for first in range(0, plan.size, _FILL):
                    ranks = np.arange(first, min(first + _FILL, plan.size), dtype=np.int64)
                    rows = random.random((len(ranks), plan.dim), dtype=np.float32)
                    client.mset(dict(zip(_keys(id_of(ranks)), _values(rows), strict=True)))
                told.send(path)
                told.recv()
            finally:
                process.terminate()
                process.wait(10)

    def worker(self, plan: Plan, address: Any, number: int) -> _RedisWorker:
        return _RedisWorker(plan, address, number)


class _RedisWorker:
    def __init__(self, plan: Plan, address: str, number: int) -> None:
        self._client = _connect(address)
        self._dim = plan.dim
        self._batches = [_keys(ids) for ids in batches(plan, number)]
        self._rows = gradients(plan, number, plan.batch)

    def do(self, measure: str, number: int) -> None:
        keys = self._batches[number % len(self._batches)]
        if measure == "pull":
            np.frombuffer(b"".join(self._client.mget(keys)), dtype=np.float32).reshape(-1, self._dim)
        else:
            self._client.mset(dict(zip(keys, _values(self._rows), strict=True)))

    def close(self) -> None:
        self._client.close()


def _connect(path: str) -> Any:
    import redis

    client = redis.Redis(unix_socket_path=path)
    ends_at = time.monotonic() + _START_S
    while True:
        try:
            client.ping()
            return client
        except (redis.exceptions.ConnectionError, OSError) as error:
            if time.monotonic() > ends_at:
                raise RuntimeError(f"redis-server did not come up within {_START_S:g} s: {error}") from error


def _keys(ids: Any) -> list[bytes]:
    return [key.tobytes() for key in ids]


def _values(rows: Any) -> list[bytes]:
    return [row.tobytes() for row in rows]
