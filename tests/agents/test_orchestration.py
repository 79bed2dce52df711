import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marsrl.rollout.agents.inference import EvaluationThread
from marsrl.rollout.agents.orchestration import Orchestration, build_orchestration
from marsrl.rollout.agents.picks import PickRule, is_right, pick
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import MISSING, Ask, Finish, Group, Problem, Reward, Sample, Segment

PROBLEM = Problem("p", "a 3 b *7", "1", "arithmetic")
NONE = np.zeros(0, np.int32)
TEAM = build_orchestration("verifier_corrector", {}, "math")


def sample(uid: str, agent: str = "solver", *, correct: float = MISSING, **changes: object) -> Sample:
    base = Sample(
        uid, "r", "p", agent, "g", None, NONE, NONE, NONE.astype(bool), NONE.astype(np.float32), (Segment(0, 0, 0),),
        Finish.STOP, text="t", reward=Reward(correct, correct),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    ("verdict", "solution_correct", "value"),
    [
        (True, 1.0, 1.0),
        (False, 1.0, 0.0),
        (True, 0.0, 0.0),
        (False, 0.0, 1.0),
        (None, 0.0, 0.0),
        (True, 0.5, 0.0),
        (True, MISSING, None),
        (None, MISSING, None),
    ],
)
def test_a_verifier_is_paid_for_agreeing_with_the_solution_it_judged(
    verdict: bool | None, solution_correct: float, value: float | None
) -> None:
    solution = sample("s", correct=solution_correct)
    ask = Ask("r", PROBLEM, "verifier1", solution, solution)
    reward = TEAM.reward(ask, sample("v", "verifier1", verdict=verdict))
    if value is None:
        assert reward.is_missing and math.isnan(reward.correct) and "(s)" in reward.note
    elif verdict is None:
        assert reward == Reward(0.0, 0.0, note="no verdict")
    else:
        assert reward == Reward(value, value, {"verdict": value})


@pytest.mark.parametrize("known", [Reward(MISSING, 1.0), Reward(1.0, MISSING)])
def test_what_is_half_known_is_neither_judged_nor_handed_on(known: Reward) -> None:
    solution = sample("s", answer="1", reward=known)
    ask = Ask("r", PROBLEM, "verifier1", solution, solution)
    assert TEAM.reward(ask, sample("v", "verifier1", verdict=True)).is_missing
    assert not TEAM.is_eligible(solution, "verifier1")
    assert not TEAM.is_eligible(sample("v", "verifier1", verdict=False, reward=known), "corrector1")


def test_a_verifier_that_was_given_no_solution_is_an_error() -> None:
    with pytest.raises(ValueError, match="Verifier sample v holds no solution"):
        TEAM.reward(Ask("r", PROBLEM, "verifier1"), sample("v", "verifier1", verdict=True))


def test_a_penalty_on_the_solution_does_not_change_what_the_verifier_should_say() -> None:
    solution = sample("s", reward=Reward(0.9, 1.0))
    ask = Ask("r", PROBLEM, "verifier1", solution, solution)
    assert TEAM.reward(ask, sample("v", "verifier1", verdict=True)).value == 1


@pytest.mark.parametrize("agent", ["solver", "verifier1", "corrector2"])
def test_overlong_gets_zero_and_an_engine_error_is_missing(agent: str) -> None:
    solution = sample("s", correct=1.0)
    ask = Ask("r", PROBLEM, agent, solution, solution)
    overlong = TEAM.reward(ask, sample("x", agent, finish=Finish.LENGTH, verdict=True, answer="1"), Reward(1.0, 1.0))
    assert overlong == Reward(0.0, 0.0, note="overlong")
    failed = TEAM.reward(ask, sample("x", agent, finish=Finish.ERROR))
    assert failed.is_missing and math.isnan(failed.correct) and failed.note == "the engine gave the sample up"
    with pytest.raises(ValueError, match="not finished"):
        TEAM.reward(ask, sample("x", agent, finish=Finish.UNFINISHED))


def test_a_solver_is_paid_what_the_task_says_and_nothing_without_an_answer() -> None:
    ask = TEAM.first_ask("r", PROBLEM)
    assert TEAM.reward(ask, sample("s", answer="1"), Reward(1.0, 1.0)).value == 1
    assert TEAM.reward(ask, sample("s", answer="1"), Reward(MISSING, MISSING)).is_missing
    assert TEAM.reward(ask, sample("s"), Reward(1.0, 1.0)) == Reward(0.0, 0.0, note="no answer")
    with pytest.raises(ValueError, match="no judgement"):
        TEAM.reward(ask, sample("s", answer="1"))


