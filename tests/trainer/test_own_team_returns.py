"""`marsrl try` shows which agents a team calls, with made-up answers or those of a table. Values that a user's team returns are
accepted if valid; invalid values end one episode or sample, with one line that names the location.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from marsrl.commands.cli import main
from marsrl.commands.rehearsal import rehearse
from marsrl.rollout.types import Finish, Sample
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import read_config

TEAM = """
import random
from dataclasses import replace
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.types import Ask, Finish, Message, Reward

class Pair(Orchestration):
    agents = (AgentSpec("solver"), AgentSpec("critic", Role.VERIFIER))

    def follow(self, episode):
        first = episode.ask("solver")
        said = episode.said(first)
        return [first] if said is None else [first, episode.ask("critic", said)]
"""
SECOND = ".1/"  # only the second of the two episodes returns the unusable value


def play(tmp_path: Path, method: str, otherwise: str = "") -> dict[str, Sample]:
    """Play two episodes with a team that has this method, and return the samples by uid."""
    path = tmp_path / "my_team.py"
    path.write_text(TEAM + "\n" + textwrap.indent(textwrap.dedent(method).strip(), "    ") + "\n")
    config, _ = read_config(None, [f"orchestration={path}:Pair", "rollout.group_size=2", *otherwise.split()])
    credited = rehearse(config, {"solver": ["\\boxed{7} Answer: 7"], "critic": ["Verdict: correct"]}).credited
    return {sample.uid: sample for group in credited.groups for sample in group.samples}


def line_of(tmp_path: Path, words: str) -> int:
    lines = (tmp_path / "my_team.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


@pytest.mark.parametrize(
    "returned",
    [
        '[{"role": "user", "content": "Solve it."}]',
        '({"role": "system", "content": "You solve."}, Message("user", "Solve it."))',
    ],
)
def test_messages_may_be_those_of_openai_s_api(returned: str, tmp_path: Path) -> None:
    samples = play(tmp_path, f"def messages(self, episode, ask):\n    return {returned}")
    assert len(samples) == 4 and all("Solve it." in sample.prompt_text for sample in samples.values())
    # A run checks this before it begins.
    words = [f"orchestration={tmp_path}/my_team.py:Pair", "rollout.engine=local", "rollout.placement=local"]
    preflight(read_config(None, words)[0], world_size=1)


@pytest.mark.parametrize(("value", "correct"), [("0.5", 0.5), ("1", 1.0), ("True", 1.0), ("-2.5", 0.0), ("3", 1.0)])
def test_a_number_is_a_reward(value: str, correct: float, tmp_path: Path) -> None:
    samples = play(tmp_path, f"def reward(self, episode, ask, sample, judged=None):\n    return {value}")
    assert len(samples) == 4
    assert {(s.reward.value, s.reward.correct) for s in samples.values()} == {(float(eval(value)), correct)}


NO_MESSAGES = "TypeError: expected a list of messages, found"
NO_REWARD = "TypeError: expected Reward(value, correct) or a number, found"
SURROGATE = "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"
PARAMETERS = {"messages": "episode, ask", "parse": "sample", "reward": "episode, ask, sample, judged"}
PARAMETERS["turn_rewards"] = "episode, sample"
CASES = [
    ("messages", '"Solve it."', f"{NO_MESSAGES} 'Solve it.' (str)"),
    ("messages", '[{"role": "user"}]', "ValueError: expected a message with the keys role and content, found role"),
    ("messages", '[Message("judge", "x")]',
     "ValueError: expected a message's role to be one of system, user, assistant, tool, found 'judge'"),
    ("messages", r'[Message("user", "\ud800")]', SURROGATE),
    ("messages", "1 / 0", "ZeroDivisionError: division by zero"),
    ("parse", "None", "TypeError: expected a Sample, such as replace(sample, answer=...), found None"),
    ("parse", "replace(sample, answer=7)", "TypeError: expected answer to be str or None, found 7 (int)"),
    ("parse", "replace(sample, verdict='yes')", "TypeError: expected verdict to be bool or None, found 'yes' (str)"),
    ("parse", "replace(sample, agent='nobody', outcome='x')",
     "ValueError: expected `parse` to change only shown, answer, verdict, finish, found changes in agent, outcome"),
    ("parse", r"replace(sample, answer='\ud800')", SURROGATE),
    ("reward", "'1'", f"{NO_REWARD} '1' (str)"),
    ("reward", "float('inf')", "ValueError: expected the reward to be finite, found inf"),
    ("reward", "Reward(1.0, 2.0)", "ValueError: expected `correct` from 0 to 1, found 2"),
    ("reward", "Reward(1.0, 1.0, {'a': 'b'})", "TypeError: expected a to be a number, found 'b' (str)"),
    ("turn_rewards", "(0.5, 1)",
     "ValueError: expected 1 rewards, one for each turn of 000001.1/solver:0/critic:0, or none, found 2"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "returned", "expected"), CASES)
def test_unusable_returns_end_only_their_episode_or_sample(
    method: str, returned: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The team returns the unusable value for the second episode's critic. If `messages` returns it, the episode ends; otherwise
    the critic's sample is an error.
    """
    given = PARAMETERS[method]
    who, its_agent = ("ask.id", "ask.agent") if method == "messages" else ("sample.uid", "sample.agent")
    body = f"""
    def {method}(self, {given}):
        if {SECOND!r} in {who} and {its_agent} == "critic":
            return {returned}
        return super().{method}({given})
    """
    samples = play(tmp_path, body)
    wrong = [sample for sample in samples.values() if sample.finish is Finish.ERROR]
    line = line_of(tmp_path, "return 1 / 0" if "/ 0" in returned else f"def {method}(")
    message = f"Pair.{method}: {expected} (my_team.py:{line})"
    assert message in caplog.text and "Traceback" not in caplog.text
    if method == "messages":
        assert not wrong and [uid for uid in samples if SECOND in uid] == ["000001.1/solver:0"]
    else:
        (sample,) = wrong
        assert (SECOND in sample.uid, sample.agent, sample.reward.note) == (True, "critic", message)
    assert len(samples) == (3 if method == "messages" else 4)
    assert all(not sample.reward.is_missing for sample in samples.values() if sample not in wrong)


