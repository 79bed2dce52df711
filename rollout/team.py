"""The team: its agents, how each is asked, which engines answer, and who judges."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.engines.protocol import DecodeRequest, Progress, Sampling
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.schedule.partial_rollouts import Partial
from marsrl.rollout.types import Ask, Finish, IntArray, Problem, Reward, Sample

Judge = Callable[[Sequence[tuple[Problem, str]]], list[Reward]]
"""The task's judgement of (problem, answer) pairs, in order; what cannot be judged gets a missing reward."""


class WatchedJudge:
    """The task's judge, which tells on_call (number of answers, start, end; time.time()) of each call, where it is set."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.on_call: Callable[[int, float, float], None] | None = None

    def __call__(self, answers: Sequence[tuple[Problem, str]]) -> list[Reward]:
        start = time.time()
        rewards = self._judge(answers)
        if self.on_call is not None and answers:
            self.on_call(len(answers), start, max(start, time.time()))  # the wall clock may be set back
        return rewards


def derive_seed(run_seed: int, *path: object) -> int:
    """A 63-bit seed for one purpose, from the run's seed and names alone: no generator is shared or advanced."""
    text = "\x1f".join([str(run_seed), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Team:
    """Everything that is needed to have an agent answer and to judge what it said.

    renderers and pools are by policy name; an agent's policy is agents[name].policy.
    records_experts: policies whose engines record, for training, which experts each token went through.
    """

    agents: Mapping[str, AgentConfig]
    orchestration: Orchestration
    renderers: Mapping[str, ChatRenderer]
    pools: Mapping[str, EnginePool]
    judge: WatchedJudge
    records_experts: frozenset[str] = frozenset()

    def renderer(self, agent: str) -> ChatRenderer:
        return self.renderers[self.agents[agent].policy]

    def prompt(self, ask: Ask) -> tuple[IntArray, str] | None:
        """The prompt's tokens and text; None where it is longer than the agent's max_input_tokens."""
        prompt_ids, text = self.renderer(ask.agent).render(self.orchestration.messages(ask))
        return (prompt_ids, text) if len(prompt_ids) <= self.agents[ask.agent].max_input_tokens else None

    def sampling(self, agent: str) -> Sampling:
        """How the agent samples in training."""
        config = self.agents[agent]
        return Sampling(config.temperature, config.top_p, config.top_k, self.renderer(agent).stop_ids)

    def sample(
        self, ask: Ask, index: int, prompt: tuple[IntArray, str], partial: Partial, finish: Finish, error: str = ""
    ) -> Sample:
        """A finished completion as a parsed Sample, not judged yet."""
        sample = Sample(
            uid=f"{ask.group_id}:{index}",
            rollout_id=ask.rollout_id,
            problem_id=ask.problem.id,
            agent=ask.agent,
            group_id=ask.group_id,
            parent_uid=ask.parent.uid if ask.parent else None,
            prompt_ids=prompt[0],
            token_ids=partial.token_ids,
            is_sampled=np.ones(len(partial.token_ids), bool),
            rollout_logprobs=partial.logprobs,
            segments=partial.segments,
            finish=finish,
            text=self.renderer(ask.agent).decode(partial.token_ids),
            prompt_text=prompt[1],
            reward=Reward(np.nan, np.nan, note=error or "not judged"),
            routed_experts=partial.routed_experts,
        )
        return self.orchestration.parse(sample)

    def judged(self, finished: Sequence[tuple[Ask, Sample]]) -> list[Sample]:
        """The same samples with their rewards: the orchestration's rules, over the task's judgement where it is needed."""
        asked = [i for i, (_, sample) in enumerate(finished) if self.orchestration.needs_judge(sample)]
        pairs = [(finished[i][0].problem, finished[i][1].answer or "") for i in asked]
        judgements = dict(zip(asked, self.judge(pairs), strict=True))
        return [
            sample  # an error keeps its missing reward and the reason
            if sample.finish is Finish.ERROR
            else replace(sample, reward=self.orchestration.reward(ask, sample, judgements.get(i)))
            for i, (ask, sample) in enumerate(finished)
        ]

    def answer(
        self,
        asks: Sequence[Ask],
        versions: Mapping[str, int],
        *,
        max_tokens: int,
        seed: int,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
    ) -> list[Sample]:
        """One whole, judged completion to each ask, in order. Used where no group is wanted: evaluation, probes.

        `sampling` overrides the agents' own (its stop tokens do not). A prompt that is too long gets an empty
        completion that counts as overlong.
        """
        prompts = [self.prompt(ask) for ask in asks]
        no_room = (np.zeros(0, np.int32), "(the prompt is longer than max_input_tokens)")
        samples = [
            self.sample(ask, 0, prompt or no_room, Partial(), Finish.LENGTH)
            for ask, prompt in zip(asks, prompts, strict=True)
        ]
        for policy, pool in self.pools.items():
            chosen = [
                (i, ask, prompt)
                for i, (ask, prompt) in enumerate(zip(asks, prompts, strict=True))
                if prompt is not None and self.agents[ask.agent].policy == policy
            ]
            requests = [
                DecodeRequest(
                    uid=f"{ask.group_id}:0",
                    token_ids=prompt[0],
                    max_new_tokens=max_tokens,
                    sampling=replace(sampling or own, stop_token_ids=own.stop_token_ids),
                    seed=derive_seed(seed, "answer", ask.group_id),
                    affinity=ask.group_id,
                )
                for _, ask, prompt in chosen
                for own in [self.sampling(ask.agent)]
            ]
            results = pool.generate(requests, version=versions[policy], on_progress=progress) if requests else []
            for (i, ask, prompt), result in zip(chosen, results, strict=True):
                partial = Partial()
                partial.extend(result.token_ids, result.logprobs, result.version)
                samples[i] = self.sample(ask, 0, prompt, partial, result.finish, result.error)
        return self.judged(list(zip(asks, samples, strict=True)))
