# make help lists the targets. Everything runs in .venv, which `make install` makes.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Ray reports usage and vLLM statistics over the network unless told not to.
export RAY_USAGE_STATS_ENABLED ?= 0
export VLLM_NO_USAGE_STATS ?= 1
# Triton kernels on the CPU: Triton reads the variable at its import, so they have a process of their own.
INTERPRETED := TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter -q

.PHONY: help install train test cluster parity mutations check bench clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## .venv with the pinned libraries and marsrl

$(STAMP): constraints/install.sh constraints/cpu.txt constraints/gpu.txt constraints/dev.txt setup.py pyproject.toml CMakeLists.txt $(wildcard csrc/*/*)
	constraints/install.sh
	@touch $@

train: install  ## MarsRL end to end on this machine: warm start, RL, report
	torchrun --nproc-per-node 1 trainer/main.py

test: install  ## all tests that need no GPU (as root on Debian or Ubuntu with apt's chromium, bubblewrap and iproute2, for some of them)
	tests/report/chromium.sh install
	tests/apt.sh bwrap bubblewrap "so sandboxes are tested by unshare alone"
	tests/apt.sh ip iproute2 "so no cluster in a box"
	tests/all.sh

cluster: install  ## hosts made of namespaces (as root): what one host trains, and what clusters suffer
	tests/apt.sh ip iproute2 "so no cluster in a box"
	python tests/cluster/all_cases.py

parity: install  ## every parallel layout against one rank and against transformers
	python benchmarks/parity.py

mutations: install  ## mistakes put into the code, one at a time: which ones the tests beside it notice
	python tests/mutations/run.py --show

check: install  ## ruff, types, and the fast tests
	ruff check .
	mypy
	$(INTERPRETED)
	python -m pytest -m "not slow and not gpu and not multi_gpu" --ignore tests/kernels/interpreter -q

bench: install  ## benchmarks on this machine, and the default run on three seeds
	python benchmarks/train_step.py
	python benchmarks/rollout.py
	python benchmarks/learning.py --seeds 0 1 2
	python benchmarks/run.py linear_policy_loss

clean:  ## build products (not .venv, not runs)
	rm -rf build dist *.egg-info kernels/_lib
