"""Commands for problems, tools and documents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from marsrl.commands.cli.command import Config, Settings, command


@command("data", "marsrl curate raw.jsonl --out curated")
def curate(
    words: Annotated[
        list[str], Argument(metavar="INPUT", help="jsonl, parquet or HF dataset directory; or key.sub=value")
    ],
    out: Annotated[Path, Option(metavar="DIR", help="output directory; an unfinished one is resumed")],
    config: Config = None,
) -> int:
    """Select the problems worth training on: rules, near-duplicates, judges, and the accuracy of a team."""
    from marsrl.commands.curate import command
    from marsrl.commands.curate.rows import CurationStopped

    try:
        print(command.curate(words, out, config))
    except CurationStopped as stopped:
        print(f"marsrl curate: {stopped}", file=sys.stderr)
        return 1
    return 0


@command("data", "marsrl check-answers problems.jsonl", name="check-answers")
def check_answers(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="FILE", help="jsonl, parquet or HF dataset directory; or a setting, key.sub=value (task=math)"
        ),
    ] = None,
    config: Config = None,
    problems: Annotated[int, Option(min=1, help="maximum number of problems, drawn with --seed")] = 200,
    seed: Annotated[int, Option(help="seed of the problems and of the alterations of their references")] = 0,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="also write the misjudged answers, one JSON object per line")
    ] = None,
) -> int:
    """Test the judge of a file's problems: references in other notations must be rewarded, wrong answers must not.

    Each reference is judged as it is and in other notations. Wrong answers made from it are judged too: a changed digit, a
    missing element, a tiny constant, `proof`. Exits with 1 if an answer is misjudged.
    """
    from marsrl.commands.check_answers import command
    from marsrl.commands.cli.command import console
    from marsrl.trainer.runs.directory import refuse_file_of_a_run

    if out is not None:
        refuse_file_of_a_run(out)
    checked = command.check_answers(words or (), config, problems, seed)
    if out is not None:
        command.write(checked, out)
    skipped = f"; lines without a problem: {checked.num_skipped:,}" if checked.num_skipped else ""
    print(f"{checked.num_tried:,} of {checked.num_known:,} problems, {len(checked.trials):,} answers{skipped}")
    console(100).print(command.counts(checked))
    print(*filter(None, [command.rows(checked), *(f"warning: {each}" for each in checked.warnings)]), sep="\n")
    return int(bool(checked.misjudged))


@command("data", "marsrl make-facts /tmp/facts")
def make_facts(
    out: Annotated[str, Argument(help="output directory; the files must not exist")],
    options: Annotated[
        list[str] | None,
        Argument(metavar="key=value", help="task_options of task=qa: people, max_hops, about=papers, ..."),
    ] = None,
    train: Annotated[int, Option(min=1, help="number of training questions")] = 10_000,
    held_out: Annotated[int, Option(min=1, help="number of evaluation questions")] = 300,
    seed: Annotated[int, Option(help="seed of the questions")] = 0,
) -> None:
    """Write the built-in world of linked facts as files: corpus.jsonl, papers.jsonl, train.jsonl and held_out.jsonl."""
    from marsrl.rollout.config import read_settings
    from marsrl.rollout.tasks.config import FactsOptions
    from marsrl.rollout.tasks.facts import write_linked_facts

    facts = read_settings(FactsOptions, dict(word.partition("=")[::2] for word in options or []))
    write_linked_facts(out, facts, train, held_out, seed)
    print(
        f"{out}: {facts.people + facts.places:,} documents, {facts.papers:,} papers, {train:,} + {held_out:,} questions"
    )


@command("data", "marsrl serve-retrieval --corpus wiki-18.jsonl --index wiki-18.sqlite")
def serve_retrieval(
    corpus: Annotated[str, Option(metavar="FILE", help="jsonl of {id, title, text} or {id, contents}")],
    index: Annotated[
        str | None,
        Option(metavar="FILE", help="file for the index, reused next time (default: a temporary file)"),
    ] = None,
    host: Annotated[str, Option(help="address to listen on; everyone who can reach it can search")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="port; 0: any free one")] = 8000,
    top_k: Annotated[int, Option(min=1, max=100, help="documents per query, if the request does not set it")] = 3,
) -> None:
    """Serve POST /retrieve for a corpus until Ctrl-C: the API of the retrieval servers of Search-R1 and Dr. MAS."""
    from contextlib import closing

    from marsrl.rollout.imports import check_installed

    check_installed("the server", "fastapi", "uvicorn", extra="retrieval")
    from marsrl.rollout.tools.retrieval_server import serve
    from marsrl.rollout.tools.search import open_index

    with closing(open_index(corpus, index)) as opened:
        found = f"{opened.num_documents:,} documents of {corpus} at"
        serve(opened, host, port, top_k, lambda address: print(found, address, flush=True))


@command("data", 'marsrl tool search "the home of lotte holt"')
def tool(
    name: Annotated[str, Argument(metavar="TOOL", help="name under the settings `tools`: search, scholar, ...")],
    argument: Annotated[str, Argument(help="the tool's text argument, or a JSON object of its arguments")],
    settings: Settings = None,
    config: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="YAML file or preset name; default: task=qa with the built-in documents and papers",
        ),
    ] = None,
) -> int:
    """Call one tool as a team would, and print its output and duration; exits with 1 if the output is an error."""
    from marsrl.commands.tool_call import call_tool
    from marsrl.trainer.config.read import read_config

    built_in = [] if config else ["task=qa", "tools.scholar.kind=index", "tools.python={}"]
    read, origin = read_config(config, [*built_in, *(settings or ())])
    with origin.places_in_errors():
        said, is_error = call_tool(read, name, argument)
    print(said)
    return int(is_error)
