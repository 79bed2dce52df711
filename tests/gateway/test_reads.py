"""Which answers of a session are trained, and with which rewards. `marsrl try`'s code plays the sessions, without a model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from programs import program
from rich.console import Console

from marsrl.commands.rehearsal import rehearse, rehearse_shown
from marsrl.rollout.gateway.changes import BRANCH
from marsrl.rollout.types import Caller, Fate, Group, Sample
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.credit import Credited
from marsrl.trainer.report.group_metrics import poor_merges, summarise
from marsrl.trainer.report.samples_log import read_samples, write_samples
from marsrl.trainer.runs.directory import RunDirectory

CONFIG = """
task: math
orchestration: external
agents: {solver: {policy: main}, verifier: {policy: main}}
policies: {main: {model: none, dtype: float32}}
rollout: {engine: local, placement: local, prompts_per_step: 1, group_size: 2}
"""
WORDS = {"solver": [r"\boxed{5}", r"\boxed{6}"], "verifier": ["Verdict: correct"]}


def credit_of(
    tmp_path: Path, text: str, *settings: str, kind: str = "function"
) -> tuple[Credited, dict[str, list[Sample]]]:
    """Return the credit of a program's two sessions, and the samples of each session in order; the right answer is 5."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    words = [f"external.{kind}={program(tmp_path, text)}", *settings]
    config, _ = read_config(tmp_path / "run.yaml", words)
    credited = rehearse(config, WORDS, question="What is 2 + 3?", reference="5").credited
    sessions: dict[str, list[Sample]] = defaultdict(list)
    for sample in sorted((s for g in credited.groups for s in g.samples), key=lambda sample: sample.turns[0].call):
        sessions[sample.episode_id].append(sample)
    return credited, sessions


def num_trained(sample: Sample) -> int:
    return int(sample.is_sampled.sum())


AGAIN = """
def run(problem, client):
    chat = [{"role": "user", "content": problem.question}]
    chat += [client.chat("solver", chat).message, {"role": "user", "content": "Sure?"}]
    client.chat("solver", chat)
    chat.append(client.chat("solver", chat).message)
    return RETURNED
"""


@pytest.mark.parametrize("superseded", ["mask", "train"])
def test_an_answer_thrown_away_does_not_earn_the_outcome(tmp_path: Path, superseded: str) -> None:
    """The session discards its second answer, 6. Each byte is a token here, and an end token ends a turn."""
    text = AGAIN.replace("RETURNED", "float(client.session.endswith('0'))")
    credited, sessions = credit_of(tmp_path, text, f"external.superseded={superseded}")
    length, masks = len(r"\boxed{5}") + 1, superseded == "mask"
    for first, again in sessions.values():
        assert [num_trained(first), num_trained(again)] == [length * (1 if masks else 2), length]
        assert first.reward.note == f"calls 1, 2{' (superseded)' * masks} of 3" and again.reward.note == "call 3 of 3"
        assert first.text.count("boxed") == 2 and first.length == (length if masks else len(first.token_ids))
    assert credited.num_tokens == length * (4 if masks else 6)
    metrics = summarise(credited.groups, version=0)
    assert metrics["session/superseded_tokens"] == 2 * length * masks and metrics["session/unread_tokens"] == 0
    assert metrics["response_length/solver/min"] == length
    advantages = [credited.advantages[sample.uid] for samples in sessions.values() for sample in samples]
    assert advantages == pytest.approx([1, 1, -1, -1], rel=1e-5)


def test_the_task_judges_the_last_answer_that_was_read(tmp_path: Path) -> None:
    """The sessions' answers are 5, 6, 5 and 6, 5, 6. Each program discards its second answer."""
    _, sessions = credit_of(tmp_path, AGAIN.replace("RETURNED", "None"))
    found = [[(s.answer, s.reward.correct) for s in samples] for samples in sessions.values()]
    assert found == [[("5", 1.0), ("5", 1.0)], [("6", 0.0), ("6", 0.0)]]
    assert [s.turn_text[:9] for samples in sessions.values() for s in samples] == [rf"\boxed{{{i}}}" for i in "5566"]


