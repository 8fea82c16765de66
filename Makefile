# Every target sets up what it needs in .venv; nothing that happens to be installed is relied on,
# apart from Python 3.11 or newer with its venv module. PYTHON=python3.12 picks another one.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

# Each environment that a target needs is an extra of pyproject.toml; the stamp records that it is installed.
$(VENV)/stamp-%: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "keras_ckpt needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) \
		|| { rm -rf $(VENV); echo "No venv could be made. On Debian: apt-get install python3-venv" >&2; exit 1; }

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 18

.PHONY: demo
demo: $(VENV)/stamp-demo ## train a deep ResNet plain and checkpointed; results in demo-output/
	$(BIN)/python examples/demo_resnet.py

.PHONY: test
test: $(VENV)/stamp-test ## run every check: lint, format, types, tests, code blocks of the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

.PHONY: format
format: $(VENV)/stamp-test ## mend what the linter can mend, and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(VENV)/stamp-docs ## build the documentation into site/
	$(BIN)/mkdocs build --strict

.PHONY: clean
clean: ## remove the environment, caches and results
	rm -rf $(VENV) build dist site demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
