"""Write the tables of docs/papers.md under "Numbers": values in the papers and in their presets.

    python docs/papers.py

Reads docs/papers.yaml and the presets, and writes the page from the heading on. tests/docs/test_papers.py checks the presets'
values.
"""

from __future__ import annotations

from collections.abc import Iterable
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
Each heading names a paper and its preset. The section begins with the numbers that are the same in both, by their place in the
paper; *script* means the code published with the paper. A table then has the numbers that differ, with reasons. *Not stated*
lists numbers that, as far as we know, neither text nor code states. A last paragraph has the values that differ in other presets
of the paper. `python docs/papers.py` writes these sections from `docs/papers.yaml` and the presets. For results, see
[evidence.md](evidence.md)."""


@dataclass(frozen=True)
class Number:
    """A number from a paper. value: None if the paper does not state it. why: the reason if the preset differs, otherwise ""."""

    where: str
    quantity: str
    value: Any
    key: str
    why: str = ""


@dataclass(frozen=True)
class Paper:
    """The numbers of a paper, and the presets that have them.

    words: settings added to each preset. others: presets for other machines or models. whys: {key: why the value in `others`
    differs from that in `preset`}.
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
    """Read docs/papers.yaml."""
    all_papers = []
    for entry in yaml.safe_load(DATA.read_text("utf-8")):
        also = entry.get("also", {"presets": (), "rows": {}})
        rows = tuple(Number(*row) for row in entry["rows"])
        words = tuple(entry.get("words", ()))
        all_papers.append(Paper(entry["title"], entry["preset"], rows, words, tuple(also["presets"]), also["rows"]))
    return all_papers


def value_of(config: RunConfig, key: str) -> Any:
    """Return the config's value of the key, as JSON; None if its section is left out. <name> in a key stands for every agent.

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
    """Format the value for a cell of a table."""
    if isinstance(value, dict | list):
        return "`" + yaml.safe_dump(value, default_flow_style=True).strip() + "`"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def by_reason(pairs: Iterable[tuple[str, str]]) -> str:
    """Return (text, reason) pairs as a list, with texts of the same reason in one line."""
    texts: dict[str, list[str]] = {}
    for text, why in pairs:
        texts.setdefault(why, []).append(text)
    return "\n".join(f"- {', '.join(group)}: {why}" for why, group in texts.items())


def differing(key: str, config: RunConfig, others: Iterable[RunConfig]) -> str:
    """Format the key and the distinct values in `others` that differ from config's."""
    values = dict.fromkeys(shown(value_of(other, key)) for other in others)
    values.pop(shown(value_of(config, key)), None)
    return f"`{key}` {' or '.join(values)}"


def numbers() -> str:
    """Return the section with the numbers of every paper, including its heading."""
    parts = [HEADING + "\n" + BEGINNING]
    for paper in papers():
        config = paper.config(paper.preset)
        ours = {row.key: f"`{row.key}` {shown(value_of(config, row.key))}" for row in paper.rows}
        parts.append(f"### {paper.title}: {paper.preset}")
        same: dict[str, list[str]] = {}
        for row in paper.rows:
            if not row.why:
                same.setdefault(row.where, []).append(ours[row.key])
        parts.append("\n".join(f"- {where}: {', '.join(entries)}" for where, entries in same.items()))
        changed = [row for row in paper.rows if row.why and row.value is not None]
        lines = ["| where | paper | ours | why |", "|---|---|---|---|"]
        for row in sorted(changed, key=lambda row: row.where):
            lines.append(f"| {row.where}: {row.quantity} | {shown(row.value)} | {ours[row.key]} | {row.why} |")
        parts.append("\n".join(lines))
        if chosen := [(ours[row.key], row.why) for row in paper.rows if row.why and row.value is None]:
            parts.append("The paper does not state these values:\n\n" + by_reason(chosen))
        if paper.others:
            configs = [paper.config(other) for other in paper.others]
            differences = by_reason((differing(key, config, configs), why) for key, why in paper.whys.items())
            others = " and ".join([*([", ".join(paper.others[:-1])] if paper.others[1:] else []), paper.others[-1]])
            parts.append(f"{others} {'have' if paper.others[1:] else 'has'} the same values, except:\n\n{differences}")
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """Return the whole page: the present text before the heading, and new numbers."""
    return PAGE.read_text("utf-8").partition(HEADING)[0] + numbers()


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"{PAGE}: written")
