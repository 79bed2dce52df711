"""Operations of the training loop (loop.py), on every rank. All ranks train; rank 0 plays, evaluates (driver.py) and logs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property

import torch

from marsrl.rollout.player.stages import RolloutState, StepBatch
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import FloatArray
from marsrl.trainer.checkpoint import CheckpointWriter, is_due, load_checkpoint
from marsrl.trainer.config import RunConfig
from marsrl.trainer.data.bad_steps import (
    KEPT_BAD_BATCHES,
    BadBatch,
    bad_batch_file,
    save_bad_batch,
    too_many_errors,
    why_nothing_trains,
)
from marsrl.trainer.data.credit import Credited, teacher_metrics
from marsrl.trainer.data.mini_batches import Average
from marsrl.trainer.data.scatter import MiniBatch
from marsrl.trainer.driver import Driver
from marsrl.trainer.evaluate.score import eval_metrics
from marsrl.trainer.learner.learner import Learner, Together, groups
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.learner.trained_tokens import TrainedSample, TrainedTokens
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.publishes import Publish, append_publish, forget_publishes
from marsrl.trainer.report.step_metrics import step_metrics
from marsrl.trainer.report.summary import save_summary
from marsrl.trainer.report.trace import TraceLog
from marsrl.trainer.report.trace_sources import gather_rank_spans, watch_engines, watch_judge
from marsrl.trainer.runs.collective import barrier, broadcast_bytes, gather_bytes, rank
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.stop import Stopped, StopSignals
from marsrl.trainer.weights.sync import Standby, SyncReport, WeightSync, publish

_FEWEST_JUDGED = 20  # fewest answers, over one or more steps, for a meaningful share of missing judgements
_NO_GRADIENT = "no sample had a gradient"
_HOW_TO_REFILL = "; rollout.refill adds problems for groups with equal rewards (docs/credit.md)"
_LANES = {"credit": "credit/main"}  # parts of a step that trace.json also shows in a lane of their own


class Run:
    """One run on one rank. Methods called by the loop are collective unless their docstring says otherwise."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        console: RunConsole,
        learners: Mapping[str, Learner],
        syncs: Mapping[str, WeightSync],
        driver: Driver | None,
        seconds: Mapping[str, float],
    ) -> None:
        self.config = config
        self.directory = directory
        self.console = console
        self.learners = learners
        self.syncs = syncs  # one per policy, from its learner to its engines
        self.driver = driver
        self.agents = config.agents
        self.versions = dict.fromkeys(config.policies, 0)  # A frozen policy stays at 0.
        pools = None if driver is None else {policy: driver.team.pool_of(policy) for policy in learners}
        self.standby = Standby(syncs, learners, self.versions, pools)
        self.step = 0
        self.consumed_version = 0  # policy version that trains on this step's batch, from which staleness counts
        self.trace = TraceLog(directory.trace if driver is not None else None)
        if driver is not None:
            watch_engines(driver.team.all_pools, self.trace)
            watch_judge(driver.team, self.trace)
            driver.rollout.listen(lambda: self.trace.mark("stage"), driver.log.episode_clock)
        self.seconds: dict[str, float] = {}
        self.total_seconds = dict(seconds)  # seconds of each part of the run, including those before the first step
        self.began = time.monotonic()
        self.num_empty_steps = 0  # consecutive steps, including this one, in which no policy had a token to train on
        self.untrained: Counter[str] = Counter()  # {reason: steps that trained nothing}; only on rank 0
        self.resumed_step = 0
        self.has_trained = False  # True if this step trained
        self.has_shown_sample = False  # True once this process has shown a sample on the console
        self.bad_steps: dict[str, list[int]] = {}  # consecutive steps that a policy skipped, including this one
        self.stop = StopSignals()
        self.saved_step, self.saved_s = 0, time.monotonic()
        self.checkpoints = CheckpointWriter(
            directory,
            keep_last=config.run.keep_checkpoints,
            keep_every=config.run.keep_every,
            keep_best=config.run.keep_best,
            is_async=config.run.async_checkpoint,
        )

    @cached_property
    def groups(self) -> list[Together]:
        """Groups of trained policies. Policies that share micro-batches are in one group."""
        return groups(self.learners, [agent.policy for agent in self.agents.values()])

    @property
    def _rank_0(self) -> Driver:
        """The driver; must be called only on rank 0."""
        assert self.driver is not None
        return self.driver

    @property
    def keeps_tokens(self) -> bool:
        """True if tokens of this step are logged."""
        every = self.config.run.token_log_every
        return bool(every) and self.step % every == 0

    @property
    def measures_agents(self) -> bool:
        """True if each agent's share of the gradient is measured in this step."""
        every = self.config.trainer.agent_grad_norm_every
        return bool(every) and self.step % every == 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the body as timing_s/{name} of this step, and as a span of this rank's lane in trace.json."""
        start = time.monotonic()
        with ExitStack() as stack:
            for lane in (f"rank/{rank()}", *([_LANES[name]] if name in _LANES else [])):
                stack.enter_context(self.trace.span(lane, name, step=self.step))
            yield
        elapsed = time.monotonic() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        self.total_seconds[name] = self.total_seconds.get(name, 0.0) + elapsed

    def begin(self) -> None:
        """Resume from a checkpoint if run.resume is set; send the weights to the engines; evaluate before the first step."""
        barrier()  # Rank 0 starts its engines before it gets here.
        if self.config.trainer.sleep:
            # The learners need the memory to load weights, and to compute log-probs for weight sync's comparison.
            self._put_engines_to_sleep(list(self.learners))
        resume, restored = self.config.run.resume, None
        if resume != "off":
            restored = load_checkpoint(self.directory, self.learners, resume, self.console.warning)
            for learner in self.learners.values():
                learner.sleep()
        if restored is not None:
            self.step = self.saved_step = self.resumed_step = restored.step
            self.versions.update(restored.versions)
            steps_left = max(0, self.config.run.steps - self.step)
            self.console.message(
                f"resumes after step {self.step}: {steps_left} of {self.config.run.steps} steps are left"
            )
            if not steps_left:
                self.console.warning(
                    f"run.steps is {self.config.run.steps} and step {self.step} is done; nothing is trained; raise run.steps"
                )
        if self.driver is not None:
            resume_step = restored.step if restored is not None else (0 if self.directory.existed else None)
            self.driver.log.open(resume_step)
            self.directory.forget_after(resume_step or 0)
            forget_publishes(self.directory.publishes, resume_step if resume_step is not None else -1)
            if (league := self.driver.league) is not None:
                league.forget_after(-1 if restored is None else self.versions[league.config.policy])
            if restored is not None and restored.rollout is not None:
                self.driver.rollout.restore(restored.rollout)
        for group in self.groups:
            policies, whose = list(group.learners), "its" if len(group.learners) == 1 else "their"
            if self.config.trainer.sleep:
                self._put_engines_to_sleep(self._renewed_from(group))
            with (
                self.console.part(f"sending the weights of {', '.join(policies)} to {whose} engines"),
                self.timed("publish"),
            ):
                self._sync(group, policies)
        if self.config.run.evaluate:
            with self.timed("evaluate"):
                self.standby.during(lambda: self._rank_0.evaluate_before(self.versions, self.step))
        self.saved_s = time.monotonic()
        barrier()

    def steps_left(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps, from 1. Without skipped steps, step n makes policy version n."""
        with self.stop.noted():
            while self.step < self.config.run.steps:
                self.step += 1
                self.console.step = self.step
                self.seconds = {}
                self.has_trained = False
                if self.driver is not None:
                    self.trace.mark("step", self.step)
                yield self.step

    def play(self) -> StepBatch | None:
        """Play a stage and return its finished groups on rank 0; other ranks wait and return None. Collective.

        Raises Stopped if rank 0 received a stop signal. The previous step is saved; this step is lost.
        """
        self.consumed_version = max(self.versions[policy] for policy in self.learners)
        title = f"step {self.step}/{self.config.run.steps} rollout"
        before = self._rollout_state()

        def look() -> None:
            if self.stop.is_asked:
                raise Stopped

        try:
            batch = self.standby.during(lambda: self._rank_0.play(self.versions, title, look))
            if batch is not None and batch.groups and not self.has_shown_sample:
                self.console.sample(batch.groups[0].samples[0])
                self.has_shown_sample = True
            return batch
        except Stopped:
            if self.step - 1 > self.saved_step:
                if self.config.trainer.sleep and self.driver is not None:
                    self.driver.rollout.stages.rest()  # Engines with requests cannot sleep.
                self._save(self.step - 1, before)
            self.checkpoints.finish()
            raise

    def _rollout_state(self) -> RolloutState | None:
        """Return the current rollout state on rank 0; None elsewhere."""
        return None if self.driver is None else self.driver.rollout.snapshot()

    def agents_of(self, policy: str) -> list[str]:
        return [name for name, agent in self.agents.items() if agent.policy == policy]

    @property
    def average(self) -> Average:
        """Reduction of the token losses."""
        config = self.config
        return Average(config.loss.aggregation, config.credit.denominator, config.rollout.max_response_tokens)

    def note_credit(self, credited: Credited) -> None:
        """Record the advantages, for the samples log, and the metrics of credit. Rank 0 only."""
        self._rank_0.log.note_credit(credited)

    def ask_teachers(self, batch: StepBatch) -> dict[str, FloatArray]:
        """Return, on rank 0, log-probs of the teachers (agents.<name>.teacher), by uid of the trained samples.

        With rollout.overlap, the agents' engines keep decoding during the call.
        """
        team, credit = self._rank_0.team, self.config.credit
        if not team.teachers:
            return {}
        samples = [s for g in batch.groups for s in g.samples if credit.trains(s.agent) and not s.reward.is_missing]
        with self.timed("teacher"):
            logprobs = team.teacher_logprobs(samples)
        self._rank_0.log.note(teacher_metrics(samples, logprobs))
        return logprobs

    def choose_kept(self, credited: Credited | None) -> frozenset[str]:
        """Choose the samples whose tokens are logged in this step; return their uids. Collective in steps that log tokens."""
        if not self.keeps_tokens:
            return frozenset()
        chosen = None
        if self.driver is not None:
            chosen = encode(self.driver.log.choose_kept(credited, self.step) if credited is not None else [])
        return frozenset(decode(list[str], broadcast_bytes(chosen)))

    @property
    def engines_drop_weights(self) -> bool:
        """True if engines drop their weights while their policy trains, so that even a skipped step must resend them."""
        return self.config.rollout.placement == "colocated"

    @contextmanager
    def engines_asleep(self, group: Together) -> Iterator[None]:
        """Free the engines' GPU memory for the trainer inside the block, if rollout.placement=colocated.

        Collective with that placement.
        """
        if not self.engines_drop_weights:
            yield
            return
        self._put_engines_to_sleep(self._renewed_from(group))
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # Return this rank's cached memory to the engines.
        barrier()

    def _renewed_from(self, group: Together) -> list[str]:
        """Return the policies that are published before their engines' next request: this and later groups' policies."""
        return [policy for later in self.groups[self.groups.index(group) :] for policy in later.learners]

    def _put_engines_to_sleep(self, renewed: Sequence[str]) -> None:
        """Free all engines' memory on the trainer's GPUs; the next request to an engine wakes it. Collective.

        renewed: policies that are published before the next request to their engines, so that these engines drop their weights;
            other engines keep theirs.
        """
        if self.driver is not None:
            with self.timed("sleep"):
                self.driver.team.sleep(renewed=renewed)
        barrier()

    def note_step(self, policy: str, stats: StepStats, mini_batches: tuple[MiniBatch, ...] | None) -> None:
        """Count a skipped step and save its batch; rank 0 keeps metrics and logged tokens. Collective.

        mini_batches: the step's mini-batches on rank 0; None elsewhere.
        """
        self.has_trained |= not stats.is_empty
        bad = self.bad_steps.setdefault(policy, [])
        if not stats.is_skipped:
            bad.clear()
        else:
            bad.append(self.step)
            if mini_batches is not None:
                most = self.config.trainer.max_bad_steps * len(self.learners)
                sequences = tuple(sequence for mini_batch in mini_batches for sequence in mini_batch.sequences)
                batch = BadBatch(self.step, policy, self.versions[policy], stats.loss, stats.grad_norm, sequences)
                path = save_bad_batch(self.directory, batch, keep=max(most, KEPT_BAD_BATCHES))
                self.console.warning(f"step {self.step}: {batch.problem}; the step is skipped, its batch is {path}")
        if self.keeps_tokens:
            parts = gather_bytes(encode(stats.tokens))
            if self.driver is not None:
                self.driver.log.tokens += [
                    tokens for part in parts for tokens in decode(tuple[TrainedTokens, ...], part)
                ]
        samples = gather_bytes(encode(stats.samples))
        if self.driver is not None:
            self.driver.log.samples += [
                sample for part in samples for sample in decode(tuple[TrainedSample, ...], part)
            ]
            self._note_of(policy, step_metrics(stats, list(self.agents)))

    def _note_of(self, policy: str, metrics: Mapping[str, float]) -> None:
        """Log a policy's metrics on rank 0. With several policies, the metrics' names begin with the policy's name."""
        prefix = "" if len(self.learners) == 1 else f"{policy}/"
        self._rank_0.log.note({prefix + name: value for name, value in metrics.items()})

    def stop_if_unusable(self, batch: StepBatch | None) -> None:
        """Stop the run if its steps are unusable. Collective; call it once the step's metrics and samples are on disk.

        batch: the step's batch on rank 0; None elsewhere.

        Raises RuntimeError, on all ranks at once, if
            more than rollout.max_error_share of the step's samples and episodes ended in errors;
            the judge left more than judge.max_missing_share of the answers unjudged;
            the step has no samples and no sample is in progress; or
            in trainer.max_empty_steps consecutive steps, no sample had a gradient.
        """
        reason = ""
        if self.driver is not None and batch is not None:
            self.num_empty_steps = 0 if self.has_trained else self.num_empty_steps + bool(batch.groups)
            is_last = self.num_empty_steps >= self.config.trainer.max_empty_steps
            is_over = not (self.has_trained or batch.groups or self.driver.rollout.is_playing)
            reason = too_many_errors(batch, self.config.rollout.max_error_share)
            if not reason and (model := self.driver.team.judge.model) is not None:
                reason = model.too_many_missing("train", at_least=_FEWEST_JUDGED)
            if not reason and (is_last or is_over):
                reason = why_nothing_trains(batch, self.config, self.num_empty_steps)
        problem = broadcast_bytes(f"step {self.step}: {reason}".encode() if self.driver is not None else None).decode()
        if not problem.endswith(": "):
            raise RuntimeError(problem)

    def stop_if_diverged(self) -> None:
        """Stop the run if it has diverged. Call it once the step's metrics and samples are on disk.

        Raises RuntimeError, on all ranks at once, if trainer.max_bad_steps consecutive steps had a non-finite loss or gradient.
        """
        for policy, bad in self.bad_steps.items():
            if len(bad) >= self.config.trainer.max_bad_steps:
                files = ", ".join(str(bad_batch_file(self.directory, step, policy)) for step in bad)
                raise RuntimeError(
                    f"step {self.step}: the loss or gradient of policy {policy} was not finite in {len(bad)} steps in a "
                    f"row (trainer.max_bad_steps); their batches are {files} (marsrl.trainer.data.bad_steps reads them); "
                    "lower the learning rate, or remove samples that these batches have in common"
                )

    def publish(self, group: Together, is_new: Mapping[str, bool]) -> None:
        """Publish the policies of a group to their engines in one publish.

        is_new: {policy: True if the step changed its weights}. With False, the same version is published again.
        """
        for policy, is_updated in is_new.items():
            self.versions[policy] += is_updated
            every = self.config.policies[policy].reference_every
            if is_updated and every and self.versions[policy] % every == 0:
                self.learners[policy].refresh_reference()
        self._sync(group, list(is_new))

    def _sync(self, group: Together, policies: Sequence[str]) -> None:
        """Send the policies' current weights to their engines and verify them; rank 0 logs the time. Collective."""
        driver, during = self.driver, self.standby.during
        adapters = policies if driver is not None and policies[0] in driver.team.adapters else None
        at_rest = nullcontext() if driver is None else driver.rollout.resting(self.versions, adapters)
        syncs = {policy: self.syncs[policy] for policy in policies}
        reports = publish(self.learners, syncs, self.versions, at_rest, during, group) or {}
        for policy, report in reports.items():
            self._note_publish(policy, report)

    def _note_publish(self, policy: str, report: SyncReport) -> None:
        """Log a publish on rank 0."""
        driver = self._rank_0
        end = time.monotonic()
        parts = {f"{part}_s": round(seconds, 4) for part, seconds in report.seconds_of.items()}
        arguments = {"version": report.version, "bytes": report.num_bytes, **parts}
        self.trace.add(f"sync/{policy}", "publish", end - report.seconds, end, arguments)
        compared = report.comparison
        append_publish(
            self.directory.publishes,
            Publish(
                self.step,
                policy,
                report.version,
                report.digest,
                report.num_engines,
                None if compared is None else compared.median,
                None if compared is None else compared.noise,
                report.num_bytes,
                round(report.seconds, 4),
                report.num_shards,
            ),
        )
        driver.num_syncs += 1
        self._note_of(policy, report.metrics)
        if driver.league is not None:
            driver.league.keep(policy, report.version)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate if an evaluation is due; rank 0 logs the results as the step's eval/... metrics. Collective."""
        if not self.config.run.eval_every or step % self.config.run.eval_every:
            return
        with self.timed("evaluate"):
            result = self.standby.during(
                lambda: self._rank_0.evaluate(self.versions, step, f"evaluation at step {step}")
            )
        if self.driver is not None and result is not None:
            self.driver.log.note(eval_metrics(result))

    def record(self, step: int, batch: StepBatch | None) -> None:
        """Write metrics, samples, trace and warnings of this step on rank 0. Collective."""
        gather_rank_spans(self.trace)
        driver = self.driver
        if driver is None or batch is None:
            return
        if driver.rebalancer is not None:
            driver.log.note({"rollout/engine_moves": driver.rebalancer.take_moves()})
        driver.log.write(
            step,
            batch,
            self.seconds,
            version=self.consumed_version,
            num_unfinished=driver.rollout.num_unfinished,
            untrained="" if self.has_trained else self._why_untrained(batch),
        )
        if driver.log.kept:
            with self.timed("token_log"):
                driver.log.write_tokens(step, batch)
        driver.log.forget()
        self.trace.save()

    def _why_untrained(self, batch: StepBatch) -> str:
        why = "no group has ended; the episodes continue in the next step (rollout.pipeline)"
        why = _NO_GRADIENT if batch.groups else why
        self.untrained[why] += 1
        return why

    def checkpoint_if_due(self, step: int) -> None:
        """Save a checkpoint if one is due. Collective.

        A checkpoint is due by run.checkpoint_every or run.checkpoint_minutes, after the last step, at the best evaluation so far
        (run.keep_best), and if a rank received a stop signal.

        Raises Stopped, on all ranks, if a rank received a stop signal; the step is saved.
        """
        self.checkpoints.finish_if_written()
        is_asked, last = self.stop.is_asked, self.config.run.steps
        is_best = False
        if self.driver is not None and self.config.run.keep_best:
            is_best = step == self.directory.best_evaluated([*self.directory.steps_on_disk(), step])
        due, is_stopping = is_due(
            self.config.run, step, last=last, saved_s=self.saved_s, is_asked=is_asked, is_best=is_best
        )
        if due:
            self._save(step, self._rollout_state())
        if is_stopping:
            self.checkpoints.finish()
            raise Stopped

    def _save(self, step: int, rollout: RolloutState | None) -> None:
        if self.config.trainer.sleep:
            self._put_engines_to_sleep([])
        self.checkpoints.save(step, self.versions, self.learners, rollout)
        if self.config.trainer.sleep:
            for learner in self.learners.values():
                learner.sleep()
            barrier()  # Rank 0 wakes the engines after this.
        self.saved_step, self.saved_s = step, time.monotonic()

    def finish(self) -> None:
        """Complete the last checkpoint, run the final evaluation, write summary.json, and print the table of results."""
        self.checkpoints.finish()
        if self.untrained:
            num_steps, why = self.step - self.resumed_step, max(self.untrained, key=self.untrained.__getitem__)
            why += _HOW_TO_REFILL if why == _NO_GRADIENT and self.config.rollout.refill is None else ""
            self.console.warning(f"{self.untrained.total()} of {num_steps} steps trained nothing: {why}")
        driver, after = self.driver, None
        if self.config.run.evaluate:
            with self.timed("evaluate"):
                after = self.standby.during(lambda: self._rank_0.evaluate(self.versions, self.step, "evaluation after"))
        if driver is not None:
            if self.config.run.keep_best:
                self.directory.mark_best()  # The final evaluation may be the best.
            driver.after = after
            seconds = {**self.total_seconds, "run": time.monotonic() - self.began}
            summary = driver.summary(self.config, self.step, seconds)
            save_summary(self.directory.summary, summary)
            self.trace.save()
            driver.log.close()
            self.console.results(summary)
            self.console.message(f"report: marsrl report {self.directory.path}")
        barrier()
