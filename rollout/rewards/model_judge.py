"""Language model as judge: takes answers and returns futures of rewards, while other agents decode.

    submit -> cached or pending? -> prompt (hle.py) -> the policy's engines -> parse -> yes 1, no 0
                                                        ^                        '-> unreadable: drawn again
                                                        '------ judge.retries times ------'   then missing

Answers are hostile, the judge's output is untrusted, and its server may be down or hang. Any failure is counted and becomes a
missing reward with a note; too_many_missing reports an excessive share of them. Only the judge's thread calls its engines.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

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

_VERSION = 0  # a frozen policy's version never changes
_COLLECT_S = 0.05  # maximum wait for results, and so the maximum delay of a new answer
_RETRY_TEMPERATURE = 0.7  # at temperature 0 the model would repeat its completion
_MOST_SHOWN = 200  # characters of the judge's text in a message or note
_COUNTED = (
    *("calls", "cached", "missing", "yes", "retries", "compared", "agreed"),
    *("input_tokens", "cached_tokens", "output_tokens", "seconds", "engine_restarts"),
)

_Key = tuple[str, str, str]  # question, reference, answer


class _Draw(NamedTuple):
    """A pending draw. result: cancelled if its judgement is abandoned."""

    request: DecodeRequest
    purpose: Purpose
    result: asyncio.Future[DecodeResult]


class ModelJudge:
    """Judge of answers by a frozen policy, in a separate thread; see the module.

        judge = ModelJudge(pool, renderer, JudgeConfig(policy="judge"), task_judge=task.judge, seed=0)
        judge.submit(problem, "Lima", "evaluate").result()

    Args:
        pool: the policy's engines, which only the judge may call; close the pool after the judge.
        task_judge: the task's judge, for judge/compared and judge/agreed.
        right_answers: splits a reference into its right answers, any of which suffices.
    """

    def __init__(
        self,
        pool: EnginePool,
        renderer: ChatRenderer,
        config: JudgeConfig,
        *,
        task_judge: Judge,
        seed: int,
        right_answers: Callable[[str], Sequence[str]] = lambda reference: [reference],
    ) -> None:
        self.pool, self.config = pool, config
        self._renderer, self._task_judge, self._seed, self._right_answers = renderer, task_judge, seed, right_answers
        self._changed = threading.Condition()  # guards the fields below, which both threads use
        self._open: dict[_Key, Future[Judgement]] = {}  # pending judgements, which calls with the same answer join
        self._kept: OrderedDict[_Key, Future[Judgement]] = OrderedDict()  # cache, least recently used first
        self._counts: dict[Purpose, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        # For each answer since the last too_many_missing: why it has no judgement, or "".
        self._reasons: dict[Purpose, list[str]] = defaultdict(list)
        self._error: Exception | None = None
        self._is_closed = False
        # Used only by the event loop.
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._due: list[DecodeRequest] = []
        self._drawing: dict[str, _Draw] = {}  # pending draws, by uid
        self._decoder: asyncio.Task[None] | None = None
        self._num_requests = 0
        self._thread = threading.Thread(target=self._run, name="marsrl-judge", daemon=True)
        self._thread.start()

    def serves(self, purpose: Purpose) -> bool:
        """Return True if the model judges answers of episodes with this purpose (judge.when)."""
        return self.config.when == "always" or purpose != "train"

    def submit(self, problem: Problem, answer: str, purpose: Purpose) -> Future[Reward]:
        """Start a judgement. The future is cancelled if the judge closes first.

        Raises RuntimeError: the judge is closed, or its engines are lost for good.
        """
        if problem.answer is None:
            return known(Reward(MISSING, MISSING, note=f"problem {problem.id} has no reference answer"))
        most = self.config.max_answer_chars
        if len(answer) > most:
            return known(
                Reward(0.0, 0.0, {"answer": 0.0}, f"the answer has {len(answer)} characters; at most {most} allowed")
            )
        task_reward, reward = self._task_judge(problem, answer), Future[Reward]()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("ModelJudge.submit: the judge is closed")
            if self._error is not None:
                raise RuntimeError(f"the judge has failed: {self._error}") from self._error
            judgement = self._judgement((problem.question, problem.answer, answer), purpose)
        judgement.add_done_callback(lambda _: self._tell(reward, judgement, task_reward, purpose))
        return reward

    def take_counts(self, purpose: Purpose) -> dict[str, float]:
        """Return metrics since the last call, judge/...; {} if the model does not judge for this purpose.

        calls: number of answers. cached: answers judged before, or equal to one being judged. compared: answers judged by both
        the model and the task. agreed: compared answers with equal judgements. seconds: total time from answers to judgements.
        """
        if not self.serves(purpose):
            return {}
        with self._changed:
            counts = self._counts.pop(purpose, {})
        return {f"judge/{name}": counts.get(name, 0.0) for name in _COUNTED}

    def too_many_missing(self, purpose: Purpose, at_least: int = 1) -> str:
        """Return a message if over judge.max_missing_share of the answers since the last check have no judgement; otherwise "".

        at_least: the check is postponed until there are this many answers.
        """
        with self._changed:
            reasons = self._reasons[purpose]
            if len(reasons) < at_least:
                return ""
            self._reasons[purpose] = []
        most, missing = self.config.max_missing_share, list(filter(None, reasons))
        if len(missing) <= most * len(reasons):
            return ""
        return (
            f"the judge (judge.policy={self.config.policy}) did not judge {len(missing)} of {len(reasons)} answers, "
            f"more than judge.max_missing_share = {most:g}; the last reason: {missing[-1]}"
        )

    def sleep(self) -> None:
        """Wait until all draws have ended, abandoned ones too, since they occupy engines; then put the engines to sleep."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not (self._open or self._drawing))
        self.pool.sleep(keeps_weights=True)

    def close(self) -> None:
        """End the thread and drop pending judgements; may be called twice. The pool stays open."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _judgement(self, key: _Key, purpose: Purpose) -> Future[Judgement]:
        """Return the cached or pending judgement of the same answer, or start a new one. Requires the lock."""
        counts = self._counts[purpose]
        counts["calls"] += 1
        if key in self._kept or key in self._open:
            counts["cached"] += 1
            if key in self._open:
                return self._open[key]
            self._kept.move_to_end(key)
            return self._kept[key]
        self._open[key] = said = asyncio.run_coroutine_threadsafe(self._judge(key, purpose), self._loop)
        return said

    def _tell(
        self, reward: Future[Reward], model_judgement: Future[Judgement], task_reward: Future[Reward], purpose: Purpose
    ) -> None:
        """Set the reward once both the model's and the task's own judgement are available."""
        if model_judgement.cancelled():
            reward.cancel()
            reward.set_running_or_notify_cancel()  # notifies threads that wait for the reward
            return
        why_none = model_judgement.exception()
        if why_none is None:
            judgement = model_judgement.result()
            value = float(judgement.is_correct)
            judged = Reward(value, value, {"answer": value}, f"the judge: {_shown(judgement.reasoning)}")
        elif isinstance(why_none, Unreadable):
            judged = Reward(MISSING, MISSING, note=f"the judge: {why_none}")
        else:
            reward.set_exception(why_none)
            return

        def settle(task_reward: Future[Reward]) -> None:
            task_correct = (
                MISSING if task_reward.cancelled() or task_reward.exception() else task_reward.result().correct
            )
            with self._changed:
                counts = self._counts[purpose]
                self._reasons[purpose].append(str(why_none) if judged.is_missing else "")
                if judged.is_missing:
                    counts["missing"] += 1
                else:
                    is_known = task_correct == task_correct
                    counts["yes"] += judged.value
                    counts["compared"] += is_known
                    counts["agreed"] += is_known and (task_correct == 1) == (judged.value == 1)
            if reward.set_running_or_notify_cancel():
                reward.set_result(judged)

        task_reward.add_done_callback(settle)

    # The methods below run in the judge's event loop.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())

    async def _judge(self, key: _Key, purpose: Purpose) -> Judgement:
        """Make a new judgement. Raises Unreadable if no draw is readable or time runs out; later results are dropped."""
        judgement, began = None, time.monotonic()
        try:
            async with asyncio.timeout(self.config.timeout_s) as limit:
                judgement = await self._drawn(key, purpose)
            return judgement
        except TimeoutError:
            if not limit.expired():  # the engines raised it, not this time limit
                raise
            raise Unreadable(f"no judgement within judge.timeout_s = {self.config.timeout_s:g} s") from None
        finally:
            with self._changed:
                future = self._open.pop(key)
                self._counts[purpose]["seconds"] += time.monotonic() - began
                if judgement is not None and self.config.cache_entries:
                    self._kept[key] = future
                    if len(self._kept) > self.config.cache_entries:
                        self._kept.popitem(last=False)
                self._changed.notify_all()

    async def _drawn(self, key: _Key, purpose: Purpose) -> Judgement:
        """Return the first readable judgement of 1 + judge.retries draws."""
        question, reference, answer = key
        most = self.config.max_input_tokens
        prompt, text = self._prompt(question, answer, reference)
        if len(prompt) > most:
            reason = f"the judge's prompt would have {len(prompt)} tokens, more than judge.max_input_tokens = {most}"
            # An answer that is too long by itself is wrong; a long question or reference makes the judgement missing.
            if len(self._prompt(question, "", reference)[0]) <= most:
                return Judgement(False, reason)
            raise Unreadable(reason)
        starts_in_thought = text.rstrip().endswith(THINK_OPEN)
        for number in range(1, self.config.retries + 2):
            result = await self._decoded(prompt, key, purpose, number)
            if result.finish is Finish.ERROR:  # the engine has already retried
                raise Unreadable(f"the engine failed: {_shown(result.error)}")
            output = self._renderer.decode(result.token_ids) if result.text is None else result.text
            try:
                if result.finish is not Finish.STOP:
                    raise Unreadable(
                        f"the judgement is cut off after {len(result.token_ids)} tokens (judge.max_response_tokens)"
                    )
                spoken = visible(output, starts_in_thought)
                if spoken is None:
                    raise Unreadable("its <think> block is never closed")
                return read_judgement(spoken)
            except Unreadable as error:
                unread = Unreadable(f"{error}: {_shown(output)}")
        raise unread

    async def _decoded(self, prompt: IntArray, key: _Key, purpose: Purpose, number: int) -> DecodeResult:
        """Decode one draw of a judgement. number: number of the draw, from 1."""
        self._num_requests += 1
        uid, temperature = f"judge/{self._num_requests}", self.config.temperature
        if number > 1:
            temperature = max(temperature, _RETRY_TEMPERATURE)
            with self._changed:
                self._counts[purpose]["retries"] += 1
        request = DecodeRequest(
            uid=uid,
            token_ids=prompt,
            max_new_tokens=self.config.max_response_tokens,
            sampling=Sampling(temperature, stop_token_ids=self._renderer.stop_ids),
            seed=derive_seed(self._seed, "judge", *key, number),
            affinity=uid,
            text_from=len(prompt),
        )
        self._due.append(request)
        self._drawing[uid] = draw = _Draw(request, purpose, self._loop.create_future())
        if self._decoder is None or self._decoder.done():
            self._decoder = asyncio.create_task(self._decode())
        return await draw.result

    async def _decode(self) -> None:
        """Run the engines until no draw is pending. If the engines fail permanently, all pending judgements fail."""
        try:
            while self._drawing:
                due, self._due = self._due, []
                if due:
                    self.pool.submit(due, version=_VERSION)
                for result in await asyncio.to_thread(self.pool.collect, _COLLECT_S):
                    self._take(result)
                with self._changed:
                    self._changed.notify_all()  # sleep() waits for the last draw
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            for draw in self._drawing.values():
                if not draw.result.done():
                    draw.result.set_exception(error)

    def _take(self, result: DecodeResult) -> None:
        draw = self._drawing.pop(result.uid)
        faults, (num_read, num_drawn) = self.pool.take_faults(), result.usage_of(draw.request)
        with self._changed:
            counts = self._counts[draw.purpose]
            counts["input_tokens"] += num_read
            counts["cached_tokens"] += result.num_cached_tokens
            counts["output_tokens"] += num_drawn
            counts["engine_restarts"] += faults.engine_restarts
        if not draw.result.done():  # the judgement may have been abandoned meanwhile
            draw.result.set_result(result)

    def _prompt(self, question: str, answer: str, reference: str) -> tuple[IntArray, str]:
        messages = judge_messages(question, answer, self._right_answers(reference), self._seed)
        return self._renderer.render(messages, **self.config.template_options)


def _shown(text: str) -> str:
    """Return the end of an untrusted text, where a judgement says yes or no, as one line without control characters."""
    return repr(text if len(text) <= _MOST_SHOWN else f"... {text[-_MOST_SHOWN:]}")
