"""Plays given episodes to their ends with one set of weights: evaluation. Nothing is trained, cut into stages or kept.

all episodes -> asks of the round -> completions -> calls of tools, asks for what waits -> ... -> judged -> next round
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace

import numpy as np

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Progress, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.schedule.partial_rollouts import NOTHING_OPEN, Partial, tokens_behind
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.team import Prompt, Team
from marsrl.rollout.types import Ask, Finish, Sample, ToolCall


@dataclass(slots=True)
class _Completion:
    """The one sample of an ask. prompt: None where it is longer than the agent may read. said: once it has ended."""

    episode: Episode
    ask: Ask
    prompt: Prompt | None
    partial: Partial = field(default_factory=Partial)
    said: Sample | None = None

    @property
    def uid(self) -> str:
        return f"{self.ask.id}:0"


@dataclass(slots=True)
class AtOnce:
    """See the module.

    max_tokens: of one completion. sampling: in place of the agents' own; what ends a completion is theirs.
    num_decoded: tokens so far. answered: all samples, with their tokens, which episodes do not keep, and without texts.
    """

    team: Team
    versions: Mapping[str, int]
    max_tokens: int
    sampling: Sampling
    progress: Progress | None = None
    num_decoded: int = 0
    answered: list[Sample] = field(default_factory=list)

    def play(self, episodes: Sequence[Episode], seed: Callable[[int], int]) -> None:
        """To their ends: one sample to each ask, one ask of each episode after the other. seed: of the round's draws."""
        number = 0
        while asked := self._follow(episodes):
            self.answer(asked, seed(number))
            number += 1

    def answer(self, asks: Sequence[tuple[Episode, Ask]], seed: int) -> list[Sample]:
        """One whole, judged completion to each ask, in order; the asks are over then.

        A prompt that is too long gets an empty completion that counts as overlong.
        """
        asked = [_Completion(episode, ask, self.team.prompt(episode, ask)) for episode, ask in asks]
        going, waiting = asked, list[_Completion]()
        while going or waiting:
            self._decode([each for each in going if each.prompt is not None], seed)
            for each in [each for each in going if each.prompt is None]:
                self._end(each, Finish.LENGTH)
            self._close([each for each in going if each.said is not None])
            waiting += [each for each in going if each.said is None]
            going = self._after_waiting(waiting) if waiting else []
            waiting = [each for each in waiting if each.uid in each.episode.waiting]
        return [each.said for each in asked if each.said is not None]

    def _follow(self, episodes: Sequence[Episode]) -> list[tuple[Episode, Ask]]:
        """What is asked next in each, after the tools that are called first."""
        asked = []
        while True:
            calls = []
            for episode in episodes:
                asks, own = self.team.follow(episode)
                asked += [(episode, ask) for ask in asks]
                calls += [(episode, call) for call in own]
            if not calls:
                return asked
            self._call(calls)

    def _call(self, calls: Sequence[tuple[Episode, ToolCall]]) -> None:
        assert self.team.tools is not None  # Team.follow lets no call through else
        futures = [(episode, call, self.team.tools.submit(call)) for episode, call in calls]
        wait([future for _, _, future in futures])
        for episode, call, future in futures:
            episode.outputs[call.id] = future.result()

    def _decode(self, going: Sequence[_Completion], seed: int) -> None:
        """Each to its end, or to where it waits."""
        for policy, pool in self.team.pools.items():
            own = [each for each in going if self.team.agents[each.ask.agent].policy == policy]
            requests = [self._request(each, seed) for each in own]
            behind = tokens_behind(self.num_decoded, self.progress)
            results = pool.generate(requests, version=self.versions[policy], on_progress=behind) if requests else []
            for each, result in zip(own, results, strict=True):
                self._take(each, result)

    def _request(self, each: _Completion, seed: int) -> DecodeRequest:
        assert each.prompt is not None
        own, known = self.team.sampling(each.ask.agent), each.partial.token_ids
        place = (len(known),) if len(known) else ()
        return DecodeRequest(
            uid=each.uid,
            token_ids=np.concatenate([each.prompt.ids, known]).astype(np.int32, copy=False),
            max_new_tokens=self._most_tokens(each.ask.agent) - len(known),
            sampling=replace(self.sampling, stop_token_ids=own.stop_token_ids, stop=own.stop),
            seed=derive_seed(seed, "answer", each.ask.id, *place),
            affinity=each.ask.id,
        )

    def _most_tokens(self, agent: str) -> int:
        return min(self.max_tokens, self.team.agents[agent].max_response_tokens or self.max_tokens)

    def _take(self, each: _Completion, result: DecodeResult) -> None:
        self.num_decoded += len(result.token_ids)
        each.partial.extend(result.token_ids, result.logprobs, result.version)
        self._end(each, result.finish, result.error)

    def _end(self, each: _Completion, finish: Finish, error: str = "") -> None:
        prompt = each.prompt or Prompt(np.zeros(0, np.int32), "(the prompt is longer than max_input_tokens)")
        sample = self.team.sample(each.episode, each.ask, 0, prompt, each.partial, finish, error)
        if sample.finish is Finish.WAITING:
            each.episode.wait(sample)
        else:
            each.said = sample

    def _close(self, ended: Sequence[_Completion]) -> None:
        samples = [each.said for each in ended if each.said is not None]
        judged = self.team.judged([(e.episode, e.ask, said) for e, said in zip(ended, samples, strict=True)])
        for each, sample in zip(ended, judged, strict=True):
            each.said = sample
            self.answered.append(replace(sample, text="", prompt_text=""))
            each.episode.close(each.ask, (sample,))

    def _after_waiting(self, waiting: Sequence[_Completion]) -> list[_Completion]:
        """What is to be decoded now: asks that waiting samples led to, and samples that go on.

        Where there is neither, nothing more can come, and they end as errors.
        """
        episodes = list({id(each.episode): each.episode for each in waiting}.values())
        new = [_Completion(episode, ask, self.team.prompt(episode, ask)) for episode, ask in self._follow(episodes)]
        resumed = []
        for each in waiting:
            tokens = self.team.continuation(each.episode, each.episode.waiting[each.uid])
            if tokens is not None and len(each.partial.token_ids) + len(tokens) < self._most_tokens(each.ask.agent):
                each.partial.go_on_with(tokens)
                resumed.append(each)
            elif tokens is not None:
                self._end(each, Finish.LENGTH)
        for each in resumed:
            del each.episode.waiting[each.uid]
        ended = [each for each in waiting if each.said is not None]
        if not (new or resumed or ended):
            for each in waiting:
                self._end(each, Finish.ERROR, each.episode.error or NOTHING_OPEN)
            ended = list(waiting)
        self._close(ended)
        return new + resumed
