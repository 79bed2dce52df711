"""The tables of docs/papers.md under "Numbers": what the papers set, and what their presets do.

    python docs/papers.py

Reads docs/papers.yaml and the presets, and writes the page from the heading on. What a preset is to say is held by
tests/docs/test_papers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from marsrl.rollout.orchestrations.registry import find_orchestration
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import CONFIGS, read_config

PAGE = Path(__file__).with_name("papers.md")
DATA = Path(__file__).with_name("papers.yaml")
HEADING = "## Numbers\n"
BEGINNING = """\
For each paper, the numbers that its preset shares, by where they are stated; those that differ, and why; and those that we chose
because neither text nor code states them, as far as we know. `python docs/papers.py` writes this from `docs/papers.yaml` and the
presets. *Script*: the code published with the paper. An empty cell: as above. Results: [evidence.md](evidence.md)."""


@dataclass(frozen=True)
class Number:
    """A number of a paper. value: None where the paper does not state it; why: why the preset has another, else ""."""

    where: str
    quantity: str
    value: Any
    key: str
    why: str = ""


@dataclass(frozen=True)
class Paper:
    """The numbers of a paper, and the presets that have them.

    words: settings on top of each. others: presets for other machines or models; whys: {key: why theirs differ from `preset`'s}.
    """

    title: str
    preset: str
    rows: tuple[Number, ...]
    words: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    whys: dict[str, str] = field(default_factory=dict)

    def config(self, preset: str) -> RunConfig:
        return read_config(CONFIGS / f"{preset}.yaml", self.words)[0]


def papers() -> list[Paper]:
    """All of docs/papers.yaml."""
    found = []
    for each in yaml.safe_load(DATA.read_text("utf-8")):
        also = each.get("also", {"presets": (), "rows": {}})
        rows = tuple(Number(*row) for row in each["rows"])
        words = tuple(each.get("words", ()))
        found.append(Paper(each["title"], each["preset"], rows, words, tuple(also["presets"]), also["rows"]))
    return found


def value_of(config: RunConfig, key: str) -> Any:
    """The config's value of the key, as JSON; None where the section is left out. Of a key with <name>: of every agent.

    Raises:
        ValueError: agents have different values.
    """
    options = find_orchestration(config.orchestration).Options.model_validate(config.orchestration_options)
    values: list[Any] = [{**config.model_dump(mode="json"), "orchestration_options": options.model_dump(mode="json")}]
    for part in key.split("."):
        if part == "<name>":
            values = list(values[0].values())
        else:
            values = [value.get(part) if value is not None else None for value in values]
    if any(value != values[0] for value in values):
        raise ValueError(f"docs/papers.yaml: {key} is {values}, one for each agent; name the agent")
    return values[0]


def shown(value: Any) -> str:
    """The value as it stands in a cell."""
    if isinstance(value, dict | list):
        return "`" + yaml.safe_dump(value, default_flow_style=True).strip() + "`"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; in the first column, a cell that repeats the one above it stays empty."""
    lines, above = [headings, ["---"] * len(headings)], ""
    for first, *rest in rows:
        lines.append(["" if first == above else first, *rest])
        above = first
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def numbers() -> str:
    """The numbers of every paper, from the heading on."""
    parts = [HEADING + "\n" + BEGINNING]
    for paper in papers():
        config = paper.config(paper.preset)
        parts.append(f"### {paper.title}: {paper.preset}")
        same: dict[str, list[str]] = {}
        for row in paper.rows:
            if not row.why:
                same.setdefault(row.where, []).append(f"`{row.key}` {shown(row.value)}")
        parts.append(table(("where", "the same"), ((where, "; ".join(found)) for where, found in same.items())))
        differing = sorted((row for row in paper.rows if row.why and row.value is not None), key=lambda row: row.where)
        cells = (
            (row.where, row.quantity, shown(row.value), f"`{row.key}`", shown(value_of(config, row.key)), row.why)
            for row in differing
        )
        parts.append(table(("where", "what", "paper", "key", "ours", "why"), cells))
        chosen: dict[str, list[str]] = {}
        for row in paper.rows:
            if row.why and row.value is None:
                chosen.setdefault(row.why, []).append(f"`{row.key}` {shown(value_of(config, row.key))}")
        if chosen:
            parts.append(
                "Not stated: " + "; ".join(f"{', '.join(found)} ({why})" for why, found in chosen.items()) + "."
            )
        if paper.others:
            configs = [config, *(paper.config(other) for other in paper.others)]
            rows = (
                (f"`{key}`", *(shown(value_of(each, key)) for each in configs), why) for key, why in paper.whys.items()
            )
            parts.append(f"The same in {', '.join(paper.others)}, but for:")
            parts.append(table(("key", paper.preset, *paper.others, "why"), rows))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """All of docs/papers.md: its words before the heading, and the numbers."""
    return PAGE.read_text("utf-8").partition(HEADING)[0] + numbers()


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"{PAGE}: written")
