"""Do the prompts of a team's first agent fit? Asked of the data as it is, before anything starts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.episode import Episode
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.registry import TOKENIZERS
from marsrl.rollout.types import Ask
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError
from marsrl.trainer.schools.schools import school_of

_LOOKED_AT = 64  # prompts, where all fit


def check_first_prompts(config: RunConfig, task: Task, orchestration: Orchestration, num_problems: int) -> list[str]:
    """Warnings about first prompts that are longer than the agent's max_input_tokens; an error where none can be asked or cut.

    num_problems: of the data; 0: the task makes them.
    """
    source = task.problems(config.run.seed)
    (ask, *_) = _first_asks(
        orchestration, Episode("preflight", "preflight", task.problems(config.run.seed).next_problem())
    )
    first, settings = ask.agent, config.agents[ask.agent]
    policy, room, is_skipped = settings.policy, settings.max_input_tokens, settings.long_prompts == "skip"
    with ExitStack() as stack:
        model = config.policies[policy].model
        if model is None:
            model = stack.enter_context(tempfile.TemporaryDirectory())
            school = school_of(config)
            assert school is not None
            TOKENIZERS[school.tokenizer].write(model)
        renderer = ChatRenderer(model)
    lengths: list[int] = []
    most, key = num_problems or _LOOKED_AT, f"agents.{first}.max_input_tokens"
    while len(lengths) < most and (len(lengths) < _LOOKED_AT or (is_skipped and min(lengths) > room)):
        episode = Episode("preflight", "preflight", source.next_problem())
        (ask, *_) = _first_asks(orchestration, episode)
        messages = orchestration.messages(episode, ask)
        lengths.append(len(renderer.render(messages, **settings.template_options)[0]))
        if lengths[-1] == 0:
            raise ConfigError(
                f"policies.{policy}.model: its tokenizer makes not one token of a prompt; see to its files"
            )
        if not is_skipped and renderer.render_cut(messages, room, "left", **settings.template_options) is None:
            raise ConfigError(f"{key} is {room}, and the chat template leaves no room in it for a message: raise it")
    num_long = sum(length > room for length in lengths)
    if num_long == len(lengths) and is_skipped:
        raise ConfigError(
            f"{key} is {room}, and of {num_long} prompts the shortest has {min(lengths)} tokens: none can be asked; raise it, or "
            f"set agents.{first}.long_prompts"
        )
    if num_long:
        fate = "not be asked" if is_skipped else f"be cut (agents.{first}.long_prompts)"
        return [f"{num_long} of {len(lengths)} prompts are longer than {key} ({room} tokens) and will {fate}"]
    return []


def _first_asks(orchestration: Orchestration, episode: Episode) -> Sequence[Ask]:
    """Whom the team asks first; ConfigError where its own code fails, or asks nobody."""
    try:
        asks = [each for each in orchestration.follow(episode) if isinstance(each, Ask)]
    except Exception as error:
        raise ConfigError(
            f"orchestration {orchestration.name}: follow of an episode in which nothing was asked raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if not asks:
        raise ConfigError(f"orchestration {orchestration.name}: follow asks nobody about a new problem")
    return asks
