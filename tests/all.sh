#!/usr/bin/env bash
# All tests that need no GPU, as two runs side by side, one for each of two cores: those that start engines and whole
# runs, and all others on one thread. Arguments go to both. The last lines are the closing lines of the three pytests.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'kill 0' INT TERM
select=(-m "not gpu and not multi_gpu" -q "$@")
engines=(tests/engines tests/integration)
# Triton reads the variable at its import, so kernels that it interprets have a process of their own.
interpreted=tests/kernels/interpreter

(
  export OMP_NUM_THREADS=1
  TRITON_INTERPRET=1 python -m pytest "$interpreted" "${select[@]}" >"$folder/interpreted" 2>&1
  first=$?
  python -m pytest tests "${engines[@]/#/--ignore=}" --ignore "$interpreted" --durations=10 "${select[@]}" >"$folder/beside" 2>&1
  exit $((first ? first : $?))
) &
beside_pid=$!
python -m pytest "${engines[@]}" --durations=15 "${select[@]}" 2>&1 | tee "$folder/main"
status=$?
wait "$beside_pid"
beside_status=$?
cat "$folder/interpreted" "$folder/beside"
echo
for run in interpreted beside main; do tail -n 1 "$folder/$run"; done
exit $((status ? status : beside_status))
