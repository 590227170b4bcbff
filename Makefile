# Every target works in a fresh clone: it first creates .venv, with the versions of constraints.txt.

BIN := .venv/bin
# What runs, and what tests and checks it besides: `make demo` needs only the first.
STAMP := .venv/.installed
TOOLS := .venv/.installed-tools

# The suite in parts, a process each: `make test` runs three at a time, as tests of processes and
# limits wait, and begins the next as soon as one ends, so the longest come first. What is compiled
# in a process is shared by its tests. `others` holds every test that no other part names.
PARTS := engines servers triton commands mosaic others models executables users
USERS := tests/e2e/test_smollm2.py
MODELS := tests/e2e tests/models/test_golden.py
DOCUMENTS := tests/e2e/test_documents.py tests/e2e/test_examples.py
ENGINES := tests/engine
SERVERS := tests/server
TRITON := tests/kernels/test_triton.py tests/kernels/test_sample.py tests/kernels/test_sweep.py
MOSAIC := tests/kernels $(TRITON:%=--ignore=%)
EXECUTABLES := tests/exec tests/nn
COMMANDS := tests/cli tests/weights tests/bench
NAMED := $(MODELS) $(ENGINES) $(SERVERS) tests/kernels $(EXECUTABLES) $(COMMANDS)
# XLA compiles tiny models and interpreted kernels in half the time without LLVM's optimiser and with
# its older emitter of fusions, and in another 13 % less as one LLVM module instead of up to 32: its
# plan of buffers and copies stays the same, the machine code does not. `users`, in which the default
# model meets transformers' tokens, is compiled as for users; at night every family is.
QUICKLY := XLA_FLAGS='--xla_backend_optimization_level=0 \
	--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters \
	--xla_cpu_parallel_codegen_split_count=1'

# The first interpreter on PATH that is new enough; `make PYTHON=/path/to/python` overrides it.
PYTHON ?= $(shell for python in python3.12 python3 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo tools test $(PARTS:%=test-%) nightly nightly-kernels nightly-others nightly-golden lint format bench clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12

# A change of the native library's sources also installs again, which builds it.
NATIVE := setup.py $(wildcard pallas_kernels/native/src/*)

# What setup.py builds with. In an environment of its own, as pip would make, JAX were installed twice.
BUILD := 'setuptools>=80' jax $(if $(shell command -v c++ || command -v clang++),,ziglang)
# Python compiles the modules that it imports, and keeps them (3 s here); pip would compile all, one
# after the other (27 s).
INSTALL := $(BIN)/pip install --no-input --no-compile -c constraints.txt
export PYTHONDONTWRITEBYTECODE :=

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo 'jaxinfer needs Python 3.12 or newer: install it, or run make PYTHON=/path/to/python' >&2; \
	  exit 1; }
	@echo 'Installing jaxinfer into .venv: about 50 packages, 800 MB, then its native library is compiled.'
	@$(PYTHON) -m venv .venv
	@$(INSTALL) $(BUILD) && $(INSTALL) --no-build-isolation -e .
	@touch $@

# The extra's requirements alone: with -e '.[dev]' pip would compile the native library again.
$(TOOLS): $(STAMP)
	@echo 'Installing the tools of tests and checks into .venv (the extra dev of pyproject.toml).'
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["optional-dependencies"]["dev"], sep="\n")' >.venv/tools.txt
	@$(INSTALL) -r .venv/tools.txt
	@touch $@

demo: $(STAMP) ## Download a small model and let it answer a question
	$(BIN)/jaxinfer generate --stats "What is the capital of France?"

tools: $(TOOLS) ## Install the tools of tests and checks: pytest, ruff, pyright

test: $(TOOLS) ## Run the test suite on the CPU, without the nightly batteries
	@$(MAKE) --no-print-directory --keep-going --output-sync -j3 $(PARTS:%=test-%)

test-users: $(TOOLS)
	@$(BIN)/pytest -q $(USERS)

test-models: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(MODELS) $(DOCUMENTS:%=--ignore=%) $(USERS:%=--ignore=%)

test-engines: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(ENGINES)

test-servers: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(SERVERS)

test-triton: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(TRITON)

test-mosaic: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(MOSAIC)

test-executables: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(EXECUTABLES)

test-commands: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(COMMANDS) $(DOCUMENTS)

test-others: $(TOOLS)
	@$(QUICKLY) $(BIN)/pytest -q $(NAMED:%=--ignore=%)

nightly: nightly-kernels nightly-others nightly-golden ## Run the long batteries

nightly-kernels: $(TOOLS)
	$(BIN)/pytest -q -m nightly --hypothesis-profile nightly tests/kernels

nightly-others: $(TOOLS)
	$(BIN)/pytest -q -m nightly --hypothesis-profile nightly --ignore=tests/kernels

nightly-golden: $(TOOLS)
	$(BIN)/pytest -q tests/models/test_golden.py

lint: $(TOOLS) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(TOOLS) ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure tokens per second on the CPU
	$(BIN)/python -m bench.cpu

clean: ## Remove .venv and everything that tools leave behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
