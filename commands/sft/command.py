"""`marsrl sft`: train the team's policies on data.demonstrations, and write Hugging Face directories for RL to start from.

    read and check -> [batch -> one step of each policy -> checkpoint if due]* -> runs/NAME/hf

Every rank reads the file. The order of an epoch depends only on run.seed and the epoch's number, so resuming needs only the step.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from marsrl.commands.sft.demonstrations import Demonstration, Demonstrations, held_out, read_demonstrations
from marsrl.rollout.adapter import write_adapter
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.build import join_ranks, with_first_rank_dtypes
from marsrl.trainer.checkpoint import CheckpointWriter, is_due, load_checkpoint
from marsrl.trainer.checks.device import why_not_device
from marsrl.trainer.checks.dtypes import decide_dtypes
from marsrl.trainer.checks.policy_files import check_adapter, check_files, check_trainable
from marsrl.trainer.checks.refusals import why_not_offloaded
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.origin import ConfigError, ConfigOrigin, refuse
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron.hf_files import made_whole
from marsrl.trainer.learner.megatron.layout import why_not_together
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.machine import quiet_libraries
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.metrics import MetricsLog
from marsrl.trainer.runs.collective import barrier, rank
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.existing_run import (
    differences,
    saved_config,
    settings_to_resume,
)
from marsrl.trainer.runs.failure import failure_message, say_last, where_to_go_on
from marsrl.trainer.runs.lock import RunLock
from marsrl.trainer.runs.stop import Stopped, StopSignals, let_first_rank_end
from marsrl.trainer.supervised.imitation import Goal, Lesson, Measured, measure, supervised_learner, teach
from marsrl.trainer.torchrun import is_rank_0, world_size
from marsrl.trainer.visible import visible


def sft(config: RunConfig, origin: ConfigOrigin) -> int:
    """Run `marsrl sft` and return its exit code: 0 success, 1 failure, 130 interrupted.

    Raises ValueError for invalid settings or files.
    """
    launcher, prepared = os.getppid(), prepare(config, origin)  # holds the run's lock until this function returns
    try:
        teach_team(prepared)
    except KeyboardInterrupt:
        if prepared.directory is not None:
            say_last(f"marsrl sft: interrupted; {where_to_go_on(prepared.directory)}")
        else:
            let_first_rank_end(launcher)
        return 130
    except Exception as error:
        print(visible(traceback.format_exc()), file=sys.stderr)
        if prepared.directory is not None:
            say_last(failure_message(error, prepared.directory))
        else:
            let_first_rank_end(launcher)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class PreparedSft:
    """Checked settings and demonstrations. directory, lock: the run's directory and its lock; None except on rank 0."""

    config: RunConfig
    found: Demonstrations
    directory: RunDirectory | None
    lock: RunLock | None


def prepare(config: RunConfig, origin: ConfigOrigin) -> PreparedSft:
    """Check the settings and demonstrations, create or reopen the run's directory, and print a summary.

    Raises ValueError or OSError if settings or files are invalid, or another process is writing the run.
    """
    is_first = is_rank_0()
    directory = lock = None
    with ExitStack() as undo, origin.places_in_errors():
        began = settings_to_resume(config) if is_first else None  # other ranks take rank 0's dtypes later (teach_team)
        config, dtypes = decide_dtypes(config, began)
        demonstrations, ends = _checked(config)
        if is_first:
            directory = RunDirectory.create(config.run.dir, config.run.name, f"sft-{origin.name}", config.run.resume)
            lock = RunLock(directory)
            undo.callback(lock.release)
            fingerprint = {
                "data.demonstrations": {"demonstrations": len(demonstrations.lines), "sum": demonstrations.sum}
            }
            lines = [f"warning: {lock.warning}"] if lock.warning else []
            if directory.existed and config.run.resume != "off":
                lines += _differing(directory, config, fingerprint)
            directory.write_config(config.model_dump(mode="json"), made_of=str(origin))
            directory.keep_data(fingerprint)
            print(f"# settings: {origin}", *dtypes, *ends, *lines, sep="\n", flush=True)
        undo.pop_all()
    return PreparedSft(config, demonstrations, directory, lock)


