"""Player's game for training: problems begin in stages, and judged samples leave in groups for the trainer.

    want()   requests one more batch
    take()   returns a batch, if one is ready

Stage s of new problems begins once s <= batches wanted + rollout.overlap, and stage s-1 is over or leaves engines without work.

With rollout.overlap = 0 there is one stage per step, and the engines rest in between.

    stage k:   new problems + asks due from stage k-1 + unfinished samples
                    | one ordered submission; each sample decodes at most rollout.tokens_per_stage tokens
                    v
               finished samples -> judged, while others decode -> complete groups -> batch k (all agents at once)
                                                          | the team's next asks (Orchestration.follow)
                                                          v
                                                     asked in stage k+1

A sample that waits for a tool or another agent continues within the stage, and so does its episode. With `pipeline:
trajectory`, the baseline, a step has as many stages as its problems need to end. `pipeline: agentic` is MarsRL's pipeline
(arXiv:2511.11373, section 3.3): the unit of training is an agent's finished group, so up to five agents of different problems
are in flight in one stage.

With rollout.overlap > 0 the trainer trains meanwhile, and every request starts as soon as it is possible: the next segment of a
sample when a segment ends, and the team's next asks when a sample ends. A stage does not wait for the longest samples of the
previous one: it begins when every pool has a free slot. Stage s is over when every sample that was unfinished at its beginning
has finished or reached the end of a segment (waiting for input is not an end); with `pipeline: trajectory`, when nothing is
open. All groups closed since the previous stage then become batch s. So the decoder is at most rollout.overlap stages ahead of
the trainer, and a trained sample is at most about rollout.overlap + rollout.segments versions old, because its group waits for
its last sample. Asks made late in a stage belong to the next stage, and their samples are one version older. With trains_whole,
a sample also waits for the team's last call.

rollout.refill adds problems for groups without spread (refill.py). With rollout.overlap = 0 it adds them in waves: a stage that
would end continues with the problems that are due, in the order of draws. So neither their number nor the batch depends on the
order in which samples finish. With rollout.overlap > 0 a group that closes adds its problem at once, to the newest stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.completion import Completion, Instance, OpenAsk, State
from marsrl.rollout.player.player import Player
from marsrl.rollout.player.refill import Counting, RefillCounts, Rest, Spread
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.team import Team
from marsrl.rollout.types import Ask, Finish, Group, IntArray, Problem, Sample

_MOST_LENGTHS = 512  # finished completions from which the remaining length of another is estimated


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Training input of one step, with the metrics of its stage(s)."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


@dataclass(slots=True)
class RolloutState:
    """State of the rollout in a checkpoint."""

    open: dict[str, OpenAsk]  # unfinished asks, by id
    pending: list[Ask] = field(default_factory=list)  # asks of the next stage
    instances: dict[str, Instance] = field(default_factory=dict)  # running instances, by rollout_id
    # Draws so far, including those of resting problems; determines the next problem and its rollout_id.
    num_instances: int = 0
    closed: list[Group] = field(default_factory=list)  # groups closed since the last batch
    ready: list[StepBatch] = field(default_factory=list)  # batches not yet taken by the trainer
    num_stages: int = 0  # stages of new problems begun so far
    num_batches: int = 0  # stages ended so far; each has given a batch
    num_taken: int = 0  # batches taken by the trainer
    refill: RefillCounts = field(default_factory=RefillCounts)
    # Problems that rest, or have rested, by id. An entry is removed when a group of the problem has spread.
    resting: dict[str, Rest] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)  # metrics of decoding since the last batch

    def without_work(self) -> RolloutState:
        """Return the state between two stages, in which no problem is unfinished or waits to be trained."""
        num = self.num_batches
        return RolloutState(
            {}, num_instances=self.num_instances, num_stages=num, num_batches=num, num_taken=num, resting=self.resting
        )

    def copy(self) -> RolloutState:
        """Return an independent copy. Samples, groups and arrays are immutable, and shared."""
        return replace(
            self,
            pending=list(self.pending),
            open={name: each.copy() for name, each in self.open.items()},
            instances={
                name: replace(
                    each, episodes={of: episode.copy() for of, episode in each.episodes.items()}, held=list(each.held)
                )
                for name, each in self.instances.items()
            },
            closed=list(self.closed),
            ready=list(self.ready),
            refill=replace(self.refill),
            resting=dict(self.resting),
        )


class Stages:
    """Game of training, in stages; see the module. One thread at a time calls it; only player.collect may run concurrently.

        stages.resume({"main": 0}); stages.want()
        while (batch := stages.take()) is None:
            stages.advance(timeout_s=0.2)
        stages.rest(); ... new weights ...; stages.resume({"main": 1})

    source: source of problems; each draw of a problem is a rollout instance.
    seed: the run's seed, from which the seeds of requests and picks derive.
    trains_whole: True to train the samples of a rollout instance together, with its outcomes, once all of it has ended.
    counting: how groups are counted for rollout.refill and data.rest; None: both are off.
    """

    has_segments, answers_too_long = True, False

    def __init__(
        self,
        config: RolloutConfig,
        team: Team,
        source: ProblemSource,
        *,
        seed: int,
        trains_whole: bool = False,
        counting: Counting | None = None,
    ) -> None:
        self.config, self.team, self.source, self.seed, self.trains_whole = config, team, source, seed, trains_whole
        self._counting = counting
        # True if programs play sessions. A stage then ends when the episodes that it began end.
        self._plays_sessions = team.orchestration.plays_sessions
        # True if a stage ends when all samples that it began end, so that the engines rest between stages.
        self.in_step = config.overlap == 0 and not self._plays_sessions
        # Completions, or ids of episodes, that each running stage waits for, oldest first.
        self._awaited: deque[set[Completion | str]] = deque()
        self.player = Player(team, self, in_step=self.in_step)
        self.state = RolloutState(self.player.open)
        self._num_wanted = self._num_played = 0  # batches wanted; stages played for the next batch
        # Lengths in tokens of each agent's latest finished completions, latest last; 0: an entry without a completion yet.
        self._lengths: dict[str, IntArray] = defaultdict(lambda: np.zeros(_MOST_LENGTHS, np.int32))
        self.on_stage: Callable[[], None] | None = None  # called when a stage begins
        # Called with (episode's id, False) when an episode begins, and with (id, True) when it ends.
        self.on_episode: Callable[[str, bool], None] | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished())

    @property
    def is_playing(self) -> bool:
        """True if any drawn problem is running or waits to be trained."""
        return bool(self.state.instances or self.state.closed or self.state.ready)

    # Called for the trainer.

    def want(self) -> None:
        """Request one more batch: one more stage may begin."""
        self._num_wanted += 1
        self._begin_if_due()

    def take(self) -> StepBatch | None:
        """Return the oldest ready batch, or None."""
        if not self.state.ready:
            return None
        self.state.num_taken += 1
        return self.state.ready.pop(0)

    def rest(self, adapters: Sequence[str] | None = None) -> None:
        """Abort decoding, which frees the engines for other calls; see Player.rest."""
        self.player.rest(adapters)
        self._end_if_over()

    def resume(self, versions: Mapping[str, int]) -> None:
        """Resume after `rest`, under the given policy versions."""
        self.player.resume(versions)
        for ask in [ask for ask in self.state.open.values() if self._is_overdue(ask)]:
            self.player.close(ask)
        self.player.settle()
        self._begin_if_due()

    def snapshot(self) -> RolloutState:
        """Return the state for a checkpoint. A running segment is not part of it and is decoded again."""
        return replace(self.state.copy(), counts=dict(self.player.counts))

    def restore(self, state: RolloutState) -> None:
        """Continue from a checkpoint; before the first `resume`."""
        self.state = state
        # Running stages continue as one: unfinished completions belong to the oldest.
        self.state.num_stages = min(self.state.num_stages, self.state.num_batches + 1)
        self._num_wanted = self.state.num_taken
        if self._counting is None or not self._counting.rest:
            self.state.resting.clear()  # data.rest has been turned off since the checkpoint
        self.player.counts.update(self.state.counts)
        episodes = [each for instance in self.state.instances.values() for each in instance.episodes.values()]
        self.player.restore(self.state.open, episodes)
        self._go_on()
        if self.state.num_stages == self.state.num_batches:
            self._awaited.popleft()

    # Called by the decoder.

    def advance(self, timeout_s: float) -> None:
        """Submit what is due, wait for results (at most timeout_s), and process them."""
        self.player.submit()
        self.absorb(self.player.collect(timeout_s))

    def absorb(self, results: Sequence[DecodeResult]) -> None:
        """Process results and everything that follows from them."""
        self.player.take(results)
        self._end_if_over()
        self._begin_if_due()

    # Callbacks of the player.

    def most_tokens(self, agent: str) -> int:
        return self.team.agents[agent].max_response_tokens or self.config.max_response_tokens

    def request(self, completion: Completion) -> DecodeRequest:
        known, agent = len(completion.token_ids), completion.agent
        left = max(1, self.config.tokens_per_stage - completion.num_decoded)
        max_new_tokens = min(self.most_tokens(agent) - known, left)
        more: dict[str, float | int | None] = {}
        if self.team.agents[agent].policy in self.team.records_experts:
            recorded = completion.routed_experts
            more["experts_from"] = 0 if recorded is None else len(recorded)
        if not self.in_step:
            lengths = self._lengths[agent]
            # Predict the length from completions that were longer, so that pools can send the longest requests first.
            longer = lengths[lengths > known]
            expected = int(longer.sum()) / len(longer) - known if len(longer) else None
            more["expected_new_tokens"] = None if expected is None else min(expected, max_new_tokens)
        seed = derive_seed(self.seed, "decode", completion.uid, known)
        return completion.request(max_new_tokens, self.team.sampling(agent), seed, **more)

    def goes_on(self, completion: Completion, result: DecodeResult) -> bool:
        if result.finish is Finish.UNFINISHED and not self.in_step:  # the next request decodes the rest of the segment
            completion.num_decoded += len(result.token_ids)
            return True
        completion.num_decoded = 0
        if of_stage := next((each for each in self._awaited if completion in each), None):
            of_stage.remove(completion)  # the stage no longer waits for this completion
        return not self.in_step

    def judged(self, completion: Completion) -> None:
        self._finished(completion)
        if not self.in_step:
            lengths = self._lengths[completion.agent]
            lengths[:-1] = lengths[1:]
            lengths[-1] = len(completion.token_ids)

    def closed(self, ask: OpenAsk, samples: tuple[Sample, ...]) -> None:
        dropped = ask.unfinished
        self._finished(*dropped)
        self.player.counts["rollout/dropped_stragglers"] += len(dropped)
        self.player.counts["rollout/errors"] += sum(sample.finish is Finish.ERROR for sample in samples)
        name, rollout_id = ask.ask.group, ask.episode.rollout_id
        if self.trains_whole or name != ask.ask.id:
            self.state.instances[rollout_id].held += samples
        else:
            self._close(Group(name, rollout_id, ask.ask.agent, samples), ask.episode.problem)

    def is_followed(self, episode: Episode) -> bool:
        return True

    def followed(self, episode: Episode, asks: Sequence[Ask]) -> None:
        if self.in_step:
            self.state.pending += asks
        else:
            self.player.ask(episode, asks)

    def ended(self, episode: Episode) -> None:
        """Count the episode; with the last one of its instance, release the instance's held samples for training."""
        if self.on_episode is not None:
            self.on_episode(episode.id, True)
        self._finished(episode.id)
        counts = self.player.counts
        counts["rollout/episodes"] += 1
        counts.update({f"team/{name}": value for name, value in self.team.metrics(episode).items()})
        instance = self.state.instances[episode.rollout_id]
        if self.trains_whole:
            outcomes = self.team.outcomes(episode)
            instance.held = [
                self.team.with_outcome(each, outcomes[each.uid]) if each.uid in outcomes else each
                for each in instance.held
            ]
        counts["rollout/failed_episodes"] += episode.error != ""
        del instance.episodes[episode.id]
        if instance.episodes:
            return
        # Each group has one agent, even if a team's asks share group names.
        groups: dict[tuple[str, str], list[Sample]] = {}
        for sample in instance.held:
            groups.setdefault((sample.group_id, sample.agent), []).append(sample)
        for (name, agent), samples in sorted(groups.items()):
            in_order = tuple(sorted(samples, key=lambda sample: sample.uid))
            self._close(Group(name, episode.rollout_id, agent, in_order), episode.problem)
        if self._counting is not None and self._counting.agent is None:
            whole = [group for group in self.state.closed if group.rollout_id == episode.rollout_id]
            self._count(episode.rollout_id, whole, episode.problem)
        del self.state.instances[episode.rollout_id]

    # Stages.

    def _begin_if_due(self) -> None:
        state = self.state
        if self.player.is_resting or state.num_stages >= self._num_wanted + self.config.overlap:
            return
        if state.num_stages > state.num_batches:  # the previous stage has not ended
            may = not self.in_step and self.config.pipeline == "agentic" and self.player.has_room
            if not (may and self._num_new()):
                return
        state.num_stages += 1
        self._begin(draws=True)
        self._end_if_over()

    def _begin(self, *, draws: bool) -> None:
        """Begin a stage: new problems (if draws), unfinished samples of the previous stage, and the asks due after it."""
        self._num_played += 1
        if self.on_stage is not None:
            self.on_stage()
        if draws:
            self._draw(self._num_new())
        self._ask_pending()
        self._go_on()

    def _ask_pending(self) -> None:
        pending, self.state.pending = self.state.pending, []
        for ask in pending:
            self.player.ask(self._episode(ask), [ask])
        self.player.settle()

    def _add(self, num_problems: int) -> None:
        """Add new problems to the newest stage, for rollout.refill."""
        self.state.refill.problems += num_problems
        later, self.state.pending = self.state.pending, []
        before = self._in_play()
        self._draw(num_problems, is_added=True)
        self._awaited[-1] |= self._in_play() - before
        self._ask_pending()
        self.state.pending = [*later, *self.state.pending]

    def _go_on(self) -> None:
        """Continue all unfinished samples in this stage."""
        self.player.due(each for each in self._unfinished() if each.state is State.DUE)
        self._awaited.append(self._in_play())

    def _in_play(self) -> set[Completion | str]:
        """Return what a stage that begins now waits for: unfinished completions, or ids of programs' episodes."""
        if self._plays_sessions:
            return {name for instance in self.state.instances.values() for name in instance.episodes}
        return set(self._unfinished())

    def _num_new(self) -> int:
        """Return the number of new problems of a stage; with rollout.stage_size=total, continued samples count against it."""
        config, unfinished = self.config, self._unfinished()
        num_carried = len(unfinished) if self.in_step else sum(bool(each.segments) for each in unfinished)
        if num_carried > config.max_unfinished:
            return 0
        taken = round(num_carried / config.group_size) if config.stage_size == "total" else 0
        return max(0, config.prompts_per_step - taken)

    def _draw(self, num_problems: int, *, is_added: bool = False) -> None:
        """Begin the episodes of new problems. is_added: rollout.refill adds them."""
        team = self.team.orchestration
        for _ in range(num_problems):
            problem = self._next_problem()
            rollout_id = f"{self.state.num_instances:06d}"
            names = [rollout_id] if team.is_one_episode else [f"{rollout_id}.{i}" for i in range(team.group_size)]
            episodes = {name: Episode(name, rollout_id, problem, self.seed) for name in names}
            self.state.instances[rollout_id] = Instance(episodes, is_added=is_added)
            for episode in list(episodes.values()):
                if self.on_episode is not None:
                    self.on_episode(episode.id, False)
                self.player.begin(episode)

    def _next_problem(self) -> Problem:
        """Draw the next problem that does not rest (data.rest)."""
        while True:
            problem = self.source(self.state.num_instances)
            self.state.num_instances += 1
            rest = self.state.resting.get(problem.id)
            if rest is None or not rest.left:
                return problem
            self.state.resting[problem.id] = rest._replace(left=rest.left - 1)

    def _close(self, group: Group, problem: Problem) -> None:
        self.state.closed.append(group)
        if self._counting is not None and self._counting.agent == group.agent:
            self._count(group.rollout_id, [group], problem)

    def _count(self, rollout_id: str, groups: Sequence[Group], problem: Problem) -> None:
        """Count a group, or a rollout instance with all its groups, for rollout.refill and data.rest."""
        assert self._counting is not None
        spread, instance = self._counting.spread_of(groups), self.state.instances[rollout_id]
        self.state.refill.count(spread, groups, is_added=instance.is_added)
        instance.is_counted = True
        instance.has_spread |= spread is Spread.TASK
        resting, longest = self.state.resting, self._counting.rest
        if instance.has_spread:
            resting.pop(problem.id, None)
        elif longest and spread is not Spread.UNKNOWN:
            last = resting.get(problem.id, Rest(0, 0))
            if not last.left:  # otherwise another dead group of the problem has already set a rest
                length = min(max(1, 2 * last.length), longest)
                resting[problem.id] = Rest(length, length)

    def _num_due(self) -> int:
        """Return the number of problems that rollout.refill adds now."""
        if self._counting is None:
            return 0
        num_open = sum(each.is_added and not each.is_counted for each in self.state.instances.values())
        num_due = self.state.refill.num_due(self.config, num_open)
        return num_due if num_due and self._num_new() else 0

    def _end_if_over(self) -> None:
        state = self.state
        if state.num_stages == state.num_batches:
            return
        if self.in_step:
            self._ask_for_waiting()
        if self.config.overlap and (num_due := self._num_due()):
            self._add(num_due)
        if not self._is_over():
            return
        if self.in_step and self.config.pipeline == "trajectory" and (state.pending or state.open):
            self._awaited.popleft()
            self._begin(draws=False)
            return
        if self.config.overlap == 0 and (num_due := self._num_due()):
            self._add(num_due)
            return
        if self.config.overlap == 0 and not self.in_step:
            self.player.rest()
        groups = state.closed if self.in_step else sorted(state.closed, key=lambda group: group.group_id)
        self._note_faults()
        self._note_counted()
        num_over = 1
        self._awaited.popleft()
        while state.num_stages > state.num_batches + num_over and self._is_over():
            self._awaited.popleft()
            num_over += 1
        carried = self._carried_tokens()
        carried.update(self._tokens_of(sample for group in groups for sample in group.samples))
        for i in range(num_over):  # stages that end together share the groups
            share = groups[len(groups) * i // num_over : len(groups) * (i + 1) // num_over]
            counts = self.player.counts
            metrics = {**counts, "rollout/stages": self._num_played, "rollout/unfinished": self.num_unfinished}
            carried.subtract(self._tokens_of(sample for group in share for sample in group.samples))
            metrics |= {f"rollout/carried_tokens/{policy}": number for policy, number in carried.items()}
            state.ready.append(StepBatch(tuple(share), metrics))
            counts.clear()
            self._num_played = 0
        state.num_batches += num_over
        state.closed = []
        self._begin_if_due()

    def _is_over(self) -> bool:
        """Return True if the oldest stage is over."""
        if self.in_step:
            return not self.player.is_busy
        if self.config.pipeline == "trajectory":
            return not (self.player.open or self.player.is_calling)
        return not self._awaited[0]

    def _finished(self, *ended: Completion | str) -> None:
        """Record the ends of completions or episodes."""
        for awaited in self._awaited:
            awaited.difference_update(ended)

    def _ask_for_waiting(self) -> None:
        """Open asks of the next stage early if their episode has a waiting completion."""
        while not self.player.is_working:
            pending = [(self._episode(ask), ask) for ask in self.state.pending]
            now = [(episode, ask) for episode, ask in pending if episode.waiting]
            if not now:
                return
            self.state.pending = [ask for episode, ask in pending if not episode.waiting]
            for episode, ask in now:
                self.player.ask(episode, [ask])
            self.player.settle()

    def _note_faults(self) -> None:
        """Add the pools' recovered faults since the last batch, and the counts of tools and judge, to the metrics."""
        counts = self.player.counts
        for pool in self.team.pools.values():
            faults = pool.take_faults()
            counts["rollout/engine_restarts"] += faults.engine_restarts
            counts["rollout/resubmitted"] += faults.resubmitted
            counts["rollout/failed_requests"] += faults.failed
        if self.team.tools is not None:
            counts.update(self.team.tools.take_counts())
        if self.team.judge.model is not None:
            counts.update(self.team.judge.model.take_counts("train"))

    def _note_counted(self) -> None:
        """Add the counts of rollout.refill and data.rest to the metrics."""
        if self._counting is not None:
            self.player.counts.update(self.state.refill.metrics(self.config))
            if self._counting.rest:
                self.player.counts["data/resting"] = sum(bool(each.left) for each in self.state.resting.values())
            self.state.refill = RefillCounts()

    def _carried_tokens(self) -> Counter[str]:
        """Count decoded tokens of samples that are not in a closed group, by policy."""
        held = [sample for instance in self.state.instances.values() for sample in instance.held]
        held += [sample for ask in self.state.open.values() for sample in ask.samples]
        carried = self._tokens_of(held)
        for each in self._unfinished():
            carried[self.team.agents[each.agent].policy] += int(np.count_nonzero(each.is_sampled))
        return carried

    def _tokens_of(self, samples: Iterable[Sample]) -> Counter[str]:
        counts = Counter(dict.fromkeys((agent.policy for agent in self.team.agents.values()), 0))
        for sample in samples:
            counts[self.team.agents[sample.agent].policy] += sample.num_sampled
        return counts

    def _unfinished(self) -> list[Completion]:
        return [each for ask in self.state.open.values() for each in ask.unfinished]

    def _episode(self, ask: Ask) -> Episode:
        """Return the episode of an open ask."""
        name = ask.episode_id
        return self.state.instances[name.partition(".")[0]].episodes[name]

    def _is_overdue(self, ask: OpenAsk) -> bool:
        """Return True if the ask continues without its stragglers."""
        age = self.player.versions[self.team.agents[ask.ask.agent].policy] - ask.opened_version
        return self.config.group_completion == "drop_stragglers" and age > self.config.max_group_age
