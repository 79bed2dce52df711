"""All that can be wrong with a run and is cheap to see, before process groups, Ray or engines start."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from marsrl.rollout.agents.orchestration import orchestration_named
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.tasks import Task, make_task
from marsrl.trainer.batch_plan import BatchPlan, batch_plan
from marsrl.trainer.config import RunConfig
from marsrl.trainer.read_config import ConfigError


@dataclass(frozen=True, slots=True)
class Checked:
    """Settings that fit together and with what is on disk. `task` holds its problems already read."""

    config: RunConfig
    plan: BatchPlan
    task: Task

    def text(self, *, with_config: bool) -> str:
        """The batch arithmetic, after the resolved config if wanted."""
        plan = "\n".join(f"  {line}" for line in self.plan.lines())
        config = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False) if with_config else ""
        return f"{config}batch arithmetic:\n{plan}"


def preflight(config: RunConfig, world_size: int) -> Checked:
    """Resolve and check; reads the data files, looks into the model directories, starts nothing.

    Raises:
        ValueError: settings, data or a model directory cannot be used; the text says which, found, expected.
        OSError: a file cannot be read.
    """
    orchestration = orchestration_named(config.orchestration)
    config = _with_agents(config, tuple(orchestration.agents))
    task = make_task(
        config.task,
        options=config.task_options,
        train=config.data.train,
        evaluation=config.data.eval,
        question_key=config.data.question_key,
        answer_key=config.data.answer_key,
        on_bad_line=config.data.on_bad_line,
    )
    for name, policy in config.policies.items():
        if policy.model is not None:
            from marsrl.trainer.megatron.shape import read_shape

            read_shape(policy.model).check_layout(policy.layout, world_size)
        elif config.task != "arithmetic":
            raise ConfigError(
                f"policies.{name}.model is not set, and only the built-in task (arithmetic) has a warm-started policy of its "
                "own; give a Hugging Face model directory (`marsrl init` makes a random one to try things with)"
            )
    return Checked(config, batch_plan(config, tuple(config.agents), world_size), task)


def _with_agents(config: RunConfig, names: tuple[str, ...]) -> RunConfig:
    """`agents` in the orchestration's order, defaults where none is given; an agent it does not know is an error."""
    unknown = [name for name in config.agents if name not in names]
    if unknown:
        raise ConfigError(
            f"agents.{unknown[0]}: orchestration {config.orchestration} has no such agent; its agents are {', '.join(names)}"
        )
    agents = {name: config.agents.get(name, AgentConfig()) for name in names}
    # through validation again: the checks between sections see the agents that were filled in
    return RunConfig.model_validate({**config.model_dump(), "agents": {n: a.model_dump() for n, a in agents.items()}})