def test_a_sample_of_a_thrown_away_answer_alone_has_no_reward(tmp_path: Path) -> None:
    text = """
    def run(problem, client):
        client.chat("solver", [problem.question])
        client.chat("solver", [problem.question])
        return float(client.session.endswith("0"))
    """
    credited, sessions = credit_of(tmp_path, text)
    for thrown, kept in sessions.values():
        assert thrown.reward.is_missing and num_trained(thrown) == 0 and thrown.uid not in credited.advantages
        assert thrown.reward.note == "the program has discarded its answer and asked again; call 1 (superseded) of 2"
        assert abs(credited.advantages[kept.uid]) == pytest.approx(1, rel=1e-5)
    assert summarise(credited.groups, version=0)["reward/solver/missing"] == 2


SUMMARIES = """
def run(problem, client):
    is_long = client.session.endswith("0")
    for number in range(4 if is_long else 1):
        client.chat("solver", [f"{problem.question} Part {number}."])
        client.chat("verifier", [f"Part {number}."])
    return {"solver": float(is_long), "verifier": float(not is_long)}
"""


def test_a_session_of_four_samples_counts_as_much_as_one(tmp_path: Path) -> None:
    """If samples counted instead, the four advantages would be 1/2 and the other one -2."""
    credited, sessions = credit_of(tmp_path, SUMMARIES)
    long, short = sessions.values()
    assert (len(long), len(short)) == (8, 2)
    for sample in (*long, *short):
        is_better = (sample.agent == "solver") == (sample in long)
        assert credited.advantages[sample.uid] == pytest.approx(1 if is_better else -1, rel=1e-5)


BY_TURN = ("credit.std=none", "credit.turns=returns", "loss.aggregation=token")
PRICED = """
def run(problem, client):
    chat = [{"role": "user", "content": problem.question}]
    first = client.chat("solver", chat)
    client.chat("solver", [*chat, first.message, {"role": "user", "content": "Sure?"}])
    last = client.chat("solver", ["Alone."])
    client.chat("verifier", ["Right?"])
    return {first.id: -0.25, "solver": float(client.session.endswith("0")), last.id: 0.5}
"""


def test_rewards_by_id_and_by_agent_add_up_with_credit_by_turn(tmp_path: Path) -> None:
    credited, sessions = credit_of(tmp_path, PRICED, *BY_TURN)
    for right, (chat, alone, verifier) in zip((1.0, 0.0), sessions.values(), strict=True):
        assert chat.reward.turns == (-0.25, 0.0) and chat.reward.value == right - 0.25
        assert alone.reward.turns == (0.5,) and alone.reward.value == right + 0.5
        assert chat.reward.parts == {"program": right, "turns": -0.25} and verifier.reward.is_missing
        # The agent's reward is added to its last turn, and so to the returns of all turns before it.
        sign = 1 if right else -1
        assert credited.turns[chat.uid] == [sign, sign] and credited.turns[alone.uid] == [sign]


def test_rewards_by_id_are_a_samples_mean_without_credit_by_turn(tmp_path: Path) -> None:
    _, sessions = credit_of(tmp_path, PRICED)
    for chat, alone, verifier in sessions.values():
        assert (chat.reward.value, alone.reward.value) == (-0.25, 0.5) and verifier.reward.is_missing
        assert chat.reward.turns == () and chat.reward.parts == {"program": -0.25}


STEPS = """
class run:
    def reset(self, problem):
        self.number = 0
        return {"solver": problem.question, "verifier": "Wait."}

    def step(self, text):
        self.number += 1
        if self.number == 1:
            return {"verifier": text}, -0.25
        if self.number == 2:
            return {"solver": "Again?"}
        return END, -0.5
"""


@pytest.mark.parametrize("settings", [BY_TURN, ()], ids=["by turn", "by sample"])
@pytest.mark.parametrize(("end", "earned"), [("0.5", (0.5, 0.5)), ('{"verifier": 1.0}', (0.0, 1.0)), ("None", None)])
def test_an_environments_rewards_of_steps_are_added(
    tmp_path: Path, end: str, earned: tuple[float, float] | None, settings: tuple[str, ...]
) -> None:
    credited, sessions = credit_of(tmp_path, STEPS.replace("END", end), *settings, kind="environment")
    for solver, verifier in sessions.values():
        first, second = earned or [float(solver.answer == "5")] * 2  # the task judges the last answer
        assert solver.reward.turns == (-0.25, -0.5) and verifier.reward.turns == (0.0,)
        assert (solver.reward.value, verifier.reward.value) == (first - 0.75, second)
        assert solver.reward.correct == first
    assert bool(credited.turns) == bool(settings)


