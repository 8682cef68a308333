"""How Paceline compares with other systems, and with itself. One file a benchmark, or a folder where it needs several.

    python -m benchmarks.steps            one of them, from the root of the repository; --help says what it takes
    python -m benchmarks                  all of them (`make bench`); each keeps its figures in benchmarks/results
    python -m benchmarks --quick          all of them in their smallest form (`make bench-quick`); nothing is kept

A benchmark is a module with a `BENCHMARK`: its options with their full and their quick values, what it measures, and
its targets. `common` has what all of them share, `catalogue` the list of all.
"""
