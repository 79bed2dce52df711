"""Scripted engines, which replace those that rollout.engine names, and helpers to run and read runs with them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from engine_cases import spec_of
from small_run import sevens

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import (
    AdapterUpdate,
    DecodeRequest,
    Engine,
    EngineSpec,
    WeightReceipt,
    WeightUpdate,
)
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.types import FloatArray, IntArray
from marsrl.trainer import build
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import read_config
from marsrl.trainer.loop import train
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_samples
from marsrl.trainer.run import Run
from marsrl.trainer.runs.directory import RunDirectory, step_files

# Short prompts for Verifiers; those of `math` have 2,000 bytes.
BRIEFLY = ("agents.verifier1.prompt=chain", "agents.verifier2.prompt=chain")


@contextmanager
def engines_are(engine: Callable[[], Engine]) -> Iterator[None]:
    """Replace every engine of runs and evaluations in this process, inside the block."""

    def make_pool(policy: str, spec: EngineSpec, config: RolloutConfig, **others: Any) -> EnginePool:
        replicas = LocalReplicas([engine() for _ in range(config.engines)])
        return EnginePool(replicas, policy, deadline_s=config.deadline_s, sleeps=config.placement == "colocated")

    with mock.patch.object(build, "make_pool", make_pool):
        yield


class ScriptedWithWeights(ScriptedEngine):
    """Engine that answers by a script, and scores the probe of a weight sync with the weights that it received."""

    def __init__(
        self, model: Path, *args: Any, adapters: Mapping[str, AdapterConfig] | None = None, **options: Any
    ) -> None:
        adapters = adapters or {}
        super().__init__(*args, adapters=list(adapters), **options)
        self._local = LocalEngine(spec_of(model, adapters=adapters))

    def score(
        self, sequences: Sequence[IntArray], adapter: str | Sequence[str] = "", temperature: float | None = None
    ) -> list[FloatArray]:
        self._need("weights", "kv_cache")
        return self._local.score(sequences, adapter, temperature)

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        super().update_weights(update)
        return self._local.update_weights(update)

    def update_adapter(self, update: AdapterUpdate) -> WeightReceipt:
        super().update_adapter(update)
        return self._local.update_adapter(update)


def saying(
    model: Path,
    script: Callable[[DecodeRequest], str],
    kind: type[ScriptedWithWeights] = ScriptedWithWeights,
    **options: Any,
) -> Callable[[], Engine]:
    """Return a function that creates engines which answer by the script, with this model's tokens."""
    renderer = ChatRenderer(model)
    encode = lambda text: renderer.encode_trusted(text).tolist()  # noqa: E731
    return functools.partial(kind, model, script, encode=encode, **options)


def half_right(request: DecodeRequest, rng: random.Random | None = None) -> str:
    """Return a Solver's answer, 7 or 8, or a Verifier's verdict, drawn with the request's uid as seed unless `rng` is given."""
    rng = rng or random.Random(request.uid)
    if request.uid.rpartition("/")[2].startswith("verifier"):
        return f"Findings: none\nVerdict: {rng.choice(['correct', 'wrong'])}"
    return f"So the answer is \\boxed{{{rng.choice(['7', '8'])}}}."


def on_sevens(folder: Path, model: Path, *more: str) -> list[str]:
    """Return settings of a small run of the policy `main` on problems whose answer is 7."""
    return [
        "task=math", f"data.train={sevens(folder)}", f"policies.main={{model: {model}, dtype: float32}}",
        "rollout.engine=local", "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_response_tokens=120",
        "evaluate.num_problems=3", "evaluate.fixed_inputs=4", *more,
    ]  # fmt: skip


@contextmanager
def opened(folder: Path, words: Sequence[str]) -> Iterator[Run]:
    """Open a run called `scripted` in folder/runs, as trainer/main.py does, in this process."""
    checked = preflight(read_config(None, words)[0], world_size=1)
    directory = RunDirectory.create(folder / "runs", "scripted", "math_default", checked.config.run.resume)
    directory.write_config(checked.config.model_dump(mode="json"))
    with build.open_run(checked, directory) as run:
        yield run


def train_here(folder: Path, words: Sequence[str]) -> RunDirectory:
    """Open a run as `opened` does, and train it to its end."""
    with opened(folder, words) as run:
        train(run)
        return run.directory


def samples_of(run: RunDirectory) -> list[SampleRecord]:
    """Return the samples of all steps, in order."""
    return [record for path in step_files(run.samples).values() for record in read_samples(path)]


def rows_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the values of metrics.jsonl."""
    return [row.values for row in read_metrics(run.metrics)]


def untimed(run: RunDirectory) -> list[dict[str, Any]]:
    """Return metrics.jsonl without measured times."""

    def is_timing(name: str) -> bool:
        return name.startswith(("timing_s/", "latency_s/", "perf/")) or name.endswith(("_per_s", "seconds", "_s"))

    rows = read_metrics(run.metrics)
    return [{"step": row.step} | {k: v for k, v in row.values.items() if not is_timing(k)} for row in rows]
