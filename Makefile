# Every target sets up what it needs first. `make help` lists them.

SGLANG ?= 0.5.20
VENV ?= .venv
PYTHON ?= python3
VERSIONS ?= 0.5.16 0.5.23
# One GPU is not shared by two test processes.
WORKERS ?= $(if $(shell command -v nvidia-smi),1,2)
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
SETUP = $(PYTHON) sgl_prefix_attn/installer/setup_env.py
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-versions lint lint-types lint-imports lint-native bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: SGLANG=$(SGLANG) VENV=$(VENV) PYTHON=$(PYTHON) WORKERS=$(WORKERS) PYTEST_ARGS= DEMO_ARGS="

setup: ## make the environment: torch, SGLang, this package (CPU, or the GPU's where there is one)
	@$(SETUP) --venv $(VENV) --sglang $(SGLANG)

demo: setup ## real server, trace slice and RL group, prefixpack against the stock backend
	@$(BIN)/python -m sgl_prefix_attn demo $(DEMO_ARGS)

test: setup ## all tests but the slow ones, with the real server, in two processes
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: setup ## tests of minutes to hours: 10,000 schedules, 20 kills, more server options, GPU kernel registers
	@$(PYTEST) -m slow $(PYTEST_ARGS)

test-versions: ## the quick end-to-end tests on other SGLang releases, each in an environment of its own
	@set -e; for version in $(VERSIONS); do \
		echo "== SGLang $$version"; \
		$(SETUP) --venv .venv-$$version --sglang $$version; \
		.venv-$$version/bin/python -m pytest -m versions tests/e2e $(PYTEST_ARGS); \
	done

lint: setup ## ruff, mypy and import directions of the package, clang-format
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j 2 lint-types lint-imports lint-native

lint-types:
	$(BIN)/mypy

lint-imports:
	$(BIN)/lint-imports

lint-native:
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

bench: setup ## plan time, host cost of a step, packed against request-wise attention on the CPU; JSON in build/bench
	@mkdir -p build/bench
	@set -e; for name in kernel/plan_time serving/host_cost kernel/cpu_packed; do \
		echo "== benchmarks/$$name.py"; \
		$(BIN)/python benchmarks/$$name.py --out build/bench/$${name#*/}.json; \
	done

clean: ## remove environments, builds and caches made here
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f sgl_prefix_attn/_native*.so
