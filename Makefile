# The two commands of a newcomer: `make demo` and `make test`. Each prepares its own virtual environment.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-runs test-parts test-hosts test-wheel check lint types docs bench bench-quick soak simulate chaos torch-suite torch-tools clean

demo: $(READY)
	$(BIN)/python examples/elastic.py

# Two halves at once: most of a test's time is spent waiting for processes. Each half is shown when it is done.
RUNS := tests/train tests/engine tests/c10d
test: $(READY)
	@echo "testing in two halves at once; each takes some minutes, and is shown when it is done"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-runs test-parts

test-runs: $(READY)
	$(BIN)/python -m pytest $(RUNS)

test-parts: $(READY)
	$(BIN)/python -m pytest $(RUNS:%=--ignore=%)

# Whole runs over several hosts (network namespaces, so root is needed), which lose workers, hosts and coordinators, and
# schedules of chaos whose outcome is known.
test-hosts: $(READY)
	$(BIN)/python -m pytest --override-ini=addopts= -ra -m hosts

# The wheel as a user has it: built, installed into an environment of its own, used outside of this folder.
test-wheel: $(READY)
	$(BIN)/python -m pytest --override-ini=addopts= -ra -m wheel tests/test_wheel.py

check: lint types test

# The pages of docs/ as a site in build/docs; a warning is an error.
docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,docs]"
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs build/docs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Against Gloo, RPC, Ray and Redis, MPI and torchft, where they are installed (Debian: openmpi-bin, redis-server; PyPI: impi-rt). Not part of `make test`: it
# measures, for hours. One alone: `python -m benchmarks.NAME`.
bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,bench]"
	$(BIN)/python -m benchmarks

# Each of them in its smallest form, so that none rots: ten minutes on two quiet cores. Its figures say nothing, and none is kept.
bench-quick: $(READY)
	$(BIN)/python -m benchmarks --quick

# Random fault schedules of all machines together, and of parts; a failing one is printed as the command that replays it.
SEEDS ?= 100000
simulate: $(READY)
	$(BIN)/python -m paceline.testing.simulate --seeds $(SEEDS)

# Random faults on real runs of several hosts, checked by a model that counts its samples; docs/explanation/chaos.md. Seeds that are in chaos/results.jsonl are
# skipped, so a long run can be made in parts. Several hosts need root.
MINUTES ?= 10
SEED    ?= 0
chaos: $(READY)
	$(BIN)/python -m paceline.testing.chaos --minutes $(MINUTES) --seed $(SEED)

# PyTorch's own suite for backends of torch.distributed, on Gloo and on Paceline: the same tests must be run, all must pass.
torch-suite: $(READY)
	for size in 2 4; do \
		$(BIN)/python -m tests.c10d.torch_suite --world-size $$size --backend gloo --only '^(?!test_all_to_all)' --json torch-suite-gloo-$$size.json && \
		$(BIN)/python -m tests.c10d.torch_suite --world-size $$size --json torch-suite-$$size.json --against torch-suite-gloo-$$size.json \
		|| exit 1; \
	done

# Programs of Accelerate, Lightning and Transformers on Gloo and on Paceline: the same must come out, and a death must be told.
torch-tools: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,tools]"
	$(BIN)/python -m tests.c10d.torch_tools

# Longer than a test may take: thousands of operations, deaths and re-formed groups.
soak: $(READY)
	$(BIN)/python -m pytest --override-ini=addopts= -m soak --timeout 3600

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Paceline needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
