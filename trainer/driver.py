"""Rank 0's side of a run: who plays, who evaluates, and the log of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from marsrl.rollout.pool.rebalance import Rebalancer
from marsrl.rollout.schedule.background import BackgroundScheduler
from marsrl.rollout.schedule.ledger import Batch
from marsrl.rollout.schedule.scheduler import Scheduler
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team
from marsrl.trainer.evaluate.draws import EVALUATION, Kept
from marsrl.trainer.evaluate.evaluator import Evaluator, FixedInputs
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.summarise_run import Gates, missed_gates
from marsrl.trainer.report.summary import Evaluation
from marsrl.trainer.runs.directory import RunDirectory, write_atomically, write_json
from marsrl.trainer.step_log import StepLog


@dataclass(slots=True)
class Driver:
    """Rank 0 alone has one. versions: of each policy, what its engines hold.

    before, after: the evaluations of a run's two ends, once they are made. num_syncs: publishes that engines have proven.
    """

    directory: RunDirectory
    console: RunConsole
    team: Team
    scheduler: Scheduler | BackgroundScheduler
    evaluator: Evaluator
    log: StepLog
    rebalancer: Rebalancer | None = None
    before: Evaluation | None = None
    after: Evaluation | None = None
    num_syncs: int = 0

    def play(self, versions: Mapping[str, int], title: str, on_look: Callable[[], None]) -> Batch:
        """The next step's finished groups. title: of the progress bar; on_look: called whenever it moves."""
        if self.rebalancer is not None and self.rebalancer.is_due:
            with self.scheduler.resting(versions):
                self.rebalancer.move()
        with self.console.progress(title, unit="tokens") as bar:

            def progress(num_tokens: int) -> None:
                bar.update(num_tokens)
                on_look()

            batch = self.scheduler.next_batch(versions, progress)
        if self.rebalancer is not None:
            self.rebalancer.note_stage()
        return batch

    def evaluate_before(self, versions: Mapping[str, int], step: int, gates: Gates) -> None:
        """The fixed inputs and the first evaluation, made once: a run that goes on reads them. gates: of a warm start."""
        inputs_file, before_file = self.directory.path / "fixed_inputs.msgpack", self.directory.evaluation_before
        if before_file.exists():
            self.evaluator.fixed = decode(FixedInputs, inputs_file.read_bytes())
            self.before = Evaluation.model_validate_json(before_file.read_bytes())
            return
        with Kept(self.directory.evaluation(0)) as kept, self.console.progress("fixed inputs", unit="episodes") as bar:
            inputs = self.evaluator.collect_inputs(versions, bar.played, kept)
        self.before = self.evaluate(versions, step, "evaluation before")
        if missed := missed_gates(self.before, gates):
            self.console.warning(f"the warm start missed its gate: {'; '.join(missed)}; RL goes on from there")
        write_atomically(inputs_file, encode(inputs))
        write_json(before_file, self.before.model_dump(mode="json"))

    def evaluate(self, versions: Mapping[str, int], step: int, name: str) -> Evaluation:
        """How good the team is with the weights after `step`; draws that its folder has are not made again."""
        folder = self.directory.evaluation(step)
        with self.scheduler.resting(), Kept(folder) as kept:
            num_kept, num_draws = self.evaluator.num_kept(versions, kept)
            if num_kept:
                self.console.message(f"{name}: {num_kept} of {num_draws} draws are kept")
            with self.console.progress(name, unit="episodes") as bar:
                found = self.evaluator.evaluate(versions, bar.played, kept)
            for pool in self.team.pools.values():
                pool.forget_prefixes()  # the next stage finds the engines as if nobody had evaluated
        if self.rebalancer is not None:
            self.rebalancer.forget()
        write_json(folder / EVALUATION, found.model_dump(mode="json"))
        return found
