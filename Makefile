# The two commands of the README, and what developers run. Everything lives in .venv; delete it to start over.
#   TORCH_INDEX=URL   take torch from another package index (another CUDA version, a CPU build)
#   PYTHON=python3.12 make .venv with this Python

PYTHON ?= python3
BIN := .venv/bin
# One thread a process: tests run in two processes beside each other.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: quickstart test test-long check clean
.DELETE_ON_ERROR:

quickstart: .venv/installed
	$(BIN)/daguerre train quickstart

test: check
	$(TEST) -m "not long" -n 2

test-long: .venv/installed
	$(TEST) -m long

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py

clean:
	rm -rf .venv build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
