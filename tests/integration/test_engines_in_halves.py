"""Two training steps with vLLM over two processes, whose every sync is proven."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from random_model import write_model
from runner import Runner

from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.summary import load_summary

pytestmark = pytest.mark.slow

WORDS = (
    "task=math",
    "orchestration=solver",
    "loss.entropy_coef=0.1",  # the model is random and earns nothing: this alone changes it
    "policies.main.dtype=float32",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_response_tokens=16",
    "rollout.placement=local",
    "rollout.vllm.tensor_parallel=2",
    "rollout.vllm.expert_parallel=true",
    "run.evaluate=false",
    "run.steps=2",
)


def test_two_steps_train_with_an_engine_in_halves(
    tmp_path: Path, runner: Runner, left_behind: Callable[[], list[str]]
) -> None:
    """Experts spread over two processes of the trainer's own; engines in halves that Ray starts, and dense ones: where each
    of their syncs is proven by parameter, test_trainer_engine_sync.py.
    """
    data = tmp_path / "train.jsonl"
    problems = [{"question": f"What is {i} + 4?", "answer": f"#### {i + 4}"} for i in range(20)]
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    model = write_model("qwen3moe", tmp_path / "model", vocab_size=330, max_position_embeddings=4096)
    write_byte_tokenizer(model)
    words = (f"policies.main.model={model}", f"data.train={data}", *WORDS)
    directory = runner.run("halves", *words)
    rows = [row.values for row in read_metrics(directory / "metrics.jsonl")]
    assert len(rows) == 2 and all(row["actor/updates"] for row in rows)
    assert all(row["sync/probe_tokens"] == 640 for row in rows)
    medians = [row["sync/probe_diff_median"] for row in rows]
    assert all(median is not None and median < 1e-5 for median in medians), medians
    assert load_summary(directory / "summary.json").verified_syncs == 3
    deadline = time.monotonic() + 60
    while left_behind() and time.monotonic() < deadline:  # a worker takes a moment to end
        time.sleep(0.5)
    assert left_behind() == []
