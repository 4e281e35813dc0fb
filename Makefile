# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: demo test test-all check bench soak clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,lab,redis,mooncake]'
	.ci/system-packages
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/stemma demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-all: $(STAMP)
	$(BIN)/python -m pytest -m ''

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.engine

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
