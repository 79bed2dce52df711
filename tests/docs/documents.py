"""Commands, config blocks, settings and links of the documents, each with its place."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from typer.main import get_command

from marsrl.trainer import main
from marsrl.trainer.commands import cli
from marsrl.trainer.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
]
MENTIONS = re.compile(r"marsrl( \w+)?|.*\[.*")  # of running text: the name of a program, and how its words are written
STARTERS = ("torchrun ", "python ", "marsrl ", "make ", "pip ", "apt-get ")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_COMMENT = re.compile(r"(^|\s)#\s.*$")
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


@dataclass(frozen=True)
class Found:
    """A piece of a document. where: file and line, or whose --help says it."""

    where: str
    text: str


def blocks(page: Path) -> list[Found]:
    """Fenced and indented blocks, without their fences and indentation."""
    found: list[Found] = []
    lines, start, fence = [*page.read_text("utf-8").splitlines(), ""], 0, False
    held: list[str] = []

    def end() -> None:
        if any(held):
            found.append(Found(f"{_name(page)}:{start}", "\n".join(held).strip("\n")))
        held.clear()

    for number, line in enumerate(lines, start=1):
        if line.startswith("```"):
            end()
            fence, start = not fence, number + 1
        elif fence:
            held.append(line)
        elif line.startswith("    ") or (held and not line):
            if not held:
                if lines[number - 2].strip():
                    continue  # a paragraph or a list goes on, indented
                start = number
            held.append(line[4:])
        else:
            end()
    end()
    return found


def prose(page: Path) -> str:
    """The page without its blocks, so that a span in backticks may go over a line's end."""
    text = page.read_text("utf-8")
    return "\n".join("" if line.startswith(("    ", "```")) else line for line in text.splitlines())


def spans(page: Path) -> list[Found]:
    """Spans in backticks of the running text."""
    text = prose(page)
    return [
        Found(f"{_name(page)}:{text.count(chr(10), 0, match.start()) + 1}", " ".join(match[1].split()))
        for match in _SPAN.finditer(text)
    ]


def typed(text: str) -> list[str]:
    """The commands among lines, without comments; a line that ends in a backslash goes on."""
    joined = text.replace("\\\n", " ").splitlines()
    lines = (" ".join(_COMMENT.sub("", line).split()) for line in joined)
    return [line for line in lines if f"{line} ".startswith(STARTERS)]


@cache
def commands() -> tuple[Found, ...]:
    """All of them: of blocks, of the running text, of the head of each preset, of each --help."""
    found: list[Found] = []
    for page in PAGES:
        for block in blocks(page):
            found += [Found(block.where, line) for line in typed(block.text)]
        for span in spans(page):
            script, _, words = span.text.partition(" ")
            if MENTIONS.fullmatch(span.text):
                continue
            is_script = script.endswith(".py") and words and (ROOT / script).is_file()
            found += [Found(span.where, line) for line in typed(f"python {span.text}" if is_script else span.text)]
    for preset in sorted((ROOT / "configs").glob("*.yaml")):
        head = "\n".join(line[1:].strip() for line in preset.read_text("utf-8").splitlines() if line.startswith("#"))
        found += [Found(f"{_name(preset)}, its head", line) for line in typed(head)]
    for program in ("trainer/main.py", *(f"marsrl {name}" for name in get_command(cli.app).commands)):
        found += [Found(f"`{program} --help`", line) for line in typed(_help(program).split("example", 1)[1])]
    return tuple(found)


def config_blocks() -> list[Found]:
    """Blocks that are YAML with a section of the config at the top, or the preset that they go on from."""
    sections = tuple(f"{name}:" for name in RunConfig.model_fields)
    return [block for page in PAGES for block in blocks(page) if block.text.startswith(sections)]


def python_blocks() -> list[Found]:
    """Blocks that are files of Python."""
    return [block for page in PAGES for block in blocks(page) if block.text.startswith(("from ", "import ", "def "))]


def other_blocks() -> list[Found]:
    """Blocks that nobody types: pictures and listings."""
    known = [*config_blocks(), *python_blocks()]
    return [block for page in PAGES for block in blocks(page) if block not in known and not typed(block.text)]


def links() -> list[Found]:
    """Targets of links to something in the repository, as paths from its root."""
    found = []
    for page in PAGES:
        for match in _LINK.finditer(page.read_text("utf-8")):
            if "://" not in match[1]:
                target = (page.parent / match[1]).resolve()
                found.append(Found(_name(page), str(target.relative_to(ROOT))))
    return found


def rows(page: str) -> list[list[str]]:
    """The cells of a page's tables."""
    lines = (ROOT / "docs" / page).read_text("utf-8").splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("| ")]


def is_on_the_page(name: str) -> bool:
    """Is a metric, or a pattern of names (actor/<name>/tokens), in docs/metrics.md?"""
    pattern = re.compile(re.sub(r"<\w+>", "[^/]+", name))
    named = [each for cells in rows("metrics.md") for each in re.findall(r"`([a-z_0-9]+/[^`]+)`", cells[0])]
    return any(pattern.fullmatch(each) or re.fullmatch(re.sub(r"<\w+>", ".+", each), name) for each in named)


def _help(program: str) -> str:
    shown = io.StringIO()
    wide = mock.patch.dict("os.environ", COLUMNS="300")  # an example is on one line
    with wide, contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        if program == "trainer/main.py":
            main.main(["--help"])
        else:
            cli.main([program.removeprefix("marsrl "), "--help"])
    return shown.getvalue()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))
