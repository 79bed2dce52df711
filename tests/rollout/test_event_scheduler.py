"""What holds whatever the order in which samples end: many random scripts, no model, no thread (5 s)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from marsrl.rollout.agents.orchestration import build_orchestration
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.pool import EnginePool, LocalReplicas
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.event_scheduler import EventScheduler
from marsrl.rollout.ledger import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.rollout.tasks.data import DataCursor
from marsrl.rollout.team import Team
from marsrl.rollout.types import Group, Message, Problem, Reward

AGENTS = ("solver", "verifier1", "corrector1", "verifier2", "corrector2")
END = 1


class LetterRenderer:
    """A token a character; no tokenizer library."""

    stop_ids = (END,)

    def render(self, messages: tuple[Message, ...]) -> tuple[np.ndarray, str]:
        text = "\n".join(message.content for message in messages)
        return np.asarray([2 + ord(c) % 250 for c in text] or [2], np.int32), text

    def decode(self, token_ids: np.ndarray) -> str:
        return "".join(chr(t) for t in token_ids.tolist() if t != END)


def script(request: DecodeRequest) -> list[int]:
    """Lengths with a long tail; answers and verdicts by a coin. Depends on the uid alone."""
    rng = random.Random(request.uid)
    is_verifier = request.uid.rpartition("/")[2].startswith("verifier")
    said = f"Verdict: {rng.choice(['correct', 'wrong'])}" if is_verifier else f"\\boxed{{{rng.choice('78')}}}"
    thought = "." * min(60, int(rng.lognormvariate(2.0, 0.8)))
    return [ord(c) for c in f"{thought}\n{said}"]


def judge(answers: Any) -> list[Reward]:
    return [Reward(float(answer == problem.answer), float(answer == problem.answer)) for problem, answer in answers]


@dataclass
class Play:
    """A scheduler with its engines, driven as a trainer would."""

    config: RolloutConfig
    seed: int = 0
    num_problems: int = 40
    tokens_per_step: int = 9
    engines: list[ScriptedEngine] = field(default_factory=list)
    version: int = 0
    answers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        agents = {name: AgentConfig() for name in AGENTS}
        self.engines = [
            ScriptedEngine(script, tokens_per_step=self.tokens_per_step) for _ in range(self.config.engines)
        ]
        for engine in self.engines:
            engine._answers = self.answers  # a script goes on wherever its sample comes back to
        pool = EnginePool(LocalReplicas(self.engines), slots=12)
        orchestration = build_orchestration("verifier_corrector", agents, "math", self.config.picks)
        team = Team(agents, orchestration, {"main": LetterRenderer()}, {"main": pool}, judge)  # type: ignore[dict-item]
        problems = [Problem(f"p{i}", f"question {i}", "7", "math") for i in range(self.num_problems)]
        self.scheduler = EventScheduler(self.config, team, DataCursor(problems, self.seed), seed=self.seed)

    def start(self) -> None:
        for engine in self.engines:
            engine._version = self.version
        self.scheduler.resume({"main": self.version})

    def batch(self) -> Any:
        self.scheduler.ask()
        for _ in range(10_000):
            if (batch := self.scheduler.take()) is not None:
                return batch
            self.scheduler.advance(0.0)
        raise AssertionError("no batch")

    def publish(self) -> None:
        self.scheduler.rest()
        self.version += 1
        self.start()

    def train(self, steps: int, decode_while_training: int = 4) -> list[tuple[Group, ...]]:
        trained = []
        for _ in range(steps):
            trained.append(self.batch().groups)
            for _ in range(decode_while_training):
                self.scheduler.advance(0.0)
            self.publish()
        return trained


def config_of(**options: Any) -> RolloutConfig:
    base = {"engine": "scripted", "prompts_per_step": 2, "group_size": 3, "max_response_tokens": 48, "overlap": 1}
    return RolloutConfig(**(base | options))


CONFIGS = {
    "one segment": config_of(),
    "four segments": config_of(segments=4),
    "two engines, two ahead": config_of(segments=3, overlap=2, engines=2),
    "three ahead, half of a stage": config_of(segments=2, overlap=3, finish_share=0.5),
    "stragglers dropped": config_of(segments=8, group_completion="drop_stragglers", max_group_age=1, overlap=2),
    "small pool": config_of(segments=8, max_unfinished=6),
    "trajectories": config_of(pipeline="trajectory", segments=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(2))
def test_a_sample_is_trained_once_and_its_group_is_whole(name: str, seed: int) -> None:
    config = CONFIGS[name]
    play = Play(config, seed=seed)
    play.start()
    rng = random.Random(seed)
    groups = [g for _ in range(8) for g in sum(play.train(1, rng.randrange(8)), ())]
    uids = Counter(s.uid for g in groups for s in g.samples)
    assert len(groups) > 12 and max(uids.values()) == 1
    assert len({g.group_id for g in groups}) == len(groups)
    for group in groups:
        assert [s.uid for s in group.samples] == sorted(s.uid for s in group.samples)
        assert {s.group_id for s in group.samples} <= {group.group_id}
        if config.group_completion == "wait":
            assert len(group.samples) == 3
        for sample in group.samples:
            assert [seg.start for seg in sample.segments] == [0, *[seg.end for seg in sample.segments][:-1]]
            assert sample.segments[-1].end == len(sample.token_ids) == len(sample.rollout_logprobs)
            versions = [seg.version for seg in sample.segments]
            assert versions == sorted(versions)
            whole = [*script(DecodeRequest(sample.uid, None, 0, None, 0, "")), END]  # type: ignore[arg-type]
            assert sample.token_ids.tolist() == whole[: len(sample.token_ids)]
            if sample.parent_uid is not None and config.group_completion == "wait":
                assert sample.parent_uid in uids


@pytest.mark.parametrize("name", CONFIGS)
def test_a_restored_scheduler_goes_on_with_every_problem_once(name: str) -> None:
    """Batches taken up to a checkpoint and after it are those of one run: nothing twice, nothing lost."""
    play = Play(CONFIGS[name])
    play.start()
    trained = play.train(3)
    state = decode(RolloutState, encode(play.scheduler.snapshot()))
    play.train(1)  # lost: the process is killed here
    again = Play(CONFIGS[name], version=3, answers=play.answers)
    again.scheduler.restore(state)
    again.start()
    trained += again.train(5)
    groups = [g for batch in trained for g in batch]
    assert len({g.group_id for g in groups}) == len(groups)
    # every problem drawn is trained, or waits somewhere: each of them in one place
    waiting = [g for b in again.scheduler.state.ready for g in b.groups] + again.scheduler.state.closed
    open_groups = [g.ask for g in again.scheduler.state.open.values()]
    solver = [g.rollout_id for g in [*groups, *waiting, *open_groups] if g.agent == "solver"]
    assert sorted(solver) == [f"{i:06d}" for i in range(1, again.scheduler.state.num_instances + 1)]
    problems = Counter(s.problem_id for g in groups if g.agent == "solver" for s in g.samples[:1])
    assert max(problems.values()) == 1 and again.scheduler.state.num_instances <= 40
