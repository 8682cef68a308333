"""`python -m benchmarks.outages`."""

from __future__ import annotations

from benchmarks.outages.benchmark import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.main()
