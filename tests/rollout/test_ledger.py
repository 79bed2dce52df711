"""The books by hand: what each step of a group's life writes into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import fields, replace
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from letters import PROMPT_ENDS, LetterRenderer, letter_config, letter_problems, letter_team

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.engines.protocol import DecodeResult
from marsrl.rollout.episode import Episode
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.pool.recovery import Faults
from marsrl.rollout.schedule.ledger import Ended, Ledger, SchedulerState, StepBatch
from marsrl.rollout.schedule.partial_rollouts import Instance, OpenAsk, Partial
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.state import decode as decode_state
from marsrl.rollout.state import encode
from marsrl.rollout.types import Ask, Finish, Group, Message, Problem, Reward, Sample, ToolCall, ToolOutput
from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer

VERSION = {"main": 3}


def ledger(**options: Any) -> Ledger:
    config = letter_config(**options)
    return Ledger(config, letter_team(config)[0], letter_problems(9), seed=5)


def opened(books: Ledger) -> list[OpenAsk]:
    return books.open_asks(books.draw(), VERSION)


def result(count: int, finish: Finish = Finish.LENGTH, **more: Any) -> DecodeResult:
    tokens = np.arange(40, 40 + count, dtype=np.int32)
    return DecodeResult("uid", tokens, -tokens.astype(np.float32), finish, 7, **more)


def decode(books: Ledger, group: OpenAsk, index: int, text: str) -> Sample:
    """The sample has said this and is judged."""
    partial = Partial()
    partial.extend(np.array([ord(c) for c in text], np.int32), np.zeros(len(text), np.float32), 3)
    (sample,) = books.samples([Ended(group, index, partial, Finish.STOP)])
    (judged,) = books.team.judged([(books.episode(group.ask), group.ask, sample)])
    group.finished[index] = judged
    del group.partial[index]
    return judged


def test_every_problem_that_is_drawn_is_an_instance_of_its_own() -> None:
    books = ledger()
    asks = books.draw() + books.draw()
    assert [ask.episode_id for ask in asks] == ["000001", "000002", "000003", "000004"]
    assert {ask.agent for ask in asks} == {"solver"} and len({books.episode(ask).problem.id for ask in asks}) == 4
    assert books.state.num_instances == 4


def test_an_ask_opens_with_as_many_samples_as_it_has_and_no_token() -> None:
    books = ledger(group_size=3)
    first, second = opened(books)
    assert list(books.state.open) == ["000001/solver", "000002/solver"] and books.num_unfinished == 6
    assert first.prompt_text == books.episode(first.ask).problem.question and first.prompt_ids[-1] == PROMPT_ENDS
    assert (first.opened_version, sorted(first.partial), first.finished) == (3, [0, 1, 2], {})
    assert not any(partial.segments for partial in second.partial.values())
    del first.partial[1]
    assert books.num_unfinished == 5


def test_a_prompt_that_is_too_long_is_counted_and_the_others_are_asked() -> None:
    books = ledger(prompts_per_step=4)
    asks = books.draw()
    for ask, length in zip(asks, [10, 9, 11, 1], strict=True):
        books.episode(ask).problem = Problem("p", "x" * length, "7", "math")
    books.team = replace(books.team, agents={**books.team.agents, "solver": AgentConfig(max_input_tokens=10)})
    assert [each.ask.id for each in books.open_asks(asks, VERSION)] == ["000002/solver", "000004/solver"]
    assert books.counts["rollout/prompts_too_long"] == 2 and books.counts["rollout/failed_episodes"] == 0
    assert list(books.state.instances) == ["000002", "000004"]  # of the others nothing goes on
    assert books.counts["rollout/prompts_cut"] == 0


@pytest.mark.parametrize(("cut", "read"), [("cut_middle", "abcdefnopqr"), ("cut_left", "hijklmnopqr")])
def test_a_prompt_that_is_too_long_is_cut_if_that_is_wanted_and_counted(tmp_path: Path, cut: str, read: str) -> None:
    write_byte_tokenizer(tmp_path)
    renderer = ChatRenderer(tmp_path)
    books = ledger(prompts_per_step=3)
    asks = books.draw()
    for ask, question in zip(asks, ["abcdefghijklmnopqr", "abcdefghijk", "a"], strict=True):
        books.episode(ask).problem = Problem("p", question, "7", "math")
    most = len(renderer.render([Message("user", "")])[0]) + 11
    for limit, opened, num_cut in ((most, [read, "abcdefghijk", "a"], 1), (most - 11, [], 0)):
        settings = AgentConfig.model_validate({"max_input_tokens": limit, "long_prompts": cut})
        agents, renderers = {**books.team.agents, "solver": settings}, {"main": renderer}
        books.team = replace(books.team, agents=agents, renderers=renderers)
        prompts = [each.prompt_text for each in books.open_asks(asks, VERSION)]
        assert prompts == [renderer.render([Message("user", text)])[1] for text in opened]
        assert books.counts["rollout/prompts_cut"] == num_cut + (limit < most)
        assert books.counts["rollout/prompts_too_long"] == (0 if opened else 3)


def test_a_request_goes_on_from_what_is_known_for_one_stage() -> None:
    books = ledger(segments=4)  # 12 tokens a stage of 48
    group = opened(books)[0]
    first = books.request(group, 1)
    assert (first.uid, first.affinity) == ("000001/solver:1", "000001/solver")
    assert first.token_ids.tolist() == group.prompt_ids.tolist() and first.max_new_tokens == 12
    assert first.sampling == books.team.sampling("solver") and first.experts_from is None
    assert first.seed == derive_seed(5, "decode", first.uid, 0) != books.request(group, 2).seed
    assert [books.request(group, 1, num_decoded=n).max_new_tokens for n in (5, 11, 12, 13)] == [7, 1, 1, 1]
    group.partial[1].extend(np.full(40, 65), np.zeros(40), 0)
    last = books.request(group, 1)
    assert last.token_ids.tolist() == [*group.prompt_ids.tolist(), *[65] * 40] and last.token_ids.dtype == np.int32
    assert (last.max_new_tokens, last.seed) == (8, derive_seed(5, "decode", first.uid, 40))
    assert books.request(group, 1, num_decoded=6).max_new_tokens == 6


def test_an_agent_s_own_limit_ends_its_completions() -> None:
    books = ledger(segments=4)
    group = opened(books)[0]
    books.team = replace(books.team, agents={**books.team.agents, "solver": AgentConfig(max_response_tokens=15)})
    assert books.request(group, 1).max_new_tokens == 12
    group.partial[1], finish = books.extended(group, 1, result(12))
    assert finish is Finish.UNFINISHED and books.request(group, 1).max_new_tokens == 3
    assert books.extended(group, 1, result(3))[1] is Finish.LENGTH


def test_what_cannot_be_read_is_penalised_where_that_is_asked_for() -> None:
    books = ledger()
    group = opened(books)[0]
    assert decode(books, group, 0, "hm").reward == Reward(0.0, 0.0, note="no answer")
    books.team = replace(books.team, agents={**books.team.agents, "solver": AgentConfig(format_penalty=0.1)})
    assert decode(books, group, 1, "hm").reward == Reward(-0.1, 0.0, {"format": -0.1}, note="no answer")
    assert decode(books, group, 2, "\\boxed{8}").reward.value == 0.0


def test_what_is_trained_of_a_truncated_distribution_is_bounded_and_recorded() -> None:
    books = ledger()
    group = opened(books)[0]
    for top_k, most in ((-1, 30), (0, 30), (7, 7)):
        own = {**books.team.agents, "solver": AgentConfig(top_p=0.9, top_k=top_k)}
        books.team = replace(books.team, agents=own, max_kept={"solver": 30})
        asked = books.request(group, 0).sampling
        assert (asked.top_p, asked.top_k, asked.records_kept) == (0.9, most, True)
    assert not books.team.sampling("verifier1").records_kept and books.team.sampling("verifier1").top_k == -1
    with pytest.raises(
        RuntimeError,
        match="uid: agents.solver.top_p and top_k truncate, and its engine did not say which tokens were kept, as loss.tr",
    ):
        books.extended(group, 0, result(2))
    kept = KeptTokens.of([np.array([40, 50], np.int32), np.array([41], np.int32)])
    partial, _ = books.extended(group, 0, result(2, kept_tokens=kept))
    assert partial.kept_tokens is not None and partial.kept_tokens.counts.tolist() == [2, 1]
    assert books.counts["rollout/kept_tokens"] == 3
    books.extended(group, 1, result(2, kept_tokens=kept))
    assert books.counts["rollout/kept_tokens"] == 3 + 3
    assert books.extended(group, 0, result(0))[0].kept_tokens is None
    books.team = replace(books.team, max_kept={})
    assert not books.request(group, 0).sampling.records_kept


def test_experts_are_asked_for_from_where_the_record_ends() -> None:
    books = ledger()
    books.team = replace(books.team, records_experts=frozenset({"main"}))
    group = opened(books)[0]
    assert books.request(group, 0).experts_from == 0
    group.partial[0].extend(np.zeros(2, np.int32), np.zeros(2), 0, np.zeros((7, 1, 2), np.uint8))
    assert books.request(group, 0).experts_from == 7
    books.team = replace(books.team, records_experts=frozenset({"other"}))
    assert books.request(group, 0).experts_from is None


def test_a_segment_is_counted_and_put_behind_what_was_there() -> None:
    books = ledger()  # 48 tokens at most
    group = opened(books)[0]
    prompt = len(group.prompt_ids)
    experts = np.ones((4, 1, 2), np.uint8)
    partial, finish = books.extended(group, 0, result(20, num_cached_tokens=3, routed_experts=experts))
    assert finish is Finish.UNFINISHED and len(group.partial[0].token_ids) == 0  # the books are as they were
    assert partial.token_ids.tolist() == list(range(40, 60)) and partial.logprobs.tolist() == [
        -n for n in range(40, 60)
    ]
    assert [(s.start, s.end, s.version) for s in partial.segments] == [
        (0, 20, 7)
    ] and partial.routed_experts is not None
    group.partial[0] = partial
    for count, given, finish in [
        (27, Finish.LENGTH, Finish.UNFINISHED),
        (27, Finish.UNFINISHED, Finish.UNFINISHED),
        (28, Finish.LENGTH, Finish.LENGTH),
        (28, Finish.UNFINISHED, Finish.LENGTH),
        (28, Finish.STOP, Finish.STOP),
        (1, Finish.STOP, Finish.STOP),
        (0, Finish.ERROR, Finish.ERROR),
        (2, Finish.ERROR, Finish.ERROR),
    ]:
        cached = 4 if given is Finish.STOP and count > 1 else 0
        assert books.extended(group, 0, result(count, given, num_cached_tokens=cached, seconds=0.25))[1] is finish
    own = {name: n for name, n in books.counts.items() if name.startswith("cost/")}
    assert own == {
        "cost/solver/output_tokens": books.counts["rollout/tokens"],
        "cost/solver/input_tokens": books.counts["rollout/prompt_tokens"],
        "cost/solver/cached_tokens": 3 + 4,
        "cost/solver/seconds": 8 * 0.25,
    }
    assert books.counts == own | {
        "rollout/tokens": 20 + 27 + 27 + 28 + 28 + 28 + 1 + 2,
        "rollout/prompt_tokens": prompt + 8 * (prompt + 20),
        "rollout/cached_tokens": 3 + 4,
    }


def test_a_sample_is_of_its_group_and_keeps_the_reason_of_its_error() -> None:
    books = ledger()
    group = opened(books)[0]
    (sample,) = books.samples([Ended(group, 2, group.partial[2], Finish.ERROR, "burnt")])
    assert (sample.uid, sample.group_id, sample.finish) == ("000001/solver:2", "000001/solver", Finish.ERROR)
    assert sample.prompt_ids is group.prompt_ids and sample.prompt_text == group.prompt_text
    assert sample.reward.note == "burnt"


@pytest.mark.parametrize(("completion", "overdue"), [("wait", []), ("drop_stragglers", [6, 7])])
def test_a_group_is_overdue_when_it_is_older_than_it_may_be(completion: str, overdue: list[int]) -> None:
    books = ledger(group_completion=completion, max_group_age=2)
    group = opened(books)[0]  # at version 3
    assert [v for v in range(3, 8) if books.is_overdue(group, {"main": v})] == overdue


def test_a_closed_ask_is_a_group_of_what_has_finished_in_order() -> None:
    books = ledger(group_size=4)
    first, other = opened(books)
    samples = {index: decode(books, first, index, "no answer") for index in (2, 0)}
    first.finished[3] = replace(samples[0], uid="000001/solver:3", finish=Finish.ERROR)
    del first.partial[3]
    assert books.close_ask(first) == []  # nobody is asked about what has no answer
    closed = (samples[0], samples[2], first.finished[3])
    assert books.state.closed == [Group("000001/solver", "000001", "solver", closed)]
    assert (books.counts["rollout/dropped_stragglers"], books.counts["rollout/errors"]) == (1, 1)
    assert books.state.open == {"000002/solver": other} and list(books.state.instances) == ["000002"]
    books.close_ask(other)
    assert books.counts["rollout/dropped_stragglers"] == 1 + 4
    assert [len(group.samples) for group in books.state.closed] == [3, 0] and not books.state.instances
    assert books.is_playing  # until what was closed is trained
    books.state.closed.clear()
    assert not books.is_playing
    books.state.ready.append(StepBatch((), {}))
    assert books.is_playing


def test_what_an_episode_keeps_of_its_answers_has_no_tokens() -> None:
    books = ledger(group_size=2)
    first = opened(books)[0]
    for index in range(2):
        decode(books, first, index, "so \\boxed{8}")
    books.close_ask(first)
    for kept in books.state.instances["000001"].episodes["000001"].answers["000001/solver"]:
        assert not (len(kept.token_ids) or len(kept.prompt_ids) or len(kept.rollout_logprobs) or len(kept.is_sampled))
        assert (kept.text, kept.prompt_text, kept.shown, kept.answer) == ("", "", "so \\boxed{8}", "8")
        assert kept.reward.value == 0 and kept.segments


def test_picks_are_made_once_when_every_group_of_the_agent_is_closed() -> None:
    books = ledger(picks=2, group_size=4)
    solver = opened(books)[0]
    for index in range(4):
        decode(books, solver, index, "\\boxed{7}")
    asks = books.close_ask(solver)
    assert [ask.agent for ask in asks] == ["verifier1"] * 2 and len({ask.id for ask in asks}) == 2
    first, second = books.open_asks(asks, VERSION)
    for each in (second, first):
        for index in range(4):
            decode(books, each, index, "Verdict: wrong")
    assert books.close_ask(second) == []
    corrections = books.close_ask(first)
    assert [ask.agent for ask in corrections] == ["corrector1"] * 2
    assert all(ask.inputs[0] in ("000001/solver:0", *(ask.inputs[0] for ask in asks)) for ask in corrections)
    # the same whatever the order in which they close, and again from what a checkpoint keeps
    copied = decode_state(SchedulerState, encode(books.state))
    episode = copied.instances["000001"].episodes["000001"]
    assert [ask for ask in books.team.orchestration.follow(episode) if ask.agent == "corrector1"] == corrections
    assert books.team.follow(episode) == ([], [])  # all of it was asked before


def test_whole_instances_are_trained_at_once_with_their_outcomes() -> None:
    books = ledger(picks=1, group_size=2)
    books.trains_whole = True
    solver = opened(books)[0]
    right, wrong = decode(books, solver, 0, "\\boxed{7}"), decode(books, solver, 1, "\\boxed{8}")
    (report,) = books.open_asks(books.close_ask(solver), VERSION)
    assert report.ask.inputs == (wrong.uid,) and not books.state.closed  # a Verifier learns most from wrong solutions
    for index in range(2):
        decode(books, report, index, "Verdict: correct")
    assert books.is_playing
    assert books.close_ask(report) == [] and list(books.state.instances) == ["000002"]
    groups = {group.agent: group.samples for group in books.state.closed}
    assert [(s.uid, s.outcome) for s in groups["solver"]] == [(right.uid, 1.0), (wrong.uid, 0.0)]
    assert [s.outcome for s in groups["verifier1"]] == [0.0, 0.0]  # of the solution that they judged
    assert [s.reward.value for s in groups["verifier1"]] == [0.0, 0.0] and len(groups["solver"][0].token_ids)


class Turns(Orchestration):
    """Two agents in turn, in episodes of their own."""

    name = "turns"
    agents = (AgentSpec("solver"), AgentSpec("verifier1", Role.VERIFIER))

    def follow(self, episode: Episode) -> list[Ask]:
        first = episode.ask("solver")
        said = episode.said(first)
        if episode.problem.answer == "raise" and said is not None:
            raise ZeroDivisionError("a mistake")
        return [first] if said is None else [first, episode.ask("verifier1", said)]


def turns(**options: Any) -> Ledger:
    books = ledger(**{"prompts_per_step": 1, "group_size": 2, **options})
    team = Turns({}, "math", rollout=books.config)
    books.team = replace(books.team, orchestration=team, agents=team.settings)
    return books


def test_episodes_of_single_samples_go_on_alone_and_are_compared_over_the_instance() -> None:
    books = turns()
    first, second = opened(books)
    assert [each.ask.id for each in (first, second)] == ["000001.0/solver", "000001.1/solver"]
    assert [list(each.partial) for each in (first, second)] == [[0], [0]]
    decode(books, first, 0, "\\boxed{7}")
    (asked,) = books.close_ask(first)  # the other has not answered yet
    assert (asked.id, asked.group) == ("000001.0/solver:0/verifier1", "000001/verifier1")
    decode(books, second, 0, "\\boxed{8}")
    (other,) = books.close_ask(second)
    reports = books.open_asks([other, asked], VERSION)
    for each in reports:
        decode(books, each, 0, "Verdict: correct")
    books.close_ask(reports[0])
    assert not books.state.closed and list(books.state.instances["000001"].episodes) == ["000001.0"]
    books.close_ask(reports[1])
    assert not books.state.instances
    assert [(g.group_id, g.agent, [s.uid for s in g.samples]) for g in books.state.closed] == [
        ("000001/solver", "solver", ["000001.0/solver:0", "000001.1/solver:0"]),
        ("000001/verifier1", "verifier1", ["000001.0/solver:0/verifier1:0", "000001.1/solver:0/verifier1:0"]),
    ]
    assert [s.reward.value for s in books.state.closed[1].samples] == [1.0, 0.0]


def test_what_agents_share_is_a_group_of_each_and_an_ask_said_twice_is_one() -> None:
    books = turns(group_size=1)
    books.team.orchestration.follow = lambda episode: [  # type: ignore[method-assign]
        one := episode.ask("solver", group="all"),
        one,
        episode.ask("verifier1", group="all"),
    ]
    asks = opened(books)
    assert [each.ask.id for each in asks] == ["000001.0/solver", "000001.0/verifier1"]
    for each in reversed(asks):
        decode(books, each, 0, "\\boxed{7}")
        books.close_ask(each)
    found = [(group.group_id, group.agent, len(group.samples)) for group in books.state.closed]
    assert found == [("000001/all", "solver", 1), ("000001/all", "verifier1", 1)]


def test_a_team_that_fails_ends_its_episode_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    books = turns(prompts_per_step=2)
    asks = books.draw()
    for ask in asks[:2]:
        books.episode(ask).problem = Problem("p", "?", "raise", "math")
    for each in books.open_asks(asks, VERSION):
        decode(books, each, 0, "\\boxed{7}")
        asked = books.close_ask(each)
        assert len(asked) == (each.ask not in asks[:2])
    assert "episode 000001.0 ends: turns.follow: ZeroDivisionError: a mistake" in caplog.text
    assert books.counts["rollout/failed_episodes"] == 2
    assert [group.group_id for group in books.state.closed] == ["000001/solver"]  # what it said before is kept
    assert len(books.state.instances["000002"].episodes) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda episode: None, "expected a list of episode.ask(...) and episode.call(...), found None"),
        (
            lambda episode: ["solver"],
            "expected a list of episode.ask(...) and episode.call(...), found 'solver' (str)",
        ),
        (lambda episode: [episode.ask("nobody")], "no agent is called 'nobody'; there are solver, verifier1"),
        (lambda episode: [Ask("000009/solver", "solver")], "expected a call in episode 000001.0"),
        (lambda episode: [episode.ask("solver", num_samples=0)], "expected at least one sample, found 0"),
        (
            lambda episode: [episode.ask("solver", turn=n) for n in range(9)],
            "9 calls of agents and tools, at most rollout.max_turns = 8",
        ),
    ],
)
def test_nonsense_of_a_team_is_told(wrong: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    books = turns()
    books.team = replace(books.team, max_turns=8)
    books.team.orchestration.follow = wrong  # type: ignore[method-assign]
    assert books.draw() == [] and not books.state.instances
    assert said in caplog.text and books.counts["rollout/failed_episodes"] == 2


def test_a_parser_or_a_reward_that_raises_makes_an_error_of_the_sample() -> None:
    books = turns()
    first, second = opened(books)

    def raises(*_: Any) -> Any:
        raise ValueError("what is this")

    books.team.orchestration.parse = raises  # type: ignore[method-assign]
    sample = decode(books, first, 0, "\\boxed{7}")
    assert sample.finish is Finish.ERROR and sample.reward.is_missing
    assert sample.reward.note.startswith("turns.parse: ValueError: what is this (test_ledger.py:")
    del books.team.orchestration.parse
    books.team.orchestration.reward = raises  # type: ignore[method-assign]
    sample = decode(books, second, 0, "\\boxed{7}")
    assert (sample.finish, sample.answer) == (Finish.ERROR, None)
    assert sample.reward.note.startswith("turns.reward: ValueError: what is this (test_ledger.py:")
    assert books.close_ask(first) == books.close_ask(second) == []  # nothing follows from it
    assert books.counts["rollout/errors"] == 2 and len(books.state.closed[0].samples) == 2
    books.team.orchestration.messages = raises  # type: ignore[method-assign]
    assert opened(books) == [] and books.counts["rollout/failed_episodes"] == 2
    assert books.counts["rollout/prompts_too_long"] == 0


def test_what_pools_have_mended_is_in_the_metrics_once() -> None:
    books = ledger()
    books.team.pools["main"]._faults = Faults(engine_restarts=1, resubmitted=20, failed=3)
    for _ in range(2):
        books.note_faults()
        found = {name: n for name, n in books.counts.items() if n}
        assert found == {"rollout/engine_restarts": 1, "rollout/resubmitted": 20, "rollout/failed_requests": 3}


def test_what_tools_and_a_model_that_judges_have_counted_is_in_the_metrics() -> None:
    books = ledger()
    tools, model = (
        SimpleNamespace(take_counts=lambda *purpose, n=n: {f"{n}/{purpose}": 2}) for n in ("tools", "judge")
    )
    books.team = replace(books.team, tools=tools)  # type: ignore[arg-type]
    books.team.judge.model = model  # type: ignore[assignment]
    for _ in range(2):
        books.note_faults()
    assert {name: n for name, n in books.counts.items() if n} == {"tools/()": 4, "judge/('train',)": 4}


@pytest.mark.parametrize(("stage_size", "drawn"), [("new", [4, 4, 4, 4]), ("total", [4, 4, 3, 2])])
def test_groups_that_are_carried_over_take_places_of_new_problems_to_the_nearest_whole(
    stage_size: str, drawn: list[int]
) -> None:
    books = ledger(stage_size=stage_size, prompts_per_step=4)  # groups of 3
    assert [len(books.draw(num_carried)) for num_carried in (0, 1, 2, 5)] == drawn
    books = ledger(stage_size=stage_size, prompts_per_step=4, group_size=1)
    assert len(books.draw()) == 4


def test_a_team_s_own_numbers_add_up_over_its_episodes() -> None:
    books = ledger()
    books.team.orchestration.metrics = lambda episode: {"x": 2.0}  # type: ignore[method-assign]
    for group in opened(books):
        for index in list(group.partial):
            decode(books, group, index, "no answer")
        books.close_ask(group)
    assert books.counts["team/x"] == 4 and books.counts["rollout/episodes"] == 2


class Looks(Orchestration):
    """Two Solvers wait for what a tool says; a helper is asked as soon as it is known."""

    name = "looks"
    agents = (AgentSpec("solver"), AgentSpec("helper"))
    tools = ("look",)
    is_one_episode = True

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        asked: list[Ask | ToolCall] = [episode.ask("solver", num_samples=2)]
        for sample in episode.waiting.values():
            asked.append(call := episode.call("look", sample))
            if episode.output(call) is not None:
                asked.append(episode.ask("helper", sample))
        return asked

    def continuation(self, episode: Episode, sample: Sample) -> str | None:
        output = episode.output(episode.call("look", sample))
        return None if output is None else output.text

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        return (Message("user", "q"),)

    def parse(self, sample: Sample) -> Sample:
        return (
            replace(sample, finish=Finish.WAITING) if sample.text.endswith("?") else replace(sample, shown=sample.text)
        )


class ByHand:
    """A tool that says something when a test lets it."""

    def __init__(self) -> None:
        self.said: dict[str, Future[ToolOutput]] = {}

    def submit(self, call: ToolCall) -> Future[ToolOutput]:
        return self.said.setdefault(call.id, Future())

    def take_counts(self) -> Mapping[str, float]:
        return {}


class WaitingRenderer(LetterRenderer):
    def completion_ids(self, text: str) -> np.ndarray:
        return np.asarray([*map(ord, text)], np.int32)


LOOKS = [f"000001/solver:{index}/0/look#0" for index in range(2)]


def looks(**options: Any) -> tuple[Ledger, ByHand]:
    books, tools = ledger(**{"prompts_per_step": 1, "group_size": 2, **options}), ByHand()
    team = Looks({}, "math", rollout=books.config)
    agents = {name: AgentConfig() for name in ("solver", "helper")}
    renderers = {"main": WaitingRenderer()}
    books.team = replace(books.team, orchestration=team, agents=agents, renderers=renderers, tools=tools)  # type: ignore[arg-type]
    return books, tools


def pause(books: Ledger, group: OpenAsk, index: int) -> list[Ask]:
    partial = Partial()
    partial.extend(np.array([ord("?")], np.int32), np.zeros(1, np.float32), 3)
    (sample,) = books.samples([Ended(group, index, partial, Finish.STOP)])
    assert sample.finish is Finish.WAITING and sample.reward.note == "not judged"
    return books.suspend(group, index, partial, sample)


def test_a_sample_waits_until_its_own_call_has_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[float | None, str]] = []

    def noted(calls: Any, timeout_s: float | None, until: str) -> Any:
        waits.append((timeout_s, until))
        return wait(calls, timeout_s, until)

    monkeypatch.setattr("marsrl.rollout.schedule.ledger.wait", noted)
    books, tools = looks()
    (group,) = opened(books)
    assert not books.is_calling and not books.is_stirred and books.take_outputs(timeout_s=None) == []
    assert pause(books, group, 0) == [] and list(tools.said) == LOOKS[:1]
    assert [books.is_waiting(group, index) for index in range(2)] == [True, False] and books.is_stirred
    pause(books, group, 1)
    assert books.is_calling and books.take_outputs() == []
    assert books.take_resumed() == ([], []) and not books.is_stirred  # what is being called is yet to come
    tools.said[LOOKS[1]].set_result(ToolOutput("xy"))
    (asked,) = books.take_outputs(timeout_s=3600)
    assert waits == [(0, FIRST_COMPLETED), (3600, FIRST_COMPLETED)]  # not for the other one
    assert (asked.agent, asked.inputs) == ("helper", ("000001/solver:1",)) and books.is_calling
    assert books.take_resumed() == ([(group, 1)], [])
    assert [books.is_waiting(group, index) for index in range(2)] == [True, False]
    assert [[chr(t) for t in group.partial[index].token_ids] for index in range(2)] == [["?"], ["?", "x", "y"]]
    tools.said[LOOKS[0]].set_result(ToolOutput("z"))
    assert len(books.take_outputs()) == 1 and not books.is_calling and books.take_resumed() == ([(group, 0)], [])
    assert books.counts["rollout/foreign_tokens"] == 2 + 1


def test_all_outputs_are_waited_for_where_that_is_wanted_and_entered_in_the_order_of_the_calls() -> None:
    books, tools = looks()
    (group,) = opened(books)
    for index in range(2):
        pause(books, group, index)
    for delay_s, name in zip((0.06, 0.02), LOOKS, strict=True):
        Timer(delay_s, tools.said[name].set_result, [ToolOutput("x")]).start()
    asks = books.take_outputs(timeout_s=None)
    assert [ask.inputs for ask in asks] == [("000001/solver:0",), ("000001/solver:1",)]
    assert books.take_resumed()[0] == [(group, 0), (group, 1)]


@pytest.mark.parametrize("is_instance_left", [False, True])
def test_an_output_that_comes_after_its_episode_s_end_is_dropped(is_instance_left: bool) -> None:
    books, tools = looks()
    (group,) = opened(books)
    pause(books, group, 0)
    if is_instance_left:
        books.state.instances["000001"].episodes.clear()
    else:
        books.state.instances.clear()
    tools.said[LOOKS[0]].set_result(ToolOutput("x"))
    assert books.take_outputs() == [] and not books.is_calling


def test_restored_books_call_again_what_has_no_output_and_go_on_with_what_has() -> None:
    books, tools = looks()
    (group,) = opened(books)
    for index in range(2):
        pause(books, group, index)
    tools.said[LOOKS[1]].set_result(ToolOutput("x"))
    books.take_outputs()
    again, called = looks()
    again.state = decode_state(SchedulerState, encode(books.state))
    again.resume_waiting()
    assert list(called.said) == LOOKS[:1] and again.is_calling
    resumed, ended = again.take_resumed()
    assert [(each.ask.id, index) for each, index in resumed] == [("000001/solver", 1)] and not ended


def test_a_sample_is_given_up_only_when_nothing_is_open_beside_it() -> None:
    books, _ = looks()
    books.team.orchestration.follow = lambda episode: [episode.ask("solver"), episode.ask("helper")]  # type: ignore[method-assign]
    asks = books.draw()
    (group,) = books.open_asks(asks[:1], VERSION)
    pause(books, group, 0)
    assert books.take_resumed() == ([], [])  # the helper is asked in the next stage
    (helper,) = books.open_asks(asks[1:], VERSION)
    books.resume_waiting()
    assert books.take_resumed() == ([], [])  # it is being decoded
    decode(books, helper, 0, "hm")
    books.resume_waiting()
    assert books.take_resumed() == ([], [])  # it is to be closed
    books.close_ask(helper)
    resumed, ((opened_ask, place, sample),) = books.take_resumed()
    assert not resumed and opened_ask is group and (place, sample.uid) == (0, "000001/solver:0")
    assert sample.finish is Finish.ERROR and "nothing was asked for" in sample.reward.note
    assert not books.is_waiting(group, 0) and books.counts["rollout/foreign_tokens"] == 0


def test_a_listener_hears_of_a_stage() -> None:
    books, told = ledger(), list[int]()
    books.note_stage()
    books.on_stage = lambda: told.append(1)
    books.note_stage()
    assert told == [1]


def test_a_listener_hears_of_the_beginning_and_end_of_an_episode() -> None:
    books, told = ledger(prompts_per_step=1), list[tuple[str, bool]]()
    books.on_episode = lambda name, has_ended: told.append((name, has_ended))
    (group,) = opened(books)
    assert told == [("000001", False)]
    for index in list(group.partial):
        decode(books, group, index, "no answer")
    books.close_ask(group)
    assert told == [("000001", False), ("000001", True)]


def test_a_run_begins_with_empty_books() -> None:
    state = SchedulerState()
    assert [state.num_instances, state.num_stages, state.num_batches, state.num_taken] == [0, 0, 0, 0]
    assert not (state.pending or state.open or state.instances or state.closed or state.ready)


def test_a_copy_of_the_state_is_equal_in_everything_and_stays_so() -> None:
    books = ledger()
    first, second = opened(books)
    decode(books, second, 0, "\\boxed{7}")
    first.partial[0].extend(np.zeros(2, np.int32), np.zeros(2), 0)
    state = books.state
    state.pending, state.closed = [first.ask], [Group("g", "r", "solver", ())]
    state.ready, state.num_stages, state.num_batches, state.num_taken = [StepBatch((), {"x": 1.0})], 4, 3, 2
    assert all(getattr(state, f.name) for f in fields(SchedulerState))  # nothing is at its default
    copied = state.copy()
    taken = encode(copied)
    assert taken == encode(state)
    first.partial[0].extend(np.zeros(2, np.int32), np.zeros(2), 0)
    decode(books, second, 1, "\\boxed{7}")
    state.instances["000001"].episodes["000001"].asks.clear()
    state.instances["000002"].episodes["000002"].answers["g"] = ()
    state.instances["000002"].held.append(second.finished[0])
    state.instances["a"] = Instance()
    for each in (state.pending, state.closed, state.ready, state.open):
        each.clear()
    assert encode(copied) == taken
