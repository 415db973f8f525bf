# Every target installs what it needs into .venv; a repeated run does nothing twice.
# Another interpreter: make setup PYTHON=python3.12 (after make clean).

PYTHON ?= python3
JOBS ?= 2# processes that run the tests
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev
DOCS := $(VENV)/.stamp-docs

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export MPLBACKEND := Agg
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test coverage lint workflows types format bench docs pages clean

help: ## print this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 11

setup: $(DEV) ## create .venv with the package and all tools

demo: $(DEV) ## train with and without primum on a small task, and compare
	$(BIN)/python -m lab demo

test: lint types ## lint, types, then every test
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

coverage: $(DEV) ## every test again, with the share of lines and branches they reach
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --cov --cov-report=term --cov-report=html

lint: $(DEV) workflows ## check style and formatting, and the workflows
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

CHECK := $(BIN)/check-jsonschema --quiet --builtin-schema
workflows: $(DEV) ## check what GitHub reads: workflows, issue forms, citation
	$(CHECK) vendor.github-workflows .github/workflows/*.yml
	$(CHECK) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(CHECK) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK) vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github

types: $(DEV) ## check types, strictly
	$(BIN)/python -m mypy

format: $(DEV) ## fix what lint can fix by itself
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(DEV) ## measure the cost of one step
	$(BIN)/python -m lab.bench.overhead

docs: $(DOCS) ## build the documentation into site/
	$(BIN)/python -m lab.pages --check
	$(BIN)/python -m mkdocs build --strict

pages: $(DEV) ## update tables and plots of the README and the docs from stored results
	$(BIN)/python -m lab.pages

clean: ## remove .venv, caches and everything built
	rm -rf $(VENV) site dist build htmlcov .coverage .coverage.* .mypy_cache .nox .pytest_cache .ruff_cache .hypothesis
	find src lab tests examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The build backend comes first, pinned, so that building the package needs no environment of its own.
# Some systems ship Python without ensurepip: there, the system's pip puts pip into .venv.
$(BASE): constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("the pinned tools need Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV) || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(PIP) torch hatchling editables
	@touch $@

$(DEV): $(BASE) pyproject.toml
	$(PIP) --no-build-isolation --editable ".[dev]"
	@touch $@

$(DOCS): $(DEV)
	$(PIP) --no-build-isolation --editable ".[docs]"
	@touch $@