def test_a_step_that_returns_three_values_fails_clearly(tmp_path: Path) -> None:
    text = STEPS.replace("return END, -0.5", "return 1.0, 2.0, 3.0")
    _, sessions = credit_of(tmp_path, text, kind="environment")
    note = sessions.popitem()[1][0].reward.note
    assert "step returned (1.0, 2.0, 3.0); expected messages, or a pair of messages and the turn's reward" in note


def test_a_tuple_from_a_function_fails_by_name(tmp_path: Path) -> None:
    """Its second value would be taken for rewards of turns, of which agents' names are none."""
    text = """
    def run(problem, client):
        client.chat("solver", ["5"])
        return 1.0, {"solver": 0.5}
    """
    _, sessions = credit_of(tmp_path, text)
    note = sessions.popitem()[1][0].reward.note
    assert "the program returned (1.0, {'solver': 0.5}); expected nothing, a text, a number or {name: number}" in note


SUB_AGENTS = """
def run(problem, client):
    main, report = [problem.question], []
    name, parent = NAMES
    for turn in range(2):
        main.append(client.chat("solver", main, name).message)
        for _ in range(2):
            sub = ["Search."]
            said = client.chat("verifier", sub, parent)
            said = client.chat("verifier", [*sub, said.message, "Go on."], parent)
        main.append(said.text)
    last = client.chat("solver", main, name)
    return RETURNED
"""


def test_samples_know_their_prefix_and_their_caller(tmp_path: Path) -> None:
    _, sessions = credit_of(tmp_path, SUB_AGENTS.replace("RETURNED", "1.0").replace("NAMES", "{}, {}"))
    for number, (main, *subs) in enumerate(sessions.values()):
        assert (main.behind, main.caller, len(main.turns)) == (None, None, 3)
        assert [sub.caller for sub in subs] == [Caller(main.uid, call) for call in (1, 1, 6, 6)]
        assert [sub.parent_uid for sub in subs] == [main.uid] * 4
        assert subs[0].behind is None
        for sub in subs[1:]:  # all sub-agents' prompts are equal
            assert sub.behind is not None and sub.behind.num_tokens == len(sub.prompt_ids)
        file = write_samples(RunDirectory(tmp_path), number, [Group("g", "r", "a", (main, *subs))])
        assert [(row.behind, row.caller) for row in read_samples(file)] == [(s.behind, s.caller) for s in (main, *subs)]


NAMED = """
def run(problem, client):
    names = {"X-Marsrl-Lineage": "sub", "X-Marsrl-Lineage-Parent": "main"}
    main = client.chat("solver", [problem.question], {"X-Marsrl-Lineage": "main"})
    for word in ("one", "two"):
        client.chat("verifier", [word], names)
    try:
        client.chat("solver", [problem.question], {"X-Marsrl-Lineage": "x" * 129})
    except RuntimeError as error:
        assert "HTTP 400" in str(error) and "X-Marsrl-Lineage has 129 characters" in str(error)
    try:
        client.chat("solver", [problem.question], {"X-Marsrl-Lineage": "third"})
    except RuntimeError as error:
        assert "HTTP 429" in str(error) and "external.max_lineages = 2" in str(error)
    again = client.chat("solver", [problem.question], {"X-Marsrl-Lineage": "sub"})  # not a repetition of main's
    return 1.0
"""