def teach_team(prepared: PreparedSft) -> None:
    """Train the remaining steps and write the models. Collective.

    Rank 0 prints the settings with which a run starts from these models. Raises the same errors as _Training.train.
    """
    quiet_libraries()
    with ExitStack() as stack:
        directory, console, _ = join_ranks(stack, prepared.config, prepared.directory)
        for note in prepared.found.notes:
            console.warning(note)
        config = with_first_rank_dtypes(prepared.config)
        training = _Training(config, directory, prepared.found, console)
        if training.is_over:
            console.message(f"{directory.path}: all steps are done and the models are written")
        else:
            training.train()
        if rank() == 0:
            for name, folder in training.folders.items():
                key = "model" if config.policies[name].adapter is None else "adapter.start"
                print(f"policies.{name}.{key}={folder}", flush=True)


def _checked(config: RunConfig) -> tuple[Demonstrations, list[str]]:
    """Check models and layouts, and read the demonstrations; return them with a sentence on how each policy's turns end."""
    if (reason := why_not_device(config.run.device)) is not None:
        raise ConfigError(f"run.device is {config.run.device}: {reason}")
    file = config.data.demonstrations
    if file is None:
        raise ConfigError("data.demonstrations is not set; set it to a jsonl file of demonstrations")
    refuse(why_not_together(config.trained_policies))
    refuse(why_not_offloaded(config))
    renderers, longest = dict[str, ChatRenderer](), dict[str, int]()
    for name, policy in config.trained_policies.items():
        if policy.model is None:
            raise ConfigError(f"policies.{name}.model is not set; set it to the Hugging Face directory to start from")
        shape = read_shape(policy.model)
        check_files(policy.model, shape, is_trained=True)
        check_adapter(name, policy, shape)
        check_trainable(config, name, shape, world_size())
        renderers[name] = ChatRenderer(policy.model)
        longest[name] = min(shape.max_positions, config.trainer.max_tokens_per_micro_batch)
    ends = [f"a turn of policies.{name} ends with {renderer.ends}" for name, renderer in renderers.items()]
    return read_demonstrations(Path(file), config, renderers, longest), ends


def _differing(directory: RunDirectory, config: RunConfig, fingerprint: Mapping[str, object]) -> list[str]:
    """Return a sentence about the settings that differ from those of the run; [] if none do.

    Raises ConfigError if the demonstrations, the section sft or the seed differ, since these decide what a step trains.
    """
    start = f"run.resume={config.run.resume}: {directory.path} cannot be resumed:"
    if directory.data.is_file() and json.loads(directory.data.read_bytes()) != fingerprint:
        raise ConfigError(f"{start} the demonstrations have changed since it began; restore data.demonstrations")
    saved = saved_config(directory)
    if saved is not None and (saved.sft, saved.run.seed) != (config.sft, config.run.seed):
        raise ConfigError(f"{start} section sft or run.seed differs from its config.yaml; restore them")
    differs = differences(saved, config) if saved is not None else ""
    return [f"differs from {directory.config}: {differs}"] if differs else []


@functools.lru_cache(maxsize=1)
def _order(number: int, name: str) -> list[int]:
    return random.Random(f"sft/{name}").sample(range(number), number)