@pytest.mark.parametrize("text", ["text", "turn_text"])
def test_the_text_of_another_sample_is_an_error_that_names_shown(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method = f"""
    def parse(self, sample):
        return replace(super().parse(sample), shown=sample.{text}[:3])

    def messages(self, episode, ask):
        said = [sample.{text} for sample in episode.inputs(ask)]
        return [Message("user", "Solve it." + "".join(said))]
    """
    samples = play(tmp_path, method)
    assert sorted(sample.agent for sample in samples.values()) == ["solver", "solver"]
    line = line_of(tmp_path, "for sample in episode.inputs(ask)")
    assert (
        "/solver:0: `text` is not kept in an episode; read `shown`, " in caplog.text
        and f"(my_team.py:{line})" in caplog.text
    )


ASKS = "def follow(self, episode):\n    return [episode.ask('solver', {})]"
GOES_ON = """
def parse(self, sample):
    return replace(super().parse(sample), finish=Finish.WAITING)

def continuation(self, episode, sample):
    return {}
"""
SAYS = "def {}(self, episode):\n    return {}"
NO_NUMBERS = "TypeError: expected a dict of numbers, found None"


@pytest.mark.parametrize(
    ("method", "num_samples", "num_errors", "expected"),
    [
        (ASKS.format("turn=random.randrange(10**9)"), 0, 0,
         "episode 000001.0 ends: Pair.follow: ValueError: two calls with the same answers returned different asks"),
        (SAYS.format("follow", None), 0, 0, "expected a list of episode.ask(...) and episode.call(...), found None"),
        (SAYS.format("follow", "[episode.ask('nobody')]"), 0, 0, "no agent named 'nobody'; expected one of solver, critic"),
        (SAYS.format("follow", "[Ask('000009/solver', 'solver')]"), 0, 0, "expected an ask or call of episode 000001.0"),
        (SAYS.format("follow", "[episode.ask('solver', turn=n) for n in range(9)]"), 0, 0,
         "9 calls of agents and tools exceed rollout.max_turns = 3"),
        (ASKS.format("num_samples=1.5"), 0, 0,
         "Pair.follow: ValueError: 000001.0/solver: num_samples is 1.5; expected an integer of at least 1"),
        (ASKS.format("turn='a:b'"), 0, 0,
         "Pair.follow: TypeError: episode.ask('solver'): expected turn and index to be integers, found 'a:b' and 0"),
        # The episode's generator draws the same numbers again.
        (ASKS.format("turn=episode.rng('turn').randrange(10**9)"), 2, 0, ""),
        (GOES_ON.format("''"), 2, 2, "expected text, messages, or None"),
        (GOES_ON.format("'more'"), 2, 2, "continues more often than rollout.max_turns = 3 times"),
        (SAYS.format("outcomes", None), 4, 0, f"Pair.outcomes: {NO_NUMBERS} (my_team.py:"),
        (SAYS.format("metrics", None), 4, 0, f"Pair.metrics: {NO_NUMBERS} (my_team.py:"),
        (SAYS.format("metrics", "{'x': float('nan')}"), 4, 0,
         "Pair.metrics: ValueError: expected x to be a number, found nan (my_team.py:"),
        (SAYS.format("outcome", "'7'"), 4, 0,
         "Pair.outcomes: TypeError: expected the outcome to be Sample or None, found '7' (str)"),
    ],
)  # fmt: skip
def test_what_a_team_asks_and_says_of_its_episodes_is_checked(
    method: str, num_samples: int, num_errors: int, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = "rollout.max_turns=3 credit.reward_scheme=outcome credit.train_agents=[solver,critic]"
    samples = play(tmp_path, method, words).values()
    assert (len(samples), sum(sample.finish is Finish.ERROR for sample in samples)) == (num_samples, num_errors)
    assert expected in caplog.text and ("(my_team.py:" in caplog.text or "Pair.follow" not in expected)


def test_an_agent_without_an_answer_earns_the_episodes_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.py"
    planned = TEAM.replace('"solver"', '"planner"').replace("critic", "solver").replace("VERIFIER", "SOLVER")
    says = '    def messages(self, episode, ask):\n        return [Message("user", "Plan or solve it.")]\n'
    path.write_text(planned.replace('AgentSpec("planner")', 'AgentSpec("planner", Role.ADVISER)') + says)
    words = [f"orchestration={path}:Pair", "rollout.group_size=2"]
    answers = {"planner": ["First add. \\boxed{1} Answer: 5"], "solver": ["Answer: 1", "Answer: 2"]}
    credited = rehearse(read_config(None, words)[0], answers, question="a 3 b *7", reference="1").credited
    samples = [sample for group in credited.groups for sample in group.samples]
    rewards = {agent: [(s.reward.value, s.answer) for s in samples if s.agent == agent] for agent in answers}
    assert rewards == {"planner": [(1.0, None), (0.0, None)], "solver": [(1.0, "1"), (0.0, "2")]}
    first, second = (credited.advantages[s.uid] for s in samples if s.agent == "planner")
    assert first > 0 > second
    # Samples in which the gate may mask well-mastered tokens.
    positive = {s.uid for s in credited.sequences if s.is_positive}
    assert [s.uid in positive for s in samples if s.agent == "planner"] == [True, False]
    assert main(["try", *words]) == 0
    said = capsys.readouterr().out
    assert "# reward of planner: the outcome of the episode" in said
    assert "# reward of solver: the task's score of the answer, 0 without an answer" in said


def test_a_team_imports_what_lies_beside_it_even_late(tmp_path: Path) -> None:
    (tmp_path / "guess_words.py").write_text("WORD = 'Guess!'\n")
    (tmp_path / "guess_late.py").write_text("WORD = 'Late!'\n")
    method = """
    from guess_words import WORD

    def messages(self, episode, ask):
        import guess_late
        return [Message('user', self.WORD + guess_late.WORD)]
    """
    samples = play(tmp_path, method)
    assert len(samples) == 4 and all("Guess!Late!" in sample.prompt_text for sample in samples.values())


CHAIN = ["--question", "a 3 b *7", "--reference", "1", "rollout.group_size=2"]


@pytest.mark.parametrize("team", ["dual_system", "search_team"])
def test_own_questions_are_looked_up_in_the_built_in_world(team: str, capsys: pytest.CaptureFixture[str]) -> None:
    question = 'Who "said" it?'
    lines = shown(capsys, "task=qa", f"orchestration={team}", "rollout.group_size=1", "--question", question)
    assert lines[0] == question and len(lines) > 3 and not any("error" in line for line in lines), lines


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["try", *words]) == 0, capsys.readouterr().err
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]


