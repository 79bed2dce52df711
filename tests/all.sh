#!/usr/bin/env bash
# All tests that need no GPU, in parts, five at a time on two cores, each on one thread: a part waits now and then, for
# processes that start, that were killed or that are silent, and another has its core meanwhile. The next part starts when
# one ends. Arguments go to every pytest. A part is printed when it has ended; the last lines are the closing lines of all.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
export folder OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MARSRL_FORKS=$folder/forks
unset PYTHONDONTWRITEBYTECODE  # some hundred processes import the same files
trap 'rm -rf "$folder"' EXIT
trap 'kill 0' INT TERM

# The longest first, those that mostly wait in the middle, so that the last ones are short and busy. Files that share runs,
# engines or ranks are one part: its folders and files, in the order in which they run, with commas between.
parts=(
  tests  # all that no other part holds
  tests/megatron,tests/plan,tests/trainer/test_collective.py  # the same two ranks
  tests/engines
  tests/integration  # all that no other part holds
  tests/integration/test_miniatures.py,tests/integration/test_reward_rises.py  # forked from one process
  tests/integration/test_default_run.py,tests/integration/test_chaos.py  # the same warm start
  tests/docs
  tests/benchmarks
  tests/kernels
  tests/integration/test_trainer_engine_sync.py
  tests/integration/test_killed_rank.py
  tests/cluster
  tests/integration/test_engines_in_halves.py
  tests/kernels/interpreter
)

run_part() {  # the part, then pytest's arguments
  local part=$1 paths left_out=() other path file status
  shift
  IFS=, read -ra paths <<<"$part"
  for other in ${parts//,/ }; do
    for path in "${paths[@]}"; do
      [[ $other == "$path"/* ]] && left_out+=(--ignore "$other")
    done
  done
  file=$folder/${part//\//.}
  # Triton reads the variable at its import, so kernels that it interprets have a process of their own
  [ "$part" = tests/kernels/interpreter ] && export TRITON_INTERPRET=1
  "${MARSRL_FORKS:+$MARSRL_FORKS/}python" -m pytest "${paths[@]}" ${left_out[@]+"${left_out[@]}"} -m "not gpu and not multi_gpu" -q --durations=10 "$@" >"$file" 2>&1
  status=$?
  [ $status = 5 ] && [ $# -gt 0 ] && status=0  # the arguments choose no test of this part
  { echo; echo "=== $part"; cat "$file"; } | flock "$folder" cat
  return $status
}
export -f run_part

# what runs and engines import is imported once: most of them are forked from these three (tests/forks/server.py)
mkdir "$MARSRL_FORKS"
for kind in trainer engine torch; do
  python -W ignore tests/forks/server.py "$MARSRL_FORKS" $kind >"$folder/forks.$kind" 2>&1 &
  until [ -S "$MARSRL_FORKS/$kind" ] && [ -x "$MARSRL_FORKS/python" ]; do
    kill -0 $! || { cat "$folder/forks.$kind"; echo "so every process imports its own"; unset MARSRL_FORKS; break 2; }
    sleep 0.1
  done
done

parts="${parts[*]}" bash -c '
  printf "%s\0" $parts | xargs -0 -P 5 -I{} bash -c "run_part {} \"\$@\"" bash "$@"
' bash "$@"
status=$?
echo
for part in "${parts[@]}"; do
  file=$folder/${part//\//.}
  [ -f "$file" ] && printf '%s:\n%s\n' "$part" "$(tail -n 1 "$file")"
done
exit $((status ? 1 : 0))
