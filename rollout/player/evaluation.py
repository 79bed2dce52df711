"""Player's game for an evaluation: episodes played to their ends with one set of weights.

Nothing is trained, segmented or checkpointed.

Episodes do not wait for each other: requests that a finished completion makes possible are submitted at once. So no slot stays
free, and the total time is that of the longest episode rather than the sum of each round's longest call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.completion import Completion, OpenAsk
from marsrl.rollout.player.player import Player
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.team import Team
from marsrl.rollout.types import Ask, Sample

_COLLECT_S = 0.2  # timeout of one collect

Cast = Mapping[str, tuple[str, int]]
"""Agents that an adapter plays in place of their policies: {agent: (adapter, version)}, such as {"second": ("main@slot1",
40)}."""

OnProgress = Callable[[int, int, int, str], None]
"""Called repeatedly with (finished episodes, total episodes, tokens decoded so far, description of the calls with most open
work)."""
FIXED = "fixed inputs"


@dataclass(frozen=True, slots=True)
class Played:
    """An episode played to its end.

    samples: in order of their ends, with tokens, prompts and texts, which episodes do not keep.
    seconds: engine time (DecodeResult.seconds), by uid. usage: Completion.usage, by uid.
    latency_s: wall time from the first engine request or tool call to the last judged answer. It includes waits in the engines'
        queues, so concurrent episodes lengthen it. None if nothing was asked (every prompt was too long).
    """

    episode: Episode
    samples: tuple[Sample, ...]
    seconds: Mapping[str, float]
    usage: Mapping[str, tuple[int, int] | None]
    latency_s: float | None


OnEnd = Callable[[Played], None]


@dataclass(slots=True, eq=False)
class _Play:
    """A running episode. seed: seed of its draws. is_followed: True to play the episode to its end, False to play only given
    asks.

    cast: see Cast.
    """

    episode: Episode
    seed: int
    is_followed: bool
    cast: Cast = field(default_factory=dict)
    began_s: float | None = None
    has_asked: bool = False  # True after the first request to an engine or a tool
    samples: list[Sample] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    usage: dict[str, tuple[int, int] | None] = field(default_factory=dict)


class EvaluationPlay:
    """Game that plays an evaluation's episodes; see the module.

        play = EvaluationPlay(team, versions, 4096, Sampling())
        play.add(episodes, seed=1)
        asked = play.ask([(episode, ask), ...], seed=2)
        play.finish()                                     # plays all of these concurrently
        [each.sample for each in asked]

    max_tokens: maximum tokens of one completion. sampling: replaces the agents' sampling, except stop conditions. on_said: called
    with each completion of `ask` once it is judged. most_open: maximum concurrent episodes. A draw depends only on its ask and
    the seed, not on concurrent episodes.
    """

    has_segments, answers_too_long = False, True

    def __init__(
        self,
        team: Team,
        versions: Mapping[str, int],
        max_tokens: int,
        sampling: Sampling,
        *,
        progress: OnProgress | None = None,
        on_end: OnEnd | None = None,
        on_said: Callable[[Completion], None] | None = None,
        most_open: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._team, self._max_tokens, self._sampling, self._now = team, max_tokens, sampling, now
        self._progress, self._on_end, self._on_said, self._most_open = progress, on_end, on_said, most_open
        self._player = Player(team, self)
        self._player.resume(versions)
        self._plays: dict[int, _Play] = {}  # running episodes by id(), since an episode may have equal copies
        self._later: deque[_Play] = deque()
        self._num_open = self._num_over = self._num_episodes = 0
        self._calls: dict[str, list[int]] = {}  # [open calls, all calls] by agent and round
        # Keys of _calls by open ask: id() of its episode, which may have copies, and the ask's id.
        self._call_of: dict[tuple[int, str], str] = {}

    def add(self, episodes: Sequence[Episode], seed: int, cast: Cast | None = None) -> None:
        """Play the episodes to their ends, with one sample per ask. cast: adapters that play some agents; None: none."""
        self._num_episodes += len(episodes)
        for episode in episodes:
            self._plays[id(episode)] = play = _Play(episode, seed, is_followed=True, cast=cast or {})
            self._later.append(play)
        self._begin()

    def ask(self, asks: Sequence[tuple[Episode, Ask]], seed: int) -> list[Completion]:
        """Return a new completion for each ask; `finish` decodes them to their end and judges them.

        The episodes are not played further. An ask whose prompt is too long gets an empty completion that counts as overlong.
        """
        asked = []
        for episode, ask in asks:
            self._plays.setdefault(id(episode), _Play(episode, seed, is_followed=False))
            asked += self._ask(episode, [ask])
        return asked

    def finish(self) -> None:
        """Play until all added episodes and asks have ended."""
        before = self._num_decoded() if self._progress is not None else 0
        while self._player.is_busy or self._later:
            self._begin()
            self._player.submit()
            self._player.take(self._player.collect(_COLLECT_S))
            if self._progress is not None:
                self._progress(self._num_over, self._num_episodes, self._num_decoded() - before, self._most_calls())

    def _num_decoded(self) -> int:
        """Return the number of tokens decoded by all engines, including those of unfinished completions."""
        return sum(sum(pool.num_decoded()) for pool in self._team.pools.values())

    def _most_calls(self) -> str:
        """Describe the agent and round with the most open calls: "verifier1, round 3: 12 of 40 calls"; "" if none is open.

        The n-th call of an agent in an episode belongs to the agent's round n. The total includes the calls begun so far.
        """
        name, (num_open, num_asked) = max(self._calls.items(), key=lambda each: each[1][0], default=("", (0, 0)))
        return f"{name}: {num_asked - num_open} of {num_asked} calls" if num_open else ""

    def _begin(self) -> None:
        while self._later and (self._most_open is None or self._num_open < self._most_open):
            self._num_open += 1
            play = self._later.popleft()
            play.began_s = self._now()
            self._player.begin(play.episode)
            self._player.settle()

    def _ask(self, episode: Episode, asks: Sequence[Ask]) -> list[Completion]:
        is_followed = self._plays[id(episode)].is_followed
        for ask in asks:
            of_agent = [each.id for each in episode.asks.values() if each.agent == ask.agent]
            name = f"{ask.agent}, {f'round {of_agent.index(ask.id) + 1}' if is_followed else FIXED}"
            calls = self._calls.setdefault(name, [0, 0])
            calls[0] += 1
            calls[1] += 1
            self._call_of[id(episode), ask.id] = name
        opened = self._player.ask(episode, [replace(ask, num_samples=1) for ask in asks])
        return [each for ask in opened for each in ask.completions]

    # Callbacks of the player.

    def most_tokens(self, agent: str) -> int:
        return min(self._max_tokens, self._team.agents[agent].max_response_tokens or self._max_tokens)

    def request(self, completion: Completion) -> DecodeRequest:
        play, known, agent = self._plays[id(completion.episode)], len(completion.token_ids), completion.agent
        play.has_asked = True
        agent_sampling = self._team.sampling(agent)
        position = (known,) if known else ()
        adapter, version = play.cast.get(agent, ("", 0))  # "" means the adapter of the agent's policy
        return completion.request(
            self.most_tokens(agent) - known,
            replace(self._sampling, stop_token_ids=agent_sampling.stop_token_ids, stop=agent_sampling.stop),
            derive_seed(play.seed, "answer", completion.of.ask.id, *position),
            adapter=adapter,
            adapter_version=version,
        )

    def goes_on(self, completion: Completion, result: DecodeResult) -> bool:
        return True

    def judged(self, completion: Completion) -> None:
        play, sample = self._plays[id(completion.episode)], completion.sample
        assert sample is not None, f"{completion.uid} is not over"
        if name := self._call_of.pop((id(completion.episode), completion.of.ask.id), ""):  # "" for a program's call
            self._calls[name][0] -= 1
        if play.is_followed:
            play.samples.append(sample)
            play.seconds[sample.uid], play.usage[sample.uid] = completion.seconds, completion.usage
            return
        if self._on_said is not None:
            self._on_said(completion)

    def closed(self, ask: OpenAsk, samples: tuple[Sample, ...]) -> None:
        """Do nothing: completions were recorded as they ended."""

    def is_followed(self, episode: Episode) -> bool:
        return self._plays[id(episode)].is_followed or bool(episode.waiting)

    def followed(self, episode: Episode, asks: Sequence[Ask]) -> None:
        self._ask(episode, asks)

    def ended(self, episode: Episode) -> None:
        play = self._plays[id(episode)]
        if not play.is_followed:
            return
        self._num_open -= 1
        self._num_over += 1
        if self._on_end is not None:
            assert play.began_s is not None
            latency_s = self._now() - play.began_s if play.has_asked or episode.calls else None
            self._on_end(Played(episode, tuple(play.samples), play.seconds, play.usage, latency_s))
        play.samples, play.seconds, play.usage = [], {}, {}
