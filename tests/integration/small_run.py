"""The smallest settings with which the default run still does everything (real vLLM in Ray actors, Megatron, all five agents),
and helpers that start such runs as a user does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

# Tests of a whole run must hold for every seed; MARSRL_TEST_SEED sets another one (tests/README.md).
SEED = (f"run.seed={os.environ['MARSRL_TEST_SEED']}",) if "MARSRL_TEST_SEED" in os.environ else ()

MAIN = Path(__file__).resolve().parents[2] / "trainer" / "main.py"

# Problems with one or two operations are learned in seconds, from tutors that err often. Everything else is as in MarsRL.
ARITHMETIC = (
    "task_options={min_operations: 1, max_operations: 2}",
    "warm_start={max_solver_steps: 30, short_steps: 15, solver_loss: 0.5, max_team_steps: 8, decay_steps: 12, "
    "table_drills: 128, slip_solver: 0.4, slip_verifier: 0.3, slip_corrector: 0.4}",
)
SMALL = (
    *SEED,
    "loss.entropy_coef=0.01",  # each step trains, even if a weak team's rewards are all equal
    "evaluate={num_problems: 12, fixed_inputs: 8, accept_after: 1, max_iterations: 2, temperature: 1.0, top_p: 1.0}",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "rollout.vllm.max_num_seqs=64",
    "rollout.vllm.kv_cache_mib=64",
)
# Pick `adaptive`, because a weak Solver gives few pairs of a right and a wrong answer.
TEAM = "agents={verifier1: {pick: adaptive}, verifier2: {pick: adaptive}}"


def run_here(words: list[str]) -> None:
    """Run trainer/main.py in this process."""
    from marsrl.trainer.main import main

    assert main([*words, *SEED]) == 0


def sevens(folder: Path, number: int = 40, *, name: str = "train.jsonl", answer: str = "7") -> Path:
    """Write a file of problems that ask for a number and have this answer."""
    lines = [{"question": f"What is {answer}, asked for the {i}th time?", "answer": answer} for i in range(number)]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


def started_with(variable: str, value: str) -> list[psutil.Process]:
    """Return other processes whose environment has this variable, which children inherit; `info` has their name and cmdline."""
    every = psutil.process_iter(["name", "cmdline", "environ"])
    # cmdline is None if the process ended before or during the read.
    alive = [each for each in every if each.info["cmdline"] is not None]
    return [each for each in alive if (each.info["environ"] or {}).get(variable) == value and each.pid != os.getpid()]


LIMIT_S = 1200  # only a hanging run takes this long


@dataclass(frozen=True)
class Runner:
    """Starts runs in one folder, with one cache of warm starts."""

    folder: Path
    cache: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, "MARSRL_CACHE": str(self.cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def start(self, name: str, *words: str, ranks: int = 0) -> subprocess.Popen[str]:
        """Start a run. ranks: number of torchrun's ranks; 0: one process, without torchrun."""
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
        default = [] if any(word.startswith("preset=") for word in words) else [*ARITHMETIC, TEAM]
        settings = [f"run.dir={self.folder}", f"run.name={name}", *default, *SMALL, *words]
        return subprocess.Popen(
            [sys.executable, *launcher, str(MAIN), *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
            start_new_session=True,
        )

    def run(self, name: str, *words: str, ranks: int = 0) -> Path:
        """Run to the end, and return the run's directory."""
        process = self.start(name, *words, ranks=ranks)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == 0, output[-6000:]
        assert "uthentication" not in output, output[-6000:]  # Ray must print nothing about its authentication token
        return self.folder / name
