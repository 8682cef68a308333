"""The processes of one contender: its server, and workers that do an iteration after the other while they are timed."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.server.drivers import driver_of
from benchmarks.server.plan import Plan

_READY_S = 600.0  # a table of ten million rows takes a while
_ANSWER_S = 300.0
_WARM = 2


class CrowdError(RuntimeError):
    """A process of a contender failed, ended or gave no answer."""


class Crowd:
    def __init__(self, workers: list[Connection], plan: Plan, contender: str) -> None:
        self._workers = workers
        self._plan = plan
        self._contender = contender

    def measure(self, measure: str) -> float:
        """Iterations a second of all workers together."""
        for worker in self._workers:
            worker.send((measure, self._plan.seconds))
        answers = [_receive(worker, _ANSWER_S + self._plan.seconds, self._contender) for worker in self._workers]
        return float(sum(answers))


@contextlib.contextmanager
def crowd(plan: Plan, contender: str) -> Iterator[Crowd]:
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    ends: list[Connection] = []

    def start(target: Any, *arguments: Any) -> Connection:
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(contender, plan, *arguments, theirs), daemon=False)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(mine)
        return mine

    try:
        server = start(_serve)
        address = _receive(server, _READY_S, contender)
        workers = [start(_work, address, number) for number in range(plan.num_workers)]
        for worker in workers:
            _receive(worker, _READY_S, contender)
        yield Crowd(workers, plan, contender)
    finally:
        for end in reversed(ends):
            with contextlib.suppress(OSError):
                end.send(None)
        for process in reversed(processes):
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(connection: Connection, seconds: float, contender: str) -> Any:
    if not connection.poll(seconds):
        raise CrowdError(f"{contender}: no answer for {seconds:.0f} s")
    try:
        answer = connection.recv()
    except EOFError as error:
        raise CrowdError(f"{contender}: a process ended before its time") from error
    if isinstance(answer, _Failure):
        raise CrowdError(f"{contender}: {answer.text}")
    return answer


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _serve(contender: str, plan: Plan, told: Connection) -> None:
    try:
        driver_of(contender).serve(plan, told)
    except Exception:
        told.send(_Failure(traceback.format_exc()))


def _work(contender: str, plan: Plan, address: Any, number: int, told: Connection) -> None:
    try:
        worker = driver_of(contender).worker(plan, address, number)
        done = 0
        for measure in plan.measures:
            for _ in range(_WARM):
                worker.do(measure, done)
                done += 1
        told.send("ready")
        while (order := told.recv()) is not None:
            measure, seconds = order
            began = time.perf_counter()
            first = done
            while time.perf_counter() - began < seconds:
                worker.do(measure, done)
                done += 1
            told.send((done - first) / (time.perf_counter() - began))
        worker.close()
    except Exception:
        with contextlib.suppress(OSError):
            told.send(_Failure(traceback.format_exc()))
