"""Cheap checks of a whole run, before process groups, Ray or engines start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from marsrl.rollout.engines.refusals import TrainerHost, this_host
from marsrl.rollout.engines.vllm.arguments import who_draws
from marsrl.rollout.gateway.workers import check_external
from marsrl.rollout.imports import check_installed
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.tasks.data import fingerprint
from marsrl.rollout.tasks.find_task import lists_problems
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.tools.build import check_tools
from marsrl.rollout.types import Problem
from marsrl.trainer.checks.batch_plan import batch_plan, why_not_one_micro_batch
from marsrl.trainer.checks.device import why_not_device
from marsrl.trainer.checks.dtypes import decide_dtypes
from marsrl.trainer.checks.placement import placement_lines, with_backend
from marsrl.trainer.checks.policy_files import checked_policy
from marsrl.trainer.checks.problems import RunProblems, check_judge, problems_of, sources
from marsrl.trainer.checks.prompts import (
    check_first_prompts,
    check_parsers,
    check_teachers,
    check_templates,
    renderer_of,
)
from marsrl.trainer.checks.refusals import (
    check_machine,
    engines_device,
    ignored_settings,
    slow_records,
    stale_samples,
    vllm_of,
    why_not_backend,
    why_not_offloaded,
)
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.config.agreement import check_agreement
from marsrl.trainer.config.origin import refuse
from marsrl.trainer.data import credit
from marsrl.trainer.learner.megatron.layout import why_not_together
from marsrl.trainer.report import prometheus
from marsrl.trainer.torchrun import is_rank_0


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of the checks: resolved settings that are consistent and match the files on disk. `task` has read its problems.

    plan: lines about the batch sizes of a step.
    placement: lines that name the rank or engine of each GPU.
    ends: for each policy, text that names the tokens that end its completions.
    warnings: sentences about likely mistakes.
    curators: policies that only `marsrl curate` uses.
    dtypes: lines with the dtype that each `auto` was resolved to, and why.
    """

    config: RunConfig
    plan: tuple[str, ...]
    task: Task
    problems: RunProblems
    host: TrainerHost
    placement: tuple[str, ...]
    ends: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    curators: Mapping[str, PolicyConfig] = field(default_factory=dict)
    dtypes: Sequence[str] = ()

    def fingerprints(self) -> dict[str, dict[str, int | str]]:
        found = zip(sources(self.config.task), (self.problems.train, self.problems.held_out), strict=True)
        return {key: fingerprint(problems) for key, problems in found if problems}

    def settings(self) -> str:
        """All resolved settings, as YAML."""
        whole = self.config.model_copy(update={"policies": {**self.config.policies, **self.curators}})
        return yaml.safe_dump(whole.model_dump(mode="json"), sort_keys=False)

    def text(self) -> str:
        """Summary of the run: batch sizes, placement, data, warnings."""
        lines = ["batch arithmetic:", *(f"  {line}" for line in self.plan)]
        lines += ["placement:", *(f"  {line}" for line in self.placement)]
        if self.problems.num_skipped:
            lines.append(f"{self.problems.num_skipped} lines of the data could not be read and were skipped")
        train_source, eval_source = sources(self.config.task)
        num, most = len(self.problems.held_out), self.config.evaluate.num_problems
        if self.problems.num_taken:
            none = "held_out is empty" if lists_problems(self.config.task) else "no data.eval is given"
            whole = num + len(self.problems.train)
            lines.append(f"held out of {train_source} for evaluation: {num} of {whole:,} problems ({none})")
        elif num:
            least = (
                f", fewer than evaluate.num_problems = {most:,}"
                if most and num < most and not self.problems.sets
                else ""
            )
            lines.append(
                f"problems to evaluate on: {num if self.problems.sets or not most else min(num, most):,} of {eval_source}{least}"
            )
        lines += [f"policies.{name}: used only by marsrl curate" for name in self.curators]
        lines += self.dtypes
        device = engines_device(self.host)
        lines += [f"policies.{name}: {who_draws(vllm, device)}" for name, vllm in vllm_of(self.config).items()]
        lines += [f"a turn of policies.{name} ends with {ends}" for name, ends in self.ends.items()]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def preflight(
    config: RunConfig,
    world_size: int,
    *,
    trains: bool = True,
    given: Sequence[Problem] | None = None,
    began: RunConfig | None = None,
) -> Checked:
    """Resolve and check the settings before anything starts.

    Reads the data files, inspects the model directories, and briefly starts the user's tools.

    trains: False if the team is only evaluated. Then no trainer uses the GPUs, and data.eval alone is enough.
    given: problems to evaluate on, instead of those in the data files.
    began: settings of the run or evaluation to resume, whose dtypes are kept.

    Raises:
        ValueError: settings, data or a model directory are invalid; the message gives the value found and the values expected.
        OSError: a file cannot be read.
    """
    import torch

    device, has_cuda = why_not_device(config.run.device), torch.cuda.is_available()
    refuse(device and f"run.device is {config.run.device}: {device}")
    config, dtypes = decide_dtypes(config, began)
    if dtypes:
        check_agreement(config, trains=trains)
    curators, config = config.curators, with_backend(config.without_curators(), on_gpus=has_cuda)
    host = this_host(config.rollout.ray_address, trains=trains)
    if trains:
        refuse(credit.why_not(config))
        refuse(why_not_together(config.trained_policies))
        refuse(why_not_offloaded(config))
        if config.run.wandb is not None:
            check_installed(f"run.wandb={config.run.wandb}", "wandb", otherwise="unset run.wandb")
        if is_rank_0():
            refuse(prometheus.why_not(config.run.prometheus_port))
    else:
        config = config.without_teachers()
    check_machine(config, host)
    problems = problems_of(config, trains=trains, given=given)
    task = build_task(config.task, config.task_options, problems.train, problems.held_out)
    orchestration = build_orchestration(  # Raises if a prompt is invalid.
        config.orchestration,
        config.agents,
        task.prompts,
        config.orchestration_options,
        config.rollout,
        tools=config.tools.given,
    )
    functions = check_tools(config.tools, orchestration.tools, task.documents, task.papers)
    if config.external is not None and is_rank_0():
        check_external(config.external)
    warnings = list(problems.warnings)
    for name in config.policies:
        config, found = checked_policy(config, name, world_size, trains=trains)
        warnings += found
    check_teachers(config)
    check_parsers(config)
    warnings += check_judge(config, problems, trains=trains)
    refuse(why_not_backend(config, has_cuda=has_cuda))
    if trains:
        refuse(why_not_one_micro_batch(config, world_size))
    warnings += slow_records(config, host)
    warnings += stale_samples(config) if trains else []
    warnings += ignored_settings(config)
    check_templates(config)
    warnings += check_first_prompts(config, task, orchestration, functions, len(problems.train) if trains else 0)
    return Checked(
        config,
        batch_plan(config, world_size),
        task,
        problems,
        host,
        tuple(placement_lines(config, host, world_size)),
        {name: renderer_of(config, name).ends for name in config.policies if name not in config.teachers},
        tuple(warnings),
        curators,
        dtypes,
    )
