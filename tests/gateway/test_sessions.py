"""Calls of programs and environments become samples with the tokens that a native team would have."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from documents import other_blocks
from programs import playing, program, rollout_config, turns_of

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.player.refill import Counting, Spread
from marsrl.rollout.types import Finish, Group, IntArray, Problem, Sample

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
    [("None", {0.0}), ("'no'", {0.0}), ("problem.answer", {1.0}), ("{'solver': float('nan')}", {None}), ("{}", {None})],
)
def test_the_program_or_else_the_task_rewards_the_answer(
    model: Path, tmp_path: Path, returned: str, solver_rewards: set[float | None]
) -> None:
    """A model with random weights never writes `Answer:`, so the task judges its answers wrong."""
    config, text = rollout_config(prompts_per_step=4), ONE.replace("RETURNED", returned)
    with playing(model, config, program(tmp_path, text)) as played:
        samples = played.samples()
    values = [sample.reward.value for sample in samples.values()]
    assert len(samples) == 8 and {None if value != value else value for value in values} == solver_rewards
    assert max(max(turns_of(sample)[::2]) for sample in samples.values()) <= 40
    # Each sample is cut at its last call's limit.
    assert {sample.finish for sample in samples.values() if turns_of(sample)[-1] == 40} == {Finish.LENGTH}


@pytest.mark.parametrize("options", [{"overlap": 1}, {"overlap": 2}, {}], ids=str)
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
    with playing(model, config, program(tmp_path, text)) as played:
        while len(trained) < 8:
            batch = played.batch()
            trained.update(sample.uid for group in batch.groups for sample in group.samples)
            assert all(len(group.samples) == 2 for group in batch.groups)
            assert config.overlap or played.stages.player.is_resting  # engines get new weights now
            played.stages.rest()
    assert set(trained.values()) == {1}


def spread_of(groups: Sequence[Group]) -> Spread:
    return Spread.TASK if len({s.reward.value for group in groups for s in group.samples}) > 1 else Spread.NONE


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_instance_counts_for_refill_when_its_sessions_end(model: Path, tmp_path: Path, overlap: int) -> None:
    text = """
    def run(problem, client):
        client.chat("solver", [problem.question], max_tokens=4)
        number, place = client.session.split(".")
        return float(int(number) not in (1, 3) and place == "1")
    """
    config = rollout_config(overlap=overlap, refill={"groups": 2, "most": 3})
    with playing(model, config, program(tmp_path, text), counting=Counting(spread_of)) as played:
        batches = [played.batch() for _ in range(1 + overlap)]
    trained = sorted(int(group.rollout_id) for each in batches for group in each.groups)
    assert trained[:4] == [1, 2, 3, 4] and len(set(trained)) == len(trained)
    added = sum(each.metrics.get("refill/problems", 0) for each in batches)
    # With overlap, enough groups may be live before the dead ones close, and problems of a later stage may end early.
    assert added == 2 if not overlap else added <= 2
    assert sum(each.metrics.get("refill/dead", 0) for each in batches) == 2


def test_without_overlap_refill_waits_for_all_sessions(model: Path, tmp_path: Path) -> None:
    text = """
    import pathlib, time

    def run(problem, client):
        client.chat("solver", [problem.question], max_tokens=4)
        number, place = client.session.split(".")
        if number == "000001":  # dead, and the first to end
            pathlib.Path(__file__ + place).touch()
            return 0.0
        while not all(pathlib.Path(__file__ + other).exists() for other in "01"):
            time.sleep(0.01)
        time.sleep(0.5)
        return float(place)
    """
    config = rollout_config(prompts_per_step=3, refill={"groups": 2})
    with playing(model, config, program(tmp_path, text), counting=Counting(spread_of)) as played:
        batch = played.batch()
    assert [group.rollout_id for group in batch.groups] == ["000001", "000002", "000003"]
    assert batch.metrics["refill/live"] == 2 and batch.metrics["refill/problems"] == 0


LONG = """
import pathlib, time
from concurrent.futures import ThreadPoolExecutor

def run(problem, client):
    is_long = client.session.endswith(".0")
    with ThreadPoolExecutor() as threads:
        if is_long:
            threads.submit(client.chat, "solver", ["long " * 4000])
        while not pathlib.Path(__file__ + ".long").exists():
            time.sleep(0.01)
        client.chat("solver", ["own" if is_long else "hello"])
    return 1.0
