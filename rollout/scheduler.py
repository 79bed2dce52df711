"""Plays problems in stages: what is submitted, what is carried over, what is finished, what is asked next.

    stage k:   new problems + the picks of stage k-1 + unfinished samples
                    | one ordered submission; each sample decodes at most rollout.tokens_per_stage tokens
                    v
               finished samples -> parsed -> judged -> complete groups -> training queue (all agents at once)
                                                          | once an agent's groups of an instance are all complete
                                                          v
                                                     picks, asked in stage k+1

This is MarsRL's agentic pipeline (arXiv:2511.13373, section 3.3): the unit of training is an agent's finished group, so
up to five agents of different problems are in flight in one stage. `pipeline: trajectory` plays stages until every
problem of the step has ended: the baseline.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Progress
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.team import Team, derive_seed
from marsrl.rollout.types import Ask, Finish, Group, Sample
from marsrl.rollout.unfinished import OpenGroup, Partial, Round


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on, and what the stage (or stages) that made it did."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


@dataclass(slots=True)
class SchedulerState:
    """All that a checkpoint must keep of the rollout between two stages (the problem source keeps its own)."""

    pending: list[Ask] = field(default_factory=list)  # asked in the next stage
    open: dict[str, OpenGroup] = field(default_factory=dict)  # by group_id
    rounds: dict[tuple[str, str], Round] = field(default_factory=dict)  # by (rollout_id, agent)
    num_instances: int = 0  # problems drawn so far; a rollout_id is this number


class Scheduler:
    """The state between stages; see the module's diagram.

    Args:
        source: where problems come from; each draw of one is a rollout instance of its own.
        seed: of the run; every request's and every pick's own seed derives from it.
    """

    def __init__(self, config: RolloutConfig, team: Team, source: ProblemSource, *, seed: int) -> None:
        self.config = config
        self.team = team
        self.source = source
        self.seed = seed
        self.state = SchedulerState()

    @property
    def num_unfinished(self) -> int:
        """Samples carried over to the next stage."""
        return sum(len(group.partial) for group in self.state.open.values())

    def next_batch(self, versions: Mapping[str, int], progress: Progress | None = None) -> Batch:
        """Play until a step's groups are there: one stage, or all stages of a step's trajectories.

        Args:
            versions: the policy version that every policy's engines hold.
        """
        batches = [self._stage(versions, progress, new_problems=True)]
        if self.config.pipeline == "trajectory":
            while self.state.pending or self.state.open:
                done = sum(int(batch.metrics["rollout/tokens"]) for batch in batches)
                batches.append(self._stage(versions, _behind(done, progress), new_problems=False))
        counts: Counter[str] = Counter()
        for batch in batches:
            counts.update(batch.metrics)
        groups = tuple(g for batch in batches for g in batch.groups)
        return Batch(groups, {**counts, "rollout/stages": len(batches), "rollout/unfinished": self.num_unfinished})

    def _stage(self, versions: Mapping[str, int], progress: Progress | None, *, new_problems: bool) -> Batch:
        counts: Counter[str] = Counter()
        asks = sorted(self.state.pending, key=lambda ask: ask.group_id)
        self.state.pending = []
        if new_problems and self.num_unfinished <= self.config.max_unfinished:
            asks += [self._draw() for _ in range(self.config.prompts_per_step)]
        self._open_groups(asks, versions, counts)
        finished = self._decode(versions, progress, counts)
        self._judge(finished)
        groups = self._close_groups(versions, counts)
        self._pick()
        return Batch(tuple(groups), counts)

    def _draw(self) -> Ask:
        self.state.num_instances += 1
        return self.team.orchestration.first_ask(f"{self.state.num_instances:06d}", self.source.next_problem())

    def _open_groups(self, asks: Sequence[Ask], versions: Mapping[str, int], counts: Counter[str]) -> None:
        for ask in asks:
            prompt = self.team.prompt(ask)
            if prompt is None:
                counts["rollout/prompts_too_long"] += 1
                continue
            group = OpenGroup(ask, *prompt, opened_version=versions[self._policy(ask.agent)])
            group.partial = {index: Partial() for index in range(self.config.group_size)}
            self.state.open[ask.group_id] = group
            self.state.rounds.setdefault((ask.rollout_id, ask.agent), Round()).asks[ask.group_id] = ask

    def _decode(
        self, versions: Mapping[str, int], progress: Progress | None, counts: Counter[str]
    ) -> list[tuple[OpenGroup, int, Sample]]:
        """One ordered submission to the engines; returns what finished, the rest stays partial."""
        finished = []
        for policy, pool in self.team.pools.items():
            work = [
                (group, index)
                for _, group in sorted(self.state.open.items())
                if self._policy(group.ask.agent) == policy
                for index in sorted(group.partial)
            ]
            requests = [self._request(group, index) for group, index in work]
            behind = _behind(counts["rollout/tokens"], progress)
            results = pool.generate(requests, version=versions[policy], on_progress=behind) if requests else []
            for (group, index), request, result in zip(work, requests, results, strict=True):
                counts["rollout/tokens"] += len(result.token_ids)
                counts["rollout/prompt_tokens"] += len(request.token_ids)
                counts["rollout/cached_tokens"] += result.num_cached_tokens
                counts["rollout/errors"] += result.finish is Finish.ERROR
                partial = group.partial[index]
                partial.extend(result.token_ids, result.logprobs, result.version)
                finish = self._finish(partial, result)
                if finish is not Finish.UNFINISHED:
                    del group.partial[index]
                    prompt = (group.prompt_ids, group.prompt_text)
                    sample = self.team.sample(group.ask, index, prompt, partial, finish, result.error)
                    finished.append((group, index, sample))
        return finished

    def _request(self, group: OpenGroup, index: int) -> DecodeRequest:
        partial = group.partial[index]
        uid = f"{group.ask.group_id}:{index}"
        left = self.config.max_response_tokens - len(partial.token_ids)
        return DecodeRequest(
            uid=uid,
            token_ids=np.concatenate([group.prompt_ids, partial.token_ids]).astype(np.int32, copy=False),
            max_new_tokens=min(left, self.config.tokens_per_stage),
            sampling=self.team.sampling(group.ask.agent),
            seed=derive_seed(self.seed, "decode", uid, len(partial.token_ids)),
            affinity=group.ask.group_id,
        )

    def _finish(self, partial: Partial, result: DecodeResult) -> Finish:
        if result.finish is not Finish.LENGTH:
            return result.finish
        return Finish.LENGTH if len(partial.token_ids) >= self.config.max_response_tokens else Finish.UNFINISHED

    def _judge(self, finished: Sequence[tuple[OpenGroup, int, Sample]]) -> None:
        judged = self.team.judged([(group.ask, sample) for group, _, sample in finished])
        for (group, index, _), sample in zip(finished, judged, strict=True):
            group.finished[index] = sample

    def _policy(self, agent: str) -> str:
        return self.team.agents[agent].policy

    def _close_groups(self, versions: Mapping[str, int], counts: Counter[str]) -> list[Group]:
        """Groups that are trained now: complete ones, and with drop_stragglers old ones without their stragglers."""
        closed = []
        for group_id, group in sorted(self.state.open.items()):
            age = versions[self._policy(group.ask.agent)] - group.opened_version
            overdue = self.config.group_completion == "drop_stragglers" and age > self.config.max_group_age
            if not group.is_complete and not overdue:
                continue
            counts["rollout/dropped_stragglers"] += len(group.partial)
            samples = tuple(sample for _, sample in sorted(group.finished.items()))
            done = Group(group_id, group.ask.rollout_id, group.ask.agent, samples)
            self.state.rounds[done.rollout_id, done.agent].groups[group_id] = done
            closed.append(done)
            del self.state.open[group_id]
        return closed

    def _pick(self) -> None:
        """Where an agent's groups of an instance are all closed, choose the outputs that the next agent is asked about."""
        for (rollout_id, agent), played in sorted(self.state.rounds.items()):
            if played.is_complete:
                rng = random.Random(derive_seed(self.seed, "pick", rollout_id, agent))
                pairs = [(played.asks[group_id], played.groups[group_id]) for group_id in sorted(played.asks)]
                self.state.pending += self.team.orchestration.next_asks(pairs, rng)
                del self.state.rounds[rollout_id, agent]


def _behind(done: int, progress: Progress | None) -> Progress | None:
    """Progress of a call that comes after others which decoded `done` tokens."""
    return None if progress is None else lambda tokens: progress(done + tokens)
