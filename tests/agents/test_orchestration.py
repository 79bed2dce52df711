import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from letters import bare

from marsrl.rollout.agents.orchestration import Orchestration, is_right
from marsrl.rollout.config import AgentConfig, EvaluateConfig, RolloutConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.orchestrations.verifier_corrector import VerifierCorrector, pick
from marsrl.rollout.types import MISSING, Ask, Finish, Problem, Reward, Sample

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBLEM = Problem("p", "a 3 b *7", "1", "arithmetic")


def five(agents: dict[str, AgentConfig] | None = None, picks: int = 2, **rules: int | str) -> VerifierCorrector:
    evaluate = EvaluateConfig.model_validate(rules)
    team = build_orchestration("verifier_corrector", agents or {}, "math", None, RolloutConfig(picks=picks), evaluate)
    assert isinstance(team, VerifierCorrector)
    return team


TEAM = five()
# Parser `compat` reads what MarsRL's published script reads, **Correctness**, so this Verifier's prompt asks for that word.
COMPAT = {"verifier1": AgentConfig(prompt=str(EXAMPLES / "own_prompts/words.yaml"), parser="compat")}


def sample(uid: str, agent: str = "solver", *, correct: float = MISSING, text: str = "t", **changes: object) -> Sample:
    return bare(uid, agent, text, **{"reward": Reward(correct, correct), **changes})


def showing(*inputs: Sample, agent: str = "verifier1") -> tuple[Episode, Ask]:
    """Return an episode that contains the samples, and a request to the agent (an Ask) that shows them."""
    episode = Episode("r", "r", PROBLEM)
    uids = []
    for number, each in enumerate(inputs):
        uids.append(f"{each.uid}:{number}")
        episode.answers[each.uid] = (replace(TEAM.parse(each), uid=uids[-1], reward=each.reward),)
    return episode, Ask("r/x", agent, tuple(uids))


ONE, ZERO, GONE = Reward(1.0, 1.0), Reward(0.0, 0.0), Reward(MISSING, MISSING)
AGREES, ERRS = Reward(1.0, 1.0, {"verdict": 1.0}), Reward(0.0, 0.0, {"verdict": 0.0})
OVERLONG = {"finish": Finish.LENGTH, "verdict": True, "answer": "1"}
# Columns: agent; its parsed output; reward of the solution that it read; the task's judgement; its reward, or why it has none
REWARDS: list[tuple[str, dict[str, Any], Reward, Reward | None, Reward | str]] = [
    ("verifier1", {"verdict": True}, ONE, None, AGREES),
    ("verifier1", {"verdict": False}, ZERO, None, AGREES),
    ("verifier1", {"verdict": True}, Reward(0.5, 0.5), None, ERRS),
    # The solution is right, although it has a penalty.
    ("verifier1", {"verdict": True}, Reward(0.9, 1.0), None, AGREES),
    ("verifier1", {}, ZERO, None, replace(ZERO, note="no verdict")),
    ("verifier1", {}, GONE, None, "the solution judged (s:0) has no reward"),
    *(("verifier1", {"verdict": True}, Reward(*half), None, "(s:0)") for half in ((MISSING, 1.0), (1.0, MISSING))),
    ("solver", {"answer": "1"}, ONE, ONE, ONE),
    ("solver", {}, ONE, ONE, replace(ZERO, note="no answer")),
    *((agent, OVERLONG, ONE, ONE, replace(ZERO, note="overlong")) for agent in ("solver", "verifier1", "corrector2")),
    ("solver", {"finish": Finish.ERROR}, ONE, None, "the engine failed on the sample"),
]


@pytest.mark.parametrize(("agent", "output", "solution", "judged", "expected"), REWARDS)
def test_each_agent_is_rewarded_for_its_own_output_if_known(
    agent: str, output: dict[str, Any], solution: Reward, judged: Reward | None, expected: Reward | str
) -> None:
    reward = TEAM.reward(*showing(sample("s", reward=solution), agent=agent), sample("x", agent, **output), judged)
    if isinstance(expected, Reward):
        assert reward == expected
        return
    assert reward.is_missing and math.isnan(reward.correct) and expected in reward.note
    if "(s:0)" in expected:  # outputs with an incomplete reward are not handed on either
        assert not TEAM.is_eligible(sample("s", answer="1", reward=solution), "verifier1")
        assert not TEAM.is_eligible(sample("v", "verifier1", verdict=False, reward=solution), "corrector1")


