"""A native team, and the same team written as a program, train identically: bit for bit, from the first token to the weights
after a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from megatron_models import learner, own_groups, weights  # noqa: F401
from programs import AGENTS, playing, program, rollout_config, team_of, turns_of

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.stages import StepBatch
from marsrl.rollout.types import Ask, Finish, Message, Reward, Sample
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import Credited, credit
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.scatter import scatter
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel

IN_TURN = """
def run(problem, client):
    turns = [{"role": "user", "content": problem.question}]
    first = client.chat("solver", turns)
    report = client.chat("verifier", [{"role": "system", "content": "grade"}, f"{problem.question} \\n {first.text}"])
    again = client.chat("solver", [*turns, first.message, f"{report.text} fix"])
    rewards = {"solver": len(again.text) % 7, "verifier": len(report.text) % 7}
    return rewards | ({first.id: 2.0 * client.session.endswith("1")} if BY_TURN else {})
"""


class InTurn(Orchestration):
    """Native team that plays like the program IN_TURN. by_turn: whether the Solver's first turn has a reward of its own."""

    name = "in_turn"
    by_turn = False
    agents = (AgentSpec("solver", Role.ADVISER), AgentSpec("verifier", Role.ADVISER))

    def follow(self, episode: Episode) -> Sequence[Ask]:
        solver = episode.ask("solver")
        began = episode.waiting or episode.is_over(solver) or episode.ask("verifier").id in episode.asks
        return [solver, episode.ask("verifier")] if began else [solver]

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        question = episode.problem.question
        if ask.agent == "solver":
            return (Message("user", question),)
        (first,) = episode.waiting.values()
        return Message("system", "grade"), Message("user", f"{question} \n {first.text}")

    def parse(self, sample: Sample) -> Sample:
        if sample.agent == "solver" and sample.turn == 0 and sample.finish is Finish.STOP:
            return replace(sample, finish=Finish.WAITING)
        return replace(sample, shown=sample.turn_text)

    def continuation(self, episode: Episode, sample: Sample) -> Sequence[Message] | None:
        report = episode.said(episode.ask("verifier"))
        return None if report is None else [Message("user", f"{report.shown} fix")]

    def reward(self, episode: Episode, ask: Ask, sample: Sample, judged: Reward | None = None) -> Reward:
        value = float(len(sample.turn_text) % 7)
        return Reward(value, min(value, 1.0))

    def turn_rewards(self, episode: Episode, sample: Sample) -> Sequence[float]:
        if sample.agent == "verifier" or not self.by_turn:
            return ()
        return [2.0 * episode.id.endswith("1"), 0.0]


class InTurnPriced(InTurn):
    by_turn = True


@dataclass(frozen=True)
class Trained:
    """Results of one step. norms: norm of the whole gradient, then of each agent's part. checksum: of the new weights."""

    credited: Credited
    norms: tuple[float | None, ...]
    checksum: str


def trained(model: Path, batch: StepBatch, rules: CreditConfig) -> Trained:
    groups = sorted(batch.groups, key=lambda group: group.group_id)
    credited = credit(groups, rules, AGENTS)
    policy = learner(model)
    before = checksum_of(policy)
    updates = scatter(mini_batches(credited, 1, Average(), seed=0, step=1), policy.shard(4096))
    stats = policy.train_step(updates, by_agent=True)
    after = checksum_of(policy)
    parallel.stop(keep_world=True)
    assert after != before and stats.grad_norm > 0
    return Trained(credited, (stats.grad_norm, *stats.agent_grad_norms), after)


def checksum_of(policy: Learner) -> str:
    return digest(name.encode() + weight.numpy().tobytes() for name, weight in sorted(weights(policy).items()))


def digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def shown(name: str, trained: Trained) -> Iterator[str]:
    """Yield lines to print: tokens, advantages, gradient norms."""
    sequences = sorted(trained.credited.sequences, key=lambda sequence: sequence.uid)
    tokens = digest(
        each.prompt_ids.tobytes() + each.token_ids.tobytes() + each.is_sampled.tobytes() for each in sequences
    )
    norms = ", ".join(f"{who} {norm:.9g}" for who, norm in zip(("all", *AGENTS), trained.norms, strict=True))
    yield f"tokens, {name}: {trained.credited.num_tokens} trained of {len(sequences)} samples, checksum with masks {tokens}"
    yield f"advantages, {name}: {' '.join(f'{each.advantage:.3g}' for each in sequences)}"
    yield f"gradient norm, {name}: {norms}; weights after the step, checksum {trained.checksum}"


@pytest.mark.parametrize(
    "rules",
    [CreditConfig(normalise="agent"), CreditConfig(normalise="agent", std="none", turns="returns")],
    ids=["by sample", "by turn"],
)
def test_a_native_team_and_the_same_program_train_alike(model: Path, tmp_path: Path, rules: CreditConfig) -> None:
    """The engine's log-probs are compared within 1e-5, because their last bits depend on other requests."""
    config = rollout_config(group_size=4, pipeline="trajectory")
    by_turn = rules.turns == "returns"
    ours = team_of(model, config, InTurnPriced if by_turn else InTurn).batch()
    text = IN_TURN.replace("BY_TURN", str(by_turn))
    with playing(model, config, program(tmp_path, text), sums_turns=by_turn) as played:
        theirs, next_one = played.batch(), played.batch()
    assert {group.rollout_id for group in next_one.groups} == {"000003", "000004"} and len(next_one.groups) == 4
    played_by = {agent: [s for g in theirs.groups if g.agent == agent for s in g.samples] for agent in AGENTS}
    for agent, num_runs, note in (("solver", 3, "calls 1, 3 of 3"), ("verifier", 1, "call 2 of 3")):
        assert [(len(turns_of(s)), s.reward.note) for s in played_by[agent]] == [(num_runs, note)] * 8
    counts = {"rollout/episodes": 8, "team/samples": 16, "team/calls": 24}
    assert {name: theirs.metrics[name] for name in counts} == counts and theirs.metrics["rollout/foreign_tokens"] > 0
    native, external = trained(model, ours, rules), trained(model, theirs, rules)
    assert native.credited.turns == external.credited.turns and bool(native.credited.turns) == by_turn
    if by_turn:
        several = [turns for uid, turns in native.credited.turns.items() if "solver" in uid]
        assert all(len(turns) == 2 for turns in several) and any(turns[0] != turns[1] for turns in several)
    mine, others = ({s.uid: s for s in each.credited.sequences} for each in (native, external))
    assert len(mine) == 16 and mine.keys() == others.keys() and native.credited.num_tokens > 1000
    assert {sequence.advantage for sequence in mine.values()} != {0.0}
    for uid, sequence in mine.items():
        other = others[uid]
        assert sequence.token_ids.tolist() == other.token_ids.tolist(), uid
        assert sequence.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert sequence.is_sampled.tolist() == other.is_sampled.tolist()
        np.testing.assert_allclose(sequence.rollout_logprobs, other.rollout_logprobs, atol=1e-5)
        assert sequence.advantage == other.advantage
    for lines in zip(shown("native", native), shown("external", external), strict=True):
        print(*lines, sep="\n")
    assert native.norms == external.norms and native.checksum == external.checksum
