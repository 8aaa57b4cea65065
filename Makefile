# Two commands need nothing before them: `make test` and `make run`. Each builds .venv on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NEWEST_TRITON := $(VENV)/triton-3.9/.ready
# The small CPU build of torch unless an NVIDIA GPU answers. TORCH overrides.
TORCH ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo 'torch>=2.11,<2.15'; else echo 'torch==2.13.0'; fi)
GPU_EXTRA := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo ',gpu'; fi)
WORKERS ?= 2

.PHONY: setup test lint run clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo 'headscope needs Python 3.11, 3.12 or 3.13; name one with: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' 'numpy<2.4'
	@# A CUDA build of torch brings the triton it needs; beside a CPU build the oldest supported one runs in its interpreter.
	$(BIN)/python -m pip show --quiet triton 2>/dev/null || $(BIN)/python -m pip install --quiet triton==3.6.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,studio$(GPU_EXTRA)]' '$(TORCH)'
	@touch $(STAMP)

# The newest supported triton, beside the installed one: kernels are compiled ahead of time with both.
$(NEWEST_TRITON): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton-3.9 'triton==3.9.*'
	@touch $(NEWEST_TRITON)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/helpers/typecheck.py

# The summary line of pytest is the last line printed.
test: lint $(NEWEST_TRITON)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) -q $(PYTEST_ARGS)

run: $(STAMP)
	$(BIN)/headscope fetch smollm2
	@if test -f app.py; then $(BIN)/headscope studio; \
	else $(BIN)/headscope inspect --model smollm2 --prompt sample_prompts/code.txt; fi

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
