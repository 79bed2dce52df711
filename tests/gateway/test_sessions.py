"""Programs play: what they ask becomes samples, token by token what a team of ours would have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from programs import AGENTS, VERSIONS, natively, playing, program, rollout_config, turns_of

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.engines.protocol import Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import EvaluationPlay
from marsrl.rollout.types import Ask, Finish, Message, Problem, Reward, Sample
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit

IN_TURN = """
def run(problem, client):
    turns = [{"role": "user", "content": problem.question}]
    first = client.chat("solver", turns)
    report = client.chat("verifier", [{"role": "system", "content": "grade"}, f"{problem.question} \\n {first.text}"])
    again = client.chat("solver", [*turns, first.message, f"{report.text} fix"])
    return {"solver": len(again.text) % 7, "verifier": len(report.text) % 7}
"""


class InTurn(Orchestration):
    """The same, as a team of ours."""

    name = "in_turn"
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


def test_a_team_of_ours_and_the_same_as_a_program_are_trained_on_equal_tokens_and_advantages(
    model: Path, tmp_path: Path
) -> None:
    config = rollout_config(group_size=4, pipeline="trajectory")
    ours = natively(model, config, InTurn).batch()
    with playing(model, config, {"function": program(tmp_path, IN_TURN)}) as played:
        theirs = played.batch()
    sequences = []
    for batch in (ours, theirs):
        credited = credit(sorted(batch.groups, key=lambda g: g.group_id), CreditConfig(normalise="agent"), AGENTS)
        sequences.append({sequence.uid: sequence for sequence in credited.sequences})
        assert credited.num_tokens > 1000
    mine, others = sequences
    assert len(mine) == 16 and mine.keys() == others.keys()
    assert {sequence.advantage for sequence in mine.values()} != {0.0}
    for uid, sequence in mine.items():
        other = others[uid]
        assert sequence.token_ids.tolist() == other.token_ids.tolist(), uid
        assert sequence.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert sequence.is_sampled.tolist() == other.is_sampled.tolist()
        assert sequence.advantage == other.advantage
        np.testing.assert_allclose(sequence.rollout_logprobs, other.rollout_logprobs, atol=1e-5)
    assert sum(len(turns_of(s)) == 3 for group in theirs.groups for s in group.samples) == 8


ONE = """
def run(problem, client):
    turns = [{"role": "user", "content": problem.question}]
    for _ in range(2):
        said = client.chat("solver", turns, max_tokens=40)
        turns += [said.message, {"role": "user", "content": "fix"}]
    return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "solver_rewards"),
    [
        ("None", {0.0}),
        ("'no'", {0.0}),
        ("problem.answer", {1.0}),
        ("0.25", {0.25}),
        ("{said.id: 2}", {2.0}),
        ("{'solver': float('nan')}", {None}),
    ],
)
def test_a_reward_is_the_program_s_or_the_task_s_of_its_answer(
    model: Path, tmp_path: Path, returned: str, solver_rewards: set[float | None]
) -> None:
    """Random weights never say `Answer:`, so that their own answers are wrong."""
    external = {"function": program(tmp_path, ONE.replace("RETURNED", returned))}
    with playing(model, rollout_config(prompts_per_step=4), external) as played:
        samples = played.samples()
    values = [sample.reward.value for sample in samples.values()]
    assert len(samples) == 8 and {None if value != value else value for value in values} == solver_rewards


@pytest.mark.parametrize(
    "options", [{"overlap": 1}, {"overlap": 2, "finish_share": 0.5}, {"finish_share": 0.5}], ids=str
)
def test_sessions_span_stages_and_versions(model: Path, tmp_path: Path, options: dict[str, float]) -> None:
    text = """
    import time

    def run(problem, client):
        turns = [{"role": "user", "content": problem.question}]
        for _ in range(3):
            said = client.chat("solver", turns, max_tokens=20)
            turns += [said.message, {"role": "user", "content": "fix"}]
            time.sleep(0.3 * client.session.endswith(".1"))
        return 1.0
    """
    config = rollout_config(**options)
    trained = Counter[str]()
    with playing(model, config, {"function": program(tmp_path, text)}) as played:
        while len(trained) < 8:
            batch = played.batch()
            trained.update(sample.uid for group in batch.groups for sample in group.samples)
            assert all(len(group.samples) == 2 for group in batch.groups)
            assert config.overlap or played.stages.player.is_resting  # engines get new weights now
            played.stages.rest()
    assert set(trained.values()) == {1}


def test_an_evaluation_plays_programs(model: Path, tmp_path: Path) -> None:
    external = {"function": program(tmp_path, ONE.replace("RETURNED", "problem.answer"))}
    ended = []
    with playing(model, rollout_config(), external) as played:
        play = EvaluationPlay(played.team, VERSIONS, 1500, Sampling(), on_end=ended.append, most_open=3)
        problem = Problem("p", "a 3 b *7", "1", "arithmetic")
        play.add([Episode(f"eval{i}.0", f"eval{i}.0", problem, purpose="evaluate") for i in range(5)], seed=1)
        play.finish()
    assert len(ended) == 5
    for each in ended:
        outcome = played.team.outcome(each.episode)
        assert outcome is not None and outcome.reward.correct == 1.0 and not each.episode.error
        assert [sample.turn for sample in each.samples] == [1]
