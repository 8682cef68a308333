"""One rank of one library: a process that waits for orders and measures. Started by `crew`."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline.cli.bench.allreduce.drivers.base import AllReduceDriver, Buffer
from paceline.cli.bench.allreduce.messages import (
    Channel,
    FormOrder,
    MeasureOrder,
    Order,
    RankFailed,
    RankReady,
    RankTimes,
    to_bench,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of `paceline bench`; the bench starts it.")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--driver", required=True, help="module:Class")
    parser.add_argument("--rank", type=int, default=-1)
    options = parser.parse_args()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(options.socket)
    threading.Thread(target=_end_with_bench, args=(connection,), daemon=True).start()
    channel = to_bench(connection)
    try:
        _serve(channel, options.driver, options.rank)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        channel.send(RankFailed(message=f"{type(error).__name__}: {error}"))
        # Not the usual way out: a library's own farewell would wait for ranks that no longer answer.
        os._exit(1)


def _end_with_bench(connection: socket.socket) -> None:
    """Ends this process when the bench is gone, even from within an operation that will never return."""
    hang_up = select.poll()
    hang_up.register(connection, 0)  # no events asked for: wakes on a hang-up only, and sleeps until then
    hang_up.poll()
    os._exit(1)


def _serve(channel: Channel[Order], driver_name: str, rank: int) -> None:
    order = channel.receive()
    if not isinstance(order, FormOrder):
        raise TypeError(f"the first order is {type(order).__name__}, expected FormOrder")
    module, _, name = driver_name.partition(":")
    join: Callable[..., AllReduceDriver[Any]] = getattr(importlib.import_module(module), name)
    driver = join(order.rendezvous, rank=rank, num_ranks=order.num_ranks, num_threads=order.num_threads)
    channel.send(RankReady(rank=driver.rank, num_ranks=driver.num_ranks, version=driver.version))
    # Kept from round to round: a training loop's steady state is measured, not the first touch of memory.
    buffers: dict[tuple[int, str], Buffer[Any]] = {}
    # The bench lives as long as this wait can last: `_end_with_bench` ends it otherwise.
    while isinstance(order := channel.receive(), MeasureOrder):
        key = (order.num_elements, order.tensors)
        if key not in buffers:
            buffers[key] = driver.buffer(*key)
        channel.send(_measure(driver, buffers[key], order))
    driver.close()


def _measure(driver: AllReduceDriver[Any], buffer: Buffer[Any], order: MeasureOrder) -> RankTimes:
    _check_sum(driver, buffer, order, "before")
    buffer.clear()
    _time(driver, buffer, order.algorithm, order.num_warmups)
    gc.disable()
    measured = _time(driver, buffer, order.algorithm, order.num_iterations)
    gc.enable()
    _check_sum(driver, buffer, order, "after")
    return measured


def _check_sum(driver: AllReduceDriver[Any], buffer: Buffer[Any], order: MeasureOrder, when: str) -> None:
    buffer.fill(driver.rank)
    driver.all_reduce(buffer, order.algorithm)
    if not buffer.holds_sum(driver.num_ranks):
        raise ArithmeticError(
            f"wrong sum of {order.num_elements} float32 {when} the timed operations "
            f"(algorithm {order.algorithm}, tensors {order.tensors})"
        )


def _time(driver: AllReduceDriver[Any], buffer: Buffer[Any], algorithm: str, num_iterations: int) -> RankTimes:
    barrier, all_reduce, clock = driver.barrier, driver.all_reduce, time.perf_counter_ns
    entered_ns = [0] * num_iterations
    left_ns = [0] * num_iterations
    for iteration in range(num_iterations):
        barrier()
        entered_ns[iteration] = clock()
        all_reduce(buffer, algorithm)
        left_ns[iteration] = clock()
    return RankTimes(entered_ns=entered_ns, left_ns=left_ns)


if __name__ == "__main__":
    main()
