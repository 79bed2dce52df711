"""Plays given episodes to their ends with one set of weights: evaluation. Nothing is trained, cut into stages or kept.

    an ask -> a completion -> judged -> the ask is over -> what its episode asks next, or calls of tools
                 '-> it waits -> asks and calls of its episode -> goes on with what they say

No episode waits for another: what a completion's end makes possible is submitted at once, so that a slot that is free is used,
and all that is to be played is as long as its longest episode, not as the longest of each round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.schedule.partial_rollouts import Partial
from marsrl.rollout.schedule.waiting import resume
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.team import Ending, Prompt, Team
from marsrl.rollout.types import Ask, Finish, Reward, Sample, ToolCall, ToolOutput

_COLLECT_S, _BESIDE_S = 0.2, 0.01  # how long results are waited for; with judges or tools at work
_REPORT_S = 0.2

OnProgress = Callable[[int, int, int], None]
"""Told now and then (episodes and asks that are over, of how many, tokens decoded so far)."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that was played to its end.

    samples: all of it in the order in which they ended, with their tokens, which episodes do not keep, and without texts.
    seconds: of an engine (DecodeResult.seconds), by uid. latency_s: from the first request to an engine, or call of a tool, to
    the last answer, judged, on a clock on the wall: waits in the engines' queues are in it, and what was played beside it
    makes them longer. None where nothing was ever asked (every prompt was too long).
    """

    episode: Episode
    samples: tuple[Sample, ...]
    seconds: Mapping[str, float]
    latency_s: float | None


OnEnd = Callable[[Played], None]


@dataclass(slots=True, eq=False)
class _Play:
    """An episode that is played. seed: of its draws. is_followed: to its end; else the asks that were given are all."""

    episode: Episode
    seed: int
    is_followed: bool
    open: dict[str, Completion] = field(default_factory=dict)  # by uid
    said: list[Sample] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # of `said`, by uid
    began_s: float | None = None  # when the first request or call was made
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class Completion:
    """The one completion of an ask. prompt: None where it is longer than the agent may read. said: once it is judged."""

    ask: Ask
    prompt: Prompt | None
    play: _Play
    partial: Partial = field(default_factory=Partial)
    seconds: float = 0.0  # of an engine
    said: Sample | None = None

    @property
    def uid(self) -> str:
        return f"{self.ask.id}:0"

    @property
    def episode(self) -> Episode:
        return self.play.episode

    @property
    def sample(self) -> Sample:
        """What was said, of a completion that is over."""
        assert self.said is not None, f"{self.uid} is not over"
        return self.said


@dataclass(slots=True)
class AtOnce:
    """See the module.

        player = AtOnce(team, versions, 4096, Sampling())
        player.play(episodes, seed=1)
        asked = player.ask([(episode, ask), ...], seed=2)
        player.finish()                                     # all of it, side by side
        [each.sample for each in asked]

    max_tokens: of one completion. sampling: in place of the agents' own; what ends a completion is theirs.
    num_decoded: tokens so far. A draw follows from its ask and the seed, whatever is played beside it.
    """

    team: Team
    versions: Mapping[str, int]
    max_tokens: int
    sampling: Sampling
    progress: OnProgress | None = None
    on_end: OnEnd | None = None
    on_said: Callable[[Completion], None] | None = None  # told of each completion of `ask`, once it is judged
    most_open: int | None = None  # episodes begun and not ended: the first end while the last have not begun
    now: Callable[[], float] = time.monotonic  # seconds
    num_decoded: int = 0
    _later: deque[_Play] = field(default_factory=deque)
    _num_open: int = 0
    _plays: list[_Play] = field(default_factory=list)
    _due: list[Completion] = field(default_factory=list)
    _in_flight: dict[str, Completion] = field(default_factory=dict)  # by uid; at the engines
    _judging: dict[Completion, tuple[Sample, Future[Reward] | None]] = field(default_factory=dict)
    _calling: dict[Future[ToolOutput], tuple[_Play, ToolCall]] = field(default_factory=dict)
    _reported_s: float = 0.0

    def play(self, episodes: Sequence[Episode], seed: int) -> None:
        """To their ends: one sample to each ask."""
        plays = [_Play(episode, seed, is_followed=True) for episode in episodes]
        self._plays += plays
        self._later.extend(plays)
        self._begin()

    def _begin(self) -> None:
        while self._later and (self.most_open is None or self._num_open < self.most_open):
            self._num_open += 1
            self._go_on(self._later.popleft())

    def ask(self, asks: Sequence[tuple[Episode, Ask]], seed: int) -> list[Completion]:
        """One whole, judged completion to each ask, of an episode that is played no further.

        A prompt that is too long gets an empty completion that counts as overlong.
        """
        plays: dict[int, _Play] = {}
        asked = []
        for episode, ask in asks:
            if id(episode) not in plays:
                plays[id(episode)] = _Play(episode, seed, is_followed=False)
            asked.append(self._open(plays[id(episode)], ask))
        self._plays += plays.values()
        return asked

    def finish(self) -> None:
        """Returns when all that was begun is over."""
        while self._due or self._in_flight or self._judging or self._calling or self._later:
            self._begin()
            self._submit()
            self._take(self._collect())
            self._take_outputs()
            self._take_judged()
            self._report()
        self._report(is_last=True)

    def _open(self, play: _Play, ask: Ask) -> Completion:
        each = Completion(ask, self.team.prompt(play.episode, ask), play)
        play.open[each.uid] = each
        if each.prompt is None:
            self._end((each, Finish.LENGTH, ""))
        else:
            self._due.append(each)
        return each

    def _go_on(self, play: _Play) -> None:
        """Do what the episode makes possible: asks and calls that are new, samples that wait and now can go on."""
        if play.is_followed or play.episode.waiting:
            asks, calls = self.team.follow(play.episode)
            for call in calls:
                assert self.team.tools is not None  # Team.follow lets no call through else
                self._note_begin(play)
                self._calling[self.team.tools.submit(call)] = (play, call)
            for ask in asks:
                self._open(play, ask)
        self._resume(play)
        if play.is_followed and not (play.has_ended or play.open or play.episode.open_calls):
            play.has_ended = True
            self._num_open -= 1
            if self.on_end is not None:
                latency_s = None if play.began_s is None else self.now() - play.began_s
                self.on_end(Played(play.episode, tuple(play.said), play.seconds, latency_s))
            play.said, play.seconds = [], {}

    def _resume(self, play: _Play) -> None:
        def is_stuck() -> bool:
            return not play.episode.open_calls and all(uid in play.episode.waiting for uid in play.open)

        for each in resume(self.team, play.episode, lambda uid: play.open[uid].partial, self._most_tokens, is_stuck):
            if each.finish is None:
                self._due.append(play.open[each.uid])
            else:
                self._end((play.open[each.uid], each.finish, each.error))

    def _note_begin(self, play: _Play) -> None:
        if play.began_s is None:
            play.began_s = self.now()

    def _submit(self) -> None:
        due, self._due = self._due, []
        for each in due:
            self._note_begin(each.play)
        self._in_flight.update((each.uid, each) for each in due)
        for policy, pool in self.team.pools.items():
            own = [each for each in due if self.team.agents[each.ask.agent].policy == policy]
            if own:
                pool.submit([self._request(each) for each in own], version=self.versions[policy])

    def _collect(self) -> list[DecodeResult]:
        pools = [pool for pool in self.team.pools.values() if pool.num_under_way]
        if not pools:  # judges and tools are at work alone
            judging: list[Future[Any]] = [judgement for _, judgement in self._judging.values() if judgement is not None]
            wait([*judging, *self._calling], 0.0 if len(judging) < len(self._judging) else None, FIRST_COMPLETED)
            return []
        timeout_s = _BESIDE_S if self._judging or self._calling else _COLLECT_S
        return [result for pool in pools for result in pool.collect(timeout_s / len(pools))]

    def _request(self, each: Completion) -> DecodeRequest:
        assert each.prompt is not None
        own, known = self.team.sampling(each.ask.agent), each.partial.token_ids
        place = (len(known),) if len(known) else ()
        return DecodeRequest(
            uid=each.uid,
            token_ids=np.concatenate([each.prompt.ids, known]).astype(np.int32, copy=False),
            max_new_tokens=self._most_tokens(each.ask.agent) - len(known),
            sampling=replace(self.sampling, stop_token_ids=own.stop_token_ids, stop=own.stop),
            seed=derive_seed(each.play.seed, "answer", each.ask.id, *place),
            affinity=each.ask.id,
        )

    def _most_tokens(self, agent: str) -> int:
        return min(self.max_tokens, self.team.agents[agent].max_response_tokens or self.max_tokens)

    def _take(self, results: Sequence[DecodeResult]) -> None:
        ended = []
        for result in results:
            each = self._in_flight.pop(result.uid)
            self.num_decoded += len(result.token_ids)
            each.seconds += result.seconds
            each.partial.extend(result.token_ids, result.logprobs, result.version)
            ended.append((each, result.finish, result.error))
        self._end(*ended)

    def _end(self, *ended: tuple[Completion, Finish, str]) -> None:
        """Completions have ended, and are judged; or they wait."""
        none = Prompt(np.zeros(0, np.int32), "(the prompt is longer than max_input_tokens)")
        samples = self.team.samples(
            [
                Ending(each.episode, each.ask, 0, each.prompt or none, each.partial, finish, error)
                for each, finish, error in ended
            ]
        )
        for (each, _, _), sample in zip(ended, samples, strict=True):
            if sample.finish is Finish.WAITING:
                each.episode.wait(sample)
                self._go_on(each.play)
            else:
                (judgement,) = self.team.begin_judging([(each.episode, each.ask, sample)])
                self._judging[each] = sample, judgement

    def _take_judged(self) -> None:
        done = {each: found for each, found in self._judging.items() if found[1] is None or found[1].done()}
        for each, (sample, judgement) in done.items():
            del self._judging[each]
            play = each.play
            reward = None if judgement is None else judgement.result()
            each.said = self.team.rewarded(each.episode, each.ask, sample, reward)
            if play.is_followed:
                play.said.append(replace(each.said, full_text=None, prompt_text=""))
                play.seconds[each.said.uid] = each.seconds
            elif self.on_said is not None:
                self.on_said(each)
            play.episode.close(each.ask, (each.said,))
            del play.open[each.uid]
            self._go_on(play)

    def _take_outputs(self) -> None:
        for future in [future for future in self._calling if future.done()]:
            play, call = self._calling.pop(future)
            play.episode.outputs[call.id] = future.result()
            self._go_on(play)

    def _report(self, *, is_last: bool = False) -> None:
        now = self.now()
        if self.progress is not None and (is_last or now - self._reported_s > _REPORT_S):
            self._reported_s = now
            num_over = sum(play.has_ended if play.is_followed else not play.open for play in self._plays)
            self.progress(num_over, len(self._plays), self.num_decoded)
