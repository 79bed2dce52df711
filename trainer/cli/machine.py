"""This machine."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from marsrl.trainer.cli.command import AddParser, command, takes_settings


def _doctor(add: AddParser) -> None:
    parser = command(
        add,
        "doctor",
        "Say what is installed and what will serve on this machine, and why not the rest; of a config, whether it runs here.",
        "marsrl doctor",
    )
    takes_settings(parser, "YAML file, or a preset's name: what would become of it on hosts like this one")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of the trainer, as torchrun's (default: 1)")
    parser.add_argument(
        "--nproc-per-node", type=int, help="ranks on each, as torchrun's (default: the GPUs that engines leave)"
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.checks.doctor import examine, report
        from marsrl.trainer.config.read import read_config

        if words.nnodes < 1 or (words.nproc_per_node or 1) < 1:
            raise ValueError(
                f"--nnodes is {words.nnodes}, --nproc-per-node {words.nproc_per_node}; expected at least 1"
            )
        config, origin = None, None
        if words.config or words.settings:
            config, origin = read_config(words.config, words.settings)
            print(f"# settings: {origin}")
        findings = examine(config, words.nnodes, words.nproc_per_node)
        print(report(findings))
        return int(any(finding.detail.startswith("refused") for finding in findings))

    parser.set_defaults(run=run)


def _join(add: AddParser) -> None:
    parser = command(
        add,
        "join",
        "Lend this host to a trainer on another one: its engines run here. Two commands make a cluster, in any order:\n\n"
        "  trainer hosts:  torchrun ... trainer/main.py ... rollout.ray_address=here\n"
        "  engine hosts:   marsrl join HOST        (HOST: where trainer rank 0 is)\n\n"
        "Stays in the foreground until the trainer's cluster ends (exit code 0) or Ctrl-C. A cluster demands its token: copy\n"
        "~/.ray/auth_token of HOST, which its first run makes, to the same place here, or name it with --token-file. Ray and\n"
        "Python must be HOST's; models, and sync.directory if set, must be at the same paths.",
        "marsrl join node0",
    )
    parser.add_argument(
        "head", metavar="HOST[:PORT]", help="of trainer rank 0; the port is that of rollout.ray_address=here:PORT"
    )
    parser.add_argument("--gpus", help="those for engines, of the GPUs seen here: 0,1 (default: all)")
    parser.add_argument(
        "--engines", type=int, help="how many engines this host has room for, where it has no GPU (default: 1)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="the cluster's token (default: ~/.ray/auth_token)")
    parser.add_argument(
        "--wait",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds to wait for HOST, at first and while it is silent (default: 1800)",
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.rollout.config import HEAD_PORT
        from marsrl.rollout.pool.addresses import split_address
        from marsrl.trainer.checks.device import why_not_device

        host, port = split_address(words.head, HEAD_PORT)
        # ValueError says what is no number
        gpus = [int(each) for each in words.gpus.split(",")] if words.gpus else None
        if words.engines is None and (reason := why_not_device("cuda" if gpus else "auto")) is not None:
            raise ValueError(f"{reason}, or give --engines")
        if importlib.util.find_spec("ray") is None:
            raise ValueError("the package ray is not installed here: install the version of the trainer's host")
        from marsrl.rollout.pool.ray_node import JoinError, join, offer_of_this_host

        def say(line: str) -> None:
            print(f"marsrl join: {line}", flush=True)

        try:
            join(
                host,
                port,
                offer_of_this_host(gpus, words.engines),
                token_file=words.token_file,
                wait_s=words.wait,
                say=say,
            )
        except JoinError as error:
            print(f"marsrl join: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            say("interrupted; this host has left")
            return 130
        return 0

    parser.set_defaults(run=run)


COMMANDS = {
    "doctor": _doctor,
    "join": _join,
}
