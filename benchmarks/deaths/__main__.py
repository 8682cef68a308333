"""`python -m benchmarks.deaths`."""

from __future__ import annotations

from benchmarks.deaths.benchmark import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.main()