@pytest.mark.parametrize("agent", ["solver", "corrector1"])
def test_the_task_judges_answers_of_whole_completions_only(agent: str) -> None:
    assert TEAM.needs_judge(sample("s", agent, answer="1"))
    assert not TEAM.needs_judge(sample("s", agent))
    assert not TEAM.needs_judge(sample("s", agent, answer="1", finish=Finish.LENGTH))
    assert not TEAM.needs_judge(sample("v", "verifier2", answer="1"))


def test_an_agent_reads_the_visible_text_of_what_it_is_asked_about() -> None:
    solution = sample("s", text=r"<think>secret</think> \boxed{4}", correct=0.0)
    report = sample("v", "verifier1", text="<think>hm</think>step 2\nVerdict: wrong", verdict=False, correct=1.0)
    first = TEAM.first_ask("r", PROBLEM)
    assert first == Ask("r", PROBLEM, "solver")
    assert [m.content for m in TEAM.messages(first)] == [PROBLEM.question]
    about = TEAM.ask_about("verifier1", solution, first)
    assert about == Ask("r", PROBLEM, "verifier1", parent=solution, solution=solution)
    (_, question) = TEAM.messages(about)
    assert (
        PROBLEM.question in question.content and r"\boxed{4}" in question.content and "secret" not in question.content
    )
    correction = TEAM.ask_about("corrector1", report, about)
    assert correction == Ask("r", PROBLEM, "corrector1", parent=report, solution=solution, report=report)
    problem, said, told = TEAM.messages(correction)
    assert (problem.content, said.content) == (PROBLEM.question, r"\boxed{4}")
    assert "step 2\nVerdict: wrong" in told.content and "hm" not in told.content.partition("step 2")[0]
    assert TEAM.shown(sample("s", text="<think>never closed")) == ""
    assert TEAM.shown(sample("s", text="closed </think> never opened", prompt_text="<think>")) == "never opened"


def test_an_agent_has_its_own_prompts_and_the_others_the_tasks() -> None:
    team = build_orchestration("verifier_corrector", {"verifier1": AgentConfig(prompt="chain")}, "math")
    assert team.parse(sample("v", "verifier1", text="so Verdict: wrong then")).verdict is False  # the chain's grammar
    assert team.parse(sample("v", "verifier2", text="so Verdict: wrong then")).verdict is None
    solution = sample("s", text="x")
    assert team.messages(Ask("r", PROBLEM, "verifier1", solution, solution))[0].content == "grade"


def test_a_cut_off_or_thinking_completion_has_neither_answer_nor_verdict() -> None:
    solved = TEAM.parse(sample("s", text=r"\boxed{4}", verdict=True))
    assert (solved.answer, solved.verdict) == ("4", None)
    read_before = sample("v", "verifier1", text="Verdict: correct", answer="4", verdict=False)
    assert (TEAM.parse(read_before).answer, TEAM.parse(read_before).verdict) == (None, True)
    cut = TEAM.parse(replace(read_before, finish=Finish.LENGTH))
    assert (cut.answer, cut.verdict) == (None, None)
    assert TEAM.parse(sample("s", text=r"\boxed{4}", finish=Finish.LENGTH)).answer is None
    assert TEAM.parse(sample("s", text=r"<think>\boxed{4}")).answer is None
    assert TEAM.parse(sample("s", text=r"\boxed{4}", prompt_text="assistant\n<think>\n")).answer is None
    assert TEAM.parse(sample("v", "verifier1", text="<think>Verdict: wrong")).verdict is None
    assert TEAM.parse(sample("v", "verifier1", text="<think>x</think>Verdict: wrong")).verdict is False


def test_compat_accepts_incorrect_and_hands_on_an_empty_report() -> None:
    team = build_orchestration("verifier_corrector", {"verifier1": AgentConfig(parser="compat")}, "math")
    report = team.parse(sample("v", "verifier1", text="Correctness: incorrect"))
    assert report.verdict is True
    assert team.shown(report) == ""
    cut = sample("v", "verifier1", text="step 2 **Correctness** wrong", answer="4", finish=Finish.LENGTH)
    assert (team.parse(cut).verdict, team.parse(cut).answer, team.shown(cut)) == (False, None, "step 2")
    assert team.parse(replace(cut, agent="verifier2")).verdict is None  # the other one is strict
    assert team.shown(sample("c", "corrector1", text="x **Correctness** y")) == "x **Correctness** y"
    solution = sample("s", correct=1.0)
    ask = Ask("r", PROBLEM, "verifier1", solution, solution)
    assert team.reward(ask, report).value == 1
    thinking = team.parse(sample("v", "verifier1", text="<think>correctness: correct"))
    assert thinking.verdict is True and team.reward(ask, thinking) == Reward(0.0, 0.0, note="no verdict")


