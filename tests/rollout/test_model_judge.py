"""A model as the judge, with a scripted engine: its verdicts, missing verdicts, and their effect on a stage."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import pool_of
from letters import NO, YES, answer_in, judge, letter_config, letter_problems, letter_team, next_batch

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.player.stages import Stages
from marsrl.rollout.rewards.config import JudgeConfig
from marsrl.rollout.rewards.model_judge import ModelJudge
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.types import Problem, Reward

PERU = Problem("peru", "Capital of Peru?", "Lima", "qa")


class Desk:
    """A judge, its requests as (answer, request), and its engine.

    says: function (answer, number of earlier requests for it) that returns the judge's output.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        says: Callable[[str, int], str],
        kind: type[ScriptedEngine] = ScriptedEngine,
        sleeps: bool = False,
        **config: Any,
    ) -> None:
        self.asked: list[tuple[str, DecodeRequest]] = []

        def script(request: DecodeRequest) -> str:
            answer = answer_in(renderer.decode(request.token_ids))
            before = sum(earlier == answer for earlier, _ in self.asked)
            self.asked.append((answer, request))
            return says(answer, before)

        self.engine = kind(script, encode=lambda text: renderer.encode_trusted(text).tolist())
        settings = JudgeConfig.model_validate({"policy": "judge", "when": "always", **config})
        self.judge = ModelJudge(pool_of(self.engine, sleeps=sleeps), renderer, settings, task_judge=judge, seed=0)

    def rewards(self, *answers: str, problem: Problem = PERU, purpose: Any = "train") -> list[Reward]:
        return [each.result(60) for each in [self.judge.submit(problem, answer, purpose) for answer in answers]]


@pytest.fixture
def desk(renderer: ChatRenderer) -> Iterator[Callable[..., Desk]]:
    with ExitStack() as stack:

        def make(*words: Any, **options: Any) -> Desk:
            made = Desk(options.pop("renderer", renderer), *words, **options)
            stack.callback(made.judge.close)
            return made

        yield make


Make = Callable[..., Desk]


def by_answer(answer: str, before: int) -> str:
    """Judge answers with an L as right. The judgement of the answer "mumble" is never readable, that of "hesitate" only at the
    second request.
    """
    if answer == "mumble" or (answer == "hesitate" and not before):
        return "well, \x1b[31mcorrect: yes perhaps"
    return YES if "L" in answer or answer == "hesitate" else NO


def test_yes_is_1_no_is_0_unreadable_is_retried_then_missing(desk: Make) -> None:
    judged = desk(by_answer)
    right, wrong, late, never = judged.rewards("Lima, of course", "Rome", "hesitate", "mumble")
    assert (right.value, right.correct, right.parts) == (1.0, 1.0, {"answer": 1.0}) and "so it is" in right.note
    assert (wrong.value, late.value) == (0.0, 1.0) and never.is_missing and math.isnan(never.correct)
    assert "no line `correct:`" in never.note and "\x1b" not in never.note
    draws = {answer: [r for a, r in judged.asked if a == answer] for answer in ("Rome", "hesitate", "mumble")}
    assert {answer: len(found) for answer, found in draws.items()} == {"Rome": 1, "hesitate": 2, "mumble": 3}
    assert [r.sampling.temperature for r in draws["mumble"]] == [0.0, 0.7, 0.7]
    assert len({r.seed for r in draws["mumble"]}) == 3 and draws["Rome"][0].max_new_tokens == 1024
    counts = judged.judge.take_counts("train")
    expected = {"calls": 4, "missing": 1, "yes": 2, "retries": 3, "cached": 0, "compared": 3, "agreed": 1}
    assert {name: counts[f"judge/{name}"] for name in expected} == expected  # the task agrees only about Rome
    assert counts["judge/input_tokens"] == sum(len(r.token_ids) for _, r in judged.asked)
    assert counts["judge/output_tokens"] > 0 and set(judged.judge.take_counts("train").values()) == {0.0}


def test_a_judge_is_read_after_its_thought_and_only_if_complete(desk: Make, tmp_path: Path) -> None:
    said = {"thinks": f"<think>correct: yes</think>{NO}", "stops": f"<think>{YES}", "long": f"{YES}\n" + "x" * 2000}
    judged = desk(lambda answer, before: said[answer], retries=0)
    thinks, stops, long = judged.rewards(*said)
    assert thinks.value == 0 and stops.is_missing and "<think> block is never closed" in stops.note
    assert long.is_missing and "cut off after 1024 tokens (judge.max_response_tokens)" in long.note
    write_byte_tokenizer(tmp_path)
    thinker = ChatRenderer(tmp_path)
    thinker.tokenizer.chat_template += "<think>\n"  # the template opens the thought
    begun = desk(lambda answer, before: YES, renderer=thinker, retries=0)
    assert begun.rewards("a")[0].is_missing


