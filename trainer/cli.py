"""The `marsrl` command: everything beside training itself."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it failed, 2 the command line or its files cannot be used."""
    parser = argparse.ArgumentParser(prog="marsrl", description="Multi-agent reinforcement learning for LLM teams.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _doctor(commands.add_parser)
    _join(commands.add_parser)
    _init(commands.add_parser)
    _try(commands.add_parser)
    _evaluate(commands.add_parser)
    _curate(commands.add_parser)
    _report(commands.add_parser)
    _export(commands.add_parser)
    _plan(commands.add_parser)
    _tool(commands.add_parser)
    _serve_retrieval(commands.add_parser)
    _make_facts(commands.add_parser)
    words, behind = parser.parse_known_args(arguments)
    if "words" in words and not any(word.startswith("-") for word in behind):
        words.words += behind  # argparse takes positional words before options or behind them, not both
    elif behind:
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    try:
        return int(words.run(words))
    except (ValueError, OSError) as error:
        print(f"marsrl {words.command}: {error}", file=sys.stderr)
        return 2


AddParser = Callable[..., argparse.ArgumentParser]


def _command(add: AddParser, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    return add(
        name,
        help=summary.replace("%", "%%"),  # argparse formats it
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _doctor(add: AddParser) -> None:
    parser = _command(
        add,
        "doctor",
        "Say what is installed and what will serve on this machine, and why not the rest; of a config, whether it runs here.",
        "marsrl doctor",
    )
    parser.add_argument(
        "--config", help="YAML file, or a preset's name: what would become of it on hosts like this one"
    )
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of the trainer, as torchrun's (default: 1)")
    parser.add_argument(
        "--nproc-per-node", type=int, help="ranks on each, as torchrun's (default: the GPUs that engines leave)"
    )
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.doctor import examine, report
        from marsrl.trainer.read_config import read_config

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
        return int(any(finding.topic == "config" and finding.detail.startswith("refused") for finding in findings))

    parser.set_defaults(run=run)


def _join(add: AddParser) -> None:
    parser = _command(
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

        host, port = split_address(words.head, HEAD_PORT)
        gpus = (
            [int(each) for each in words.gpus.split(",")] if words.gpus else None
        )  # ValueError says what is no number
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
        "--tokenizer",
        default="bytes",
        help="bytes, arithmetic, facts, calls, or a directory to copy one from (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default: %(default)s")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.models.init_model import init_model

        init_model(words.shape, words.tokenizer, Path(words.out), seed=words.seed, dtype=words.dtype)
        print(words.out)
        return 0

    parser.set_defaults(run=run)


def _try(add: AddParser) -> None:
    parser = _command(
        add,
        "try",
        "Play one problem by a team with made-up answers and show whom it asks, and what that is worth; no model is needed.",
        "marsrl try orchestration=debate rollout.group_size=2",
    )
    parser.add_argument("--config", help="YAML file, or a preset's name; where it is silent, the task's preset holds")
    parser.add_argument("--answers", metavar="FILE", help="YAML, agent: [text, ...]: what it says, call by call")
    parser.add_argument("--question", default="", help="default: a problem of the task")
    parser.add_argument("--reference", default="", help="the right answer to --question")
    parser.add_argument("--prompts", action="store_true", help="also show what each agent read")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")

    def run(words: argparse.Namespace) -> int:
        from rich.console import Console

        from marsrl.trainer.evaluate.rehearsal import drawn, read_answers, rehearse
        from marsrl.trainer.read_config import read_config

        config, origin = read_config(words.config, words.settings)
        answers = read_answers(Path(words.answers), list(config.agents)) if words.answers else {}
        with origin.places_in_errors():
            problem, credited = rehearse(config, answers, question=words.question, reference=words.reference)
        print(f"# settings: {origin}")
        width = None if sys.stdout.isatty() else 160
        Console(highlight=False, width=width).print(drawn(problem, credited, with_prompts=words.prompts))
        return 0

    parser.set_defaults(run=run)


def _evaluate(add: AddParser) -> None:
    parser = _command(
        add,
        "evaluate",
        "Evaluate a team without training it: each agent and the whole loop, with 95% intervals.",
        "marsrl evaluate task=math policies.main.model=/models/Qwen3-0.6B data.eval=aime25.jsonl",
    )
    parser.add_argument("--config", help="YAML file, or a preset's name; where it is silent, the task's preset holds")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="FILE",
        help="evaluate this config too, and set both side by side",
    )
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.evaluate.command import evaluate_alone
        from marsrl.trainer.runs.directory import refuse_file_of_a_run

        if words.json:
            refuse_file_of_a_run(Path(words.json))
        evaluate_alone(words.config, words.settings, words.json, words.compare)
        return 0

    parser.set_defaults(run=run)


def _curate(add: AddParser) -> None:
    parser = _command(
        add,
        "curate",
        "Choose the problems that are worth training on: rules, near-duplicates, judges, and how often a team is right.",
        "marsrl curate raw.jsonl --out curated",
    )
    parser.add_argument(
        "words", nargs="+", metavar="INPUT", help="jsonl, parquet or HF dataset directory; or key.sub=value"
    )
    parser.add_argument("--out", required=True, help="directory; where it has begun, it goes on")
    parser.add_argument("--config", help="YAML file, or a preset's name; where it is silent, the task's preset holds")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.curate.command import curate
        from marsrl.trainer.curate.missing import CurationStopped

        try:
            print(curate(words.words, Path(words.out), words.config))
        except CurationStopped as stopped:
            print(f"marsrl curate: {stopped}", file=sys.stderr)
            return 1
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
        from marsrl.trainer.report.report import write_report

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
        from marsrl.trainer.models.export import export

        done = export(words.source, words.out, words.policy)
        print(f"{done.folder}: {done.num_bytes:,} bytes of weights from {done.source}")
        return 0

    parser.set_defaults(run=run)


def _plan(add: AddParser) -> None:
    parser = _command(
        add,
        "plan",
        "Will a run fit on so many GPUs, in which layout, and how long is a step? By formula; no GPU is needed.",
        "marsrl plan --config configs/qwen3_30b_a3b.yaml --gpus 64 --gpu h100-80g",
    )
    parser.add_argument("--config", help="YAML file, or a preset's name; where it is silent, the task's preset holds")
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
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")

    def run(words: argparse.Namespace) -> int:
        from rich.console import Console

        from marsrl.trainer.plan.command import as_json, show
        from marsrl.trainer.plan.plan import make_plan
        from marsrl.trainer.read_config import read_config
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
        show(plan, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
        return 0

    parser.set_defaults(run=run)


def _tool(add: AddParser) -> None:
    parser = _command(
        add,
        "tool",
        "Call one tool as a team would, and show what it says and how long it took; exits with 1 where that is an error.",
        'marsrl tool search "the home of mira holt"',
    )
    parser.add_argument("tool", help="of the settings `tools`: search, scholar, ...")
    parser.add_argument("argument", help="the text that it takes, or a JSON object of its arguments")
    parser.add_argument(
        "--config",
        help="YAML file, or a preset's name; without one task=qa holds, with the built-in documents and papers",
    )
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.evaluate.tool_call import call_tool
        from marsrl.trainer.read_config import read_config

        built_in = [] if words.config else ["task=qa", "tools.scholar.kind=index", "tools.python={}"]
        config, origin = read_config(words.config, [*built_in, *words.settings])
        with origin.places_in_errors():
            called = call_tool(config, words.tool, words.argument)
        print(called.text())
        return int(called.output.is_error)

    parser.set_defaults(run=run)


def _serve_retrieval(add: AddParser) -> None:
    parser = _command(
        add,
        "serve-retrieval",
        "Answer POST /retrieve over a corpus, as the retrieval servers of Search-R1 and Dr. MAS do, until Ctrl-C.",
        "marsrl serve-retrieval --corpus wiki-18.jsonl --index wiki-18.sqlite",
    )
    parser.add_argument("--corpus", required=True, help="jsonl of {id, title, text} or {id, contents}")
    parser.add_argument("--index", help="file that keeps the index for the next time (default: a temporary one)")
    parser.add_argument("--host", default="127.0.0.1", help="who reaches it can search (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument(
        "--top-k", type=int, default=3, help="documents for requests that do not say how many (default: %(default)s)"
    )

    def run(words: argparse.Namespace) -> int:
        for package in ("fastapi", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"the package {package} is not installed; pip install fastapi uvicorn (marsrl[retrieval])"
                )
        if not 0 <= words.port < 1 << 16 or not 1 <= words.top_k <= 100:
            raise ValueError(
                f"--port is {words.port}, expected 0 to 65535; --top-k is {words.top_k}, expected 1 to 100"
            )
        from contextlib import closing

        from marsrl.rollout.tools.retrieval_server import serve
        from marsrl.rollout.tools.search import open_index

        with closing(open_index(words.corpus, words.index)) as index:
            num = index.num_documents

            def say(address: str) -> None:
                print(f"{num:,} documents of {words.corpus} at {address}", flush=True)

            serve(index, words.host, words.port, words.top_k, say)
        return 0

    parser.set_defaults(run=run)


def _make_facts(add: AddParser) -> None:
    parser = _command(
        add,
        "make-facts",
        "Write the built-in world of linked facts as files: corpus.jsonl, papers.jsonl, train.jsonl and held_out.jsonl.",
        "marsrl make-facts /tmp/facts",
    )
    parser.add_argument("out", metavar="OUT", help="directory; the files must not be there yet")
    parser.add_argument("--train", type=int, default=10_000, help="questions to train on (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=300, help="questions to evaluate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of questions (default: %(default)s)")
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="task_options of task=qa: people, max_hops, about=papers, ..."
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.rollout.tasks.linked_facts import read_facts_options, write_linked_facts

        if min(words.train, words.held_out) < 1:
            raise ValueError(f"--train is {words.train}, --held-out is {words.held_out}; expected at least 1")
        options = read_facts_options(words.options)
        write_linked_facts(words.out, options, words.train, words.held_out, words.seed)
        print(
            f"{words.out}: {options.people + options.places:,} documents, {options.papers:,} papers, "
            f"{words.train:,} + {words.held_out:,} questions"
        )
        return 0

    parser.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
