"""Plays problems in stages: what is submitted, what is carried over, what is finished, what is asked next.

    stage k:   new problems + the picks of stage k-1 + unfinished samples
                    | one ordered submission; each sample decodes at most rollout.tokens_per_stage tokens
                    v
               finished samples -> parsed -> judged -> complete groups -> training queue (all agents at once)
                                                          | what the team asks next (Orchestration.follow)
                                                          v
                                                     picks, asked in stage k+1

A sample that waits for a tool or for another agent goes on within the stage, and so does its episode.

This is MarsRL's agentic pipeline (arXiv:2511.11373, section 3.3): the unit of training is an agent's finished group, so
up to five agents of different problems are in flight in one stage. `pipeline: trajectory` plays stages until every
problem of the step has ended: the baseline. With rollout.overlap, event_scheduler.py plays instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Progress
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.schedule.ledger import Ended, Ledger, RolloutState, StepBatch
from marsrl.rollout.schedule.partial_rollouts import OpenAsk, tokens_behind
from marsrl.rollout.types import Finish, Sample

_PROGRESS_S = 0.2


class Scheduler(Ledger):
    """Stage and step are 1:1; nothing runs between two calls. See the module's diagram."""

    def next_batch(self, versions: Mapping[str, int], progress: Progress | None = None) -> StepBatch:
        """Play until a step's groups are there: one stage, or all stages of a step's trajectories.

        Args:
            versions: the policy version that every policy's engines hold.
        """
        if self.state.ready:  # left by a run with rollout.overlap
            self.state.num_taken += 1
            return self.state.ready.pop(0)
        batches = [self._stage(versions, progress, new_problems=True)]
        if self.config.pipeline == "trajectory":
            while self.state.pending or self.state.open:
                done = sum(int(batch.metrics["rollout/tokens"]) for batch in batches)
                batches.append(self._stage(versions, tokens_behind(done, progress), new_problems=False))
        counts: Counter[str] = Counter()
        for batch in batches:
            counts.update(batch.metrics)
        groups = tuple(g for batch in batches for g in batch.groups)
        self.state.num_stages = self.state.num_batches = self.state.num_taken = self.state.num_taken + 1
        return StepBatch(groups, {**counts, "rollout/stages": len(batches), "rollout/unfinished": self.num_unfinished})

    @contextmanager
    def resting(self, versions: Mapping[str, int] | None = None) -> Iterator[None]:
        """Engines are at rest between two stages anyway; the next call of next_batch tells the versions."""
        yield

    def snapshot(self) -> RolloutState:
        return RolloutState(self.state.copy(), self.source.state())

    def restore(self, state: RolloutState) -> None:
        self.state = state.scheduler
        self.source.load(state.source)
        self.resume_waiting()

    def close(self) -> None:
        """Nothing of ours is left running."""

    def _stage(self, versions: Mapping[str, int], progress: Progress | None, *, new_problems: bool) -> StepBatch:
        self.note_stage()
        self.counts: Counter[str] = Counter()
        asks, self.state.pending = self.state.pending, []
        if new_problems and self.num_unfinished <= self.config.max_unfinished:
            asks += self.draw(self.num_unfinished)
        self.open_asks(asks, versions)
        work = [(opened, index) for opened in self._in_order() for index in opened.partial]
        while True:
            work = [(opened, index) for opened, index in work if not self.is_waiting(opened, index)]
            self._judge(self._decode(work, versions, progress))
            self._close_whole(versions)
            self.state.pending += self.take_outputs(timeout_s=None)
            work, ended = self.take_resumed()
            self._judge(ended)
            work += [(opened, index) for opened in self._open_for_waiting(versions) for index in opened.partial]
            if not (work or ended or self.is_calling or self.is_stirred):
                break
        self.note_faults()
        groups, self.state.closed = self.state.closed, []
        return StepBatch(tuple(groups), self.counts)

    def _in_order(self) -> list[OpenAsk]:
        return [opened for _, opened in sorted(self.state.open.items())]

    def _close_whole(self, versions: Mapping[str, int]) -> None:
        for each in self._in_order():
            if each.is_complete or self.is_overdue(each, versions):
                self.state.pending += self.close_ask(each)

    def _open_for_waiting(self, versions: Mapping[str, int]) -> list[OpenAsk]:
        """Open, of what is pending, the asks of episodes in which a sample waits."""
        now = [ask for ask in self.state.pending if self.episode(ask).waiting]
        self.state.pending = [ask for ask in self.state.pending if not self.episode(ask).waiting]
        return self.open_asks(now, versions)

    def _decode(
        self, work: Sequence[tuple[OpenAsk, int]], versions: Mapping[str, int], progress: Progress | None
    ) -> list[tuple[OpenAsk, int, Sample]]:
        """One ordered submission to the engines; returns what finished, the rest stays partial or waits."""
        finished = []
        for policy, pool in self.team.pools.items():
            own = [(opened, index) for opened, index in work if self.policy_of(opened.ask.agent) == policy]
            requests = [self.request(opened, index) for opened, index in own]
            behind = tokens_behind(self.counts["rollout/tokens"], progress)
            results = self._play(pool, requests, versions[policy], behind) if requests else []
            ended = []
            for (opened, index), result in zip(own, results, strict=True):
                partial, finish = self.extended(opened, index, result)
                if finish is Finish.UNFINISHED:
                    opened.partial[index] = partial
                else:
                    ended.append(Ended(opened, index, partial, finish, result.error))
            for each, sample in zip(ended, self.samples(ended), strict=True):
                if sample.finish is Finish.WAITING:
                    self.state.pending += self.suspend(each.opened, each.place, each.partial, sample)
                else:
                    finished.append((each.opened, each.place, sample))
        return finished

    def _play(
        self, pool: EnginePool, requests: Sequence[DecodeRequest], version: int, progress: Progress | None
    ) -> list[DecodeResult]:
        """Results in the order of the requests: all of them to the end, or until rollout.finish_share has finished."""
        if self.config.finish_share == 1:
            return pool.generate(requests, version=version, on_progress=progress)
        left = {
            request.uid: self.most_tokens(self.state.open[request.affinity].ask.agent) - self._num_known(request)
            for request in requests
        }
        results: dict[str, DecodeResult] = {}
        num_finished, num_tokens = 0, 0
        pool.submit(requests, version=version)
        while len(results) < len(requests):
            has_share = num_finished >= self.config.finish_share * len(requests)
            for result in pool.drain() if has_share else pool.collect(_PROGRESS_S):
                results[result.uid] = result
                num_tokens += len(result.token_ids)
                num_finished += result.finish is not Finish.LENGTH or len(result.token_ids) >= left[result.uid]
            if progress is not None:
                progress(num_tokens)
        return [results[request.uid] for request in requests]

    def _num_known(self, request: DecodeRequest) -> int:
        """Tokens of its completion that a request begins with."""
        return len(request.token_ids) - len(self.state.open[request.affinity].prompt_ids)

    def _judge(self, finished: Sequence[tuple[OpenAsk, int, Sample]]) -> None:
        judged = self.team.judged([(self.episode(each.ask), each.ask, sample) for each, _, sample in finished])
        for (opened, index, _), sample in zip(finished, judged, strict=True):
            del opened.partial[index]
            opened.finished[index] = sample
