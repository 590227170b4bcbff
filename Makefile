# Every target works in a fresh clone: it first creates .venv, with the versions of constraints.txt.

BIN := .venv/bin
STAMP := .venv/.installed
ASIDE := tests/kernels tests/bench tests/models

# The first interpreter on PATH that is new enough; `make PYTHON=/path/to/python` overrides it.
PYTHON ?= $(shell for python in python3.12 python3 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test nightly lint format bench clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo 'jaxinfer needs Python 3.12 or newer: install it, or run make PYTHON=/path/to/python' >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-input -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Download a small model and let it answer a question
	$(BIN)/jaxinfer generate --stats --temperature 0 "What is the capital of France?"

test: $(STAMP) ## Run the test suite on the CPU, without the nightly batteries
	@# side by side: what these folders compile and interpret takes as long as all the others
	@log=$$(mktemp); $(BIN)/pytest -q $(ASIDE) >$$log 2>&1 & aside=$$!; \
	$(BIN)/pytest -q $(ASIDE:%=--ignore=%); rest=$$?; \
	wait $$aside; status=$$?; cat $$log; rm -f $$log; exit $$((rest | status))

nightly: $(STAMP) ## Run the long batteries
	$(BIN)/pytest -q -m nightly --hypothesis-profile nightly

lint: $(STAMP) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP) ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure tokens per second on the CPU
	$(BIN)/python -m bench.cpu

clean: ## Remove .venv and everything that tools leave behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
