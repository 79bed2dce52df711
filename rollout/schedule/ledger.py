"""What has been asked, what is being decoded and what is complete: the books that every scheduler keeps.

    asks -> open ones, of partial samples -> results -> finished samples -> judged -> closed -> groups for the trainer
      ^                   ^                     '-> waiting for calls of tools, other asks <-.     |
      |                   '----------------- Orchestration.continuation --------------------'     |
      '------------------------------------- Orchestration.follow --------------------------------'

No engine, no clock and no order of its own in here: a scheduler says when each of these happens.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.episode import Episode
from marsrl.rollout.schedule.partial_rollouts import Instance, OpenAsk, Partial
from marsrl.rollout.schedule.waiting import resume
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.protocol import CursorState, ProblemSource
from marsrl.rollout.team import Ending, Prompt, Team
from marsrl.rollout.types import Ask, Finish, Group, Sample, ToolCall, ToolOutput


class Ended(NamedTuple):
    """A partial sample with its last segment behind it, which has finished or waits. error: why, where it failed."""

    opened: OpenAsk
    place: int
    partial: Partial
    finish: Finish
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step trains on, and what the stage (or stages) that made it did.

    StepBatch((group, another), {"rollout/stages": 1.0, "rollout/unfinished": 12.0, ...})
    """

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


@dataclass(slots=True)
class SchedulerState:
    """All that a checkpoint must keep of the rollout (the problem source keeps its own).

    The last five fields are of rollouts that overlap with training; between two stages of others they are empty.
    """

    pending: list[Ask] = field(default_factory=list)  # asked in the next stage
    open: dict[str, OpenAsk] = field(default_factory=dict)  # by ask id
    instances: dict[str, Instance] = field(default_factory=dict)  # by rollout_id
    num_instances: int = 0  # problems drawn so far; a rollout_id is this number
    closed: list[Group] = field(default_factory=list)  # of the stage that is being played
    ready: list[StepBatch] = field(default_factory=list)  # of earlier stages, not trained yet
    num_stages: int = 0  # begun so far
    num_batches: int = 0  # made so far: stages that have ended
    num_taken: int = 0  # of these, batches given to the trainer

    def copy(self) -> SchedulerState:
        """A copy that stays as it is while the original goes on. Samples, groups and arrays never change: shared."""
        return SchedulerState(
            pending=list(self.pending),
            open={
                key: replace(
                    each,
                    finished=dict(each.finished),
                    partial={index: replace(partial) for index, partial in each.partial.items()},
                )
                for key, each in self.open.items()
            },
            instances={
                key: Instance({name: episode.copy() for name, episode in each.episodes.items()}, list(each.held))
                for key, each in self.instances.items()
            },
            num_instances=self.num_instances,
            closed=list(self.closed),
            ready=list(self.ready),
            num_stages=self.num_stages,
            num_batches=self.num_batches,
            num_taken=self.num_taken,
        )


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What a checkpoint keeps of the rollout: the scheduler's books, and where the problem source stands."""

    scheduler: SchedulerState
    source: CursorState


