#!/usr/bin/env bash
# Makes .venv and installs the pinned set: torch first (the right build for this machine), then everything else without
# letting a resolver touch it, then marsrl itself in editable mode. Called by `make install`; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'install: %s\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit 1; }

PYTHON=${PYTHON:-}
if [ -z "$PYTHON" ]; then
  for candidate in python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
      PYTHON=$candidate
      break
    fi
  done
fi
[ -n "$PYTHON" ] || die "needs Python 3.11 or 3.12; found $(python3 --version 2>&1 || echo none). Install one, or name it: make PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
  || die "$PYTHON is $("$PYTHON" --version 2>&1); marsrl needs Python 3.11 or 3.12"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null \
  || die "$PYTHON has no venv module; on Debian or Ubuntu: apt-get install python3-venv"
command -v g++ >/dev/null || die "g++ is missing (it builds the CPU kernels); on Debian or Ubuntu: apt-get install g++"

[ -x .venv/bin/python ] || { say "making .venv with $("$PYTHON" --version)"; "$PYTHON" -m venv .venv; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
TORCH=2.13.0
torch_build() { .venv/bin/python -c 'import torch; print(torch.__version__)' 2>/dev/null || true; }

if has_gpu; then
  say "a GPU is here: torch $TORCH and vllm for CUDA"
  pip install -q -r constraints/gpu.txt
else
  if [ "$(torch_build)" != "$TORCH+cpu" ]; then
    say "torch $TORCH for CPU"
    wanted=("torch==$TORCH+cpu" numpy==2.3.5)
    # pip's configured sources first: a mirror or a local file serves; then PyTorch's own index of CPU builds.
    { [ -z "${TORCH_INDEX:-}" ] && pip install -q "${wanted[@]}" 2>/dev/null; } \
      || pip install -q "${wanted[@]}" --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
    [ "$(torch_build)" = "$TORCH+cpu" ] \
      || die "got torch $(torch_build) where a CPU build was asked for (no GPU here); set TORCH_INDEX to an index with torch==$TORCH+cpu"
  fi
  say "the pinned set (vLLM for CPU, Ray, Megatron-core, ...)"
  # --no-deps: a resolver would fetch torchvision, torchaudio and a second, CUDA torch. The list is a full resolution.
  pip install -q --no-deps -r constraints/cpu.txt
fi
pip install -q --no-deps -r constraints/dev.txt
say "marsrl (MARSRL_BUILD=${MARSRL_BUILD:-auto})"
PATH="$PWD/.venv/bin:$PATH" pip install -q --no-deps --no-build-isolation -e .
.venv/bin/python -c 'import marsrl.kernels'
say "done"
