"""Prompt sets, built-in and from files, and the parsers of completions."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marsrl.commands.cli import main
from marsrl.rollout.agents.parsers import (
    PARSERS,
    LastMatch,
    boxed_answer,
    chain_answer,
    chain_verdict,
    compat_report,
    compat_verdict,
    drmas_is_valid,
    drmas_report,
    drmas_verdict,
    final_answer,
    regex_text,
    regex_verdict,
    route,
    strict_verdict,
    tagged,
    tagged_verdict,
    visible,
)
from marsrl.rollout.agents.prompts import TAUGHT, parse_prompts, prompt_set, set_names, without_tags
from marsrl.rollout.agents.roles import PLACEHOLDERS, READS, Role
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration, find_orchestration
from marsrl.rollout.orchestrations.solver import Solver
from marsrl.rollout.types import Ask, Message, Problem

SOLVER = 'answer: boxed\nturns:\n  solver:\n    - user: "{problem}"\n'
INVERTED = "  correct: {regex: 'correct', example: incorrect}\n  wrong: {regex: 'incorrect', example: incorrect}\n"
HOSTILE = "{report} {{solution}} {0} {problem!r} {purpose} %s $x {"


@pytest.mark.parametrize("name", set_names())
def test_a_printed_prompt_set_asks_and_parses_like_the_original(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prompts", name]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out, "utf-8")
    shipped, file = prompt_set(name), prompt_set(str(tmp_path / "mine.yaml"))
    assert shipped.turns.keys() == file.turns.keys()
    values = {key: f"<{key}>" for role in Role for names in PLACEHOLDERS[role] for key in names}
    for role in shipped.turns:
        messages = file.fill(role, **values)
        assert messages == shipped.fill(role, **values)
        shown = "".join(message.content for message in messages)
        assert all(f"<{key}>" in shown for key in PLACEHOLDERS[role][0])
        what = READS.get(role)
        assert what is None or file.parsers[what] == shipped.parsers[what]
    for parser in (each for kind in PARSERS.values() for each in kind.values()):  # each parser reads its own examples
        read = [parser.read(f"so\n{said.replace('ANSWER', '7')}") for said in parser.examples]
        assert read == ([True, False] if len(read) == 2 else ["7"] * len(read)) != []
        assert all(parser.is_shown(f"End with {said}.") for said in parser.examples) and not parser.is_shown(
            "Answer it."
        )


@pytest.mark.parametrize("name", sorted({*set_names()} - {*TAUGHT}))
def test_a_built_in_prompt_set_asks_for_the_forms_it_reads(name: str) -> None:
    shipped = prompt_set(name)
    for role in [role for role in shipped.turns if role in READS]:
        chat = shipped.fill(role, problem="What is 2 + 2?")
        assert shipped.parsers[READS[role]].is_shown(*(turn.content for turn in chat))


def test_the_form_is_asked_for_once() -> None:
    solver = partial(prompt_set("math").fill, Role.SOLVER)
    assert [turn.content for turn in solver(problem="2 + 2?")] == ["2 + 2?\n\nPut the final answer in \\boxed{}."]
    for asks in ("2 + 2? Box it: \\boxed{}", "In \\boxed{number} write 2 + 2."):
        assert [turn.content for turn in solver(problem=asks)] == [asks]
    corrector = prompt_set("math").fill(Role.CORRECTOR, problem="2 + 2?", solution="4", report="no")
    assert sum(turn.content.count("\\boxed{") for turn in corrector) == 1
    # A parser without an example still has its form appended.
    file = parse_prompts(SOLVER.replace("boxed", "{regex: 'A(.)'}\nform: Write A and a digit."), "f")
    assert file.fill(Role.SOLVER, problem="P")[0].content == "P\n\nWrite A and a digit."


def test_the_sets_are_listed_with_their_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()[::2]] == set_names()
    assert "roles: router, searcher, answerer, reasoner, distiller" in told
    assert main(["prompts", "poetry"]) == 2 and "no prompt set named 'poetry'" in capsys.readouterr().err


def test_values_are_filled_in_once_whatever_they_hold() -> None:
    text = 'answer: boxed\nturns:\n  corrector:\n    - user: "{problem}|{solution}|{report}"\n'
    (turn,) = parse_prompts(text, "f").fill(Role.CORRECTOR, problem=HOSTILE, solution=HOSTILE, report=HOSTILE)
    assert turn.content == f"{HOSTILE}|{HOSTILE}|{HOSTILE}"
    facts = prompt_set("facts").fill(Role.DISTILLER, problem="p", output="o", purpose=HOSTILE)
    assert facts[0].content == f"p o What is looked for: {HOSTILE}\n\n read"


def test_braces_that_are_no_placeholder_stay_as_they_are() -> None:
    kept = r'\boxed{} \boxed{answer} \frac{ab}{cd} x^{ab} {"tool": "...", "a": {...}} {x} { problem } {Name} ${1}'
    text = SOLVER.replace("{problem}", "PLACE").replace('"PLACE"', f"|-\n        {{problem}} {kept} {{{{problem}}}}")
    (turn,) = parse_prompts(text, "f").fill(Role.SOLVER, problem="P")
    assert turn.content == f"P {kept} {{problem}}"


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "the file is empty; expected `turns`"),
        ("turns: [\n", 2, "but found '<stream end>'"),
        (f"{SOLVER}awnser: boxed\n", 5, "unknown key awnser; did you mean answer?"),
        (f"{SOLVER}answer: boxed\n", 5, "the key answer is given twice"),
        (SOLVER.replace("user:", "system:"), 4, "the last turn of solver is by system; expected user"),
        (SOLVER.replace('"{problem}"', "{problem}"), 4, "a text that begins with a brace needs quotes"),
        (SOLVER.replace('"{problem}"', '"Solve it."'), 4, "the turns of solver lack {problem}; its placeholders are {problem}"),
        (SOLVER.replace('m}"', 'm} {report}"'), 4, "solver has no {report}; its placeholders are {problem}; for a"),
        (SOLVER.replace('"{problem}"', "|\n        {problem}\n\n        {probelm}"), 7, "solver has no {probelm}"),
        (SOLVER.removeprefix("answer: boxed\n"), 3, "the key answer is missing; expected a parser for the answer of solver"),
        (SOLVER.replace("boxed", "box"), 1, "answer: no parser named 'box'; expected one of boxed, answer_tag, answer_word"),
        (SOLVER.replace("boxed", "{regex: '('}"), 1, "answer.regex is not a valid RE2 regular expression: missing ): ("),
        (SOLVER.replace("boxed", "{regex: 'A(.)', example: A7}"), 1, "answer.example lacks ANSWER"),
        (f"verdict:\n{INVERTED}{SOLVER}", 2, "verdict.correct.example 'incorrect' is not parsed as correct"),
    ],
)  # fmt: skip
def test_an_error_in_a_prompt_file_is_one_line_with_its_place(
    text: str, line: int, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        build_orchestration("solver", {"solver": AgentConfig(prompt=str(file))}, "math")
    message = str(error.value)
    assert message.startswith(f"agents.solver.prompt: {file}:{line}: ") and expected in message and "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"turns: \xff")
    for name, said in (("none.yaml", "No such file or directory"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(ValueError, match=f"^agents.solver.prompt: {tmp_path / name}: {said}$"):
            build_orchestration("solver", {"solver": AgentConfig(prompt=str(tmp_path / name))}, "math")


def test_a_prompt_file_needs_a_chat_for_every_role_played(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SOLVER)
    config = AgentConfig(prompt=str(tmp_path / "mine.yaml"))
    build_orchestration("solver", {"solver": config}, "math")
    for team, agent, role in (
        ("solver_verifier", "solver", "corrector"),
        ("debate", "debater", "debater"),
        ("verifier_corrector", "verifier2", "verifier"),
    ):
        with pytest.raises(ValueError, match=f"^agents.{agent}.prompt: .*mine.yaml has no chat for the role {role} "):
            build_orchestration(team, {agent: config}, "math")


def test_the_prompt_file_on_the_page_can_be_parsed() -> None:
    page = (Path(__file__).parents[2] / "docs/prompts.md").read_text("utf-8").partition("## The file\n\n")[2]
    file = parse_prompts(textwrap.dedent(page.partition("\n`turns`")[0]), "page")
    assert [turn.content for turn in file.fill(Role.VERIFIER, problem="P", solution="S")][1] == "P\n\nS"
    read = file.parsers["verdict"].read
    assert [read(text) for text in ("Grade: right", "grade:wrong.", "right")] == [True, False, None]


def test_the_examples_of_the_page_come_before_the_problem() -> None:
    page = (Path(__file__).parents[2] / "docs/prompts.md").read_text("utf-8").partition("`few_shot.yaml`:\n\n")[2]
    file = parse_prompts(textwrap.dedent(page.partition("\n## ")[0]), "page")
    turns = file.fill(Role.SOLVER, problem="P")
    assert [turn.role for turn in turns] == ["system", *2 * ["user", "assistant"], "user"] and turns[-1].content == "P"
    assert [file.parsers["answer"].read(turn.content) for turn in turns[2::2]] == ["42", "5"]


@pytest.mark.parametrize("name", set_names())
def test_system_and_suffix_are_read_in_every_role(name: str) -> None:
    plain = prompt_set(name)
    values = {key: f"<{key}>" for role in Role for names in PLACEHOLDERS[role] for key in names}
    for role, before in ((role, plain.fill(role, **values)) for role in plain.turns):
        filled = plain.with_words([role], "Is {problem} \\sqrt{}?", "{{answer}} x^{ab}").fill(role, **values)
        rest = [turn for turn in before if turn.role != "system"]
        last = Message("user", f"{rest[-1].content}\n\n{{answer}} x^{{ab}}")
        assert filled == (Message("system", "Is <problem> \\sqrt{}?"), *rest[:-1], last)
        assert plain.with_words([role], None, None) == plain


def test_an_agent_of_several_roles_has_its_words_in_each() -> None:
    words = {"solver": AgentConfig(system="Be brief.", suffix="Use \\boxed{}.")}
    team = build_orchestration("solver_verifier", words, "math")
    for role in (Role.SOLVER, Role.CORRECTOR):
        chat = team.prompt("solver", role, Episode("e", "e", Problem("p", "Q", "1", "math")))
        assert chat[0] == Message("system", "Be brief.") and chat[-1].content.endswith("\n\nUse \\boxed{}.")


@pytest.mark.parametrize(
    ("team", "agent", "words", "expected"),
    [
        ("solver", "solver", {"suffix": "See {report}."}, "agents.solver.suffix: solver has no {report}; its placeholders"),
        ("solver", "solver", {"system": "A {probelm}."}, "agents.solver.system: solver has no {probelm}"),
        ("external", "clerk", {"suffix": "Hi"}, "agents.clerk.suffix is set, but with orchestration=external the program"),
    ],
)  # fmt: skip
def test_a_system_or_suffix_that_cannot_be_used_is_refused(
    team: str, agent: str, words: dict[str, str], expected: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        build_orchestration(team, {agent: AgentConfig(**words)}, "math")


def test_system_may_not_replace_a_turn_that_shows_the_problem(tmp_path: Path) -> None:
    text = SOLVER.replace("    - user", '    - system: "Solve {problem}"\n    - user').replace(
        'user: "{problem}"', "user: Now."
    )
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^agents.solver.system replaces the turn of solver that shows \{problem\}"):
        build_orchestration("solver", {"solver": AgentConfig(prompt=str(tmp_path / "mine.yaml"), system="Hi")}, "math")


def test_a_team_that_builds_its_own_chats_must_show_system() -> None:
    class Own(Solver):
        def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
            return (Message("user", f"Q {self.settings['solver'].system}"),)

    Own({"solver": AgentConfig(suffix="Q {problem}")}, "math").check_words("solver", [Message("user", "a Q 1")])
    with pytest.raises(ValueError, match="agents.solver.system is set, but Own.messages does not show it"):
        Own({"solver": AgentConfig(system="Hi")}, "math").check_words("solver", [Message("user", "Q Hi")])


BARE = r"""
answer: boxed
verdict: verify_tag
route: verify_tag
query: search_tag
turns:
  solver: [user: "{problem}"]
  debater: [user: "{problem} {solution} {others}: \\\\boxed{}?"]
  verifier: [system: "Say <verify>yes or no.", user: "{problem} {solution}"]
  router: [user: "{problem} {found}"]
  searcher: [user: "{problem} {found}"]
  answerer: [user: "Box it: \\\\boxed{}.", assistant: "Yes.", user: "{problem} {found}"]
