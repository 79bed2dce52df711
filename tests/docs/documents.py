"""Commands, config blocks, settings and links of the documents, each with its location."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from markdown_it import MarkdownIt
from markdown_it.token import Token
from typer.main import get_command

from marsrl.commands import cli
from marsrl.trainer import main
from marsrl.trainer.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [
    ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "examples/guess_number", "examples/real_team")
]
# Program names in running text, written without a command's arguments.
MENTIONS = re.compile(r"(marsrl|ray)( [\w-]+)?|.*\[.*")
STARTERS = ("torchrun ", "python ", "marsrl ", "ray ", "make ", "pip ", "apt-get ", "docker ")
_COMMENT = re.compile(r"(^|\s)#\s.*$")


@dataclass(frozen=True)
class Found:
    """A piece of a document. where: file and line, or the command whose --help contains it."""

    where: str
    text: str


@cache
def parsed(page: Path) -> list[Token]:
    """Return the page's Markdown tokens (CommonMark with tables)."""
    return MarkdownIt().enable("table").parse(page.read_text("utf-8"))


def blocks(page: Path) -> list[Found]:
    """Return fenced and indented blocks, without fences and indentation."""
    return [
        Found(f"{_name(page)}:{token.map[0] + 1 + (token.type == 'fence')}", token.content.strip("\n"))
        for token in parsed(page)
        if token.map and token.type in ("fence", "code_block")
    ]


def pieces(page: Path) -> list[tuple[int, Token]]:
    """Return the texts, spans in backticks, links and pictures of running text, each with its paragraph's first line number."""
    return [(token.map[0] + 1, piece) for token in parsed(page) if token.map for piece in token.children or ()]


def spans(page: Path) -> list[Found]:
    """Return the spans in backticks within running text."""
    return [
        Found(f"{_name(page)}:{line}", " ".join(piece.content.split()))
        for line, piece in pieces(page)
        if piece.type == "code_inline"
    ]


def typed(text: str) -> list[str]:
    """Return the commands among the lines, without comments, with continued lines joined."""
    joined = text.replace("\\\n", " ").splitlines()
    lines = (" ".join(_COMMENT.sub("", line).split()) for line in joined)
    return [line for line in lines if f"{line} ".startswith(STARTERS)]


@cache
def commands() -> tuple[Found, ...]:
    """Return all commands in blocks, running text, the header of each preset, and each --help."""
    listed: list[Found] = []
    for page in PAGES:
        for block in blocks(page):
            listed += [Found(block.where, line) for line in typed(block.text)]
        for span in spans(page):
            script, _, words = span.text.partition(" ")
            if MENTIONS.fullmatch(span.text):
                continue
            is_script = script.endswith(".py") and words and (ROOT / script).is_file()
            listed += [Found(span.where, line) for line in typed(f"python {span.text}" if is_script else span.text)]
    for preset in sorted((ROOT / "configs").glob("*.yaml")):
        head = "\n".join(line[1:].strip() for line in preset.read_text("utf-8").splitlines() if line.startswith("#"))
        listed += [Found(f"{_name(preset)}, its head", line) for line in typed(head)]
    for program in ("trainer/main.py", *(f"marsrl {name}" for name in get_command(cli.app).commands)):
        listed += [Found(f"`{program} --help`", line) for line in typed(_help(program).split("example", 1)[1])]
    return tuple(listed)


def config_blocks() -> list[Found]:
    """Return the YAML blocks that begin with a top-level key of the config."""
    sections = tuple(f"{name}:" for name in RunConfig.model_fields)
    return [block for page in PAGES for block in blocks(page) if block.text.startswith(sections)]


def python_blocks() -> list[Found]:
    """Return the blocks that are Python files."""
    return [block for page in PAGES for block in blocks(page) if block.text.startswith(("from ", "import ", "def "))]


def other_blocks() -> list[Found]:
    """Return the blocks that users do not type: diagrams and listings."""
    known = [*config_blocks(), *python_blocks()]
    return [block for page in PAGES for block in blocks(page) if block not in known and not typed(block.text)]


def links() -> list[Found]:
    """Return link targets in the repository, as paths from its root."""
    targets = []
    for page in PAGES:
        for _, piece in pieces(page):
            target = str(piece.attrs.get("href") or piece.attrs.get("src") or "").partition("#")[0]
            if target and "://" not in target:
                targets.append(Found(_name(page), str((page.parent / target).resolve().relative_to(ROOT))))
    return targets


def rows(page: str) -> list[list[str]]:
    """Return the cells of a page's tables."""
    lines = (ROOT / "docs" / page).read_text("utf-8").splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("| ")]


def is_on_the_page(name: str) -> bool:
    """Return True if docs/metrics.md lists the metric, or a pattern that matches it (actor/<name>/tokens)."""
    pattern = re.compile(re.sub(r"<\w+>", "[^/]+", name))
    named = [each for cells in rows("metrics.md") for each in re.findall(r"`([a-z_0-9]+/[^`]+)`", cells[0])]
    return any(pattern.fullmatch(each) or re.fullmatch(re.sub(r"<\w+>", ".+", each), name) for each in named)


def _help(program: str) -> str:
    shown = io.StringIO()
    wide = mock.patch.dict("os.environ", COLUMNS="300")  # so that an example stays on one line
    with wide, contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        if program == "trainer/main.py":
            main.main(["--help"])
        else:
            cli.main([program.removeprefix("marsrl "), "--help"])
    return shown.getvalue()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))
