# Each target does its own set-up in .venv from a fresh clone; nothing but Python 3.11+, git and make is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
TRIALS ?= 50
# Arguments passed on: make tune TUNE="--seed 3", make test PYTEST="tests/cli -x"
TUNE   ?=
PYTEST ?= -n auto

.PHONY: tune test browser lint format clean
.DEFAULT_GOAL := test

tune: $(VENV)/run.stamp
	$(BIN)/autoprec tune --trials $(TRIALS) $(TUNE)

# One thread each: several test processes with a thread per core would fight over the cores.
test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST)

browser: $(VENV)/dev.stamp
	@command -v chromium >/dev/null || { echo "no chromium: apt-get install chromium"; exit 2; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "autoprec needs Python 3.11 or newer, and '$(PYTHON)' isn't: make PYTHON=/path/to/python3.11 …"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
