"""A language model as the judge: answers in, promises of rewards out, while others decode.

    submit -> judged before, or under way? -> prompt (hle.py) -> the policy's engines -> read -> yes 1, no 0
                                                    ^                              '-> unreadable: drawn again
                                                    '------- judge.retries times ------------'   then missing

Answers are hostile, the judge's own words are not trusted, and its server may be down or hang: whatever goes wrong is a
missing reward with a note, counted, and too large a share of those is told by too_many_missing. The engines are the
judge's own, as its thread drives them alone.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from marsrl.rollout.agents.parsers import THINK_OPEN, visible
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.episode import Purpose
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.rewards.config import JudgeConfig
from marsrl.rollout.rewards.hle import Judgement, Unreadable, judge_messages, read_judgement
from marsrl.rollout.rewards.judge import Judge, known
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.types import MISSING, Finish, IntArray, Problem, Reward

_VERSION = 0  # of a frozen policy, for ever
_COLLECT_S = 0.05  # for which results are waited for at a time: how long a new answer may wait
_RETRY_TEMPERATURE = 0.7  # at 0 the same would be said again
_MOST_SHOWN = 200  # characters of the judge's words in a message or note
_COUNTED = (
    *("calls", "cached", "missing", "yes", "retries", "compared", "agreed"),
    *("input_tokens", "cached_tokens", "output_tokens", "seconds", "engine_restarts"),
)

_Key = tuple[str, str | None, str]  # question, reference, answer


@dataclass(frozen=True, slots=True)
class _Caller:
    """Somebody who waits for a judgement. own: the task's own, which it is compared with."""

    reward: Future[Reward]
    purpose: Purpose
    own: Future[Reward]


@dataclass(eq=False, slots=True)
class _Pending:
    """A judgement under way, of the same answer to the same question for all that wait for it. began: monotonic seconds."""

    key: _Key
    callers: list[_Caller]
    began: float
    prompt: IntArray | None = None
    starts_in_thought: bool = False
    num_drawn: int = 0

    @property
    def purpose(self) -> Purpose:
        return self.callers[0].purpose


@dataclass(slots=True)
class _Look:
    """Judgements since too_many_missing looked last."""

    calls: int = 0
    missing: int = 0
    last: str = ""


