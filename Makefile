# Every target does its own set-up into .venv. `make` alone lists them.
PYTHON ?= python3
PORT ?= 8000
BASE ?= smollm2-135m-instruct
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-fast lint bench verify-core verify-kernels verify-router verify-speculation clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install Polyloom with what its tests need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Polyloom needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP) ## serve the base and the example adapters, talk to them, promote, roll back, leave
	$(BIN)/python -m examples.demo

serve: $(STAMP) ## run the server in the foreground on 127.0.0.1:$(PORT) and print how to call it
	$(BIN)/polyloom serve --base $(BASE) --port $(PORT)

test: lint ## lint, types, import rules and every test, against real PostgreSQL and Redis
	$(BIN)/pytest -n 2

test-fast: $(STAMP) ## the quick tests
	$(BIN)/pytest -n 2 -m 'not slow'

lint: $(STAMP) ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=typings $(BIN)/lint-imports

bench: $(STAMP) ## throughput of mixed adapters against PEFT's own mixed batch
	$(BIN)/python -m benchmarks.throughput

verify-core: $(STAMP) ## measure every quality bar of the serving core (docs/verification.md)
	$(BIN)/python -m benchmarks.verify_core

verify-kernels: $(STAMP) ## measure every quality bar of the CUDA kernels, without a GPU (docs/verification.md)
	$(BIN)/python -m benchmarks.verify_kernels

verify-router: $(STAMP) ## measure every quality bar of routes, prefix caches and fairness
	$(BIN)/python -m benchmarks.verify_router

verify-speculation: $(STAMP) ## measure every quality bar of speculation and structured output
	$(BIN)/python -m benchmarks.verify_speculation

clean: ## remove the virtual environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
