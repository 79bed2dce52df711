"""The `marsrl` command: everything beside training itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it failed, 2 the command line or its files cannot be used."""
    parser = argparse.ArgumentParser(prog="marsrl", description="Multi-agent reinforcement learning for LLM teams.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _doctor(commands.add_parser)
    _init(commands.add_parser)
    _evaluate(commands.add_parser)
    _report(commands.add_parser)
    _export(commands.add_parser)
    words = parser.parse_args(arguments)
    try:
        return int(words.run(words))
    except (ValueError, OSError) as error:
        print(f"marsrl {words.command}: {error}", file=sys.stderr)
        return 2


AddParser = Callable[..., argparse.ArgumentParser]


def _command(add: AddParser, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    return add(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _doctor(add: AddParser) -> None:
    parser = _command(
        add,
        "doctor",
        "Say what is installed and what will serve on this machine, and why not the rest.",
        "marsrl doctor",
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.doctor import report

        print(report())
        return 0

    parser.set_defaults(run=run)


def _init(add: AddParser) -> None:
    parser = _command(
        add,
        "init",
        "Write a random Qwen3-MoE checkpoint in Hugging Face format, to try things with.",
        "marsrl init --shape tiny --tokenizer bytes /tmp/tiny",
    )
    parser.add_argument("out", help="directory to write; must not exist yet, or be empty")
    parser.add_argument(
        "--shape", default="tiny", help="size of the model: tiny, cpu_default, bench (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, arithmetic, or a directory to copy one from (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default: %(default)s")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.init_model import init_model

        init_model(words.shape, words.tokenizer, Path(words.out), seed=words.seed, dtype=words.dtype)
        print(words.out)
        return 0

    parser.set_defaults(run=run)


def _evaluate(add: AddParser) -> None:
    parser = _command(
        add,
        "evaluate",
        "Evaluate a team without training it: each agent and the whole loop, with 95% intervals.",
        "marsrl evaluate task=math policies.main.model=/models/Qwen3-0.6B data.eval=aime25.jsonl",
    )
    parser.add_argument("--config", help="YAML file (default: the task's preset)")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.evaluate_alone import evaluate_alone

        evaluate_alone(words.config, words.settings, words.json)
        return 0

    parser.set_defaults(run=run)


def _report(add: AddParser) -> None:
    parser = _command(
        add,
        "report",
        "Write report.html of a run again (also of one that is still going).",
        "marsrl report runs/cpu_default-20260101-120000",
    )
    parser.add_argument("run_directory")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.report import write_report

        path = Path(words.run_directory)
        if not (path / "config.yaml").is_file():
            raise ValueError(f"{path} is not a run directory: it has no config.yaml")
        print(write_report(path))
        return 0

    parser.set_defaults(run=run)


def _export(add: AddParser) -> None:
    parser = _command(
        add,
        "export",
        "Write a checkpoint's weights as a Hugging Face directory, which transformers and vLLM load.",
        "marsrl export runs/cpu_default-20260101-120000 /models/trained",
    )
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run directory (its latest checkpoint) or checkpoints/step_N"
    )
    parser.add_argument("out", metavar="OUT", help="directory to write; must not exist yet")
    parser.add_argument("--policy", help="which of several policies (default: the only one)")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.export import export

        done = export(words.source, words.out, words.policy)
        print(f"{done.folder}: {done.num_bytes:,} bytes of weights from {done.source}")
        return 0

    parser.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
