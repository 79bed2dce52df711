"""Plays problems without waiting for stages to end: what a sample's end makes possible is done at once.

    a result comes back
      | not finished                      -> its next segment is submitted
      | waits     -> tools and other agents are called; with what they say behind it, its next segment is submitted
      | finished  -> judged -> ask complete? -> closed -> what the team asks next is opened and submitted

    ask()   the trainer wants one more batch       stage s of new problems begins when stage s-1 has ended and
    take()  a batch, where one is ready            s <= batches asked for + rollout.overlap

Stage s ends, and all groups closed since the last one become batch s, when every sample that was unfinished at its
beginning has finished or come to the end of a segment (not of a wait), or rollout.finish_share of them have finished;
with `pipeline: trajectory`, when nothing is open. Samples, picks and segments that follow do not wait for it. So the
decoder is at most rollout.overlap stages ahead of the trainer, and a sample, when it is trained, at most
rollout.overlap + rollout.segments versions old (its group waits for its last sample; picks made late in a stage belong
to the next).

No thread and no clock in here: whoever drives it calls advance() (background.py, or a simulation).
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.episode import Episode
from marsrl.rollout.schedule.ledger import Ended, Ledger, RolloutState, StepBatch
from marsrl.rollout.schedule.partial_rollouts import OpenAsk
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.team import Team
from marsrl.rollout.types import Ask, Finish, Reward, Sample

_JUDGING_S = 0.01
_KNOWN_LENGTHS = 512  # finished completions of an agent that guesses are made from


class _Key(NamedTuple):
    """A sample that is under way."""

    ask_id: str
    place: int  # among the ask's samples

    @property
    def uid(self) -> str:
        return f"{self.ask_id}:{self.place}"


@dataclass(frozen=True, slots=True)
class _Unjudged:
    """A sample that has finished. judgement: of its answer; None: its reward needs none."""

    episode: Episode
    ask: Ask
    sample: Sample
    judgement: Future[Reward] | None

    @property
    def is_judged(self) -> bool:
        return self.judgement is None or self.judgement.done()


class EventScheduler(Ledger):
    """See the module. One thread at a time calls its methods; collect() alone may run beside ask, take and snapshot.

    scheduler.resume({"main": 0}); scheduler.ask()
    while (batch := scheduler.take()) is None:
        scheduler.advance(timeout_s=0.2)
    scheduler.rest(); ... new weights ...; scheduler.resume({"main": 1})
    """

    def __init__(
        self,
        config: RolloutConfig,
        team: Team,
        source: ProblemSource,
        *,
        seed: int,
        trains_whole: bool = False,
    ) -> None:
        super().__init__(config, team, source, seed=seed, trains_whole=trains_whole)
        self.versions: Mapping[str, int] = {}
        self._is_resting = True
        self._num_asked = 0
        self._due: dict[_Key, None] = {}  # to be submitted, in order
        self._in_flight: dict[str, _Key] = {}  # by uid; at the engines
        self._decoded: Counter[_Key] = Counter()  # tokens of a segment that was aborted: it goes on with the rest
        self._judging: dict[_Key, _Unjudged] = {}
        self._awaited: set[_Key] = set()  # what the stage waits for
        self._num_awaited = 0  # when the stage began
        self._num_finished = 0  # of these
        self._lengths: dict[str, list[int]] = defaultdict(list)  # by agent, sorted: of finished completions
        self._recent: dict[str, list[int]] = defaultdict(list)  # the same in order of their end

    # The trainer's side.

    def ask(self) -> None:
        """One more batch is wanted: one more stage may begin."""
        self._num_asked += 1
        self._begin_stage_if_due()

    def take(self) -> StepBatch | None:
        """The oldest batch that is ready, or None."""
        if not self.state.ready:
            return None
        self.state.num_taken += 1
        return self.state.ready.pop(0)

    def rest(self) -> None:
        """Engines end what they decode; the tokens are kept. Afterwards they are free for anything else.

        Judgements go on meanwhile: a judge has engines or processes of its own.
        """
        self._is_resting = True
        for pool in self.team.pools.values():
            self.absorb(pool.drain())

    def resume(self, versions: Mapping[str, int]) -> None:
        """Go on where `rest` stopped, under these policy versions; each sample's next segment is of its policy's."""
        self.versions = dict(versions)
        self._is_resting = False
        overdue = [opened for opened in self.state.open.values() if self.is_overdue(opened, self.versions)]
        self._close(overdue)
        self._begin_stage_if_due()

    def snapshot(self) -> RolloutState:
        """What a checkpoint keeps: of a segment under way nothing, it is decoded again."""
        return RolloutState(self.state.copy(), self.source.state())

    def restore(self, state: RolloutState) -> None:
        """Go on from a checkpoint; before the first `resume`."""
        self.state = state.scheduler
        self.source.load(state.source)
        self._num_asked = self.state.num_taken
        self.resume_waiting()
        keys = self._unfinished()
        self._due = {key: None for key in keys if not self.is_waiting(self.state.open[key.ask_id], key.place)}
        self._await(keys)

    # The decoder's side.

    def advance(self, timeout_s: float) -> None:
        """Submit what is due, wait for results (timeout_s at most), and do all that they make possible."""
        self.submit()
        self.absorb(self.collect(timeout_s))

    def submit(self) -> None:
        """Everything that is due to the engines, tagged with its policy's version."""
        if self._is_resting:
            return
        by_policy: dict[str, list[DecodeRequest]] = defaultdict(list)
        for key in self._due:
            opened = self.state.open[key.ask_id]
            by_policy[self.policy_of(opened.ask.agent)].append(self._next_segment(opened, key.place))
            self._in_flight[key.uid] = key
        self._due.clear()
        for policy, requests in by_policy.items():
            self.team.pools[policy].submit(requests, version=self.versions[policy])

    @property
    def is_decoding(self) -> bool:
        """Do engines have something of ours?"""
        return any(pool.num_under_way for pool in self.team.pools.values())

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        """Results that the engines have, waiting timeout_s at most for the first. The books are not touched."""
        pools = [pool for pool in self.team.pools.values() if pool.num_under_way]
        if self._judging or self.is_calling:
            timeout_s = min(timeout_s, _JUDGING_S)
        return [result for pool in pools for result in pool.collect(timeout_s / len(pools))]

    def absorb(self, results: Sequence[DecodeResult]) -> None:
        """Enter results into the books, with all that follows from them."""
        self.note_faults()
        ended: dict[_Key, Ended] = {}
        for result in results:
            key = self._in_flight.pop(result.uid)
            opened = self.state.open[key.ask_id]  # asks lose their stragglers at rest, when no engine has any
            partial, finish = self.extended(opened, key.place, result)
            if finish is Finish.UNFINISHED:
                opened.partial[key.place] = partial
                self._due[key] = None
                if result.finish is Finish.UNFINISHED:  # aborted
                    self._decoded[key] += len(result.token_ids)
                else:
                    self._decoded.pop(key, None)
                    self._awaited.discard(key)
            else:
                self._decoded.pop(key, None)
                ended[key] = Ended(opened, key.place, partial, finish, result.error)
        unjudged: list[tuple[_Key, Episode, Ask, Sample]] = []
        for (key, each), sample in zip(ended.items(), self.samples([*ended.values()]), strict=True):
            if sample.finish is Finish.WAITING:
                self._open(self.suspend(each.opened, key.place, each.partial, sample))
            else:
                unjudged.append((key, self.episode(each.opened.ask), each.opened.ask, sample))
        self._judge([*unjudged, *self._go_on()])
        self._take_judged()
        self._end_stage_if_due()

    def _go_on(self) -> list[tuple[_Key, Episode, Ask, Sample]]:
        """Have what waits go on where it can; what ends instead, not judged yet."""
        self._open(self.take_outputs())
        resumed, ended = self.take_resumed()
        self._due.update(dict.fromkeys(_Key(opened.ask.id, index) for opened, index in resumed))
        return [
            (_Key(opened.ask.id, index), self.episode(opened.ask), opened.ask, sample)
            for opened, index, sample in ended
        ]

    def _judge(self, unjudged: Sequence[tuple[_Key, Episode, Ask, Sample]]) -> None:
        judgements = self.team.begin_judging([each[1:] for each in unjudged])
        for (key, episode, ask, sample), judgement in zip(unjudged, judgements, strict=True):
            self._judging[key] = _Unjudged(episode, ask, sample, judgement)

    def _take_judged(self) -> None:
        done = {key: each for key, each in self._judging.items() if each.is_judged}
        for key in done:
            del self._judging[key]
        self._finish(
            done,
            [
                self.team.rewarded(
                    each.episode, each.ask, each.sample, None if each.judgement is None else each.judgement.result()
                )
                for each in done.values()
            ],
        )

    def _finish(self, keys: Iterable[_Key], samples: Iterable[Sample]) -> None:
        """Judged samples into their asks; a sample stays partial until now, so that a snapshot loses nothing."""
        touched: dict[str, OpenAsk] = {}
        for key, sample in zip(keys, samples, strict=True):
            self._num_finished += key in self._awaited
            self._awaited.discard(key)
            opened = self.state.open[key.ask_id]
            del opened.partial[key.place]
            opened.finished[key.place] = sample
            touched[key.ask_id] = opened
            self._note_length(sample.agent, len(sample.token_ids))
        self._close([opened for opened in touched.values() if opened.is_complete])

    def _close(self, asks: Iterable[OpenAsk]) -> None:
        """Close asks, and open those that follow."""
        for opened in asks:
            for index in opened.partial:  # stragglers
                key = _Key(opened.ask.id, index)
                self._due.pop(key, None)
                self._decoded.pop(key, None)
                self._judging.pop(key, None)
                self._awaited.discard(key)
            self._open(self.close_ask(opened))

    def _open(self, asks: Sequence[Ask]) -> None:
        for opened in self.open_asks(asks, self.versions):
            self._due.update(dict.fromkeys(_Key(opened.ask.id, index) for index in opened.partial))

    # Stages.

    def _begin_stage_if_due(self) -> None:
        state = self.state
        if self._is_resting or state.num_stages > state.num_batches:
            return
        if state.num_stages >= self._num_asked + self.config.overlap:
            return
        state.num_stages += 1
        self.note_stage()
        self._open(state.pending)  # left by a run without rollout.overlap
        state.pending = []
        num_carried = self._num_carried()
        if num_carried <= self.config.max_unfinished:
            self._open(self.draw(num_carried))
        self._await(self._unfinished())
        self._end_stage_if_due()

    def _unfinished(self) -> list[_Key]:
        return [_Key(ask_id, index) for ask_id, opened in self.state.open.items() for index in opened.partial]

    def _num_carried(self) -> int:
        """Samples that have tokens and need more."""
        return sum(bool(partial.segments) for opened in self.state.open.values() for partial in opened.partial.values())

    def _await(self, keys: Sequence[_Key]) -> None:
        self._awaited, self._num_awaited, self._num_finished = set(keys), len(keys), 0

    def _end_stage_if_due(self) -> None:
        state = self.state
        if state.num_stages == state.num_batches or not self._is_stage_over():
            return
        state.num_batches += 1
        groups = tuple(sorted(state.closed, key=lambda group: group.group_id))
        metrics = {**self.counts, "rollout/stages": 1, "rollout/unfinished": self.num_unfinished}
        state.ready.append(StepBatch(groups, metrics))
        state.closed = []
        self.counts: Counter[str] = Counter()
        self._begin_stage_if_due()

    def _is_stage_over(self) -> bool:
        if self.config.pipeline == "trajectory":
            return not (self.state.open or self.is_calling)
        if self.config.finish_share < 1 and self._num_finished >= self.config.finish_share * self._num_awaited:
            return True
        return not self._awaited

    # Guesses of how long a completion gets: the longest are sent first.

    def _next_segment(self, opened: OpenAsk, index: int) -> DecodeRequest:
        request = self.request(opened, index, num_decoded=self._decoded[_Key(opened.ask.id, index)])
        known = len(opened.partial[index].token_ids)
        lengths = self._lengths[opened.ask.agent]
        longer = lengths[bisect.bisect_right(lengths, known) :]
        if not longer:
            return request
        # the mean that is left of those that got at least this far, capped by the segment's budget
        expected = min(sum(longer) / len(longer) - known, request.max_new_tokens)
        return replace(request, expected_new_tokens=expected)

    def _note_length(self, agent: str, length: int) -> None:
        bisect.insort(self._lengths[agent], length)
        self._recent[agent].append(length)
        if len(self._recent[agent]) > _KNOWN_LENGTHS:
            oldest = self._recent[agent].pop(0)
            del self._lengths[agent][bisect.bisect_left(self._lengths[agent], oldest)]