def test_the_same_answer_to_the_same_question_is_judged_once(desk: Make) -> None:
    judged = desk(by_answer, cache_entries=2)
    assert [r.value for r in judged.rewards("Lima", "Lima", "Lima")] == [1, 1, 1]
    assert judged.rewards("Lima", purpose="evaluate")[0].value == 1
    other = Problem("peru2", "Capital of Perú?", "Lima", "qa")
    assert judged.rewards("Lima", problem=other)[0].value == 1
    assert [answer for answer, _ in judged.asked] == ["Lima", "Lima"]
    train, evaluate = (judged.judge.take_counts(purpose) for purpose in ("train", "evaluate"))
    assert (train["judge/calls"], train["judge/cached"], train["judge/yes"]) == (4, 2, 4)
    assert (evaluate["judge/calls"], evaluate["judge/cached"], evaluate["judge/yes"]) == (1, 1, 1)
    judged.rewards("Lima", "Rome")  # evicts the least recently used entry
    judged.rewards("Lima", "Lima")
    assert len(judged.asked) == 3
    judged.rewards("Lima", problem=other)
    assert len(judged.asked) == 4
    mumbled = desk(by_answer, retries=0)
    # Missing judgements are not cached.
    assert all(mumbled.rewards("mumble")[0].is_missing for _ in range(2)) and len(mumbled.asked) == 2


def test_long_answers_are_wrong_long_questions_have_no_reward(desk: Make) -> None:
    judged = desk(by_answer, max_input_tokens=2000, max_answer_chars=1500)
    assert [r.value for r in judged.rewards("L" * 1501, "L" * 1400)] == [0, 0]
    long = Problem("long", "?" * 3000, "Lima", "qa")
    (missing,) = judged.rewards("Lima", problem=long)
    assert missing.is_missing and "judge.max_input_tokens = 2000" in missing.note
    assert judged.rewards("Lima", problem=Problem("n", "?", None, "qa"))[0].note == "problem n has no reference answer"
    assert judged.asked == [] and judged.judge.take_counts("train")["judge/calls"] == 2


class Deaf(ScriptedEngine):
    """Engine that answers only when the test allows it."""

    may_answer = threading.Event()

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        return super().collect(timeout_s) if self.may_answer.wait(timeout_s) else []


def test_a_late_judgement_is_missing_and_is_not_waited_for(desk: Make) -> None:
    judged = desk(by_answer, kind=Deaf, timeout_s=0.2)
    (reward,) = judged.rewards("Lima")
    assert reward.is_missing and "within judge.timeout_s = 0.2 s" in reward.note
    again = judged.judge.submit(PERU, "Lima", "train")
    Deaf.may_answer.set()
    again.result(60)  # answered by its own request or, on a busy machine, late again
    judged.judge.sleep()  # aborted requests come back and are ignored
    counts = judged.judge.take_counts("train")
    assert counts["judge/calls"] == counts["judge/missing"] + counts["judge/yes"] == 2 and counts["judge/missing"] >= 1
    assert judged.judge.pool.num_under_way == 0


def test_permanently_lost_judge_engines_end_the_run(desk: Make) -> None:
    class Burns(ScriptedEngine):
        def collect(self, timeout_s: float) -> list[DecodeResult]:
            raise OSError("the engine burns")

    judged = desk(by_answer, kind=Burns)
    with pytest.raises(OSError, match="the engine burns"):
        judged.rewards("Lima")
    with pytest.raises(RuntimeError, match="the judge has failed: the engine burns"):
        judged.judge.submit(PERU, "Lima", "train")
    judged.judge.sleep()


def team_with(judged: Desk, **config: Any) -> tuple[Team, Any, Any]:
    settings = letter_config(**config)
    team, engines = letter_team(settings)
    return replace(team, judge=WatchedJudge(judge, judged.judge)), settings, engines


def test_a_judge_of_evaluations_leaves_training_to_the_task(desk: Make) -> None:
    judged = desk(by_answer, when="evaluate")
    team, config, _ = team_with(judged, overlap=0)
    batch = next_batch(Stages(config, team, letter_problems(9), seed=0), {"main": 0})
    found = [(s.answer, s.reward.correct) for g in batch.groups for s in g.samples if s.answer is not None]
    assert len(found) > 3 and all(correct == (answer == "7") for answer, correct in found)
    assert not any(name.startswith("judge/") for name in batch.metrics) and not judged.asked


def test_the_judge_s_engines_sleep_with_the_team_and_wake(desk: Make) -> None:
    class Sleeper(ScriptedEngine):
        is_asleep = False

        def sleep(self, keeps_weights: bool) -> None:
            self.is_asleep = keeps_weights  # a frozen policy must keep its weights
            super().sleep(keeps_weights)

        def wake(self, part: Any) -> None:
            self.is_asleep = False
            super().wake(part)

    judged = desk(by_answer, kind=Sleeper, sleeps=True)  # rollout.placement=colocated
    engine: Any = judged.engine
    team, _, _ = team_with(judged)
    assert team.all_pools == [team.pools["main"], judged.judge.pool]
    assert judged.rewards("Lima")[0].value == 1
    team.sleep(renewed=())
    assert engine.is_asleep
    assert judged.rewards("Rome")[0].value == 0 and not engine.is_asleep