class ModelJudge:
    """Judges answers by a frozen policy, in a thread of its own. See the module.

        judge = ModelJudge(pool, renderer, JudgeConfig(policy="judge"), own=task.judge, seed=0)
        judge.submit(problem, "Lima", "evaluate").result()

    Args:
        pool: the policy's engines, which nobody else drives; close it after the judge.
        own: the task's own judgement, for how often both agree: judge/compared, judge/agreed.
        right_answers: those that a reference holds, of which one is enough.
    """

    def __init__(
        self,
        pool: EnginePool,
        renderer: ChatRenderer,
        config: JudgeConfig,
        *,
        own: Judge,
        seed: int,
        right_answers: Callable[[str], Sequence[str]] = lambda reference: [reference],
    ) -> None:
        self.pool, self.config = pool, config
        self._renderer, self._own, self._seed, self._right_answers = renderer, own, seed, right_answers
        self._changed = threading.Condition()  # guards all below
        self._queue: list[_Pending] = []  # to be drawn
        self._open: dict[_Key, _Pending] = {}  # that a further call of the same may join
        self._judgements: OrderedDict[_Key, Judgement] = OrderedDict()
        self._counts: dict[Purpose, dict[str, float]] = defaultdict(_no_counts)
        self._looks: dict[Purpose, _Look] = defaultdict(_Look)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_closed = False
        self._drawing: dict[str, _Pending] = {}  # by uid; the thread's own
        self._num_requests = 0

    def serves(self, purpose: Purpose) -> bool:
        """Are answers of such episodes the model's to judge (judge.when)?"""
        return self.config.when == "always" or purpose != "train"

    def submit(self, problem: Problem, answer: str, purpose: Purpose) -> Future[Reward]:
        """Begin a judgement. The future is cancelled where the judge is closed before.

        Raises:
            RuntimeError: the judge is closed, or its engines are lost for good.
        """
        if problem.answer is None:
            return known(Reward(MISSING, MISSING, note=f"problem {problem.id} has no reference answer"))
        most = self.config.max_answer_chars
        if len(answer) > most:
            return known(Reward(0.0, 0.0, {"answer": 0.0}, f"an answer of {len(answer)} characters; at most {most}"))
        key = (problem.question, problem.answer, answer)
        caller = _Caller(Future(), purpose, self._own(problem, answer))
        with self._changed:
            self._check()
            self._counts[purpose]["calls"] += 1
            judgement = self._judgements.get(key)
            if judgement is None:
                self._begin(key, caller)
                return caller.reward
            self._judgements.move_to_end(key)
            self._counts[purpose]["cached"] += 1
        self._settle(caller, judgement, "")
        return caller.reward

    def take_counts(self, purpose: Purpose) -> dict[str, float]:
        """Metrics since the last call, judge/...; {} where the model judges no such answers.

        calls: answers; cached of them were judged before, or at the same time for another. compared: of those with a judgement,
        whose own judgement by the task is known; agreed: and says the same. seconds: from each answer to its judgement.
        """
        if not self.serves(purpose):
            return {}
        with self._changed:
            counts = self._counts.pop(purpose, None) or _no_counts()
        return {f"judge/{name}": value for name, value in counts.items()}

    def too_many_missing(self, purpose: Purpose, at_least: int = 1) -> str:
        """A sentence, where more than judge.max_missing_share of the answers since the last look have no judgement; "" else.

        at_least: with fewer answers there is no look yet.
        """
        with self._changed:
            look = self._looks[purpose]
            if look.calls < at_least:
                return ""
            self._looks[purpose] = _Look()
        most = self.config.max_missing_share
        if look.missing <= most * look.calls:
            return ""
        return (
            f"the judge (judge.policy={self.config.policy}) left {look.missing} of {look.calls} answers without a judgement, "
            f"more than judge.max_missing_share = {most:g}; the last one: {look.last}"
        )

    def sleep(self) -> None:
        """As EnginePool.sleep, once nothing is drawn any more: also what was given up holds its engine."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not (self._queue or self._drawing))
        self.pool.sleep(keeps_weights=True)

    def close(self) -> None:
        """End the thread and drop what is under way; may be called twice. The pool is left open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for caller in self._take_callers():
            caller.reward.cancel()
            caller.reward.set_running_or_notify_cancel()  # tells who waits for it

    # With the lock held.

    def _check(self) -> None:
        if self._is_closed:
            raise RuntimeError("ModelJudge.submit: the judge is closed")
        if self._error is not None:
            raise RuntimeError(f"the judge has failed: {self._error}") from self._error

    def _begin(self, key: _Key, caller: _Caller) -> None:
        """Join a judgement of the same that is under way, or begin one."""
        if (pending := self._open.get(key)) is not None:
            self._counts[caller.purpose]["cached"] += 1
            pending.callers.append(caller)
            return
        self._open[key] = pending = _Pending(key, [caller], time.monotonic())
        self._queue.append(pending)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="marsrl-judge", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # Without it.

    def _take_callers(self) -> list[_Caller]:
        with self._changed:
            left = [caller for pending in self._open.values() for caller in pending.callers]
            self._open.clear()
            self._queue.clear()
        return left

    def _settle(self, caller: _Caller, judgement: Judgement | None, why_none: str) -> None:
        """The caller's reward, once the task's own judgement is there too."""
        reward = Reward(MISSING, MISSING, note=f"the judge: {why_none}")
        if judgement is not None:
            value = float(judgement.is_correct)
            reward = Reward(value, value, {"answer": value}, f"the judge: {_shown(judgement.reasoning)}")

        def end(own: Future[Reward]) -> None:
            of_task = MISSING if own.cancelled() or own.exception() else own.result().correct
            with self._changed:
                counts, look = self._counts[caller.purpose], self._looks[caller.purpose]
                look.calls += 1
                if judgement is None:
                    counts["missing"] += 1
                    look.missing, look.last = look.missing + 1, why_none
                else:
                    is_known = of_task == of_task
                    counts["yes"] += judgement.is_correct
                    counts["compared"] += is_known
                    counts["agreed"] += is_known and (of_task == 1) == judgement.is_correct
            if caller.reward.set_running_or_notify_cancel():
                caller.reward.set_result(reward)

        caller.own.add_done_callback(end)

    # In the judge's thread.

    def _run(self) -> None:
        """Round after round until the judge is closed. Where its engines fail for good, all that wait for it fail."""
        try:
            while self._round():
                pass
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            for caller in self._take_callers():
                caller.reward.set_exception(error)

    def _round(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._drawing or self._is_closed)
            if self._is_closed:
                return False
            new, self._queue = self._queue, []
        requests = [request for pending in new if (request := self._request(pending)) is not None]
        if requests:
            self.pool.submit(requests, version=_VERSION)
        for result in self.pool.collect(_COLLECT_S):
            self._take(result)
        self._give_up_late_ones()
        with self._changed:
            self._changed.notify_all()  # sleep() waits for the last of them
        return True

    def _request(self, pending: _Pending) -> DecodeRequest | None:
        """The next draw of a judgement; None where its prompt is too long, which settles it."""
        question, reference, answer = pending.key
        if pending.prompt is None:
            ids, text = self._prompt(question, answer, reference or "")
            if len(ids) > self.config.max_input_tokens:
                self._end_too_long(pending, len(ids))
                return None
            pending.prompt, pending.starts_in_thought = ids, text.rstrip().endswith(THINK_OPEN)
        self._num_requests += 1
        uid = f"judge/{self._num_requests}"
        self._drawing[uid] = pending
        is_first, pending.num_drawn = pending.num_drawn == 0, pending.num_drawn + 1
        temperature = self.config.temperature if is_first else max(self.config.temperature, _RETRY_TEMPERATURE)
        return DecodeRequest(
            uid=uid,
            token_ids=pending.prompt,
            max_new_tokens=self.config.max_response_tokens,
            sampling=Sampling(temperature, stop_token_ids=self._renderer.stop_ids),
            seed=derive_seed(self._seed, "judge", *map(str, pending.key), pending.num_drawn),
            affinity=uid,
        )

    def _prompt(self, question: str, answer: str, reference: str) -> tuple[IntArray, str]:
        messages = judge_messages(question, answer, self._right_answers(reference), self._seed)
        return self._renderer.render(messages, **self.config.template_options)

    def _end_too_long(self, pending: _Pending, num_tokens: int) -> None:
        """Long by itself an answer is wrong; a question or a reference is nobody's fault."""
        question, reference, _ = pending.key
        found = f"what it would read has {num_tokens} tokens, more than judge.max_input_tokens = {self.config.max_input_tokens}"
        is_answer = len(self._prompt(question, "", reference or "")[0]) <= self.config.max_input_tokens
        self._end(pending, Judgement(False, found) if is_answer else None, found)

    def _take(self, result: DecodeResult) -> None:
        pending = self._drawing.pop(result.uid)
        faults = self.pool.take_faults()
        with self._changed:
            counts = self._counts[pending.purpose]
            counts["input_tokens"] += 0 if pending.prompt is None else len(pending.prompt)
            counts["cached_tokens"] += result.num_cached_tokens
            counts["output_tokens"] += len(result.token_ids)
            counts["engine_restarts"] += faults.engine_restarts
            is_wanted = self._open.get(pending.key) is pending  # else it was given up meanwhile
        if not is_wanted:
            return
        if result.finish is Finish.ERROR:  # the engine has tried again by itself
            self._end(pending, None, f"no answer: {_shown(result.error)}")
            return
        said = self._renderer.decode(result.token_ids)
        try:
            if result.finish is not Finish.STOP:
                raise Unreadable(f"it is cut off after {len(result.token_ids)} tokens (judge.max_response_tokens)")
            spoken = visible(said, pending.starts_in_thought)
            if spoken is None:
                raise Unreadable("it is a thought without an end")
            judgement = read_judgement(spoken)
        except Unreadable as error:
            self._draw_again(pending, f"{error}: {_shown(said)}")
        else:
            self._end(pending, judgement, "")

    def _draw_again(self, pending: _Pending, why: str) -> None:
        if pending.num_drawn > self.config.retries:
            self._end(pending, None, why)
            return
        with self._changed:
            self._counts[pending.purpose]["retries"] += 1
            self._queue.append(pending)

    def _give_up_late_ones(self) -> None:
        """An engine's later answer to them is dropped."""
        most = self.config.timeout_s
        with self._changed:
            late = {pending for pending in self._open.values() if time.monotonic() > pending.began + most}
            self._queue = [pending for pending in self._queue if pending not in late]
        for pending in late:
            self._end(pending, None, f"no judgement within judge.timeout_s = {most:g} s")

    def _end(self, pending: _Pending, judgement: Judgement | None, why_none: str) -> None:
        with self._changed:
            if self._open.pop(pending.key, None) is None:
                return
            self._counts[pending.purpose]["seconds"] += time.monotonic() - pending.began
            if judgement is not None and self.config.cache_entries:
                self._judgements[pending.key] = judgement
                if len(self._judgements) > self.config.cache_entries:
                    self._judgements.popitem(last=False)
        for caller in pending.callers:
            self._settle(caller, judgement, why_none)


def _no_counts() -> dict[str, float]:
    return dict.fromkeys(_COUNTED, 0.0)


def _shown(text: str) -> str:
    """The end of somebody else's words in one line without control characters, where a judgement says yes or no."""
    return repr(text if len(text) <= _MOST_SHOWN else f"... {text[-_MOST_SHOWN:]}")