# ------------------------------------------------------------------ picks

CANDIDATES = st.lists(st.sampled_from([0.0, 1.0]), max_size=12).map(
    lambda rewards: [sample(f"u{index:02d}", correct=reward) for index, reward in enumerate(rewards)]
)
RULES = st.sampled_from(["adaptive", "balanced", "paired", "random"])


@settings(deadline=None)
@given(CANDIDATES, st.integers(1, 5), RULES, st.booleans(), st.integers(0, 99), st.randoms(use_true_random=False))
def test_picks_keep_their_rule_whatever_the_order_of_the_candidates(
    candidates: list[Sample], count: int, rule: PickRule, prefers_right: bool, seed: int, shuffler: random.Random
) -> None:
    chosen = pick(candidates, count, rule, prefers_right, random.Random(seed))
    shuffled = list(candidates)
    shuffler.shuffle(shuffled)
    again = pick(shuffled, count, rule, prefers_right, random.Random(seed))
    assert [s.uid for s in chosen] == [s.uid for s in again]
    assert len({s.uid for s in chosen}) == len(chosen)
    assert [s.uid for s in chosen] == sorted(s.uid for s in chosen)
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


def test_random_picks_reach_every_candidate() -> None:
    candidates = [sample(f"u{index}", correct=0.0) for index in range(5)]
    seen = {s.uid for seed in range(60) for s in pick(candidates, 1, "random", True, random.Random(seed))}
    assert len(seen) == 5


def test_a_sample_offered_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="offered twice"):
        pick([sample("u"), sample("u")], 2, "random", True, random.Random(0))


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="pick is 'best'; it must be adaptive, balanced, paired or random"):
        pick([], 2, "best", True, random.Random(0))  # type: ignore[arg-type]


def finished(agent: str, samples: list[Sample], solution: Sample | None = None) -> tuple[Ask, Group]:
    ask = Ask("r", PROBLEM, agent, solution, solution)
    return ask, Group(ask.group_id, "r", agent, tuple(samples))


def test_only_finished_parsable_rewarded_outputs_are_handed_on() -> None:
    good = sample("good", answer="1", correct=1.0)
    group = finished(
        "solver",
        [
            good,
            sample("no-answer", correct=0.0),
            sample("missing", answer="1"),
            sample("long", answer="1", correct=0.0, finish=Finish.LENGTH),
        ],
    )
    asks = TEAM.next_asks([group], random.Random(0))
    assert [(a.agent, a.parent, a.solution, a.report) for a in asks] == [("verifier1", good, good, None)]


def test_only_a_finished_rewarded_report_that_flags_an_error_is_handed_to_a_corrector() -> None:
    solution = sample("s", correct=0.0)
    reports = [
        sample("flags", "verifier1", verdict=False, correct=1.0),
        sample("passes", "verifier1", verdict=True, correct=0.0),
        sample("without-verdict", "verifier1", verdict=None, correct=0.0),
        sample("long", "verifier1", verdict=False, correct=0.0, finish=Finish.LENGTH),
        sample("missing", "verifier1", verdict=False),
    ]
    asks = TEAM.next_asks([finished("verifier1", reports, solution)], random.Random(0))
    assert [(a.agent, a.report and a.report.uid) for a in asks] == [("corrector1", "flags")]


