# Every target makes the virtual environment it needs. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIGHT := $(VENV)/.light

.PHONY: demo test test-slow test-gpu check format bench clean

$(LIGHT): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $(LIGHT)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(LIGHT)  ## 64 small classifiers, together and (a sample) one by one
	$(BIN)/carpool demo

test: $(READY)  ## the fast suite
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)  ## the full cross and the long runs
	$(BIN)/python -m pytest -n 2 -m 'slow and not gpu'

test-gpu: $(READY)  ## what needs a CUDA device
	$(BIN)/python -m pytest -m gpu

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## peers beside us in one run; writes benchmarks/results
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
