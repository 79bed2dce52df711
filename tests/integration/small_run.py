"""The smallest settings of the default run that still do all of it: real vLLM in Ray actors, Megatron, all five agents."""

from __future__ import annotations

import os
from pathlib import Path

# What tests ask of a whole run holds for every draw: MARSRL_TEST_SEED=3 has it draw otherwise (tests/README.md).
SEED = (f"run.seed={os.environ['MARSRL_TEST_SEED']}",) if "MARSRL_TEST_SEED" in os.environ else ()

MAIN = Path(__file__).resolve().parents[2] / "trainer" / "main.py"

# A task of one or two operations is learned in seconds, from tutors that slip often; the run stays MarsRL in every part.
ARITHMETIC = (
    "task_options={min_operations: 1, max_operations: 2}",
    "warm_start={max_solver_steps: 60, short_steps: 30, solver_loss: 0.5, max_team_steps: 16, decay_steps: 24, "
    "table_drills: 128, slip_solver: 0.4, slip_verifier: 0.3, slip_corrector: 0.4}",
)
SMALL = (
    *SEED,
    "loss.entropy_coef=0.01",  # each step trains, also where the rewards of every group are equal, as a poor team's may be
    "evaluate={num_problems: 12, fixed_inputs: 8, accept_after: 1, max_iterations: 2, temperature: 1.0, top_p: 1.0}",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "rollout.vllm.max_num_seqs=64",
    "rollout.vllm.kv_cache_mib=64",
)
# A poor Solver has few right-and-wrong pairs.
TEAM = "agents={verifier1: {pick: adaptive}, verifier2: {pick: adaptive}}"


def run_here(words: list[str]) -> None:
    """A run of trainer/main.py in this process."""
    from marsrl.trainer.main import main

    assert main([*words, *SEED]) == 0
