# The two commands of the README, and what developers run. Everything lives in .venv; delete it to start over.
#   TORCH_INDEX=URL   take torch from another package index (another CUDA version, a CPU build)
#   PYTHON=python3.12 make .venv with this Python

PYTHON ?= python3
BIN := .venv/bin
# One thread a process: tests run in processes beside each other, one more than two cores have, as some tests wait for
# a clock. Compiled modules are kept, as tests start many.
TEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: quickstart test test-long check lint types clean docs package sbom exchange-table recipe-tables
.DELETE_ON_ERROR:

quickstart: .venv/installed
	$(BIN)/daguerre train quickstart
	@echo 'For the command `daguerre` in this shell: source $(BIN)/activate'

# What mypy finds stands at the end: it takes one process a minute and more where it has kept nothing.
test: lint
	@mkdir -p build
	@$(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	$(TEST) -m "not long" -n 3 --dist loadfile --no-loadscope-reorder; failed=$$?; \
	wait $$types || failed=$$?; echo "mypy:"; cat build/types.txt; exit $$failed

test-long: .venv/installed-dev
	$(TEST) -m long

check: lint
	$(BIN)/mypy

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What the types say on every Python that pyproject.toml allows; `check` asks the oldest alone.
types: .venv/installed-dev
	for version in 3.11 3.12 3.13; do $(BIN)/mypy --python-version $$version || exit 1; done

# sdist and wheel in dist/, with the tests of what they hold and of the wheel in an empty folder, and the notebooks.
# Needs no network.
package: .venv/installed-dev
	rm -rf dist
	$(BIN)/python -m build --quiet --no-isolation --outdir dist
	$(TEST) tests/package tests/library/test_notebooks.py

# What is installed with Daguerre and vendored in it, with licences, as CycloneDX JSON.
sbom: .venv/installed-dev
	$(BIN)/python tools/sbom.py dist/daguerre.cdx.json

# The pages of docs/ as one site, build/docs/index.html.
docs: .venv/installed-dev
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo build/docs/index.html

# Makes the tables of docs/recipes.md again from the recipes' headers.
recipe-tables: .venv/installed
	sed -i '/^## Small models$$/,$$d' docs/recipes.md
	$(BIN)/daguerre recipes --cards >> docs/recipes.md

# Measures again what other programs apply of our LoRAs, and writes it into docs/adapters.md.
exchange-table: .venv/installed-dev
	$(BIN)/python tools/exchange_table.py --write

.venv/installed: pyproject.toml constraints.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py

# What only tests need.
.venv/installed-dev: .venv/installed
	$(PYTHON) tools/make_venv.py --dev

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