def test_a_table_answers_each_call_and_the_tree_shows_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "answers.yaml"
    table.write_text('solver: ["so Answer: 1", "Answer: 2"]\nverifier: ["Verdict: wrong"]\n')
    lines = shown(capsys, *CHAIN, "orchestration=solver_verifier", "credit.normalise=agent", "--answers", str(table))
    assert lines[0] == "a 3 b *7   (answer: 1)"
    right, wrong = (next(i for i, line in enumerate(lines) if f"episode 000001.{n}" in line) for n in (0, 1))
    first = lines[right + 1 : wrong]
    # Calls of the Solver: 1 and 2 in the first turn, 1 and 2 again in the second; its four rewards are 1 0 1 0.
    assert [line.partition("─ ")[2] for line in first] == [
        "solver:0  'so Answer: 1'  reward 1, advantage +1.00",
        "verifier:0  'Verdict: wrong'  reward 0, advantage -1.00",
        "solver:0  'so Answer: 1'  reward 1, advantage +1.00",
    ]
    assert "solver:0  'Answer: 2'  reward 0, advantage -1.00" in lines[wrong + 1]
    assert "verifier:0  'Verdict: wrong'  reward 1, advantage +1.00" in lines[wrong + 2]


def test_answers_follow_the_seed_and_prompts_show_on_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["rollout.group_size=4", "agents.verifier1.pick=random"]
    lines = shown(capsys, *words)
    assert lines == shown(capsys, *words) != shown(capsys, *words, "run.seed=1")
    assert any("verifier1:0" in line for line in lines) and not any("prompt:" in line for line in lines)
    told = shown(capsys, *words, "--prompts")
    assert sum("prompt:" in line for line in told) == sum("reward" in line for line in lines)


