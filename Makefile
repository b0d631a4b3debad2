# SPDX-License-Identifier: Apache-2.0
# make setup | demo | test (= test-native + test-arm) | conformance | stress | cycles | cycles-check | lint | clean
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p))))
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
# On Arm, build oneDNN and KleidiAI where none is installed; x86 has oneDNN from PyPI and needs no KleidiAI. Not exported:
# vLLM would warn of them at every start.
VLLM_ARM_FETCH_ONEDNN ?= $(if $(filter aarch64,$(shell uname -m)),1,0)
VLLM_ARM_FETCH_KLEIDIAI ?= $(if $(filter aarch64,$(shell uname -m)),1,0)
BIN := $(VENV)/bin
SOURCES := $(shell find csrc cmake tests/cpp -type f) CMakeLists.txt setup.py pyproject.toml
CLANG_FORMATTED = $(shell git ls-files '*.cpp' '*.h')
EXTENSION := build/.extension
ARM_WHEEL := build/aarch64/.wheel
CYCLES_OPTIONS = $(if $(OP),--op $(OP)) $(if $(CASE),--case $(CASE)) $(if $(IMPL),--impl $(IMPL)) \
  $(foreach core,$(CORE),--core $(core)) $(if $(SUBSET),--subset $(SUBSET))

.PHONY: setup demo test test-native test-threads test-arm conformance stress arm-root cross-wheel cycles cycles-check lint clean

setup: $(EXTENSION)

$(VENV)/.requirements: tools/setup_environment.py tools/system_packages.py $(wildcard requirements/*.txt)
	@$(PYTHON) tools/setup_environment.py $(VENV)
	@touch $@

$(EXTENSION): $(VENV)/.requirements $(SOURCES)
	@mkdir -p build
	PATH="$(abspath $(BIN)):$$PATH" VLLM_ARM_FETCH_ONEDNN=$(VLLM_ARM_FETCH_ONEDNN) \
	  VLLM_ARM_FETCH_KLEIDIAI=$(VLLM_ARM_FETCH_KLEIDIAI) \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	$(BIN)/python -m demo

# On an Arm machine the native tests are the tests on Arm.
test: test-native $(if $(filter x86_64,$(shell uname -m)),test-arm)

test-native: setup $(VENV)/.bench $(VENV)/.ray
	PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -S . -B build/native-tests -DVLLM_ARM_BUILD_PYTHON=OFF -DVLLM_ARM_BUILD_TESTS=ON \
	  $(if $(filter 1,$(VLLM_ARM_FETCH_KLEIDIAI)),-DVLLM_ARM_FETCH_KLEIDIAI=ON) >/dev/null
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/native-tests --parallel
	build/native-tests/tests/cpp/kernel_tests
	$(BIN)/python -m pytest tests --ignore=tests/emulation $(PYTEST_ARGUMENTS)

# The collectives under the thread sanitizer, with threads in place of ranks.
test-threads: setup
	PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -S . -B build/thread-tests -DVLLM_ARM_BUILD_PYTHON=OFF -DVLLM_ARM_BUILD_TESTS=ON \
	  -DVLLM_ARM_SANITIZE_THREADS=ON >/dev/null
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/thread-tests --parallel
	build/thread-tests/tests/cpp/kernel_tests --source-file='*test_collectives.cpp'

# All of vLLM's own tests of the ops that ours replace; test-native runs a sample.
conformance: setup
	VLLM_ARM_CONFORMANCE=all $(BIN)/python -m pytest -s tests/conformance $(PYTEST_ARGUMENTS)

# The collectives at length: 100,000 operations, and the deaths of 50 ranks; test-native runs a few.
stress: setup
	VLLM_ARM_STRESS=1 $(BIN)/python -m pytest tests/collectives -k "random_order or killed" --durations=0 $(PYTEST_ARGUMENTS)

arm-root: setup
	@$(PYTHON) tools/system_packages.py emulation
	$(BIN)/python -m tests.emulation make-root

cross-wheel: $(ARM_WHEEL)

$(ARM_WHEEL): $(EXTENSION) $(shell find vllm_arm -name '*.py' -o -name '*.patch' -o -name series) | arm-root
	rm -rf build/aarch64 build/linux-aarch64 && mkdir -p build/aarch64
	PATH="$(abspath $(BIN)):$$PATH" VLLM_ARM_CROSS_ROOT=$$($(BIN)/python -m tests.emulation root-path) \
	  $(BIN)/python -m build --wheel --no-isolation --outdir build/aarch64 . >build/aarch64/log 2>&1 || { cat build/aarch64/log; exit 1; }
	@touch $@

test-arm: cross-wheel $(VENV)/.bench
	VLLM_ARM_REQUIRE_EMULATION=1 VLLM_ARM_AARCH64_WHEEL=$$(echo build/aarch64/*.whl) \
	  $(BIN)/python -m pytest tests/emulation $(PYTEST_ARGUMENTS)

$(VENV)/.bench: requirements/bench.txt $(VENV)/.requirements
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

$(VENV)/.ray: requirements/ray.txt $(VENV)/.requirements
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

cycles: cross-wheel $(VENV)/.bench
	VLLM_ARM_AARCH64_WHEEL=$$(echo build/aarch64/*.whl) $(BIN)/python -m benchmarks.neoverse run $(CYCLES_OPTIONS)

cycles-check: cross-wheel $(VENV)/.bench
	VLLM_ARM_AARCH64_WHEEL=$$(echo build/aarch64/*.whl) $(BIN)/python -m benchmarks.neoverse check $(CYCLES_OPTIONS)

$(VENV)/.lint: requirements/lint.txt $(VENV)/.requirements
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

lint: setup $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED)
	$(BIN)/hadolint docker/Dockerfile

clean:
	rm -rf build dist $(VENV) *.egg-info vllm_arm/*.so vllm_arm/lib
