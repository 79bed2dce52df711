# `make help` lists the targets. Everything runs in .venv, which `make install` creates.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Locked set of libraries: cuda or cpu. Default: the set that .venv has, if any; otherwise cuda if nvidia-smi lists a GPU, else cpu.
INSTALLED_DEVICE := $(shell cat $(STAMP) 2>/dev/null)
MARSRL_DEVICE ?= $(INSTALLED_DEVICE)
export MARSRL_DEVICE
export PATH := $(CURDIR)/$(BIN):$(PATH)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# By default, Ray sends usage reports and vLLM sends statistics over the network.
export RAY_USAGE_STATS_ENABLED ?= 0
export VLLM_NO_USAGE_STATS ?= 1
# With this variable set, each of the hundreds of processes that tests start would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# Tests of Triton kernels on the CPU. They run in a separate process, because Triton reads the variable when it is imported.
INTERPRETED := TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter -q -n 2 --dist loadscope
# Tests of torch.compile. They run in a separate process, because our shim for Megatron turns torch.compile off.
COMPILED := python -m pytest tests/kernels/test_traced_ops.py -q
OTHERS := --ignore tests/kernels/interpreter --ignore tests/kernels/test_traced_ops.py
# pytest may use more processes than there are cores, because tests often wait for programs to start, or to be found dead or silent.
# Each process takes about 9 s of CPU time to collect the tests.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python -m pytest -q

# Version of Triton that the CUDA set's PyTorch installs. Our kernels are tested with it and with the Triton of the CPU set.
TRITON ?= $(shell sed -n 's/^triton==\([0-9.]*\).*/\1/p' constraints/cuda.txt)
OTHER_TRITON := build/triton-$(TRITON)
# Packages for tests of the extras reasoning_gym and textarena, and of notebooks. The locked sets lack them, because some have no
# wheel.
GAMES := build/games
PYTEST := PYTHONPATH=$(CURDIR)/$(GAMES) $(PYTEST)

# Folder or page with the wheels of PyTorch for CPUs, which PyPI does not have.
TORCH_LINKS ?= https://download.pytorch.org/whl/cpu/torch/

# Module that `make mutations` changes, and the tests that should then fail.
MODULE ?= trainer/data/packing.py
TESTS ?= tests/trainer/test_packing.py

.PHONY: help install lock train real test test-all interpreted compiled test-triton cluster parity mutations check static quick bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## .venv with the locked libraries and marsrl; MARSRL_DEVICE=cuda or cpu chooses their builds

