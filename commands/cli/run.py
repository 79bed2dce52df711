"""Commands used before a run: rehearsal, demonstrations, planning and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from marsrl.commands.cli.command import Config, Settings, command, console


@command("run", "marsrl try orchestration=debate rollout.group_size=2", name="try")
def try_team(
    settings: Settings = None,
    config: Config = None,
    answers: Annotated[
        Path | None,
        Option(metavar="FILE", help="YAML file with the answers of each agent, in order: agent: \\[text, ...]"),
    ] = None,
    question: Annotated[str, Option(help="question to answer (default: a problem of the task)")] = "",
    reference: Annotated[str, Option(help="right answer to --question")] = "",
    prompts: Annotated[bool, Option("--prompts", help="also show each agent's prompt")] = False,
) -> int:
    """Run a team on one problem with made-up answers, and show its calls and rewards; no model is needed.

    Exits with 1 if every episode failed.
    """
    from marsrl.trainer.config.read import read_config

    read, origin = read_config(config, settings or ())  # before the imports below, which take seconds

    from marsrl.commands.rehearsal import read_answers, rehearse_shown

    said = read_answers(answers, list(read.agents)) if answers else {}
    rehearsal = rehearse_shown(
        read, origin, said, console(160), question=question, reference=reference, with_prompts=prompts
    )
    return int(0 < rehearsal.num_episodes == len(rehearsal.errors))


@command("run", "marsrl sft policies.main.model=/models/Qwen3-0.6B data.demonstrations=demos.jsonl")
def sft(settings: Settings = None, config: Config = None) -> int:
    """Train the team's policies on demonstrations, as a start for RL.

    Lines of data.demonstrations have one of three forms: {"messages": [...]}, where the last message is the completion;
    {"prompt": ..., "completion": ...}; or, for one agent, {"agent": ..., "prompt": {"problem": ..., ...}, "completion": ...}. The
    settings under `sft` and `policies` apply. The models are written to hf in the run's directory. With several ranks:
    torchrun --no-python marsrl sft.
    """
    from marsrl.trainer.config.read import read_config

    read, origin = read_config(config, settings or ())  # before the imports below, which take seconds

    from marsrl.commands.sft.command import sft

    return sft(read, origin)


@command("run", "marsrl plan --config configs/qwen3_30b_a3b.yaml --gpus 64 --gpu h100-80g")
def plan(
    gpus: Annotated[int, Option(min=1, max=65_536, help="total number of GPUs, including those of the engines")],
    settings: Settings = None,
    config: Config = None,
    gpu: Annotated[
        Literal["h100-80g", "a100-80g", "a100-40g", "h200-141g"], Option(help="model and memory of each GPU")
    ] = "h100-80g",
    response: Annotated[int | None, Option(help="maximum tokens per completion (rollout.max_response_tokens)")] = None,
    mean_response: Annotated[
        float | None, Option(help="mean tokens per completion (default: 0.35 of the maximum)")
    ] = None,
    json: Annotated[
        str | None,
        Option(metavar="FILE", help="also write the plan to this file as JSON; -: print JSON instead of tables"),
    ] = None,
) -> None:
    """Estimate by formula whether a run fits, in which layout, and how long a step takes; no GPU is needed."""
    from marsrl.trainer.config.read import read_config

    words = [] if response is None else [f"rollout.max_response_tokens={response}"]
    read, origin = read_config(config, [*(settings or ()), *words])  # before the imports below, which take seconds

    from marsrl.commands.plan.command import as_json, show
    from marsrl.commands.plan.plan import make_plan
    from marsrl.trainer.runs.directory import refuse_file_of_a_run

    if json:
        refuse_file_of_a_run(Path(json))
    with origin.places_in_errors():
        planned = make_plan(read, gpus, gpu, mean_response)
    if json == "-":
        print(as_json(planned))
        return
    print(f"# settings: {origin}")
    if json:
        Path(json).write_text(as_json(planned) + "\n", encoding="utf-8")
    show(planned, console(120))


@command("run", "marsrl config --explain rollout.segments", name="config")
def show_config(
    settings: Settings = None,
    config: Config = None,
    origin: Annotated[bool, Option("--origin", help="also show the source of each value, file and line")] = False,
    explain: Annotated[
        str | None, Option(metavar="KEY", help="show the type, default, meaning and value of a key or section")
    ] = None,
    markdown: Annotated[bool, Option("--markdown", help="print a page with every key")] = False,
) -> None:
    """Print the settings that result from a file and arguments, the meaning of one key, or a page with all keys."""
    from marsrl.trainer.config.explain import as_markdown, as_yaml, explained
    from marsrl.trainer.config.read import read_config

    if markdown:
        print(as_markdown(), end="")
        return
    read, made_of = read_config(config, settings or ())
    if explain:
        print(explained(explain, read, made_of))
        return
    print(f"# settings: {made_of}")
    print(as_yaml(read, made_of if origin else None), end="")


@command("run", "marsrl prompts math")
def prompts(name: Annotated[str | None, Argument(help="name of a set")] = None) -> None:
    """List the built-in prompt sets; with a name, print that set as a file for agents.<name>.prompt."""
    from marsrl.rollout.agents.prompts import prompt_set, set_names, text_of_set

    if name is not None:
        print(text_of_set(name), end="")
        return
    for set_name in set_names():
        first = text_of_set(set_name).partition("\n")[0].removeprefix("# ")
        print(f"{set_name:<12} {first}\n{'':<12} roles: {', '.join(prompt_set(set_name).turns)}")