def test_headers_name_lineages_and_callers(tmp_path: Path) -> None:
    _, sessions = credit_of(tmp_path, NAMED, "external.max_lineages=2")
    for main, one, two, again in sessions.values():
        assert (main.caller, one.caller, two.caller, again.caller) == (None, *[Caller(main.uid, 1)] * 3)
        assert all(turn.fate is Fate.READ for turn in main.turns)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("{'solver': float(client.session.endswith('0'))}", [1.0, 1.0]),
        ("{'solver': 1.0, 'verifier': float('nan')}", [1.0, None]),
        ("{'solver': 1.0, 'verifier': 0.5}", [1.0, 0.5]),
        ("{last.id: 1.0}", [1.0, 1.0]),
        ("0.5", [0.5, 0.5]),
    ],
)
def test_a_sub_agent_without_a_reward_gets_its_named_callers(
    tmp_path: Path, returned: str, expected: list[float | None]
) -> None:
    names = '{"X-Marsrl-Lineage": "main"}, {"X-Marsrl-Lineage-Parent": "main"}'
    _, sessions = credit_of(tmp_path, SUB_AGENTS.replace("RETURNED", returned).replace("NAMES", names))
    main, *subs = next(iter(sessions.values()))
    found = {None if sub.reward.is_missing else sub.reward.value for sub in subs}
    assert [main.reward.value, *found] == expected


def test_a_lineage_is_rewarded_by_its_name(tmp_path: Path) -> None:
    text = """
    def run(problem, client):
        client.chat("solver", ["one"], {"X-Marsrl-Lineage": "a"})
        client.chat("solver", ["two"], {"X-Marsrl-Lineage": "b"})
        return {"a": 0.25, "solver": 0.5, "NAME": 1.0}
    """
    _, sessions = credit_of(tmp_path, text.replace("NAME", "b"))
    assert [[s.reward.value for s in samples] for samples in sessions.values()] == [[0.25, 1.0]] * 2
    _, sessions = credit_of(tmp_path, text.replace("NAME", "c"))
    note = sessions.popitem()[1][0].reward.note
    assert "a reward is for 'c'; expected an agent, the name of a lineage or the id of an answer" in note
    _, sessions = credit_of(tmp_path, text.replace("NAME", "b"), *BY_TURN)
    note = sessions.popitem()[1][0].reward.note
    assert "a reward is for the lineage 'a'; with credit.turns=returns give it to the id of an answer" in note


CLOCK = """
def run(problem, client):
    chat = [{"role": "system", "content": "It is 10:00."}, {"role": "user", "content": problem.question}]
    for turn in range(4):
        chat[0] = {"role": "system", "content": f"It is 10:0{turn if CHANGES else 0}."}
        chat += [client.chat("solver", chat).message, {"role": "user", "content": "Sure?"}]
    return 1.0
"""


@pytest.mark.parametrize("changes", [True, False])
def test_calls_that_do_not_merge_are_measured_and_warned_of(tmp_path: Path, changes: bool) -> None:
    credited, sessions = credit_of(tmp_path, CLOCK.replace("CHANGES", str(changes)))
    metrics, warnings = summarise(credited.groups, version=0), poor_merges(credited.groups)
    samples = [sample for samples in sessions.values() for sample in samples]
    assert metrics["session/merge"] == (1 if changes else 4) == 8 / len(samples)
    shared = [sample.behind.num_tokens for sample in samples if sample.behind is not None]
    num_tokens = sum(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    assert metrics["session/duplicated"] == sum(shared) / num_tokens and len(shared) == 6 * changes
    assert warnings == [
        "programs make 1.0 calls per sample: 6 of 8 samples do not continue an earlier one because the system prompt changes at "
        "character 11: '10:00', '10:01' (docs/external.md: calls that merge)"
    ] * changes  # fmt: skip
    groups = [replace(g, samples=[replace(s, rewritten=BRANCH) for s in g.samples]) for g in credited.groups]
    assert poor_merges(groups) == []  # Samples that branch off cause no warning.


def test_new_contexts_alone_are_no_reason_to_warn(tmp_path: Path) -> None:
    credited, _ = credit_of(tmp_path, SUMMARIES)
    assert summarise(credited.groups, version=0)["session/merge"] == 1 and poor_merges(credited.groups) == []


def test_try_says_why_samples_do_not_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    text = CLOCK.replace("CHANGES", "True")
    config, origin = read_config(tmp_path / "run.yaml", [f"external.function={program(tmp_path, text)}"])
    console = Console(width=160, force_terminal=False)
    rehearse_shown(config, origin, WORDS, console, question="What is 2 + 3?", reference="5")
    shown = capsys.readouterr().out
    assert "does not continue an earlier sample: the system prompt changes at character 11: '10:01', '10:02'" in shown
    assert "warning: programs make 1.0 calls per sample" in shown
