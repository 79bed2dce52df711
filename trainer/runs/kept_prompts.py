"""A run keeps a copy of each prompt file, so that it is resumed and evaluated with the prompts it began with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from marsrl.rollout.agents.prompts import digest_of, is_prompt_file
from marsrl.trainer.config import RunConfig
from marsrl.trainer.runs.directory import RunDirectory, write_atomically


def with_kept_prompts(config: RunConfig) -> RunConfig:
    """The config with prompt files named as a run keeps them, prompts/<name>-<digest>.yaml, beside its config.yaml."""
    agents = {
        name: agent.model_copy(update={"prompt": _kept_name(agent.prompt)}) if is_prompt_file(agent.prompt) else agent
        for name, agent in config.agents.items()
    }
    return config.model_copy(update={"agents": agents})


def keep_prompts(run: RunDirectory, config: RunConfig) -> None:
    """Copy the prompt files into the run; existing copies stay."""
    for agent in config.agents.values():
        if is_prompt_file(agent.prompt):
            write_atomically(run.path / _kept_name(agent.prompt), Path(agent.prompt).read_bytes())


def changed_prompts(run: RunDirectory, saved: RunConfig, now: RunConfig) -> Iterator[str]:
    """Prompt files whose contents differ from those that the run began with; both configs from with_kept_prompts."""
    agents: dict[str, list[str]] = {}
    for name, agent in now.agents.items():
        before = saved.agents[name].prompt if name in saved.agents else None
        if not is_prompt_file(before) or not is_prompt_file(agent.prompt):
            continue
        if before != agent.prompt and _stem(before) == _stem(agent.prompt):
            agents.setdefault(before, []).append(f"agents.{name}.prompt")
    for before, keys in agents.items():
        yield (
            f"{', '.join(keys)} (the file has changed; what it began with is {run.path / before}, and a file of another name "
            "counts as another prompt)"
        )


def _kept_name(prompt: str) -> str:
    digest, stem = digest_of(prompt), Path(prompt).stem
    return f"prompts/{stem.removesuffix(f'-{digest}')}-{digest}.yaml"


def _stem(kept_name: str) -> str:
    return kept_name.rpartition("-")[0]