def test_an_agent_reads_the_visible_text_of_its_input_samples() -> None:
    solution = sample("s", text=r"<think>secret</think> \boxed{4}", correct=0.0)
    report = sample("v", "verifier1", text="<think>hm</think>step 2\nVerdict: wrong", verdict=False, correct=1.0)
    episode, first = showing(agent="solver")
    assert [m.content for m in TEAM.messages(episode, first)] == [
        f"{PROBLEM.question}\n\nPut the final answer in \\boxed{{}}."
    ]
    (_, question) = TEAM.messages(*showing(solution))
    assert PROBLEM.question in question.content and r"\boxed{4}" in question.content
    assert "secret" not in question.content
    problem, said, told = TEAM.messages(*showing(solution, report, agent="corrector1"))
    assert (problem.content, said.content) == (PROBLEM.question, r"\boxed{4}")
    assert "step 2\nVerdict: wrong" in told.content and "hm" not in told.content.partition("step 2")[0]
    grades = build_orchestration("verifier_corrector", {"verifier1": AgentConfig(prompt="chain")}, "math")
    assert grades.messages(*showing(sample("s", text="x")))[0].content == "grade"


CHAIN = {"verifier1": AgentConfig(prompt="chain")}
CUT = {"finish": Finish.LENGTH}
PARSED: list[tuple[dict[str, AgentConfig], str, str, dict[str, Any], tuple[str, str | None, bool | None]]] = [
    ({}, "solver", r"so \boxed{4}", {}, (r"so \boxed{4}", "4", None)),
    ({}, "solver", r"\boxed{4}", CUT, (r"\boxed{4}", None, None)),
    ({}, "solver", r"<think>\boxed{4}", {}, ("", None, None)),
    ({}, "solver", r"\boxed{4}", {"in_thought": True}, ("", None, None)),
    ({}, "verifier1", "Verdict: correct", {}, ("Verdict: correct", None, True)),
    ({}, "verifier1", "<think>x</think>Verdict: wrong", {}, ("Verdict: wrong", None, False)),
    # Only this agent has its own prompts, whose grammar parses its output; the others use the task's.
    (CHAIN, "verifier1", "so Verdict: wrong then", {}, ("so Verdict: wrong then", None, False)),
    (CHAIN, "verifier2", "so Verdict: wrong then", {}, ("so Verdict: wrong then", None, None)),
    # compat reads "incorrect" as acceptance with an empty report, but it parses only verifier1 here.
    (COMPAT, "verifier1", "Correctness: incorrect", {}, ("", None, True)),
    (COMPAT, "verifier1", "step 2 **Correctness** wrong", CUT, ("step 2", None, False)),
    (COMPAT, "verifier2", "step 2 **Correctness** wrong", CUT, ("step 2 **Correctness** wrong", None, None)),
    ({"solver": AgentConfig(parser="compat")}, "solver", r"so \boxed{4}", {}, (r"so \boxed{4}", "4", None)),
]


@pytest.mark.parametrize(("agents", "agent", "text", "changes", "read"), PARSED)
def test_outputs_are_parsed_by_the_grammar_of_their_prompt(
    agents: dict[str, AgentConfig], agent: str, text: str, changes: dict[str, Any], read: tuple[str, str, bool]
) -> None:
    """A truncated output, or one with an open <think> block, has no answer and no verdict, except with the parser compat."""
    team = five(agents)
    found = team.parse(sample("x", agent, text=text, answer="of before", verdict=False, **changes))
    assert (found.shown, found.answer, found.verdict) == read
    assert agents is COMPAT or team.is_readable(found) == (found.answer is not None or found.verdict is not None)


CANDIDATES = st.lists(st.sampled_from([0.0, 1.0]), max_size=12).map(
    lambda rewards: [sample(f"u{index:02d}", correct=reward) for index, reward in enumerate(rewards)]
)
RULES = st.sampled_from(["adaptive", "balanced", "paired", "random"])