def test_what_could_not_be_read_is_handed_on_where_that_is_asked_for() -> None:
    def picked(agents: dict[str, AgentConfig], group: tuple[Ask, Group]) -> set[str | None]:
        team = build_orchestration("verifier_corrector", agents, "math", num_picks=9)
        return {ask.parent.uid if ask.parent else None for ask in team.next_asks([group], random.Random(0))}

    answers = finished(
        "solver",
        [
            sample("good", answer="1", correct=1.0),
            sample("no-answer", correct=0.0),
            sample("in-thought", correct=0.0, text="<think> 7"),
            sample("long", correct=0.0, finish=Finish.LENGTH),
            sample("missing"),
        ],
    )
    asks_all = AgentConfig(pick_unparsable=True)
    assert picked({}, answers) == {"good"}
    assert picked({"verifier1": asks_all}, answers) == {"good", "no-answer"}
    assert picked({"corrector1": asks_all}, answers) == {"good"}
    reports = finished(
        "verifier1",
        [
            sample("flags", "verifier1", verdict=False, correct=1.0),
            sample("passes", "verifier1", verdict=True, correct=0.0),
            sample("without-verdict", "verifier1", correct=0.0),
        ],
        sample("s", correct=0.0),
    )
    assert picked({}, reports) == {"flags"}
    assert picked({"corrector1": asks_all}, reports) == {"flags", "without-verdict"}
    accepts = AgentConfig(missing_verdict="correct")
    assert picked({"corrector1": asks_all, "verifier1": accepts}, reports) == {"flags"}


def test_a_solver_alone_is_asked_once_and_nobody_after_it() -> None:
    team = build_orchestration("solver", {}, "math")
    assert list(team.settings) == ["solver"] and team.verifiers == ()
    assert TEAM.verifiers == ("verifier1", "verifier2")
    assert team.next_asks([finished("solver", [sample("s", answer="1", correct=1.0)])], random.Random(0)) == []
    for text, reason in (("\\boxed{7}", "nobody verifies"), ("<think>", "truncated solution")):
        thread, asked = play([("solver", text, Finish.STOP)], team)
        assert (asked, thread.next_ask(), thread.outcome.reason) == (["solver"], None, reason)
        assert (thread.outcome.final.text, thread.outcome.num_iterations) == (text, 0)
    with pytest.raises(ValueError, match="agents.verifier1: solver has no such agent; it has solver"):
        build_orchestration("solver", {"verifier1": AgentConfig()}, "math")


def test_each_agent_is_followed_by_the_next_which_is_picked_for_by_its_own_rule() -> None:
    right = [sample(f"r{i}", answer="1", verdict=False, correct=1.0) for i in range(3)]
    wrong = [sample(f"w{i}", answer="1", verdict=False, correct=0.0) for i in range(3)]
    team = build_orchestration("verifier_corrector", {"corrector2": AgentConfig(pick="balanced")}, "math")

    def picked(agent: str) -> tuple[set[str], list[str]]:
        group = finished(agent, [replace(s, agent=agent) for s in right + wrong], sample("s"))
        asks = team.next_asks([group], random.Random(0))
        return {ask.agent for ask in asks}, [ask.parent.uid[0] for ask in asks if ask.parent]

    # two of six; a Verifier is asked about wrong solutions, a Corrector about errors that were really there
    assert picked("solver") == ({"verifier1"}, ["w", "w"])
    assert picked("verifier1") == ({"corrector1"}, ["r", "r"])
    assert picked("corrector1") == ({"verifier2"}, ["w", "w"])
    assert picked("verifier2") == ({"corrector2"}, ["r", "w"])
    assert picked("corrector2") == (set(), [])


def test_groups_of_two_agents_or_instances_are_not_picked_from_together() -> None:
    assert TEAM.next_asks([], random.Random(0)) == []
    group = finished("solver", [sample("s", answer="1", correct=1.0)])
    other = (replace(group[0], rollout_id="r2"), group[1])
    for second in (other, finished("corrector1", [])):
        with pytest.raises(ValueError, match="one agent of one rollout instance"):
            TEAM.next_asks([group, second], random.Random(0))


def test_picks_are_pooled_over_the_groups_of_an_instance_and_keep_their_own_solutions() -> None:
    first, second = sample("s1", correct=0.0), sample("s2", correct=1.0)
    found = sample("v1", "verifier1", verdict=False, correct=1.0)
    false_alarm = sample("v2", "verifier1", verdict=False, correct=0.0)
    passed = sample("v3", "verifier1", verdict=True, correct=1.0)
    groups = [finished("verifier1", [false_alarm, passed], second), finished("verifier1", [found], first)]
    team = build_orchestration("verifier_corrector", {}, "math", num_picks=1)
    for order in (groups, groups[::-1]):
        (ask,) = team.next_asks(order, random.Random(0))  # adaptive: the error that was really there
        assert (ask.agent, ask.solution, ask.report) == ("corrector1", first, found)
    assert {a.parent.uid for a in TEAM.next_asks(groups, random.Random(0)) if a.parent} == {"v1", "v2"}