"""
NUMBER = "answer: {regex: '(7)'}"
OWN_ROUTE = "route: {enough: {regex: YES, example: YES}, missing: {regex: NO, example: NO}}"


@pytest.mark.parametrize(
    ("team", "change", "question", "expected"),
    [
        ("solver", ("", ""), "2 + 2?", [r"the prompt of agents.solver, as solver, does not show the form of its answer, \b"]),
        ("solver", ("", ""), r"2 + 2? In \boxed{}.", []),  # two of the three problems ask for this form
        ("solver", ("turns:", r"form: Write \boxed{}." "\nturns:"), "2 + 2?", []),
        ("solver", ("answer: boxed", NUMBER), "2 + 2?", []),  # without an example the form is unknown
        ("solver", ("answer: boxed", NUMBER.replace("}", ", example: So ANSWER}")), "So what?", []),
        # A debater's prompt must state the form too.
        ("debate", ("", ""), "2 + 2?", ["the prompt of agents.debater, as solver, "]),
        ("search_team", ("", ""), "2 + 2?", [
            "the prompt of agents.verifier, as router, does not show the form of its route, <verify>yes</verify> or <verify>",
            "the prompt of agents.search, as searcher, does not show the form of its query, <search>...</search>",
        ]),
        ("search_team", ("route: verify_tag", OWN_ROUTE), "YES?", ["the prompt of agents.search, as searcher"]),
    ],
)  # fmt: skip
def test_agents_whose_prompt_lacks_the_answers_form_are_named(
    team: str, change: tuple[str, str], question: str, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bare.yaml").write_text(BARE.replace(*change) if change[0] else BARE)
    bare = AgentConfig(prompt=str(tmp_path / "bare.yaml"))
    built = build_orchestration(team, {spec.name: bare for spec in find_orchestration(team).agents}, "math")
    problems = [Problem(f"{n}", "1 + 1?" if n == 0 else question, "2", "math") for n in range(3)]
    warnings = built.unasked(problems, {})
    assert [warning[: len(said)] for warning, said in zip(warnings, expected, strict=True)] == expected


@pytest.mark.parametrize(("task", "team"), [("math", "verifier_corrector"), ("qa", "search_team"), ("chain", "debate")])
def test_agents_with_built_in_prompts_need_no_warning(task: str, team: str) -> None:
    assert build_orchestration(team, {}, task).unasked([Problem("p", "2 + 2?", "4", task)], {}) == []


@given(
    st.sampled_from([r"a(b*)", r"(a|ab)(?:c|bcd)?", r"b(a?)|c", r"(?i)A(.)", r"(\w+)c", r"(a+?)b*", r"^a(b)|c(c)?"]),
    st.text("abcAB \n", max_size=12),
)
def test_the_last_match_is_the_last_that_finditer_finds(expression: str, text: str) -> None:
    found = list(re.finditer(expression, text))
    expected = None if not found else (found[-1][0], *found[-1].groups())
    assert LastMatch(expression).groups(text) == expected


def test_untrusted_text_loses_its_tags_in_linear_time() -> None:
    assert without_tags("a", "< / A ><a>< b>") == "[ / A ][a]< b>"
    blanks = "<" + " " * 400_000  # quadratic matching would take a quarter of an hour
    assert without_tags("a", blanks) == blanks


def test_the_last_match_of_either_expression_is_the_verdict() -> None:
    read = regex_verdict("(c)orrect", "in(corr)ect")
    # a lone surrogate, which UTF-8 cannot represent
    assert [read(text) for text in ("incorrect", "incorrect, no: correct", "\ud800 correct")] == [False, True, True]


answer_tag = partial(tagged, "answer")
READ: list[tuple[Callable[[str], object], str, object]] = [
    # The visible text begins after the last closed <think> block.
    (visible, "plain", "plain"),
    (visible, "<think>a</think>\n\nshown", "shown"),
    (visible, "a</think>shown", "shown"),  # the template opened the block
    (visible, "<think>a</think>b<think>c</think>d", "d"),
    (visible, "<think>cut off", None),
    (partial(visible, starts_in_thought=True), "still thinking, Verdict: correct", None),
    # A verdict is on a line of its own.
    (strict_verdict, "Findings: none\nVerdict: correct", True),
    (strict_verdict, "**Verdict: correct**", True),
    (strict_verdict, "**Verdict:** wrong.", False),
    (strict_verdict, "Verdict: wrong\nOn reflection that holds.", False),
    (strict_verdict, "Verdict: incorrect", None),
    (strict_verdict, "Verdict: correct|wrong", None),
    # A verdict is a substring, as in the script published with MarsRL.
    (compat_verdict, "Correctness: incorrect", True),  # a bug of the published script
    (compat_verdict, "**Correctness**: wrong", False),
    (compat_verdict, "<think>this looks correct", True),  # an unfinished <think> block is read
    (compat_report, "step 2 fails\n**Correctness**: wrong", "step 2 fails"),
    # The answer is in the last box with balanced braces.
    (boxed_answer, r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (boxed_answer, r"\boxed{7} and \boxed{unclosed", "7"),
    (boxed_answer, r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (boxed_answer, r"\boxed{}", None),
    (boxed_answer, r"\fbox{7}", "7"),
    # The answer is in the box; without a box it is the last stated answer.
    (final_answer, "The answer is 20.\nSo \\boxed{18}.\n#### 20", "18"),
    (final_answer, "16 - 7 = <<16-7=9>>9\n#### 1,080", "1,080"),
    (final_answer, "#### $18\n\nNote: a week has 7 days.", "$18"),
    (final_answer, "#### 18 dollars", "18 dollars"),
    (final_answer, "The answer is 20. No, the answer is 18. I hope this helps.", "18"),
    (final_answer, "The answer is **$3.50**. As 7 / 2 = 3.5, the answer is right.", "$3.50"),
    (final_answer, "**Final Answer:** The final answer is: $\\frac{1}{2}$.", "\\frac{1}{2}"),
    (final_answer, "**Answer**: 18 eggs per day", "18 eggs per day"),
    (final_answer, "So the correct answer is (C).\n", "(C)"),
    (final_answer, "The answer is 5! = 120.", "5! = 120"),
    (final_answer, "Final answer:\n18 eggs", "18 eggs"),
    (final_answer, "9 eggs at 2 each\n\n**18**", "18"),
    (final_answer, "So:\n\\[\n18\n\\]\n", "18"),
    (final_answer, "### Answer\n\\(-1/2\\).", "-1/2"),
    # Numbers and fragments in running text are no answers.
    (final_answer, "So she makes $18 every day.", None),
    (final_answer, "9 * 2 = 18", None),
    (final_answer, "Answer: Janet makes $18 every single day.", None),
    (final_answer, "Answer:\nShe sells 9 eggs.\nSo she makes $18.", None),
    (final_answer, "#### 2 Add them\nSo she makes $18.", None),
    (final_answer, "The answer is 18.\n#### Why\nAs 9 * 2 = 18 it is.", None),
    (final_answer, "The answer is 18, in \\boxed{}.", None),
    (final_answer, "The answer is \\boxed{18", None),
    (final_answer, "The answers are 1 and 2. Two answers: yes.", None),
    (final_answer, "The answer is " + 201 * "9", None),
    # The answer is the word after the last "Answer:" or "Verdict:".
    (chain_answer, "Answer: 3 agree Answer: 5", "5"),
    (chain_answer, "Answer: claim", None),
    (chain_verdict, "got 3 said 3 Verdict: correct", True),
    (chain_verdict, "Verdict: wrong Verdict: 3", None),
    # The answer is in the last complete tag.
    (answer_tag, "<answer> Lima </answer>", "Lima"),
    (answer_tag, "<answer>a</answer> or <ANSWER>b</Answer> .", "b"),
    (answer_tag, "<answer>a</answer> <answer>b", "a"),
    (answer_tag, "<answer>a <answer>b</answer>", "b"),
    (answer_tag, "İ<answer>a</answer>", "a"),
    (route, "<verify>yes</verify>", True),
    (route, "<verify>no</verify> then <verify>yes</verify>", True),
    (route, "<verify>yes, maybe</verify>", None),
    # The report is the whole text, as in Dr. MAS's code.
    (drmas_report, "<think>x</think> a <verify> reject\n</verify> b", "<think>x</think> a <verify>reject</verify> b"),
]


@pytest.mark.parametrize(("read", "text", "expected"), READ)
def test_a_completion_yields_only_what_its_grammar_defines(
    read: Callable[[str], object], text: str, expected: object
) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("report", "ours", "published", "is_valid"),
    [
        ("fine <verify>approve</verify>", True, True, True),
        ("no <verify>\n reject </verify> so", False, False, True),  # white space inside the first tag is removed
        ("<verify>Reject</verify>", False, True, True),  # only lower case counts
        ("<verify>reject</verify> no: <verify>approve</verify>", True, True, True),
        ("<verify>approve</verify> no: <verify> reject </verify>", False, True, True),
        ("<verify>reject", None, True, False),  # truncated
        ("<think><verify>reject</verify></think> I say <verify>approve</verify>", True, True, True),
        ("\u4e0d <verify>reject</verify>", False, False, False),  # Chinese counts as a format error
    ],
)
def test_tagged_verdicts_follow_our_and_the_published_rules(
    report: str, ours: bool | None, published: bool, is_valid: bool
) -> None:
    assert (tagged_verdict(report), drmas_verdict(report), drmas_is_valid(report)) == (ours, published, is_valid)


# Python's `re` would take exponential time for the first and third, and quadratic time for the second, because it searches again
# after each match.
HARD = (regex_text("(?:a+)+(x)$"), regex_text("(.*)[^A-Z]|[A-Z]"), regex_verdict("(?:a|a?)+b", "(?:.*a){12}c"))
UNITS = ["a", "A", "*", "{", "\n", "Answer: ", "Verdict:", "Verdict: correct*", "**Correctness**: "]
UNITS += ["\\boxed{", "<think>", "<verify> ", "<answer>", "<answer>x</answer>"]
UNITS += [" ", "\n\t", "answer is ", "#### ", "#### 7\n", "answer: \n", "answer*", "$"]


@pytest.mark.parametrize("unit", UNITS)
def test_hostile_repetition_is_read_in_linear_time(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    start = time.process_time()
    for read in {*HARD, *(read for read, _, _ in READ), tagged_verdict, drmas_verdict, drmas_is_valid}:
        read(text)
    assert time.process_time() - start < 20  # seconds; quadratic time would be hours