ifneq ($(MARSRL_DEVICE),$(INSTALLED_DEVICE))
.PHONY: $(STAMP)
endif
$(STAMP): constraints/install.sh constraints/cpu.txt constraints/cuda.txt setup.py pyproject.toml CMakeLists.txt $(wildcard csrc/*/*)
	constraints/install.sh
	@echo "$(MARSRL_DEVICE)" >$@

lock: install  ## writes constraints/cpu.txt and cuda.txt from cpu.in and cuda.in; keeps locked versions where possible
	for set in cpu cuda; do uv pip compile -q --no-header --annotation-style line --only-binary :all: \
	  --python-version $$([ $$set = cpu ] && echo 3.11 || echo 3.12) --python-platform x86_64-manylinux_2_31 --find-links $(TORCH_LINKS) \
	  $$([ $$set = cpu ] && echo --excludes constraints/cpu.excludes) constraints/$$set.in -o constraints/$$set.txt || exit; done

train: TRAINED := cpu_default-$(shell date +%Y%m%d-%H%M%S)
train: install  ## MarsRL end to end on this machine: warm start, RL, report
	torchrun --nproc-per-node 1 trainer/main.py run.name=$(TRAINED)
	marsrl report runs/$(TRAINED)

# Seed of `make real`, and the directory of the run that imitates the tutors, which runs once for each seed.
SEED ?= 0
PUPILS := runs/real_pupils_$(SEED)

real: install $(PUPILS)/hf  ## a pretrained model of 135 M parameters as MarsRL's team: imitation, RL, accuracy before and after (SEED=0)
	python trainer/main.py --config examples/real_team/run.yaml run.seed=$(SEED) policies.main.model=$(PUPILS)/hf \
	  policies.main.adapter.rank=16 policies.main.adapter.alpha=32

$(PUPILS)/hf: | install /tmp/smollm2 /tmp/real_team
	marsrl sft --config examples/real_team/run.yaml run.seed=$(SEED) run.name=$(notdir $(PUPILS)) run.resume=auto

/tmp/smollm2: | install
	marsrl fetch smollm2 $@

/tmp/real_team: | install
	python examples/real_team/problems.py $@

test: install $(GAMES)  ## tests before each commit: all quick ones, and one of each slow kind (tests/README.md)
	tests/apt.sh bwrap bubblewrap "so no sandboxes are tested"
	$(INTERPRETED) -m smoke
	$(PYTEST) -n 3 --dist loadscope --no-loadscope-reorder -m "(not slow or smoke) and not gpu and not multi_gpu" $(OTHERS)

test-all: install $(OTHER_TRITON) $(GAMES)  ## all tests that need no GPU (some need root, and install packages with apt)
	tests/apt.sh chromium chromium "so no page is opened in a browser"
	tests/apt.sh bwrap bubblewrap "so no sandboxes are tested"
	tests/apt.sh ip iproute2 "so no cluster in a box"
	$(MAKE) --output-sync -j 2 interpreted compiled
	$(PYTEST) -n 4 --dist loadscope --no-loadscope-reorder -m "not gpu and not multi_gpu" $(OTHERS) --durations=20

interpreted:
	$(INTERPRETED)

compiled:
	$(COMPILED)

$(OTHER_TRITON):
	python -m pip install -q --no-deps --target $@ triton==$(TRITON)

$(GAMES): constraints/games.txt
	rm -rf $@
	python -m pip install -q --no-deps --target $@ -r $<

test-triton: install $(OTHER_TRITON)  ## the Triton kernels, interpreted and compiled for GPUs, with another Triton (TRITON=3.7.1)
	PYTHONPATH=$(OTHER_TRITON) $(INTERPRETED)
	PYTHONPATH=$(OTHER_TRITON) python -m pytest tests/kernels -m "not gpu and not multi_gpu" --ignore tests/kernels/interpreter -k "ahead or triton" -q

cluster: install  ## training and failures on simulated hosts (network namespaces; needs root)
	tests/apt.sh ip iproute2 "so no cluster in a box"
	python -m pytest -v tests/cluster/test_cluster.py tests/cluster/all_cases.py

parity: install  ## losses and gradients of every parallel layout against one rank and transformers
	python benchmarks/parity.py

mutations: install  ## changes MODULE, one mistake at a time, and shows the mistakes that TESTS do not notice
	python -m pip install -q -c constraints/$(MARSRL_DEVICE).txt cosmic-ray==8.7.0
	sed 's#MODULE#$(MODULE)#; s#TESTS#$(TESTS)#' tests/mutations.toml | grep -v '^\#' >build/mutations.toml
	rm -f build/mutations.sqlite
	cosmic-ray init build/mutations.toml build/mutations.sqlite
	cosmic-ray exec build/mutations.toml build/mutations.sqlite
	cr-report --surviving-only --show-diff build/mutations.sqlite

check: install  ## ruff, types, and the quick tests
	$(MAKE) --output-sync -j 2 static quick

static:
	ruff check .
	mypy

quick:
	$(PYTEST) -n 3 --dist loadscope --no-loadscope-reorder -m "not slow and not gpu and not multi_gpu" $(OTHERS) --ignore tests/studies

bench: install  ## benchmarks on this machine, and the default run on three seeds
	python benchmarks/train_step.py
	python benchmarks/rollout.py
	python benchmarks/learning.py --seeds 0 1 2
	python benchmarks/run.py linear_policy_loss

clean:  ## removes build products and cached warm starts, but not .venv or runs
	rm -rf build dist *.egg-info kernels/_lib "$${MARSRL_CACHE:-$$HOME/.cache/marsrl}/warm_start"
