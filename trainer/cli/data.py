"""Problems, tools and their documents."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from marsrl.trainer.cli.command import AddParser, check_server, command, takes_settings


def _curate(add: AddParser) -> None:
    parser = command(
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


def _make_facts(add: AddParser) -> None:
    parser = command(
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
        "options",
        nargs="*",
        default=[],
        metavar="key=value",
        help="task_options of task=qa: people, max_hops, about=papers, ...",
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


def _serve_retrieval(add: AddParser) -> None:
    parser = command(
        add,
        "serve-retrieval",
        "Answer POST /retrieve over a corpus until Ctrl-C: as the retrieval servers of Search-R1 and Dr. MAS do.",
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
        check_server("retrieval", words.port)
        if not 1 <= words.top_k <= 100:
            raise ValueError(f"--top-k is {words.top_k}, expected 1 to 100")
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


def _tool(add: AddParser) -> None:
    parser = command(
        add,
        "tool",
        "Call one tool as a team would, and show what it says and how long it took; exits with 1 where that is an error.",
        'marsrl tool search "the home of lotte holt"',
    )
    parser.add_argument("tool", help="of the settings `tools`: search, scholar, ...")
    parser.add_argument("argument", help="the text that it takes, or a JSON object of its arguments")
    takes_settings(
        parser, "YAML file, or a preset's name; without one task=qa holds, with the built-in documents and papers"
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.config.read import read_config
        from marsrl.trainer.evaluate.tool_call import call_tool

        built_in = [] if words.config else ["task=qa", "tools.scholar.kind=index", "tools.python={}"]
        config, origin = read_config(words.config, [*built_in, *words.settings])
        with origin.places_in_errors():
            called = call_tool(config, words.tool, words.argument)
        print(called.text())
        return int(called.output.is_error)

    parser.set_defaults(run=run)


COMMANDS = {
    "curate": _curate,
    "make-facts": _make_facts,
    "serve-retrieval": _serve_retrieval,
    "tool": _tool,
}
