# Two commands: `make demo` and `make test`. Each builds the environment on first use.
PYTHON ?= python3
# On a machine without a GPU, name an index of CPU wheels here if your default index has only CUDA builds of torch.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two compute threads collapse when another process takes a core, so tests use one.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

.PHONY: demo test test-slow lint bench-engine bench-memory clean

demo: $(READY)
	$(BIN)/kvloop demo $(ARGS)

# One worker a core; the tests of a file stay together, since they share what is slow to start, and files keep their
# order: the longest of them, the demo, begins early and does not run alone at the end.
test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench-engine: $(READY)
	$(TEST_ENV) $(BIN)/python benchmarks/engine_vs_hf.py

# KV memory's figures beside its peers'; the last line is one JSON object.
bench-memory: $(READY)
	$(TEST_ENV) $(BIN)/python -m benchmarks.memory $(ARGS)

$(READY): pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvloop needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and by itself: resolving it with the rest may bring a CUDA build of several GB
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .kvloop .kvloop-demo