class Ledger:
    """The books and the steps that change them.

    Args:
        source: where problems come from; each draw of one is a rollout instance of its own.
        seed: of the run; every request's and every pick's own seed derives from it.
        trains_whole: the samples of a rollout instance are trained together, when all of it has ended, with its outcomes.
    """

    counts: Counter[str]  # metrics of the batch in the making

    def __init__(
        self, config: RolloutConfig, team: Team, source: ProblemSource, *, seed: int, trains_whole: bool = False
    ) -> None:
        self.config = config
        self.team = team
        self.source = source
        self.seed = seed
        self.trains_whole = trains_whole
        self.state = SchedulerState()
        self.counts = Counter()
        self._calling: dict[Future[ToolOutput], ToolCall] = {}
        self._stirred: dict[str, Episode] = {}  # by id, in which samples wait, and something has happened
        self.on_stage: Callable[[], None] | None = None  # told when a stage begins
        # told an episode's id when it begins, and (True) when it ends
        self.on_episode: Callable[[str, bool], None] | None = None

    @property
    def num_unfinished(self) -> int:
        """Samples that have been asked for and are not finished."""
        return sum(len(each.partial) for each in self.state.open.values())

    @property
    def is_playing(self) -> bool:
        """Does anything of what was drawn go on, or wait to be trained?"""
        return bool(self.state.instances or self.state.closed or self.state.ready)

    def note_stage(self) -> None:
        """A stage begins."""
        if self.on_stage is not None:
            self.on_stage()

    def resume_waiting(self) -> None:
        """After a restore: calls of tools that have no output are made again, and samples that wait are looked at."""
        for instance in self.state.instances.values():
            for episode in instance.episodes.values():
                self._call(episode.open_calls)
                self._stir(episode)

    def policy_of(self, agent: str) -> str:
        return self.team.agents[agent].policy

    def most_tokens(self, agent: str) -> int:
        """How long a completion of the agent may be, in tokens."""
        return self.team.agents[agent].max_response_tokens or self.config.max_response_tokens

    def note_faults(self) -> None:
        """What the pools have mended since the last call, into the metrics."""
        for pool in self.team.pools.values():
            faults = pool.take_faults()
            self.counts["rollout/engine_restarts"] += faults.engine_restarts
            self.counts["rollout/resubmitted"] += faults.resubmitted
            self.counts["rollout/failed_requests"] += faults.failed
        if self.team.tools is not None:
            self.counts.update(self.team.tools.take_counts())
        if self.team.judge.model is not None:
            self.counts.update(self.team.judge.model.take_counts("train"))

    def episode(self, ask: Ask) -> Episode:
        """The episode of an ask that is not over."""
        name = ask.episode_id
        return self.state.instances[name.partition(".")[0]].episodes[name]

    def draw(self, num_carried: int = 0) -> list[Ask]:
        """A stage's new problems. num_carried: samples that go on in it, which take places with rollout.stage_size=total."""
        config, asks = self.config, []
        taken = round(num_carried / config.group_size) if config.stage_size == "total" else 0
        for _ in range(config.prompts_per_step - taken):
            self.state.num_instances += 1
            rollout_id, problem = f"{self.state.num_instances:06d}", self.source.next_problem()
            team = self.team.orchestration
            names = [rollout_id] if team.is_one_episode else [f"{rollout_id}.{i}" for i in range(team.num_episodes)]
            episodes = {name: Episode(name, rollout_id, problem, self.seed) for name in names}
            self.state.instances[rollout_id] = Instance(episodes)
            for episode in list(episodes.values()):
                self._note_episode(episode, has_ended=False)
                asks += self._follow(episode)
        return asks

    def open_asks(self, asks: Sequence[Ask], versions: Mapping[str, int]) -> list[OpenAsk]:
        """Asks as partial samples without a token yet; one whose prompt is too long is over, counted, and followed on."""
        opened, left = [], deque(asks)
        while left:
            ask = left.popleft()
            episode = self.episode(ask)
            prompt = self.team.prompt(episode, ask)
            if prompt is None:
                self.counts["rollout/prompts_too_long"] += not episode.error
                left.extend(self._over(ask, ()))
                continue
            if prompt.is_cut:
                self.counts["rollout/prompts_cut"] += 1
            each = OpenAsk(ask, prompt.ids, prompt.text, opened_version=versions[self.policy_of(ask.agent)])
            each.partial = {index: Partial() for index in range(ask.num_samples)}
            self.state.open[ask.id] = each
            opened.append(each)
        return opened

    def request(self, opened: OpenAsk, index: int, num_decoded: int = 0) -> DecodeRequest:
        """The next segment of a partial sample, or what is left of it after num_decoded tokens."""
        partial = opened.partial[index]
        uid = f"{opened.ask.id}:{index}"
        left = self.most_tokens(opened.ask.agent) - len(partial.token_ids)
        return DecodeRequest(
            uid=uid,
            token_ids=np.concatenate([opened.prompt_ids, partial.token_ids]).astype(np.int32, copy=False),
            max_new_tokens=min(left, max(1, self.config.tokens_per_stage - num_decoded)),
            sampling=self.team.sampling(opened.ask.agent),
            seed=derive_seed(self.seed, "decode", uid, len(partial.token_ids)),
            affinity=opened.ask.id,
            experts_from=self._num_recorded(partial) if self._records_experts(opened.ask.agent) else None,
        )

    def _records_experts(self, agent: str) -> bool:
        return self.policy_of(agent) in self.team.records_experts

    @staticmethod
    def _num_recorded(partial: Partial) -> int:
        """Tokens of prompt and completion whose experts earlier segments recorded."""
        return 0 if partial.routed_experts is None else len(partial.routed_experts)

    def extended(self, opened: OpenAsk, index: int, result: DecodeResult) -> tuple[Partial, Finish]:
        """(the sample with this segment behind it, whether and how it has finished); the books are not changed."""
        given, of_agent = len(opened.prompt_ids) + len(opened.partial[index].token_ids), f"cost/{opened.ask.agent}"
        for total, own, count in (
            ("rollout/tokens", "output_tokens", len(result.token_ids)),
            ("rollout/prompt_tokens", "input_tokens", given),
            ("rollout/cached_tokens", "cached_tokens", result.num_cached_tokens),
        ):
            self.counts[total] += count
            self.counts[f"{of_agent}/{own}"] += count
        self.counts.update({f"{of_agent}/seconds": result.seconds})
        if result.kept_tokens is None and len(result.token_ids) and opened.ask.agent in self.team.max_kept:
            raise RuntimeError(
                f"{result.uid}: agents.{opened.ask.agent}.top_p and top_k truncate, and its engine did not say which tokens were "
                "kept, as loss.truncation=renormalise needs"
            )
        if result.kept_tokens is not None:
            self.counts["rollout/kept_tokens"] += len(result.kept_tokens.ids)
        partial = replace(opened.partial[index])
        partial.extend(result.token_ids, result.logprobs, result.version, result.routed_experts, result.kept_tokens)
        if result.finish in (Finish.STOP, Finish.ERROR):
            return partial, result.finish
        is_full = len(partial.token_ids) >= self.most_tokens(opened.ask.agent)
        return partial, Finish.LENGTH if is_full else Finish.UNFINISHED

    def samples(self, ended: Sequence[Ended]) -> list[Sample]:
        """Samples that have finished or wait, not judged yet."""
        return self.team.samples(
            [
                Ending(
                    self.episode(opened.ask),
                    opened.ask,
                    index,
                    Prompt(opened.prompt_ids, opened.prompt_text),
                    partial,
                    finish,
                    error,
                )
                for opened, index, partial, finish, error in ended
            ]
        )

    def suspend(self, opened: OpenAsk, index: int, partial: Partial, sample: Sample) -> list[Ask]:
        """The sample waits (take_resumed); the asks that follow."""
        opened.partial[index] = partial
        episode = self.episode(opened.ask)
        episode.wait(sample)
        return self._follow(episode)

    def is_waiting(self, opened: OpenAsk, index: int) -> bool:
        return f"{opened.ask.id}:{index}" in self.episode(opened.ask).waiting

    @property
    def is_calling(self) -> bool:
        """Are tools at work?"""
        return bool(self._calling)

    @property
    def is_stirred(self) -> bool:
        """May take_resumed find something?"""
        return bool(self._stirred)

    def take_outputs(self, timeout_s: float | None = 0) -> list[Ask]:
        """Enter what tools have said, waiting at most timeout_s for the first (None: for all); the asks that follow."""
        if not self._calling:
            return []
        until = ALL_COMPLETED if timeout_s is None else FIRST_COMPLETED
        done = wait(self._calling, timeout_s, until).done
        asks = []
        for future in [future for future in self._calling if future in done]:  # in the order of the calls
            call = self._calling.pop(future)
            instance = self.state.instances.get(call.episode_id.partition(".")[0])
            episode = instance.episodes.get(call.episode_id) if instance is not None else None
            if episode is not None:  # else it has ended without
                episode.outputs[call.id] = future.result()
                asks += self._follow(episode)
        return asks

    def take_resumed(self) -> tuple[list[tuple[OpenAsk, int]], list[tuple[OpenAsk, int, Sample]]]:
        """(waiting samples that go on, what they waited for behind them; those that end here, not judged yet)."""
        resumed, ended = [], list[Ended]()
        stirred, self._stirred = self._stirred, {}
        for episode in stirred.values():
            is_stuck = functools.partial(self._is_stuck, episode)
            for each in resume(self.team, episode, self._partial, self.most_tokens, is_stuck):
                opened, index = self._place(each.uid)
                self.counts["rollout/foreign_tokens"] += each.num_added
                if each.finish is None:
                    resumed.append((opened, index))
                else:
                    ended.append(Ended(opened, index, opened.partial[index], each.finish, each.error))
        samples = self.samples(ended)
        return resumed, [(each.opened, each.place, sample) for each, sample in zip(ended, samples, strict=True)]

    def _place(self, uid: str) -> tuple[OpenAsk, int]:
        """The open ask of a sample, and which of its samples it is."""
        name, _, place = uid.rpartition(":")
        return self.state.open[name], int(place)

    def _partial(self, uid: str) -> Partial:
        opened, index = self._place(uid)
        return opened.partial[index]

    def _is_stuck(self, episode: Episode) -> bool:
        """Is nothing open in it but samples that wait?"""
        open_asks = [ask for name, ask in episode.asks.items() if name not in episode.answers]
        return not episode.open_calls and all(
            ask.id in self.state.open
            and all(f"{ask.id}:{index}" in episode.waiting for index in self.state.open[ask.id].partial)
            and self.state.open[ask.id].partial
            for ask in open_asks
        )

    def _stir(self, episode: Episode) -> None:
        if episode.waiting:
            self._stirred[episode.id] = episode

    def _call(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            assert self.team.tools is not None  # Team.follow lets no call through else
            self._calling[self.team.tools.submit(call)] = call

    def is_overdue(self, opened: OpenAsk, versions: Mapping[str, int]) -> bool:
        """Does the ask go on without its stragglers?"""
        age = versions[self.policy_of(opened.ask.agent)] - opened.opened_version
        return self.config.group_completion == "drop_stragglers" and age > self.config.max_group_age

    def close_ask(self, opened: OpenAsk) -> list[Ask]:
        """Take an ask off the books of open ones, with what has finished of it; the asks that follow.

        Groups that can be trained now are in state.closed.
        """
        self.counts["rollout/dropped_stragglers"] += len(opened.partial)
        del self.state.open[opened.ask.id]
        samples = tuple(sample for _, sample in sorted(opened.finished.items()))
        self.counts["rollout/errors"] += sum(sample.finish is Finish.ERROR for sample in samples)
        ask, episode = opened.ask, self.episode(opened.ask)
        if self.trains_whole or ask.group != ask.id:
            self.state.instances[episode.rollout_id].held += samples
        else:
            self.state.closed.append(Group(ask.group, episode.rollout_id, ask.agent, samples))
        return self._over(opened.ask, samples)

    def _over(self, ask: Ask, samples: tuple[Sample, ...]) -> list[Ask]:
        episode = self.episode(ask)
        episode.close(ask, samples)
        return self._follow(episode)

    def _follow(self, episode: Episode) -> list[Ask]:
        """The asks that are new; calls of tools are made, and an episode without anything open has ended."""
        asks, calls = self.team.follow(episode)
        self._call(calls)
        self._stir(episode)
        self._end_if_over(episode)
        return asks

    def _note_episode(self, episode: Episode, *, has_ended: bool) -> None:
        if self.on_episode is not None:
            self.on_episode(episode.id, has_ended)

    def _end_if_over(self, episode: Episode) -> None:
        """An episode without an open ask or call has ended; with the last one of its instance, what was held is trained."""
        if not episode.is_at_its_end:
            return
        self._note_episode(episode, has_ended=True)
        self.counts["rollout/episodes"] += 1
        self.counts.update({f"team/{name}": value for name, value in self.team.metrics(episode).items()})
        instance = self.state.instances[episode.rollout_id]
        if self.trains_whole:
            outcomes = self.team.outcomes(episode)
            instance.held = [
                self.team.with_outcome(each, outcomes[each.uid]) if each.uid in outcomes else each
                for each in instance.held
            ]
        self.counts["rollout/failed_episodes"] += episode.error != ""
        del instance.episodes[episode.id]
        if instance.episodes:
            return
        groups: dict[tuple[str, str], list[Sample]] = {}  # of one agent each, whatever a team's asks share a name with
        for sample in instance.held:
            groups.setdefault((sample.group_id, sample.agent), []).append(sample)
        for (name, agent), samples in sorted(groups.items()):
            in_order = tuple(sorted(samples, key=lambda sample: sample.uid))
            self.state.closed.append(Group(name, episode.rollout_id, agent, in_order))
        del self.state.instances[episode.rollout_id]
