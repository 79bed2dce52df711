"""Tables of docs/evidence.md, made from results. evidence.py puts them into the page; the text between them is written by hand.

Two arms differ if the 95% interval (Student's t) of their mean difference over seeds excludes 0. With the same seed, arms share
the warm start, problems and random draws. The text under a table describes exactly that table, and is removed when its numbers
change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from arms import NORMALISE, PICKS, POLICIES, interval

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence.md"


@dataclass(frozen=True)
class Result:
    """Result of one training or evaluation. stopped: last line of output, if the training failed."""

    study: str
    arm: str
    seed: int
    settings: list[str]
    commit: str
    stopped: str | None
    found: dict[str, float]
    seconds: float
    surroundings: dict[str, Any]
    # Curves from arms.curves, or over the checkpoints of a game.
    curves: Mapping[str, Sequence[Any]] = field(default_factory=dict)


Results = Mapping[tuple[str, str, int], Result]


@dataclass(frozen=True)
class Claim:
    """Table of a section. groups: arms to compare; each arm of a group is compared with the first one.

    columns: {name of a result's number: heading}; the first `num_compared` columns show intervals over seeds, and are compared.
    at_tokens, at_step_seconds: columns with the team's accuracy when the arm had spent as many tokens, or seconds of steps, as
    the seed's cheapest arm spends in total.
    """

    study: str
    groups: tuple[tuple[str, ...], ...]
    columns: Mapping[str, str]
    num_compared: int = 1


def values(claim: Claim, arm: str, column: str, results: Results) -> dict[int, float]:
    """Return {seed: value of the column} for the finished trainings of an arm."""
    if column.startswith("at_"):
        return _at_equal(claim, arm, column.removeprefix("at_"), results)
    return {
        seed: result.found[column]
        for (study, name, seed), result in sorted(results.items())
        if (study, name) == (claim.study, arm) and result.stopped is None and column in result.found
    }


def _at_equal(claim: Claim, arm: str, spent: str, results: Results) -> dict[int, float]:
    """Return {seed: interpolated accuracy at equal spending}, for seeds that all arms of the claim have finished."""
    arms = [each for group in claim.groups for each in group]
    accuracies = {}
    for seed in sorted({seed for _, _, seed in results}):
        curves = {
            each: results[claim.study, each, seed].curves for each in arms if (claim.study, each, seed) in results
        }
        if len(curves) == len(arms) and all(spent in curve for curve in curves.values()):
            budget = min(curve[spent][-1] for curve in curves.values())
            accuracies[seed] = float(np.interp(budget, curves[arm][spent], curves[arm]["system"]))
    return accuracies


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Return the text of the mean difference over common seeds and its 95% interval; bold if the interval excludes 0."""
    paired = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if len(paired) < 2:
        return "–"
    mean, half = interval(paired)
    text = f"{'-' if mean < 0 else '+'}{_short(abs(mean))} ± {_short(half)}"
    return f"**{text}**" if abs(mean) > half else text


def table(claim: Claim, results: Results) -> str:
    """Return a Markdown table: means over seeds, and differences from the group's first arm in the compared columns."""
    compared = [*claim.columns][: claim.num_compared]
    differences = [f"difference, {claim.columns[name]}" for name in compared] if len(compared) > 1 else ["difference"]
    headings = ["", "seeds", *claim.columns.values(), *differences]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for group in claim.groups:
        for arm in group:
            by_seed = {name: values(claim, arm, name, results) for name in compared}
            num_seeds = len(by_seed[compared[0]])
            if not num_seeds:
                lines.append(f"| {arm} | not run |" + " |" * (len(headings) - 2))
                continue
            stopped = sum(
                result.stopped is not None for key, result in results.items() if key[:2] == (claim.study, arm)
            )
            seeds = f"{num_seeds}" + (f" ({stopped} stopped)" if stopped else "")
            cells = []
            for name in claim.columns:
                cells.append(_mean(claim, arm, name, results))
                if name in compared and num_seeds > 1:
                    cells[-1] += f" ± {_short(interval([*by_seed[name].values()])[1])}"
            against = [
                "–" if arm == group[0] else difference(by_seed[name], values(claim, group[0], name, results))
                for name in compared
            ]
            lines.append(f"| {' | '.join([arm, seeds, *cells, *against])} |")
    return "\n".join(lines)


def _mean(claim: Claim, arm: str, column: str, results: Results) -> str:
    finished = list(values(claim, arm, column, results).values())
    return _short(sum(finished) / len(finished)) if finished else "–"


def _short(value: float) -> str:
    """Format with three digits: .843, 1.46, 12,300."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}".replace("0.", ".", 1) if value else "0"


def provenance(results: Results) -> str:
    """Return a sentence with the commits of the results."""
    arms = {(claim.study, arm) for claim in CLAIMS.values() for group in claim.groups for arm in group}
    commits = Counter(result.commit for key, result in results.items() if key[:2] in arms)
    if not commits:
        return "Nothing has been run yet."
    named = ", ".join(f"{commit[:7]}{'+' * commit.endswith('+')} ({num})" for commit, num in commits.most_common())
    is_single = len(commits) == 1 and not any(commit.endswith("+") for commit in commits)
    return f"Results by commit: {named}." + (
        ""
        if is_single
        else " **Not yet from one clean commit** (+: modified files); `python benchmarks/studies/evidence.py` lists the "
        "missing runs."
    )


def page(text: str, results: Results) -> str:
    """Return the page with current tables and commits."""
    beginning, *sections = re.split(r"(?m)^(?=## )", text)
    *blocks, _ = beginning.strip().split("\n\n")
    blocks.append(provenance(results))
    for section in sections:
        heading, claim_text, old, *rest_of_section = section.strip().split("\n\n")
        new = table(CLAIMS[heading.removeprefix("## ")], results)
        blocks += [heading, claim_text, new, *(rest_of_section if new == old else [])]
    return "\n\n".join(blocks) + "\n"


_WHOLE = {"system": "team"}
_TEAM = {**_WHOLE, "solver": "Solver", "verifier1": "Verifier"}

CLAIMS = {
    "Whose training improves the Solver": Claim(
        "marsrl",
        (
            ("Solver trained", "whole", "critics trained", "a mean of each agent"),
            ("strong Solver, Solver trained", "strong Solver, whole", "strong Solver, critics trained"),
        ),
        {
            "solver": "Solver",
            **_WHOLE,
            "solver_before": "Solver before",
            "solver_tokens": "its tokens trained",
            "empty_steps": "idle",
        },
    ),
    "Agents' own rewards, not the outcome's": Claim("marsrl", (("own rewards", "outcome reward"),), _TEAM),
    "Another Solver's answers": Claim(
        "foreign",
        (("untrained", "trained", "own team"), ("untrained, another kind", "trained, another kind")),
        {"added": "team less Solver", "alone": "Solver"},
    ),
    "Which answers are judged and repaired": Claim(
        "marsrl", (("whole", *(f"{pick} picks" for pick in PICKS)),), _WHOLE
    ),
    "Masking tokens that are mastered": Claim(
        "marsrl",
        (("whole", "gate off", "gate always"),),
        {**_WHOLE, "entropy_first": "entropy, first quarter", "entropy_last": "last quarter"},
    ),
    "Segments, and whose log-probs are old": Claim(
        "marsrl",
        (("whole", "4 segments", "4 segments, sais"),),
        {**_WHOLE, "entropy_last": "entropy, last quarter", "empty_steps": "idle"},
    ),
    "A mean of tokens or of samples": Claim(
        "marsrl", (("whole", "mean of samples"),), {**_WHOLE, "grad_norm_max": "largest gradient norm"}
    ),
    "Advantages of each agent": Claim(
        "drmas",
        tuple(tuple(f"{policies}, {name}" for name in NORMALISE) for policies in POLICIES),
        {"grad_norm_max": "largest gradient norm", **_WHOLE, "grad_spikes": "spikes"},
    ),
    "System 1 and System 2": Claim(
        "mars",
        (("whole", "without System 1", "without Python", "without balance", "one mean"),),
        {
            **_WHOLE,
            "system2_reward_first": "reward, first quarter",
            "system2_reward_last": "last quarter",
            "empty_steps": "idle",
        },
    ),
    "Groups without spread": Claim(
        "refill",
        (("as it is", "refill", "16 problems", "refill, dead groups not counted"),),
        {
            "at_tokens": "team at equal tokens",
            "at_step_seconds": "at equal seconds",
            "system": "after 20 steps",
            "updates": "updates",
            "empty_steps": "idle",
        },
    ),
    "Groups without spread, in MARS": Claim(
        "mars",
        (("without System 1", "without System 1, refill"),),
        {**_WHOLE, "system2_reward_last": "reward, last quarter", "updates": "updates", "empty_steps": "idle"},
    ),
    "Adapters in place of whole weights": Claim(
        "adapters",
        (("adapters", "shared weights", "separate weights"),),
        {
            **_TEAM,
            "corrector1": "Corrector",
            "sync/bytes": "bytes a publish",
            "cpu_seconds": "CPU seconds",
            "peak_bytes": "bytes of memory",
        },
    ),
    "A pull to an earlier policy in self-play": Claim(
        "kuhn",
        (("none", "std", "start", "anchor"), ("start", "anchor")),
        {
            "last": "last quarter",
            "average": "average policy",
            "start": "before",
            "illegal": "illegal mass",
        },
        num_compared=2,
    ),
    "Credit for single turns": Claim(
        "toll",
        (("none", "std", "turns", "summed means"),),
        {
            "return": "return",
            "hints": "hints",
            "variance": "variance",
            "hints_before": "hints before",
        },
        num_compared=3,
    ),
}
"""{heading of the page: its table}"""