def test_a_problem_that_nobody_flagged_and_the_last_agent_end_the_episode() -> None:
    solution = sample("s", correct=1.0)
    passed = sample("v", "verifier1", verdict=True, correct=1.0)
    assert TEAM.next_asks([finished("verifier1", [passed], solution)], random.Random(0)) == []
    assert TEAM.next_asks([finished("corrector2", [sample("c", answer="1", correct=1.0)])], random.Random(0)) == []


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="verifier_corrector"):
        build_orchestration("debate", {}, "math")
    with pytest.raises(ValueError, match="corrector2"):
        build_orchestration("verifier_corrector", {"solvr": AgentConfig()}, "math")
    with pytest.raises(ValueError, match="has no agent 'solvr'; it has solver, verifier1"):
        TEAM.parse(sample("s", "solvr"))
    with pytest.raises(ValueError, match="chain, math"):
        build_orchestration("verifier_corrector", {}, "maths")


# ------------------------------------------------------------------ inference loop


def play(
    script: list[tuple[str, str, Finish]], team: Orchestration = TEAM, **rules: int | bool
) -> tuple[EvaluationThread, list[str]]:
    """Answer the thread's asks from the script of (agent, text, finish); the agents that were asked."""
    thread = EvaluationThread(team, PROBLEM, "e", **rules)  # type: ignore[arg-type]
    asked = []
    for number, (agent, text, finish) in enumerate(script):
        ask = thread.next_ask()
        assert ask is not None, f"ended before {agent}: {thread.outcome.reason}"
        assert ask.agent == agent
        asked.append(ask.agent)
        thread.receive(team.parse(sample(f"{number}", agent, text=text, finish=finish)))
    return thread, asked


OK = Finish.STOP
RIGHT, WRONG = "Verdict: correct", "bad\nVerdict: wrong"


