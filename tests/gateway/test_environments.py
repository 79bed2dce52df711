"""Environments with state: the worker plays them, and what agents say in them becomes samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documents import other_blocks
from programs import playing, program, rollout_config, turns_of

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Problem, Sample


def samples_in(model: Path, environment: str, agents: tuple[str, ...]) -> dict[str, Sample]:
    config = rollout_config(prompts_per_step=1, max_response_tokens=160)
    settings = {name: AgentConfig(max_input_tokens=100) for name in agents}
    with playing(model, config, {"environment": environment, "timeout_s": 60}, agents=settings) as played:
        return {uid.partition(".")[2]: sample for uid, sample in played.samples().items()}


PLAYERS = """
class run:
    max_tokens = 20

    def reset(self, problem):
        self.heard = []
        return {"solver": [{"role": "system", "content": "grade"}, "1 2"], "verifier": ["3"]}

    def step(self, text):
        self.heard.append(text)
        match len(self.heard):
            case 1: return "4"
            case 2: return {"verifier": "5 6"}
            case 3: return {"solver": "7", "verifier": "8"}
            case 4: return {"solver": 0.25, "verifier": 1}
"""


def test_players_have_chats_of_their_own_and_the_first_that_hears_is_on_turn(model: Path, tmp_path: Path) -> None:
    samples = samples_in(model, program(tmp_path, PLAYERS), ("solver", "verifier"))
    assert set(samples) == {f"{i}/{agent}:0" for i in (0, 1) for agent in ("solver", "verifier")}
    for name, sample in samples.items():
        is_solver = "solver" in name
        assert sample.reward.value == (0.25 if is_solver else 1.0)
        assert len(turns_of(sample)) == (5 if is_solver else 1)  # three turns, and what is heard between them
        heard = "<|system|> grade <|user|> 1 2 <|assistant|>" if is_solver else "<|user|> 3 <|user|> 5 6 <|assistant|>"
        assert " ".join(sample.prompt_text.split()) == heard


ALONE = """
class run:
    def reset(self, problem):
        self.question = problem.question
        return problem.question

    def step(self, text):
        return ["grade", {"role": "user", "content": self.question}] if self.question.startswith("a") else None

    def close(self):
        open(__file__ + ".closed", "a").write(".")
"""


def test_an_environment_without_rewards_leaves_them_to_the_task(model: Path, tmp_path: Path) -> None:
    named = program(tmp_path, ALONE.replace('startswith("a")', 'startswith("?")'))
    for sample in samples_in(model, named, ("solver",)).values():
        assert sample.reward.parts == {"outcome": 0.0} and len(turns_of(sample)) == 1  # it has no answer


def test_an_environment_is_closed_also_where_its_session_fails(model: Path, tmp_path: Path) -> None:
    named = program(tmp_path, ALONE)  # goes on until its chat is longer than a sample may be
    samples = samples_in(model, named, ("solver",))
    assert samples and all(sample.reward.is_missing for sample in samples.values())
    assert all("max_response_tokens" in sample.reward.note for sample in samples.values())
    assert (tmp_path / "program.py.closed").read_text() == ".."


@pytest.mark.parametrize(
    ("heard", "reason"),
    [('{"umpire": "1"}', "'umpire'; the agents are solver, verifier"), ('"1"', "reset: expected {agent: messages}")],
    ids=["unknown player", "nobody on turn"],
)
def test_an_environment_that_names_no_agent_fails_by_name(
    model: Path, tmp_path: Path, heard: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    named = program(tmp_path, f"class run:\n    def reset(self, problem):\n        return {heard}\n")
    config = rollout_config(prompts_per_step=1)
    settings = {name: AgentConfig(max_input_tokens=100) for name in ("solver", "verifier")}
    with playing(model, config, {"environment": named}, agents=settings) as played:
        assert played.batch().metrics["rollout/failed_episodes"] == 2
    assert reason in caplog.text


def test_the_environment_of_the_page_is_played_as_it_says() -> None:
    (block,) = (block.text for block in other_blocks() if block.where.startswith("docs/external.md:"))
    names: dict[str, Any] = {}
    exec(block, names)
    for guesses, heard in (
        ("7", [1.0]),
        ("397", ["Higher.", "Lower.", pytest.approx(1 / 3)]),
        ("0000", ["Higher."] * 3 + [0.0]),
        ("x", [-1.0]),
    ):
        game = names["Guess"]()
        assert game.reset(Problem(id="p", question="?", answer="7", task="math")).startswith("I think of a number")
        assert [game.step(f"{guess} ") for guess in guesses] == heard