def test_math_is_judged_by_its_own_judge_and_needs_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(
        capsys, "task=math", "orchestration=solver", "rollout.group_size=6",
        "--question", "What is half of one?", "--reference", r"\frac{1}{2}",
    )  # fmt: skip
    said = [line for line in lines if "solver:" in line]
    right = [r"\\frac{1}{2}" in line for line in said]
    assert len(said) == 6 and ["reward 1" in line for line in said] == right and set(right) == {True, False}
    assert main(["try", "task=math", "orchestration=solver"]) == 2
    assert "task=math needs problems: set data.train" in capsys.readouterr().err


def test_a_team_whose_prompts_lack_the_form_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = """
    def messages(self, episode, ask):
        return [Message("user", "Solve it." if ask.agent == "solver" else "Say: Verdict: correct, or wrong.")]
    """
    path = tmp_path / "my_team.py"
    path.write_text(TEAM + textwrap.indent(textwrap.dedent(says), "    "))
    words = ["--question", "2 + 2?", "--reference", "4", f"orchestration={path}:Pair", "rollout.group_size=2"]
    lines = shown(capsys, "task=math", *words)
    assert [line.partition(" the form")[0] for line in lines if "warning" in line] == [
        "warning: the prompt of agents.solver, as solver, does not show"
    ]
    assert not any("warning" in line for line in shown(capsys, *words))  # the built-in task's policy learns its forms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("judge: [hm]", "the team has no agent 'judge'; expected one of solver"),
        ("solver: hm", "expected a list of quoted answers"),
        ("solver: []", "expected a list of quoted answers"),
        ("[solver", "while parsing a flow sequence"),
    ],
)
def test_an_unusable_table_of_answers_is_refused(
    tmp_path: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.yaml").write_text(text)
    assert main(["try", "orchestration=solver", "--answers", str(tmp_path / "answers.yaml")]) == 2
    assert expected in capsys.readouterr().err
    assert main(["try", "--answers", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err == f"marsrl try: {tmp_path}/none.yaml: No such file or directory\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], []),
        (["rollout.pipeline=trajectory", "orchestration=debate"], []),
        (["orchestration=debate"], ["first update: at step 2 of 24"]),
        (["orchestration=debate", "orchestration_options.rounds=4"], ["first update: at step 4 of 24"]),
        (["orchestration=debate", "run.steps=1"], ["first update: not within run.steps = 1"]),
    ],
)
def test_try_says_at_which_step_the_first_update_comes(
    words: list[str], line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try", *words]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [text.partition(",")[0] for text in shown if text.startswith("first update")] == line