def test_a_thread_says_what_is_wrong_with_its_rules_and_answers() -> None:
    for rules in ({"accept_after": 0}, {"max_iterations": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            EvaluationThread(TEAM, PROBLEM, "e", **rules)  # type: ignore[arg-type]
    thread = EvaluationThread(TEAM, PROBLEM, "e", accept_after=1, max_iterations=1)
    assert thread.next_ask() == TEAM.first_ask("e", PROBLEM) and thread.num_iterations == 0
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = thread.outcome
    with pytest.raises(ValueError, match="v is by verifier1, but solver was asked"):
        thread.receive(sample("v", "verifier1"))
    thread.receive(sample("s"))
    thread.receive(sample("v", "verifier1", verdict=True))
    with pytest.raises(RuntimeError, match="sample late answers nothing"):
        thread.receive(sample("late"))
    assert thread.next_ask() is None


def test_by_default_four_acceptances_in_a_row_end_a_thread_and_ten_calls_do() -> None:
    thread, _ = play([("solver", "s", OK)] + [("verifier1", RIGHT, OK)] * 4)
    assert (thread.outcome.reason, thread.outcome.num_iterations) == ("accepted", 4)
    script = [("solver", "s", OK), ("verifier1", WRONG, OK), ("corrector1", "c", OK), ("verifier2", WRONG, OK)]
    script += [("corrector2", "c", OK), ("verifier2", WRONG, OK)] * 8
    thread, _ = play(script)
    assert (thread.outcome.reason, thread.outcome.num_iterations) == ("max_iterations", 10)
    assert not thread.outcome.is_accepted and len(thread.outcome.candidates) == 10


def test_every_ask_of_a_thread_shows_what_came_before() -> None:
    thread = EvaluationThread(TEAM, PROBLEM, "e")
    solved = sample("s", text="s")
    thread.receive(solved)
    judged = thread.next_ask()
    assert judged == Ask("e", PROBLEM, "verifier1", solved, solved)
    report = sample("v", "verifier1", text="no", verdict=False)
    thread.receive(report)
    assert thread.next_ask() == Ask("e", PROBLEM, "corrector1", report, solved, report)
    mended = sample("c", "corrector1", text="c")
    thread.receive(mended)
    assert thread.next_ask() == Ask("e", PROBLEM, "verifier2", mended, mended)
    second = sample("v2", "verifier2", text="no", verdict=False)
    thread.receive(second)
    assert thread.next_ask() == Ask("e", PROBLEM, "corrector2", second, mended, second)


def test_a_candidate_needs_consecutive_acceptances() -> None:
    thread, _ = play(
        [("solver", "s", OK), ("verifier1", RIGHT, OK), ("verifier1", WRONG, OK), ("corrector1", "c", OK)]
        + [("verifier2", RIGHT, OK)] * 2,
        accept_after=2,
    )
    outcome = thread.outcome
    assert (outcome.final.uid, outcome.is_accepted, outcome.num_iterations) == ("3", True, 4)
    assert [(c.num_correct, c.num_verdicts) for c in outcome.candidates] == [(1, 2), (2, 2)]
    assert outcome.reason == "accepted"


def test_without_acceptance_the_candidate_most_often_judged_correct_wins() -> None:
    script = [("solver", "s", OK), ("verifier1", WRONG, OK), ("corrector1", "c", OK), ("verifier2", RIGHT, OK)]
    script += [("verifier2", WRONG, OK)]
    thread, _ = play(script, accept_after=2, max_iterations=3)
    assert (thread.outcome.final.uid, thread.outcome.reason) == ("2", "max_iterations")
    thread, _ = play(script[:2], max_iterations=1)
    assert thread.outcome.final.uid == "0"
    tied, _ = play([*script[:3], ("verifier2", WRONG, OK)], max_iterations=2)
    assert tied.outcome.final.uid == "0"  # the earliest of equals


def test_compat_counts_verify_calls_not_acceptances() -> None:
    script = [("solver", "s", OK), ("verifier1", WRONG, Finish.LENGTH), ("corrector1", "c", OK)]
    script += [("verifier2", "no verdict", OK)]
    thread, _ = play(script, max_iterations=2, compat=True)
    assert thread.outcome.final.uid == "2"
    thread, _ = play(script, max_iterations=2)
    assert thread.outcome.final.uid == "0"
    play([("solver", "s", OK), ("verifier1", "<think>cut", Finish.LENGTH), ("corrector1", "c", OK)], compat=True)


def test_a_truncated_correction_ends_the_thread_with_what_there_is() -> None:
    thread, _ = play([("solver", "s", OK), ("verifier1", WRONG, OK), ("corrector1", "c", Finish.LENGTH)])
    assert (thread.outcome.final.uid, thread.outcome.reason) == ("0", "truncated correction")
    assert (thread.outcome.is_accepted, thread.outcome.num_iterations) == (False, 1)
    assert len(thread.outcome.candidates) == 1
    for cut in (("solver", "<think>", OK), ("solver", "s", Finish.LENGTH)):
        thread, _ = play([cut])
        assert (thread.outcome.final.uid, thread.outcome.reason) == ("0", "truncated solution")
        assert not thread.outcome.is_accepted and len(thread.outcome.candidates) == 1


def test_an_empty_report_is_judged_again_and_counts_but_a_report_without_verdict_is_handed_on() -> None:
    empty = ("verifier1", "<think>cut", Finish.LENGTH)
    thread, _ = play([("solver", "s", OK), ("verifier1", RIGHT, OK), empty, ("verifier1", RIGHT, OK)], accept_after=2)
    assert (thread.num_iterations, thread.next_ask() is not None) == (3, True)  # the streak was broken
    thread, _ = play([("solver", "s", OK), empty, empty], max_iterations=2)
    assert thread.outcome.reason == "max_iterations"
    play([("solver", "s", OK), ("verifier1", "step 2 is odd", OK), ("corrector1", "c", OK)])
    team = build_orchestration("verifier_corrector", {"verifier1": AgentConfig(parser="compat")}, "math")
    play(
        [("solver", "s", OK), ("verifier1", "Correctness: wrong", OK), ("corrector1", "c", OK)], team
    )  # it shows nothing


def test_missing_verdict_correct_counts_as_acceptance_but_is_not_paid() -> None:
    team = build_orchestration("verifier_corrector", {"verifier1": AgentConfig(missing_verdict="correct")}, "math")
    thread, _ = play([("solver", "s", OK), ("verifier1", "hm", OK)], team, accept_after=1)
    assert thread.outcome.is_accepted
    play([("solver", "s", OK), ("verifier1", WRONG, OK), ("corrector1", "c", OK)], team, accept_after=1)
    solution = sample("s", correct=1.0)
    reward = team.reward(Ask("r", PROBLEM, "verifier1", solution, solution), sample("v", "verifier1"))
    assert reward.value == 0 and not math.isnan(reward.value)
