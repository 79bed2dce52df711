"""Weights, and settings, as files."""

from __future__ import annotations

import argparse
from pathlib import Path

from marsrl.trainer.cli.command import AddParser, command


def _init(add: AddParser) -> None:
    parser = command(
        add,
        "init",
        "Write a random Qwen3-MoE checkpoint in Hugging Face format, or a run's settings as a YAML file.\n\n"
        "With --from-run OUT is a file for --config: the task, the presets that the run was made of, and each setting that\n"
        "differs from theirs, so that it gives the run's settings again (but for run.name and run.resume, which are of one run).",
        "marsrl init --shape tiny --tokenizer bytes /tmp/tiny",
    )
    parser.add_argument(
        "out", help="directory to write, which must not exist yet or be empty; with --from-run a new file"
    )
    parser.add_argument(
        "--from-run", metavar="RUN", help="run directory whose settings are written, in place of a model"
    )
    parser.add_argument(
        "--shape", default="tiny", help="size of the model: tiny, cpu_default, bench (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes, arithmetic, facts, calls, or a directory to copy one from (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default: %(default)s")

    def run(words: argparse.Namespace) -> int:
        if words.from_run:
            from marsrl.trainer.config.from_run import write_settings_of

            print(write_settings_of(Path(words.from_run), Path(words.out)))
            return 0
        from marsrl.trainer.models.init_model import init_model

        init_model(words.shape, words.tokenizer, Path(words.out), seed=words.seed, dtype=words.dtype)
        print(words.out)
        return 0

    parser.set_defaults(run=run)


def _export(add: AddParser) -> None:
    parser = command(
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
        from marsrl.trainer.models.export import export

        done = export(words.source, words.out, words.policy)
        print(f"{done.folder}: {done.num_bytes:,} bytes of weights from {done.source}")
        return 0

    parser.set_defaults(run=run)


COMMANDS = {
    "init": _init,
    "export": _export,
}
