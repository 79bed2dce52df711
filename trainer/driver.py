"""Work that only rank 0 does in a run: rollout, evaluation, and the log of the steps."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import StepBatch
from marsrl.rollout.pool.rebalance import Rebalancer
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team
from marsrl.trainer.config import RunConfig
from marsrl.trainer.evaluate.draws import EVALUATION, Kept
from marsrl.trainer.evaluate.evaluator import Evaluator, FixedInputs
from marsrl.trainer.evaluate.league import evaluate_league
from marsrl.trainer.machine import LIBRARIES, commit, device_name, library_versions
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.step_log import StepLog
from marsrl.trainer.report.summary import EngineRecord, Evaluation, Summary
from marsrl.trainer.runs.directory import RunDirectory, write_atomically, write_json
from marsrl.trainer.weights.league import League

_ANSWER_S = 60.0  # Seconds that an engine has to report its token count at the end of the run.


@dataclass(slots=True)
class Driver:
    """Driver of rollout and evaluation, on rank 0 only.

    before, after: evaluations before and after training; None until they have run.
    num_syncs: number of verified publishes.
    """

    directory: RunDirectory
    console: RunConsole
    team: Team
    rollout: Rollout
    evaluator: Evaluator
    log: StepLog
    rebalancer: Rebalancer | None = None
    league: League | None = None
    before: Evaluation | None = None
    after: Evaluation | None = None
    num_syncs: int = 0

    def play(self, versions: Mapping[str, int], title: str, on_look: Callable[[], None]) -> StepBatch:
        """Play the next step and return its finished groups.

        title: text of the progress bar. on_look: called at each update of the bar.
        """
        if self.rebalancer is not None and self.rebalancer.is_due:
            with self.rollout.resting(versions):
                self.rebalancer.move()
        with self.console.progress(title, unit="tokens") as bar:

            def progress(num_tokens: int) -> None:
                bar.update(num_tokens)
                on_look()

            batch = self.rollout.next_batch(versions, progress)
        if self.rebalancer is not None:
            self.rebalancer.note_stage()
        return batch

    def evaluate_before(self, versions: Mapping[str, int], step: int) -> None:
        """Collect the fixed inputs and, at step 0, run the first evaluation. A resumed run reads both from disk."""
        inputs_file, before_file = self.directory.path / "fixed_inputs.msgpack", self.directory.evaluation_before
        if inputs_file.exists():
            self.evaluator.fixed = decode(FixedInputs, inputs_file.read_bytes())
            if before_file.exists():
                self.before = Evaluation.model_validate_json(before_file.read_bytes())
            return
        with (
            Kept(self.directory.evaluation(0)) as kept_draws,
            self.console.progress("fixed inputs", unit="episodes") as bar,
        ):
            inputs = self.evaluator.collect_inputs(versions, bar.played, kept_draws)
        if step == 0:
            self.before = self.evaluate(versions, step, "evaluation before")
        write_atomically(inputs_file, encode(inputs))

    def evaluate(self, versions: Mapping[str, int], step: int, name: str) -> Evaluation:
        """Evaluate the team with the weights after `step`; draws that are already in the evaluation's folder are not repeated."""
        folder = self.directory.evaluation(step)
        with self.rollout.resting(), Kept(folder) as kept_draws:
            num_kept, num_draws = self.evaluator.num_kept(versions, kept_draws)
            if num_kept:
                self.console.message(f"{name}: {num_kept} of {num_draws} draws are reused")
            with self.console.progress(name, unit="episodes") as bar:
                evaluation = self.evaluator.evaluate(versions, bar.played, kept_draws)
            league = self.league
            if league is not None and (slots := league.load(versions[league.config.policy])):
                with self.console.progress(f"{name}: league", unit="games") as bar:
                    found = evaluate_league(self.evaluator, league.config, versions, slots, folder, bar.played)
                evaluation = evaluation.model_copy(update={"league": found})
            for pool in self.team.pools.values():
                pool.forget_prefixes()  # Evaluations must not affect the next stage.
        if self.rebalancer is not None:
            self.rebalancer.forget()
        write_json(folder / EVALUATION, evaluation.model_dump(mode="json"))
        self.console.accuracies(name, evaluation)
        if evaluation.league is not None:
            self.console.message(f"{name}: {evaluation.league.line}")
        for note in evaluation.notes:
            self.console.warning(f"{name}: {note}")
        return evaluation

    def summary(self, config: RunConfig, steps: int, seconds: Mapping[str, float]) -> Summary:
        """Return results and hardware of the run at its end. seconds: duration of each part of the run."""
        info = self.team.pool_of(next(iter(config.trained_policies))).infos()[0]  # Frozen policies are not reported.
        return Summary(
            name=self.directory.path.name,
            task=config.task,
            model=", ".join(policy.model or "warm start" for policy in config.policies.values()),
            device=device_name(),
            steps=steps,
            seeds={"run": config.run.seed},
            before=self.before,
            after=self.after,
            engine=EngineRecord(
                engine_class=info.engine_class,
                library=info.library,
                version=info.library_version,
                kind=info.kind,
                device=info.device,
                dtype=info.dtype,
                sampler=info.sampler,
            ),
            tokens_per_engine=tuple(count for pool in self.team.all_pools for count in pool.num_decoded(_ANSWER_S)),
            verified_syncs=self.num_syncs,
            timings=dict(seconds),
            versions={"python": platform.python_version(), **library_versions(LIBRARIES)},
            commit=commit(),
        )
