"""The `marsrl` command: everything beside training itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from marsrl.trainer.cli import data, look, machine, models, run
from marsrl.trainer.cli.command import AddParser, command, in_short


def _completion(add: AddParser) -> None:
    parser = command(
        add, "completion", "Print the completion script of a shell for `marsrl`.", "marsrl completion bash"
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])

    def run(words: argparse.Namespace) -> int:
        import shtab

        print(shtab.complete(build_parser(), words.shell))
        return 0

    parser.set_defaults(run=run)


GROUPS = {
    "run": run.COMMANDS,
    "look": look.COMMANDS,
    "data": data.COMMANDS,
    "models": models.COMMANDS,
    "this machine": {**machine.COMMANDS, "completion": _completion},
}
"""What `marsrl --help` lists: each command by name, with what makes its parser."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; its epilog is the list of them."""
    parser = argparse.ArgumentParser(
        prog="marsrl",
        description="Multi-agent reinforcement learning for LLM teams. Training itself: torchrun trainer/main.py --help.",
        formatter_class=_Grouped,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    lists = []
    for group, members in GROUPS.items():
        for make in members.values():
            make(commands.add_parser)
        summaries = {name: in_short(str(commands.choices[name].description)) for name in members}
        lists.append(f"{group}:\n" + "".join(f"  {name:<16} {summary}\n" for name, summary in summaries.items()))
    parser.epilog = "\n".join(lists)
    return parser


class _Grouped(argparse.RawDescriptionHelpFormatter):
    """Without argparse's own list of the commands."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.nargs != argparse.PARSER:
            super().add_argument(action)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it failed, 2 the command line or its files cannot be used."""
    parser = build_parser()
    words, behind = parser.parse_known_args(arguments)
    last = next((name for name in ("words", "settings") if name in words), None)
    if last is not None and not any(word.startswith("-") for word in behind):
        getattr(words, last).extend(behind)  # argparse takes positional words before options or behind them, not both
    elif behind:
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    try:
        code = int(words.run(words))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads the output has enough: `marsrl config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        from marsrl.trainer.config.explain import help_line

        print(f"marsrl {words.command}: {error}{help_line(str(error))}", file=sys.stderr)
        return 2
