#!/usr/bin/env bash
#SBATCH --job-name=marsrl
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# The first TRAINERS hosts of the job train, with RANKS ranks each; the other hosts run engines. Pass the arguments of
# trainer/main.py:
#   TRAINERS=2 sbatch docs/slurm.sh --config configs/qwen3_30b_a3b.yaml \
#     policies.main.model=/models/Qwen3-30B-A3B-Thinking-2507 data.train=problems.jsonl run.name=first
# To resume, submit the same command with run.resume=auto added. Submit from the checkout, with .venv/bin on PATH.
set -euo pipefail
export TRAINERS=${TRAINERS:-1} RANKS=${RANKS:-8} RAY_AUTH_MODE=token
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export FIRST=${hosts[0]}
for host in "${hosts[@]:TRAINERS}"; do
  srun --nodes=1 --ntasks=1 --nodelist="$host" bash -c 'while sleep 5; do ray start --address="$FIRST:6379" --block; done' &
done
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trainers=$(IFS=,; echo "${hosts[*]:0:TRAINERS}")
srun --nodes="$TRAINERS" --ntasks="$TRAINERS" --ntasks-per-node=1 --nodelist="$trainers" bash -c '
  exec torchrun --nnodes "$TRAINERS" --node-rank "$SLURM_PROCID" --master-addr "$FIRST" --nproc-per-node "$RANKS" \
    trainer/main.py "$@"' torchrun "$@" rollout.ray_address=here