def test_form_names_what_parsers_look_for(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("turns: {solver: [{user: '{problem}'}]}\nanswer: {regex: 'ANS=(.)'}\n")
    search = build_orchestration("search_team", {}, "qa")
    assert {spec.name: search.form(spec.name) for spec in search.agents} == {
        "verifier": "route in the form <verify>yes</verify> or <verify>no</verify>",
        "search": "query in the form <search>...</search>",
        "answer": "answer in the form <answer>...</answer>",
    }
    assert build_orchestration("dual_system", {}, "qa").form("system1") == ""
    own = build_orchestration("solver", {"solver": AgentConfig(prompt=str(file))}, "math")
    assert own.form("solver") == "answer that its parser finds"
    assert build_orchestration("external", {"a": AgentConfig()}, "math").form("a") == ""


@given(CANDIDATES, st.integers(1, 5), RULES, st.booleans(), st.integers(0, 99), st.randoms(use_true_random=False))
def test_picks_follow_their_rule_in_any_order_of_candidates(
    candidates: list[Sample], count: int, rule: str, prefers_right: bool, seed: int, shuffler: random.Random
) -> None:
    chosen = pick(candidates, count, rule, prefers_right, random.Random(seed))
    shuffled = list(candidates)
    shuffler.shuffle(shuffled)
    again = pick(shuffled, count, rule, prefers_right, random.Random(seed))
    uids = [s.uid for s in chosen]
    assert uids == [s.uid for s in again] == sorted(set(uids))
    num_preferred = sum(is_right(s) == prefers_right for s in candidates)
    num_other = len(candidates) - num_preferred
    got_preferred = sum(is_right(s) == prefers_right for s in chosen)
    got_other = len(chosen) - got_preferred
    if rule == "paired":
        assert got_preferred == got_other == min(num_preferred, num_other, count // 2)
        return
    assert len(chosen) == min(count, len(candidates))
    if rule == "adaptive":
        assert got_preferred == min(count, num_preferred)
    if rule == "balanced" and min(num_preferred, num_other) >= (count + 1) // 2:
        assert (got_preferred, got_other) == ((count + 1) // 2, count // 2)


def answered(team: Orchestration, *rounds: list[Sample]) -> tuple[Episode, list[Ask]]:
    """Play the rounds and return (episode, next asks). All samples of a round answer its first ask."""
    episode = Episode("r", "r", PROBLEM)
    for samples in rounds:
        asks = episode.enter(team.follow(episode))[0]
        for ask, own in zip(asks, [samples, *[[]] * len(asks)], strict=False):
            episode.close(ask, [replace(s, uid=f"{ask.id}:{i}", agent=ask.agent) for i, s in enumerate(own)])
    return episode, episode.enter(team.follow(episode))[0]


RIGHT = {"answer": "1", "shown": "t", "correct": 1.0}
FLAGS = {"verdict": False, "shown": "t"}


# Columns: receiver; output; whether it is handed on by default; and with pick_unparsable.
HANDED_ON: list[tuple[str, Sample, bool, bool]] = [
    ("verifier1", sample("good", **RIGHT), True, True),
    ("verifier1", sample("no answer", correct=0.0, shown="t"), False, True),
    ("verifier1", sample("in a thought", correct=0.0), False, False),
    ("verifier1", sample("cut off", answer="1", correct=0.0, finish=Finish.LENGTH, shown="t"), False, False),
    ("verifier1", sample("without a reward", answer="1", shown="t"), False, False),
    ("corrector1", sample("flags", correct=1.0, **FLAGS), True, True),
    ("corrector1", sample("passes", verdict=True, correct=0.0, shown="t"), False, False),
    ("corrector1", sample("no verdict", correct=0.0, shown="t"), False, True),
    ("corrector1", sample("cut off", correct=0.0, finish=Finish.LENGTH, **FLAGS), False, False),
    ("corrector1", sample("without a reward", **FLAGS), False, False),
]


@pytest.mark.parametrize(("agent", "output", "by_itself", "asked_for"), HANDED_ON)
def test_unparsable_outputs_are_handed_on_only_if_configured(
    agent: str, output: Sample, by_itself: bool, asked_for: bool
) -> None:
    """Unfinished outputs, and outputs without a reward, are never handed on."""
    asks_all = {agent: AgentConfig(pick_unparsable=True)}
    assert (TEAM.is_eligible(output, agent), five(asks_all).is_eligible(output, agent)) == (by_itself, asked_for)
    if output.uid == "no verdict":  # not handed on if a missing verdict counts as acceptance
        accepts = {"verifier1": AgentConfig(missing_verdict="correct")}
        assert not five(asks_all | accepts).is_eligible(replace(output, agent="verifier1"), agent)


def test_each_agent_gets_inputs_picked_by_its_own_rule() -> None:
    right = [sample(f"r{i}", answer="1", verdict=False, correct=1.0) for i in range(3)]
    wrong = [sample(f"w{i}", answer="1", verdict=False, correct=0.0) for i in range(3)]
    team = five({"corrector2": AgentConfig(pick="balanced")})
    # Two of six outputs are handed on: wrong solutions to a Verifier, reports of real errors to a Corrector.
    episode, asks = answered(team, right + wrong)
    shown = {"verifier1": {False}, "corrector1": {True}, "verifier2": {False}, "corrector2": {True, False}}
    for agent, kinds in shown.items():
        assert [ask.agent for ask in asks] == [agent] * 2
        assert {is_right(episode.sample(ask.inputs[-1])) for ask in asks} == kinds
        for ask in asks:
            samples = [replace(s, uid=f"{ask.id}:{i}", agent=agent) for i, s in enumerate(right + wrong)]
            episode.close(ask, samples)
        asks = episode.enter(team.follow(episode))[0]
    assert asks == [] and episode.is_at_its_end


def test_an_outcome_is_the_mean_correctness_of_the_leaves() -> None:
    team = five(picks=9)
    solved = [sample("s0", **RIGHT), sample("s1", answer="2", correct=0.0), sample("s2", answer="3")]
    said = ((True, 0.0), (False, 1.0), (None, 0.25))
    reports = [sample(f"v{i}", verdict=verdict, correct=correct) for i, (verdict, correct) in enumerate(said)]
    mended = [sample("c0", answer="1", correct=1.0), sample("c1", answer="2", correct=0.0)]
    episode, _ = answered(team, solved, reports, mended)
    handed_on = [ask.parent_uid for ask in episode.asks.values() if ask.agent == "verifier1"]
    assert sorted(map(str, handed_on)) == ["r/solver:0", "r/solver:1"]  # the third sample has no reward
    outcomes = {uid.removeprefix("r/"): value for uid, value in team.outcomes(episode).items()}
    judged = next(uid for uid in outcomes if uid.endswith("verifier1:1")).partition("/")[0]
    report = f"{judged}/verifier1:1"
    truth = {"solver:0": 1.0, "solver:1": 0.0}
    # A leaf's value is the correctness of the solution that it judged.
    assert outcomes[f"{judged}/verifier1:0"] == truth[judged]
    assert outcomes[f"{report}/corrector1:0"] == 1.0 and outcomes[f"{report}/corrector1:1"] == 0.0
    assert outcomes[f"{judged}/verifier1:2"] == 0.25  # this leaf judged no solution, so its own value counts
    assert outcomes[report] == 0.5 and outcomes[judged] == (truth[judged] + 1.0 + 0.0 + 0.25) / 4
    assert math.isnan(outcomes["solver:2"])
    # Leaves without a judgement are left out.
    episode, _ = answered(TEAM, [sample("s", **RIGHT)], [sample("v0", verdict=True, correct=1.0), sample("v1")])
    *known, unknown = TEAM.outcomes(episode).values()
    assert known == [1.0, 1.0] and math.isnan(unknown)


def test_an_unknown_agent_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="has no agent 'solvr'; expected one of solver, verifier1"):
        TEAM.parse(sample("s", "solvr"))


SAYS = {  # letters of a transcript -> text and finish reason
    "C": ("Verdict: correct", Finish.STOP),
    "W": ("bad\nVerdict: wrong", Finish.STOP),
    "n": ("step 2 is odd", Finish.STOP),  # a report without a verdict
    "T": ("<think>cut", Finish.LENGTH),  # a truncated report
    "s": ("s", Finish.STOP),  # a solution or a correction
    "v": ("<think>", Finish.STOP),  # an output that shows nothing
    "t": ("<think>cut", Finish.LENGTH),  # a truncated solution
}


def transcript(
    letters: str, agents: dict[str, AgentConfig] | None = None, **rules: int | str
) -> tuple[VerifierCorrector, Episode, list[str]]:
    """Play an evaluation with these answers, one ask at a time.

    Returns the team, the episode, and the uids of its complete solutions.
    """
    team, episode = five(agents, **rules), Episode("e", "e", PROBLEM, 0, "evaluate")
    whole = []
    for number, letter in enumerate(letters):
        asks = episode.enter(team.follow(episode))[0]
        assert len(asks) == 1, f"call {number}"
        (ask,), (text, finish) = asks, SAYS[letter]
        assert ask.num_samples == 1 and ask.agent.startswith("verifier") == (letter in "CWnT"), (number, ask.agent)
        episode.close(ask, [team.parse(sample(f"{ask.id}:0", ask.agent, text=text, finish=finish))])
        whole += [f"{ask.id}:0"] if letter in "sv" else []
    return team, episode, whole


# Columns: letters of SAYS; options; which complete solution counts, from 1 (0: none). The numbers are worked out by hand, for our
# rules and for the rules of MarsRL's published script, whose stable sort ignores acceptance.
MANY, SCRIPT = "sCWsCCWsWsWsWsWsW", {"compat": "marsrl"}
TRANSCRIPTS: list[tuple[str, dict[str, str | int], int]] = [
    ("sCCCC", {}, 1),
    ("sCCCWsCCCC", {}, 2),
    ("sCCCWsCCCC", SCRIPT, 1),  # four calls for each candidate
    ("sCWsCC", {"accept_after": 2}, 2),
    ("sWt", {}, 1),
    ("sWsWt", {}, 1),  # the earliest of equal candidates counts
    (MANY, {}, 2),
    (f"{MANY}sW", SCRIPT, 2),  # one more call
    ("sCWsCC", {**SCRIPT, "max_iterations": 4}, 1),  # two calls for each candidate
    # A truncated report neither accepts the solution nor names an error to correct, so the solution is judged again.
    ("sTCCCC", {}, 1),
    ("sCTCC", {"accept_after": 2}, 1),  # a truncated report also ends a series of acceptances
    ("sTsWt", SCRIPT, 2),  # the truncated report is handed on, but its call does not count
    ("t", {}, 0),
    ("v", {}, 1),
    ("ttsCCCC", SCRIPT, 1),
]


@pytest.mark.parametrize(("letters", "rules", "expected"), TRANSCRIPTS)
def test_a_transcript_ends_as_worked_out_by_hand(letters: str, rules: dict[str, str | int], expected: int) -> None:
    team, episode, whole = transcript(letters, **rules)
    loop = team.loop(episode)
    assert loop.final is not None and team.outcome(episode) is loop.final
    assert expected == (whole.index(loop.final.uid) + 1 if loop.final.uid in whole else 0)
    assert episode.enter(team.follow(episode))[0] == [] and loop.num_iterations == sum(map(letters.count, "CWnT"))
    assert sum(each.num_correct for each in loop.candidates) == letters.count("C")
    assert sum(each.num_verdicts for each in loop.candidates) == sum(map(letters.count, "CWn"))
    draws = [ask for ask in loop.asks if ask.agent == "solver"]
    assert [ask.id for ask in draws] == ["e/solver", "e/solver#2", "e/solver#3"][: len(draws)]
    # Evaluations show only the Solver's last draw.
    assert set(team.redrawn(episode)) == {f"{ask.id}:0" for ask in draws[:-1]}
    assert team.alone(episode) is loop.solution and loop.solution == episode.sample(f"{draws[-1].id}:0")


def test_every_ask_of_a_loop_shows_what_came_before() -> None:
    team, episode, _ = transcript("sCWsW")
    solved = "e/solver:0"
    report = f"{solved}/verifier1#2:0"
    mended = f"{report}/corrector1:0"
    assert team.loop(episode).final is None and team.outcome(episode) is None
    assert [(ask.id, ask.inputs) for ask in team.loop(episode).asks] == [
        ("e/solver", ()),
        ("e/solver:0/verifier1", (solved,)),
        ("e/solver:0/verifier1#2", (solved,)),  # the Verifier is asked again, to confirm
        (f"{report}/corrector1", (solved, report)),
        (f"{mended}/verifier2", (mended,)),
        (f"{mended}/verifier2:0/corrector2", (mended, f"{mended}/verifier2:0")),
    ]


def test_missing_verdict_correct_accepts_but_earns_no_reward() -> None:
    accepts = {"verifier1": AgentConfig(missing_verdict="correct")}
    team, episode, _ = transcript("sn", accepts, accept_after=1)
    assert team.loop(episode).final is not None
    transcript("sWs", accepts, accept_after=1)
    reward = five(accepts).reward(*showing(sample("s", correct=1.0)), sample("v", "verifier1"))
    assert reward.value == 0 and not math.isnan(reward.value)


def test_answers_are_read_by_the_parser_that_is_set() -> None:
    sentence, boxed = (sample("s:0", text=text) for text in ("So the answer is 7.", "\\boxed{7}"))
    for parser, without_box in (("strict", "7"), ("final_answer", "7"), ("boxed", None)):
        team = five({"solver": AgentConfig(parser=parser)})  # type: ignore[arg-type]  # a literal
        assert (team.parse(sentence).answer, team.parse(boxed).answer) == (without_box, "7")
    asked = build_orchestration("solver", {"solver": AgentConfig(parser="final_answer")}, "qa")
    assert asked.parse(sentence).answer == "7"
    with pytest.raises(
        ValueError, match=r"^agents.verifier1.parser is boxed, which reads answers, but verifier1 gives none"
    ):
        five({"verifier1": AgentConfig(parser="boxed")})
