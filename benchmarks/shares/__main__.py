"""`python -m benchmarks.shares`."""

from __future__ import annotations

from benchmarks.shares.benchmark import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.main()