"""


class Noting(ChatRenderer):
    """Renderer that records when each prompt starts and ends; a long prompt waits for the other session's prompt."""

    def __init__(self, model: Path, mark: Path) -> None:
        super().__init__(model)
        self.mark, self.notes, self.has_other = mark, list[str](), threading.Event()

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = (), **options: bool | str) -> tuple[IntArray, str]:
        name, *_ = messages[0]["content"].split()
        self.notes.append(f"begin {name}")
        if name == "long":
            self.mark.touch()
            self.has_other.wait(120.0)
        rendered = super().render(messages, tools, **options)
        self.notes.append(f"end {name}")
        if name == "hello":
            self.has_other.set()
        return rendered


def test_a_short_call_does_not_wait_for_a_long_tokenisation(model: Path, tmp_path: Path) -> None:
    renderer = Noting(model, tmp_path / "program.py.long")
    config = rollout_config(prompts_per_step=1, max_response_tokens=60)
    with playing(model, config, program(tmp_path, LONG), renderer=renderer) as played:
        batch = played.batch()
    assert batch.metrics["rollout/failed_episodes"] == 0
    assert renderer.notes == ["begin long", "begin hello", "end hello", "end long", "begin own", "end own"]


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


def test_each_player_has_a_chat_and_the_first_to_hear_begins(model: Path, tmp_path: Path) -> None:
    samples = samples_in(model, program(tmp_path, PLAYERS), ("solver", "verifier"))
    assert set(samples) == {f"{i}/{agent}:0" for i in (0, 1) for agent in ("solver", "verifier")}
    for name, sample in samples.items():
        is_solver = "solver" in name
        assert sample.reward.value == (0.25 if is_solver else 1.0)
        assert len(turns_of(sample)) == (5 if is_solver else 1)  # three turns, and the text between them
        heard = "<|system|> grade <|user|> 1 2 <|assistant|>" if is_solver else "<|user|> 3 <|user|> 5 6 <|assistant|>"
        assert " ".join(sample.prompt_text.split()) == heard


ALONE = """
class run:
    def reset(self, problem):
        self.question = problem.question
        return problem.question

    def step(self, text):
        return ["grade", {"role": "user", "content": self.question}] if GOES_ON else None

    def close(self):
        open(__file__ + ".closed", "a").write(".")
"""


# goes_on=True: the environment continues until its chat is longer than a sample may be.
@pytest.mark.parametrize("goes_on", [True, False])
def test_the_task_rewards_an_environment_that_gives_no_reward(model: Path, tmp_path: Path, goes_on: bool) -> None:
    """The environment is closed at the end, even if its session fails."""
    for sample in samples_in(model, program(tmp_path, ALONE.replace("GOES_ON", str(goes_on))), ("solver",)).values():
        if goes_on:
            assert sample.reward.is_missing and "max_response_tokens" in sample.reward.note
        else:
            # An episode without an answer.
            assert sample.reward.parts == {"outcome": 0.0} and len(turns_of(sample)) == 1
    assert (tmp_path / "program.py.closed").read_text() == ".."


@pytest.mark.parametrize(
    ("heard", "reason"),
    [
        ('{"umpire": "1"}', "the player 'umpire'; expected one of solver, verifier"),
        ('"1"', "reset returned '1'; expected {agent: messages}"),
        ('{"solver": [], "verifier": ["1"]}', "no message for solver, who acts next"),
    ],
    ids=["unknown player", "nobody on turn", "nothing to answer"],
)
def test_an_invalid_turn_of_an_environment_is_reported_once(
    model: Path, tmp_path: Path, heard: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    named = program(tmp_path, f"class run:\n    def reset(self, problem):\n        return {heard}\n")
    config = rollout_config(prompts_per_step=1)
    settings = {name: AgentConfig(max_input_tokens=100) for name in ("solver", "verifier")}
    with playing(model, config, {"environment": named}, agents=settings) as played:
        assert played.batch().metrics["rollout/failed_episodes"] == 2
    assert caplog.text.count(reason) == 1 and caplog.text.count(" failed: as above") == 1  # reported once


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
