"""What has been asked, what is being decoded and what is complete: the books that every scheduler keeps.

    ask -> open group of G partial samples -> results -> finished samples -> judged -> closed group -> picks -> asks

No engine, no clock and no order of its own in here: a scheduler says when each of these happens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.schedule.partial_rollouts import OpenGroup, Partial, Round
from marsrl.rollout.tasks.protocol import CursorState, ProblemSource
from marsrl.rollout.team import Team, derive_seed
from marsrl.rollout.types import Ask, Finish, Group, Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on, and what the stage (or stages) that made it did."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


@dataclass(slots=True)
class SchedulerState:
    """All that a checkpoint must keep of the rollout (the problem source keeps its own).

    The last five fields are of rollouts that overlap with training; between two stages of others they are empty.
    """

    pending: list[Ask] = field(default_factory=list)  # asked in the next stage
    open: dict[str, OpenGroup] = field(default_factory=dict)  # by group_id
    rounds: dict[tuple[str, str], Round] = field(default_factory=dict)  # by (rollout_id, agent)
    num_instances: int = 0  # problems drawn so far; a rollout_id is this number
    closed: list[Group] = field(default_factory=list)  # of the stage that is being played
    ready: list[Batch] = field(default_factory=list)  # of earlier stages, not trained yet
    num_stages: int = 0  # begun so far
    num_batches: int = 0  # made so far: stages that have ended
    num_taken: int = 0  # of these, batches given to the trainer

    def copy(self) -> SchedulerState:
        """A copy that stays as it is while the original goes on. Samples, groups and arrays never change: shared."""
        return SchedulerState(
            pending=list(self.pending),
            open={
                key: replace(
                    group,
                    finished=dict(group.finished),
                    partial={index: replace(partial) for index, partial in group.partial.items()},
                )
                for key, group in self.open.items()
            },
            rounds={key: Round(dict(played.asks), dict(played.groups)) for key, played in self.rounds.items()},
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
    """

    counts: Counter[str]  # metrics of the batch in the making

    def __init__(self, config: RolloutConfig, team: Team, source: ProblemSource, *, seed: int) -> None:
        self.config = config
        self.team = team
        self.source = source
        self.seed = seed
        self.state = SchedulerState()
        self.counts = Counter()
        self.on_stage: Callable[[], None] | None = None  # told when a stage begins

    @property
    def num_unfinished(self) -> int:
        """Samples that have been asked for and are not finished."""
        return sum(len(group.partial) for group in self.state.open.values())

    def note_stage(self) -> None:
        """A stage begins."""
        if self.on_stage is not None:
            self.on_stage()

    def policy_of(self, agent: str) -> str:
        return self.team.agents[agent].policy

    def note_faults(self) -> None:
        """What the pools have mended since the last call, into the metrics."""
        for pool in self.team.pools.values():
            faults = pool.take_faults()
            self.counts["rollout/engine_restarts"] += faults.engine_restarts
            self.counts["rollout/resubmitted"] += faults.resubmitted
            self.counts["rollout/failed_requests"] += faults.failed

    def draw(self, num_carried: int = 0) -> list[Ask]:
        """A stage's new problems. num_carried: samples that go on in it, which take places with rollout.stage_size=total."""
        config, asks = self.config, []
        taken = round(num_carried / config.group_size) if config.stage_size == "total" else 0
        for _ in range(config.prompts_per_step - taken):
            self.state.num_instances += 1
            rollout_id = f"{self.state.num_instances:06d}"
            asks.append(self.team.orchestration.first_ask(rollout_id, self.source.next_problem()))
        return asks

    def open_groups(self, asks: Sequence[Ask], versions: Mapping[str, int]) -> list[OpenGroup]:
        """Groups of partial samples without a token yet; an ask whose prompt is too long is counted and left out."""
        opened = []
        for ask in asks:
            prompt = self.team.prompt(ask)
            if prompt is None:
                self.counts["rollout/prompts_too_long"] += 1
                continue
            group = OpenGroup(ask, *prompt, opened_version=versions[self.policy_of(ask.agent)])
            group.partial = {index: Partial() for index in range(self.config.group_size)}
            self.state.open[ask.group_id] = group
            self.state.rounds.setdefault((ask.rollout_id, ask.agent), Round()).asks[ask.group_id] = ask
            opened.append(group)
        return opened

    def request(self, group: OpenGroup, index: int, num_decoded: int = 0) -> DecodeRequest:
        """The next segment of a partial sample, or what is left of it after num_decoded tokens."""
        partial = group.partial[index]
        uid = f"{group.ask.group_id}:{index}"
        left = self.config.max_response_tokens - len(partial.token_ids)
        return DecodeRequest(
            uid=uid,
            token_ids=np.concatenate([group.prompt_ids, partial.token_ids]).astype(np.int32, copy=False),
            max_new_tokens=min(left, max(1, self.config.tokens_per_stage - num_decoded)),
            sampling=self.team.sampling(group.ask.agent),
            seed=derive_seed(self.seed, "decode", uid, len(partial.token_ids)),
            affinity=group.ask.group_id,
            experts_from=self._num_recorded(partial) if self._records_experts(group.ask.agent) else None,
        )

    def _records_experts(self, agent: str) -> bool:
        return self.policy_of(agent) in self.team.records_experts

    @staticmethod
    def _num_recorded(partial: Partial) -> int:
        """Tokens of prompt and completion whose experts earlier segments recorded."""
        return 0 if partial.routed_experts is None else len(partial.routed_experts)

    def extended(self, group: OpenGroup, index: int, result: DecodeResult) -> tuple[Partial, Finish]:
        """(the sample with this segment behind it, whether and how it has finished); the books are not changed."""
        self.counts["rollout/tokens"] += len(result.token_ids)
        self.counts["rollout/prompt_tokens"] += len(group.prompt_ids) + len(group.partial[index].token_ids)
        self.counts["rollout/cached_tokens"] += result.num_cached_tokens
        self.counts["rollout/errors"] += result.finish is Finish.ERROR
        partial = replace(group.partial[index])
        partial.extend(result.token_ids, result.logprobs, result.version, result.routed_experts)
        if result.finish in (Finish.STOP, Finish.ERROR):
            return partial, result.finish
        is_full = len(partial.token_ids) >= self.config.max_response_tokens
        return partial, Finish.LENGTH if is_full else Finish.UNFINISHED

    def sample(self, group: OpenGroup, index: int, partial: Partial, finish: Finish, error: str) -> Sample:
        """A finished sample, not judged yet."""
        return self.team.sample(group.ask, index, (group.prompt_ids, group.prompt_text), partial, finish, error)

    def is_overdue(self, group: OpenGroup, versions: Mapping[str, int]) -> bool:
        """Does the group go on without its stragglers?"""
        age = versions[self.policy_of(group.ask.agent)] - group.opened_version
        return self.config.group_completion == "drop_stragglers" and age > self.config.max_group_age

    def close_group(self, group: OpenGroup) -> Group:
        """Take the group off the books of open ones, with what has finished of it."""
        self.counts["rollout/dropped_stragglers"] += len(group.partial)
        samples = tuple(sample for _, sample in sorted(group.finished.items()))
        done = Group(group.ask.group_id, group.ask.rollout_id, group.ask.agent, samples)
        self.state.rounds[done.rollout_id, done.agent].groups[done.group_id] = done
        del self.state.open[done.group_id]
        return done

    def pick(self, rollout_id: str, agent: str) -> list[Ask]:
        """What the next agent is asked about, where all groups of this round are closed; [] where some are open."""
        played = self.state.rounds[rollout_id, agent]
        if not played.is_complete:
            return []
        rng = random.Random(derive_seed(self.seed, "pick", rollout_id, agent))
        pairs = [(played.asks[group_id], played.groups[group_id]) for group_id in played.asks]
        del self.state.rounds[rollout_id, agent]
        return self.team.orchestration.next_asks(pairs, rng)
