# Everything a developer types. Needs Python 3.11+ and make; makes its own environment in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
WHEEL  := $(VENV)/wheel
DOCS   := $(VENV)/docs
# Byte code is kept where an environment says otherwise: hundreds of processes of the tests start in half the time.
unexport PYTHONDONTWRITEBYTECODE

# COMPILED=1: simulations and benchmarks run on compiled modules, from a copy of the tree (packaging/compiled.py).
ifdef COMPILED
COPY   := compiled
RUN    := cd build/compiled && PYTHONPATH=. ../../$(BIN)/python
SIM    := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/python
else
RUN    := $(BIN)/python
SIM    := $(BIN)/python
endif

.PHONY: compiled wheel demo compare test coverage check lint types bench chaos chaos-short mutants soak overload-live test-system test-postgres terraform-check docs lock lock-docs clean help

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

demo: $(READY)   ## three simulated regions, a proxy, a trace, several policies in turn: about three minutes
	@$(BIN)/gorgo demo $(ARGS)

compare: $(READY) $(COPY) ## five published systems beside their simulation, figure by figure; ARGS=--quick takes minutes, resumes in runs/experiments
	@$(SIM) -m experiments $(ARGS)

test: check      ## style, types, layers, then every test that needs pip alone; says at its end what it skipped
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

coverage: $(READY) ## the same tests with the lines that they reach; tracing costs half as much time again
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered $(ARGS)

check: $(READY)  ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

test-system: $(READY) ## tests that need apt, root or many minutes; says what it skipped
	$(BIN)/python -m pytest -m system -rs $(ARGS)

POSTGRES := tests/tuner/history tests/tuner/leader tests/tuner/sidecar/group/test_group_processes.py
test-postgres: $(READY) ## tests of history, leader and a group of tuners on a PostgreSQL server of the distribution's package
	GORGO_TEST_POSTGRES=1 $(BIN)/python -m pytest -rs -m "system or not system" $(POSTGRES) $(ARGS)

terraform-check: $(READY) ## every check of terraform/ in a table: ran, or not and why; minutes
	@$(BIN)/python -m tests.terraform

chaos: $(READY)  ## nine minutes of load on real processes while a seeded schedule breaks them; fails if anything does not hold
	@$(BIN)/python -m tests.chaos $(ARGS)

chaos-short: $(READY) ## the same for a minute; also a test
	@$(BIN)/python -m tests.chaos --short $(ARGS)

mutants: $(READY) ## 300 faults put into the code one by one, and which no test sees; up to an hour, resumes in runs/mutants
	@$(BIN)/python -m tests.mutants $(ARGS)

bench: $(READY) $(COPY) ## speed: printed, never asserted; with COMPILED=1 of the compiled modules
	$(RUN) -m tests.bench $(ARGS)

compiled: $(READY) ## build/compiled: the tree with compiled modules, for simulations; needs a C compiler, three minutes
	@$(BIN)/python packaging/compiled.py build/compiled

wheel: $(WHEEL)/.ready ## wheel and sdist in dist/, without the developers' tools; the same sources make the same bytes
	@rm -rf dist
	@$(WHEEL)/bin/python -m hatchling build -d dist

docs: $(DOCS)/.ready ## the documentation as a site in build/site, with search; a broken link is an error
	@$(DOCS)/bin/python packaging/site/build.py

soak: $(READY)   ## 100,000 short requests beside 500 slow streams: what is left of them; minutes, 1 if anything is
	@$(BIN)/python -m tests.soak $(ARGS)

overload-live: $(READY) ## capacity and beyond over HTTP beside the same load simulated: about eight minutes
	@$(BIN)/python -m tests.overload $(ARGS)

lock:            ## renew requirements.lock from pyproject.toml
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	$(VENV)/lock/bin/pip-compile --extra dev --extra report --extra notebook --extra postgres --extra otel --extra learned --extra tokens --extra events --extra picker --extra shared --extra dns --extra compression --generate-hashes --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	  --strip-extras --allow-unsafe --quiet --no-header --output-file requirements.lock pyproject.toml

lock-docs:       ## renew packaging/site/requirements.lock from the extra docs of pyproject.toml
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	$(VENV)/lock/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(VENV)/lock/docs.in
	$(VENV)/lock/bin/pip-compile --generate-hashes --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	  --strip-extras --allow-unsafe --quiet --no-header --no-annotate --output-file packaging/site/requirements.lock $(VENV)/lock/docs.in

clean:           ## remove what this file made
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage*

# The lock is whole, so nothing is resolved: pip would look for a newer release behind each `name[extra]` and refuse it.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "GORGO needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip check --quiet --disable-pip-version-check
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(WHEEL)/.ready: requirements.lock packaging/locked.py
	@$(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/python packaging/locked.py hatchling > $(WHEEL)/picked.lock
	@$(WHEEL)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r $(WHEEL)/picked.lock
	@touch $@

$(DOCS)/.ready: packaging/site/requirements.lock
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@
