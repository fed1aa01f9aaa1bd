# make demo      install, then the first training run: 13 steps of GRPO on one-digit sums, on the CPU
# make test      install, then lint, types and tests
# make test-all  the same with the tests marked slow
# make test-gpu  the tests that need a CUDA device (with TransformerEngine: pip install -e '.[gpu]' first)
# make lint      ruff and mypy alone
# make bench     the benchmarks that need no GPU; each prints a table and the ratio to its reference
# make pins      write constraints.txt from the packages in .venv, after an update
# make clean     remove .venv and caches
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo lint test test-all test-gpu bench pins clean FORCE

BIN := .venv/bin
INSTALLED := .venv/.installed
# One thread a process: a test starts up to four processes, and torch would give each of them every core.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Two at once: much of a test's time is waiting for processes that start. A file stays together with its fixtures.
TWO := -n 2 --dist loadfile

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(INSTALLED)

# Also anew where the environment does not run here: it was copied, or its Python is gone.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null && $(BIN)/python -c ''),$(CURDIR))
$(INSTALLED): FORCE
endif
$(INSTALLED): pyproject.toml constraints.txt scripts/install.sh
	@scripts/install.sh

demo: $(INSTALLED)
	$(BIN)/python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) $(TWO) -m "not slow"

test-all: lint
	$(PYTEST) $(TWO)

test-gpu: $(INSTALLED)
	$(PYTEST) -m gpu

bench: $(INSTALLED)
	$(BIN)/python benchmarks/alloc.py
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/mesh.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/memory.py cpu
	$(BIN)/python benchmarks/bank.py
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/refill.py
	$(BIN)/python benchmarks/layout_agreement.py

pins: $(INSTALLED)
	$(BIN)/python scripts/pins.py > constraints.new && mv constraints.new constraints.txt
	@touch $(INSTALLED)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