class _Training:
    """Training of all policies that have demonstrations. Every method is collective."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, demonstrations: Demonstrations, console: RunConsole
    ) -> None:
        self._config, self._directory, self._writers, self._console = config, directory, demonstrations.writers, console
        lines, self._held_out = held_out(
            demonstrations.lines, _order(len(demonstrations.lines), f"{config.run.seed}/held out"), config.sft.held_out
        )
        self._lines, self._steps_of_epoch = lines, -(-len(lines) // config.sft.batch)
        self._num_steps = config.sft.epochs * self._steps_of_epoch
        names = [name for name in config.trained_policies if any(line.policy == name for line in lines)]
        self.folders = {name: directory.hf / name if len(names) > 1 else directory.hf for name in names}
        self._learners: dict[str, Learner] = {}

    @property
    def is_over(self) -> bool:
        """True if the models are already written."""
        return all(folder.is_dir() for folder in self.folders.values())

    def train(self) -> None:
        """Train the remaining steps and write the models.

        Raises:
            Stopped: on all ranks, if one received a signal to stop; the step is saved.
            RuntimeError: trainer.max_bad_steps steps in a row had a non-finite loss or gradient.
        """
        config, run = self._config, self._config.run
        self._learners = {name: self._learner(name) for name in self.folders}
        restored = None
        if run.resume != "off":
            restored = load_checkpoint(self._directory, self._learners, run.resume, self._console.warning)
        begun = restored.step if restored is not None else 0
        writer = CheckpointWriter(
            self._directory,
            keep_last=run.keep_checkpoints,
            keep_every=run.keep_every,
            keep_best=False,
            is_async=run.async_checkpoint,
        )
        stop, num_steps, num_bad = StopSignals(), self._num_steps, 0
        with ExitStack() as stack:
            measured = self._measured() if begun % self._steps_of_epoch == 0 else {}
            note = self._open_log(stack, begun, measured)
            bar = stack.enter_context(self._console.progress("sft", num_steps, "steps"))
            stack.enter_context(stop.noted())
            saved_s = time.monotonic()
            last = begun if self._is_good(measured) else num_steps
            lessons = map(self._lesson, range(begun + 1, last + 1))
            taught = teach(self._learners, lessons, config.trainer.max_tokens_per_micro_batch)
            for step, (losses, stats) in enumerate(taught, start=begun + 1):
                row, is_bad = self._row(step, losses, stats), any(each.is_skipped for each in stats.values())
                if step % self._steps_of_epoch == 0:
                    row |= (measured := self._measured())
                    if step < last and self._is_good(measured):
                        self._console.message(
                            f"step {step}: training ends early, the held-out demonstrations reached the goal (sft.stop_*)"
                        )
                        last = step
                note(step, row)
                bar.update(step, _told(row))
                num_bad = num_bad + 1 if is_bad else 0
                if num_bad >= config.trainer.max_bad_steps:
                    raise RuntimeError(
                        f"step {step}: loss or gradient was not finite in {num_bad} steps in a row (trainer.max_bad_steps)"
                    )
                writer.finish_if_written()
                due, is_stopping = is_due(run, step, last=last, saved_s=saved_s, is_asked=stop.is_asked)
                if due:
                    writer.save(step, dict.fromkeys(self.folders, step), self._learners, None)
                    saved_s = time.monotonic()
                if is_stopping:
                    writer.finish()
                    raise Stopped
                if step == last:
                    break
        writer.finish()
        self._write_models()

    def _learner(self, name: str) -> Learner:
        policy, sft = self._config.policies[name], self._config.sft
        schedule = {"lr": sft.lr, "warmup_steps": sft.warmup_steps, "decay": sft.decay}
        return supervised_learner(
            policy.model_copy(update={"optimizer": policy.optimizer.model_copy(update=schedule)}),
            str(policy.model),
            num_writers=len(self._writers),
            total_steps=self._num_steps,
            seed=self._config.run.seed,
        )

    def _open_log(
        self, stack: ExitStack, begun: int, measured: Mapping[str, float]
    ) -> Callable[[int, Mapping[str, float]], None]:
        """Return a function that writes a step's metrics on rank 0; `measured` is logged as step 0 of a new run."""
        if rank() != 0:
            return lambda step, row: None
        log = MetricsLog(self._directory, wandb_project=self._config.run.wandb, resume_step=begun or -1)
        stack.enter_context(log)
        if measured and begun == 0:
            log.log(0, measured)
            self._console.message(f"before: {_told(measured)}")
        return log.log

    def _lesson(self, step: int) -> Lesson:
        epoch, index = divmod(step - 1, self._steps_of_epoch)
        order, size = _order(len(self._lines), f"{self._config.run.seed}/epoch {epoch}"), self._config.sft.batch
        batch = [self._lines[i] for i in order[index * size : (index + 1) * size]]
        return Lesson({name: _of(batch, name) for name in self._learners})

    def _row(self, step: int, losses: Mapping[int, Measured], stats: Mapping[str, StepStats]) -> dict[str, float]:
        """Return the metrics of a step, and warn if the step was skipped."""
        row = self._means("sft", losses, "loss")
        for name, policy_stats in stats.items():
            prefix = f"{name}/" if len(stats) > 1 else ""
            row |= {f"{prefix}actor/grad_norm": policy_stats.grad_norm, f"{prefix}actor/lr": policy_stats.lr}
            if policy_stats.is_skipped:
                uids = ", ".join(sequence.uid for sequence in self._lesson(step).sequences[name][:4])
                self._console.warning(
                    f"step {step}: policy {name} is not updated, because its loss or gradient is not finite; first lines: {uids}"
                )
        return row

    def _measured(self) -> dict[str, float]:
        """Return the metrics of the held-out demonstrations; {} if there are none."""
        measured: dict[int, Measured] = {}
        for name, learner in self._learners.items():
            if sequences := _of(self._held_out, name):
                measured |= measure(learner, sequences, learner.shard(self._config.trainer.max_tokens_per_micro_batch))
        return self._means("sft/held_out", measured, "loss", "accuracy")

    def _is_good(self, measured: Mapping[str, float]) -> bool:
        goal = Goal(self._config.sft.stop_loss, self._config.sft.stop_accuracy)
        return bool(measured) and goal.is_reached(measured["sft/held_out/loss"], measured["sft/held_out/accuracy"])

    def _means(self, prefix: str, measured: Mapping[int, Measured], *keys: str) -> dict[str, float]:
        """Return means over all tokens, and the loss of each agent if there are several; {} without tokens."""
        agents = measured.values()
        total = sum(agent.num_tokens for agent in agents)
        if not total:
            return {}
        row = {
            f"{prefix}/{key}": math.fsum(getattr(agent, key) * agent.num_tokens for agent in agents) / total
            for key in keys
        }
        if len(measured) > 1:
            row |= {f"{prefix}/{self._writers[writer]}/loss": agent.loss for writer, agent in measured.items()}
        return row

    def _write_models(self) -> None:
        missing = {name: folder for name, folder in self.folders.items() if not folder.is_dir()}
        if rank() == 0:
            for folder in missing.values():
                folder.parent.mkdir(exist_ok=True)
        barrier()  # all ranks must check before the first folder appears
        for name, folder in missing.items():
            policy, weights = self._config.policies[name], self._learners[name].held()
            if policy.adapter is None:
                weights.save_hf(folder, str(policy.model))
                continue
            tensors = {tensor: value.detach().cpu() for tensor, value in weights.export()}  # rank 0 gets all tensors
            if rank() == 0:
                with made_whole(folder) as part:
                    write_adapter(part, read_shape(str(policy.model)), policy.adapter, tensors, str(policy.model))
            barrier()


def _of(lines: Sequence[Demonstration], policy: str) -> list[TrainSequence]:
    return [line.sequence for line in lines if line.policy == policy]


def _told(row: Mapping[str, float]) -> str:
    found = {"loss": row.get("sft/loss"), "held out": row.get("sft/held_out/loss")}
    return ", ".join(f"{name} {loss:.3f}" for name, loss in found.items() if loss is not None)
