"""A run directory with made-up numbers and texts, which are not the results of a model."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from letters import AGENTS, sampled

from marsrl.rollout.types import Group, Reward, Sample, Segment
from marsrl.trainer.report.group_metrics import summarise
from marsrl.trainer.report.metrics import MetricsLog
from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.report.summary import (
    AgentEstimate,
    Confusion,
    Estimate,
    Evaluation,
    Summary,
    save_summary,
    wilson_interval,
)
from marsrl.trainer.report.trace import TraceLog
from marsrl.trainer.runs.directory import RunDirectory


def make_sample(
    uid: str, agent: str = "solver", *, num_tokens: int = 4, version: int = 0, text: str | None = None, **changes: Any
) -> Sample:
    """Return a sample with reward 1; `changes` replace fields."""
    made = {"rollout_id": "p0#0", "problem_id": "p0", "group_id": f"p0#0/{agent}/root", "prompt_text": "a 3 b *7"}
    made |= {"full_text": f"text of {uid}" if text is None else text, "reward": Reward(1.0, 1.0, {"answer": 1.0})}
    made["segments"] = (Segment(0, num_tokens, version),)
    return replace(sampled(uid, 1.0, agent=agent, tokens=num_tokens), **{**made, **changes})


def make_group(*samples: Sample) -> Group:
    first = samples[0]
    return Group(first.group_id, first.rollout_id, first.agent, samples)


def estimate(successes: float, n: int) -> Estimate:
    low, high = wilson_interval(successes, n)
    return Estimate(mean=successes / n, low=low, high=high, n=n)


def make_evaluation(rate: float, n: int = 300) -> Evaluation:
    verdicts = Confusion(right_correct=60, right_wrong=18, wrong_correct=40, wrong_wrong=38, none=4)
    loop = Confusion(right_correct=200, right_wrong=20, wrong_correct=44, wrong_wrong=90)
    judged, repaired = estimate(round((0.3 + rate / 2) * 160), 160), estimate(round(rate * 80), 80)
    return Evaluation(
        agents={
            "solver": AgentEstimate(**dict(estimate(round(rate * n), n))),
            "verifier1": AgentEstimate(**dict(judged), confusion=verdicts, loop_confusion=loop),
            "corrector1": AgentEstimate(**dict(repaired), breaks=estimate(9, 80)),
        },
        system=estimate(round((rate + 0.03) * n), n),
    )


def make_summary(**changes: Any) -> Summary:
    engine = {"engine_class": "LLMEngine", "library": "vllm", "version": "0.0-test"}
    fields: dict[str, Any] = {"name": "made-up", "task": "arithmetic", "model": "made-up Qwen3-MoE, 0.57 M parameters"}
    fields |= {"device": "made-up CPU, 2 cores", "steps": 6, "seeds": {"run": 0}}
    fields |= {"before": make_evaluation(0.55), "after": make_evaluation(0.88), "verified_syncs": 6}
    fields["engine"] = engine | {"kind": "vllm", "device": "cpu", "dtype": "float32"}
    fields |= {"timings": {"warm_start": 140.0, "rl": 101.5}, "commit": "0123abc"}
    fields |= {"versions": {"torch": "0.0-test", "ray": "0.0-test"}, "tokens_per_engine": (412_345,)}
    return Summary(**{**fields, **changes})


def make_step(step: int, rng: random.Random, text: str = "") -> tuple[list[Group], dict[str, float]]:
    """Return a step of the agentic pipeline: in step k, agent j answers problems that began in step k - j."""
    groups, advantages = [], {}
    for depth, agent in enumerate(AGENTS[: step + 1]):
        for problem in range(3):
            rollout_id = f"p{step - depth}.{problem}#0"
            parent = f"{rollout_id}/{AGENTS[depth - 1]}/{'0' * depth}" if depth else None
            shared = {"rollout_id": rollout_id, "problem_id": rollout_id.removesuffix("#0"), "parent_uid": parent}
            shared |= {"group_id": f"{rollout_id}/{agent}/{parent or 'root'}", "prompt_text": f"a 3 b *7 c -5 {text}"}
            samples = []
            for index in range(4):
                right = rng.random() < 0.4 + 0.08 * step
                missing = agent == "solver" and problem == 2 and index == 3
                value = math.nan if missing else float(right)
                number = rng.randint(5, 60)
                says: dict[str, Any] = {"reward": Reward(value, value, {"answer": value}, text)}
                if missing:
                    says["reward"] = Reward(value, value, {}, text or "late")
                says |= {"verdict": right} if agent.startswith("verifier") else {"answer": f"{number % 10}{text}"}
                says |= {"num_tokens": number, "text": f"a 3 b *7 = 1 c -5 = 6 Answer: {number % 10} {text}"}
                samples.append(
                    make_sample(f"{rollout_id}/{agent}/{'0' * depth}{index}", agent, version=step, **shared, **says)
                )
                advantages[samples[-1].uid] = 0.0 if missing else value - 0.5
            groups.append(make_group(*samples))
    return groups, advantages


def make_run(root: Path, *, text: str = "", num_steps: int = 6, finished: bool = True) -> RunDirectory:
    """Write a run with `text` in everything that comes from a model, a data file or a config."""
    rng = random.Random(0)
    run = RunDirectory.create(root, "made-up", "test")
    run.write_config({"run": {"name": "made-up"}, "data": {"train": text}, "agents": {name: {} for name in AGENTS}})
    trace = TraceLog(run.trace)
    start = trace.zero
    with MetricsLog(run) as metrics:
        for step in range(num_steps):
            groups, advantages = make_step(step, rng, text)
            write_samples(run, step, groups, advantages)
            values = summarise(groups, version=step, advantages=advantages)
            parts = {"rollout": 2 + rng.random(), "credit": 0.05, "pack": 0.1, "step": 1 + rng.random(), "publish": 0.2}
            values |= {f"timing_s/{name}": seconds for name, seconds in parts.items()}
            values |= {"actor/entropy": 0.3 - 0.02 * step, "rollout/tokens": 3000}
            values["actor/grad_norm"] = math.nan if step == 2 else 0.5 + rng.random()
            values |= {"mpt/fraction_masked": 0.04 * step, "perf/tokens_per_s": 4000 + 100 * step}
            metrics.log(step, values)
            lanes = {"rollout": "engine/0", "step": "rank/0", "publish": "sync/main", "credit": f"reward/0{text}"}
            at = start + 4.5 * step
            for mark in (f"step {step}", f"stage {step}{text}"):
                trace.add(f"mark/{mark[:5].strip()}", mark, at, at)
            for name, lane in lanes.items():
                trace.add(lane, f"{name}{text}", at, at + parts[name], {"step": step, "note": text})
                at += parts[name]
    trace.save()
    if finished:
        save_summary(run.summary, make_summary(device=f"made-up CPU {text}"))
    return run
