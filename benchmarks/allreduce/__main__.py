"""`python -m benchmarks.allreduce`."""

from __future__ import annotations

from benchmarks.allreduce.benchmark import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.main()
