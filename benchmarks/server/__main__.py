"""`python -m benchmarks.server`."""

from __future__ import annotations

from benchmarks.server.benchmark import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.main()
