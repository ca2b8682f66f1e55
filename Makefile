# `make train` and `make test` create the environment by themselves; nothing needs to be installed first but Python and pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Modules are compiled once, not in each process anew, even where the machine's environment asks for the latter.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-all test-core test-versions update lint format docs bench speed release-check clean

help:
	@echo "make train   create the environment and train the digits example"
	@echo "make test    create the environment and run the quick tests"
	@echo "make test-all all tests, as continuous integration does"
	@echo "make test-core  the quick tests of the core, in a copy without extensions"
	@echo "make test-versions  the tests but the slow ones with each Python and torch that is promised; ROWS='NAME ...' chooses some"
	@echo "make update  propose newer versions of all dependencies in constraints.txt"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make docs    the documentation as a site, in docs/_build"
	@echo "make bench   the overhead benchmark"
	@echo "make speed   ratios of speed that continuous integration watches"
	@echo "make release-check  build sdist and wheel into dist/, check them, and try them in empty environments"
	@echo "make clean   remove the environment and all outputs"
	@echo
	@echo "make PYTHON=python3.12 ... takes another Python than python3; 3.11 is the oldest that will do"

# Installed anew when the requirements change. The exact versions stand in constraints.txt.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

train: $(READY)
	$(BIN)/equipoise fit

# A third process computes while tests of the other two wait for processes of their own.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not thorough"

test-all: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# A copy of the package from which the folder of every extension is deleted.
test-core: $(READY)
	$(BIN)/python -m tests.core_alone

# Environments lie side by side in .versions/, and are kept.
test-versions: $(READY)
	$(BIN)/python -m benchmarks.versions $(ROWS)

# Writes the newest versions that the ranges allow; run the tests before you keep them. torch stays at the version whose
# build without CUDA the simulated devices are developed with. Newer ones are tested by `make test-versions`.
TORCH ?= 2.13.0
update: $(READY)
	echo "torch==$(TORCH)" | $(BIN)/uv pip compile pyproject.toml --constraint - --all-extras --python-version 3.11 --upgrade --no-annotate --quiet \
		--custom-compile-command "make update" --output-file constraints.txt
	git --no-pager diff --unified=0 constraints.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A link that leads nowhere, or a name that it cannot find, is an error.
docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --fresh-env --quiet --conf-dir docs . docs/_build
	@echo "$(CURDIR)/docs/_build/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/overhead/main.py

# A machine that is too busy for a verdict, code 2, stops nobody.
speed: $(READY)
	$(BIN)/python benchmarks/speed/main.py || test $$? -eq 2

# Everything of docs/releasing.md that a program can check.
release-check: $(READY)
	$(BIN)/python -m scripts.release

clean:
	rm -rf $(VENV) .versions dist outputs multirun docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
