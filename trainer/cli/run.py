"""Before a run and of its settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from marsrl.trainer.cli.command import AddParser, command, console, takes_settings


def _try(add: AddParser) -> None:
    parser = command(
        add,
        "try",
        "Play one problem by a team with made-up answers and show whom it asks, and what that is worth; no model is needed.",
        "marsrl try orchestration=debate rollout.group_size=2",
    )
    takes_settings(parser)
    parser.add_argument("--answers", metavar="FILE", help="YAML, agent: [text, ...]: what it says, call by call")
    parser.add_argument("--question", default="", help="default: a problem of the task")
    parser.add_argument("--reference", default="", help="the right answer to --question")
    parser.add_argument("--prompts", action="store_true", help="also show what each agent read")

    def run(words: argparse.Namespace) -> int:
        import logging

        from marsrl.rollout import team
        from marsrl.trainer.config.read import read_config
        from marsrl.trainer.evaluate.rehearsal import drawn, read_answers, rehearse, reward_rules

        def has_traceback(record: logging.LogRecord) -> bool:
            return record.exc_info is not None  # of a team that ships; what a user's code raised is in the tree

        config, origin = read_config(words.config, words.settings)
        answers = read_answers(Path(words.answers), list(config.agents)) if words.answers else {}
        log = logging.getLogger(team.__name__)
        log.addFilter(has_traceback)
        try:
            with origin.places_in_errors():
                rehearsal = rehearse(config, answers, question=words.question, reference=words.reference)
        finally:
            log.removeFilter(has_traceback)
        print(f"# settings: {origin}", *(f"# {line}" for line in reward_rules(config)), sep="\n")
        console(160).print(drawn(rehearsal, with_prompts=words.prompts))
        return 0

    parser.set_defaults(run=run)


def _plan(add: AddParser) -> None:
    parser = command(
        add,
        "plan",
        "Will a run fit on so many GPUs, in which layout, and how long is a step? By formula; no GPU is needed.",
        "marsrl plan --config configs/qwen3_30b_a3b.yaml --gpus 64 --gpu h100-80g",
    )
    takes_settings(parser)
    parser.add_argument("--gpus", type=int, required=True, help="GPUs in all, those of the engines included")
    parser.add_argument(
        "--gpu", default="h100-80g", help="h100-80g, a100-80g, a100-40g, h200-141g (default: %(default)s)"
    )
    parser.add_argument("--response", type=int, help="rollout.max_response_tokens, in place of the config's")
    parser.add_argument(
        "--mean-response", type=float, help="completion tokens on average (default: 0.35 of the maximum)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write everything to this file; - prints it instead of tables"
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.config.read import read_config
        from marsrl.trainer.plan.command import as_json, show
        from marsrl.trainer.plan.plan import make_plan
        from marsrl.trainer.runs.directory import refuse_file_of_a_run

        if words.json:
            refuse_file_of_a_run(Path(words.json))
        settings = list(words.settings)
        if words.response is not None:
            settings.append(f"rollout.max_response_tokens={words.response}")
        config, origin = read_config(words.config, settings)
        with origin.places_in_errors():
            plan = make_plan(config, words.gpus, words.gpu, words.mean_response)
        if words.json == "-":
            print(as_json(plan))
            return 0
        print(f"# settings: {origin}")
        if words.json:
            Path(words.json).write_text(as_json(plan) + "\n", encoding="utf-8")
        show(plan, console(120))
        return 0

    parser.set_defaults(run=run)


def _config(add: AddParser) -> None:
    parser = command(
        add,
        "config",
        "Print the settings that result from a file and words, what one key means, or all keys as a page.",
        "marsrl config --explain rollout.segments",
    )
    takes_settings(parser)
    parser.add_argument("--origin", action="store_true", help="with where each value was given, file and line")
    parser.add_argument("--explain", metavar="KEY", help="type, default and meaning of a key or section, and its value")
    parser.add_argument("--markdown", action="store_true", help="every key, as a page")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.config.explain import as_markdown, as_yaml, explained
        from marsrl.trainer.config.read import read_config

        if words.markdown:
            print(as_markdown(), end="")
            return 0
        config, origin = read_config(words.config, words.settings)
        if words.explain:
            print(explained(words.explain, config, origin))
            return 0
        print(f"# settings: {origin}")
        print(as_yaml(config, origin if words.origin else None), end="")
        return 0

    parser.set_defaults(run=run)


def _prompts(add: AddParser) -> None:
    parser = command(
        add,
        "prompts",
        "List the prompt sets that ship; with a name, print that one as a file for agents.<name>.prompt.",
        "marsrl prompts math",
    )
    parser.add_argument("name", nargs="?", help="of the set")

    def run(words: argparse.Namespace) -> int:
        from marsrl.rollout.agents.prompts import prompt_set, set_names, text_of_set

        if words.name is not None:
            print(text_of_set(words.name), end="")
            return 0
        for name in set_names():
            first = text_of_set(name).partition("\n")[0].removeprefix("# ")
            print(f"{name:<12} {first}\n{'':<12} roles: {', '.join(prompt_set(name).turns)}")
        return 0

    parser.set_defaults(run=run)


COMMANDS = {
    "try": _try,
    "plan": _plan,
    "config": _config,
    "prompts": _prompts,
}
