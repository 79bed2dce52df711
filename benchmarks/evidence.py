"""docs/evidence.md: what the papers claim beside what the miniatures have shown, from results/<device>/.

    python benchmarks/evidence.py              writes the page and, where matplotlib is (pip install matplotlib), its pictures

A claim is a sentence of its paper's, the arms of an ablation that speak for or against it, and a sentence of what was seen,
written by hand under the numbers. Whether two arms are told apart is computed: the mean over seeds of their difference (arms of a
seed share the warm start) has a Student's 95% interval without 0, or it is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablations import PICKS, interval
from namespace import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "cpu_xeon_2core"
PAGE = ROOT / "docs" / "evidence.md"
PICTURES = ROOT / "docs" / "evidence"

Record = Mapping[str, Any]

OF_ALL = ("seed", "found", "curves", "settings", "surroundings")
"""What a record has beside the choices that name its arm."""


@dataclass(frozen=True)
class Claim:
    """title: of its section. paper: who says it. says: what, in our words. results: the name of a file there.

    arms: those that are compared, the first with each other one; an arm is named by its values of the choices, in order.
    columns: {number of a training: heading}; the first is compared and drawn. curve: a metric to draw over the steps instead.
    seen: what the numbers say, by hand.
    """

    title: str
    paper: str
    says: str
    results: str
    arms: tuple[str, ...]
    seen: str
    columns: Mapping[str, str]
    curve: str = ""

    @property
    def picture(self) -> str:
        return self.title.lower().replace(" ", "_").replace(",", "").replace("'", "") + ".svg"


@dataclass(frozen=True)
class Arm:
    """The trainings of an arm that went to their end, and how many did not. by_seed: {seed: its record}."""

    name: str
    by_seed: Mapping[int, Record]
    num_stopped: int

    def values(self, column: str) -> dict[int, float]:
        return {
            seed: float(record["found"][column])
            for seed, record in self.by_seed.items()
            if record["found"].get(column) is not None
        }


def arms_of(claim: Claim, records: Sequence[Record]) -> list[Arm]:
    """The claim's arms, in its order.

    Raises:
        ValueError: an arm has no training that went to its end.
    """
    found = []
    for name in claim.arms:
        mine = [
            record for record in records if ", ".join(record[each] for each in record if each not in OF_ALL) == name
        ]
        whole = {record["seed"]: record for record in mine if not isinstance(record["found"], str)}
        if not whole:
            raise ValueError(f"results/{claim.results}.json has no whole training of {name!r}")
        found.append(Arm(name, whole, len(mine) - len(whole)))
    return found


def difference(arm: Arm, base: Arm, column: str) -> tuple[float, float] | None:
    """(mean, half of the 95% interval) over the seeds that both have, of arm less base; None: fewer than two seeds."""
    ours, theirs = arm.values(column), base.values(column)
    paired = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return interval(paired) if len(paired) > 1 else None


def table(claim: Claim, arms: Sequence[Arm]) -> str:
    """Markdown: each seed of the first column, mean ± half of its interval of all, the paired difference to the first arm."""
    first, heading = next(iter(claim.columns.items()))
    headings = ["", f"{heading}: by seed", *claim.columns.values(), "difference to the first"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for arm in arms:
        seeds = ", ".join(f"{value:.3f}" for _, value in sorted(arm.values(first).items()))
        seeds += f" ({arm.num_stopped} stopped)" if arm.num_stopped else ""
        shown = [_estimate(list(arm.values(column).values())) for column in claim.columns]
        lines.append(f"| {' | '.join([arm.name, seeds, *shown, _difference(arm, arms[0], first)])} |")
    return "\n".join(lines)


def _estimate(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}" if len(values) > 1 else f"{mean:.3f}"


def _difference(arm: Arm, base: Arm, column: str) -> str:
    found = difference(arm, base, column)
    if arm is base or found is None:
        return "–"
    mean, half = found
    return f"{mean:+.3f} ± {half:.3f}, {'told apart' if abs(mean) > half else 'not told apart'}"


def section(claim: Claim, records: Sequence[Record]) -> str:
    arms = arms_of(claim, records)
    return "\n\n".join(
        [
            f"## {claim.title}",
            f"**{claim.paper}**: {claim.says}",
            table(claim, arms),
            f"![{claim.title}](evidence/{claim.picture})",
            f"**Seen**: {claim.seen}",
        ]
    )


def draw(claim: Claim, records: Sequence[Record], path: Path) -> None:
    """An SVG without a date in it: an arm a row, seeds as dots, their mean with its interval; or curves and their mean."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    grey = "#7a8290"  # on white and on black
    plt.rcParams.update(
        {"svg.hashsalt": claim.title, "svg.fonttype": "none", "font.size": 10}
        | {f"{what}.color": grey for what in ("text", "xtick", "ytick")}
        | {"axes.edgecolor": grey, "axes.labelcolor": grey}
    )
    arms = arms_of(claim, records)
    figure, axes = plt.subplots(figsize=(7, 3 if claim.curve else 0.9 + 0.42 * len(arms)))
    colors = [f"C{index}" for index in range(len(arms))]
    if claim.curve:
        for arm, color in zip(arms, colors, strict=True):
            curves = [record["curves"][claim.curve] for record in arm.by_seed.values()]
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, color=color, linewidth=0.7, alpha=0.45)
            means = [_mean(values) for values in zip(*curves, strict=True)]
            axes.plot(range(1, len(means) + 1), means, color=color, linewidth=2.2, label=arm.name)
        axes.set_xlabel("step")
        axes.set_ylabel(claim.curve)
        axes.legend(frameon=False)
    else:
        column, heading = next(iter(claim.columns.items()))
        for row, (arm, color) in enumerate(zip(arms, colors, strict=True)):
            values = list(arm.values(column).values())
            axes.plot(values, [row] * len(values), "o", color=color, alpha=0.55, markersize=5)
            if len(values) > 1:
                mean, half = interval(values)
                axes.errorbar([mean], [row], xerr=[half], fmt="|", color=color, markersize=14, capsize=3)
        axes.set_yticks(range(len(arms)), [arm.name for arm in arms])
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xlabel(f"{heading}: dots are seeds, whiskers the 95% interval of the mean")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", transparent=True, metadata={"Date": None})
    plt.close(figure)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else float("nan")


BEGINNING = """\
# Evidence

What the papers claim, tried on teams that a CPU trains in minutes. Made by `python benchmarks/evidence.py` from the numbers in
`benchmarks/results/cpu_xeon_2core/`; how each was measured, with machine and commit:
[benchmarks/README.md](../benchmarks/README.md).

How to read it. Every arm is a whole training from its seed's warm start, on three seeds, none left out; an accuracy is that of
200 or 300 held-out problems. `±` is Student's 95% interval of the mean over seeds, which is wide for three: 2.5 times their
standard deviation. The last column compares arms seed by seed; *told apart* says that its interval leaves out 0. With so many
comparisons about one in twenty is told apart by chance. What a tiny policy does not show on arithmetic can still be true of 30
billion parameters on olympiad problems, and the other way round: this is evidence that the parts do what they are there for,
and no reproduction of the papers' figures."""

_WHOLE = {"system": "whole team after"}
_TEAM = {**_WHOLE, "solver": "Solver alone after"}
_CRITICS = {**_TEAM, "verifier1": "Verifier", "corrector1": "Corrector"}
_NORMALISE = ("agent", "global", "agent_mean", "agent_std")

CLAIMS = (
    Claim(
        "Agents' own rewards, not the outcome's",
        "MarsRL (arXiv:2511.11373)",
        "agents with rewards of their own (is the Solver's answer right, is the Verifier's verdict true) learn with "
        "less noise than agents that share the correctness of the last answer.",
        "ablations_marsrl",
        ("whole", "outcome reward"),
        "as claimed, in sign: with the outcome's reward the team is worse on every seed, by .15, .24 and .04, and the "
        "Verifier by .09, .21 and .14 (-.146 ± .141 over the seeds: told apart). An agent is paid for what others did "
        "after it.",
        _CRITICS,
    ),
    Claim(
        "Train the whole team, or a part of it",
        "MarsRL (arXiv:2511.11373), Table 2",
        "training Solver, Verifier and Corrector together gives the best team; the Solver alone, or the other two "
        "alone, less.",
        "ablations_marsrl",
        ("whole", "Solver trained", "critics trained"),
        "in part: Verifier and Corrector alone give less than the whole on every seed (.11, .11 and .03), the Solver "
        "alone as much (better once, worse twice). It begins at one answer in two, so most of what can be gained is "
        "its own; trained alone it leaves a Verifier at .78 and a Corrector at .50, where the whole has .87 and .73.",
        _CRITICS,
    ),
    Claim(
        "Another Solver's answers",
        "MarsRL (arXiv:2511.11373), Table 3",
        "a trained Verifier and Corrector help Solvers that they were not trained with.",
        "foreign_solver",
        ("untrained", "trained", "own team"),
        "as claimed, and told apart: to Solvers of other seeds, untrained and right about every second time, the trained "
        "Verifier and Corrector add .19, .34 and .37, the untrained ones .01 to .04. That is more than they add to the "
        "Solver that learned beside them, which leaves them little to repair.",
        {"added": "team less its Solver alone", "alone": "Solver alone", "system": "team"},
    ),
    Claim(
        "Which answers are judged and repaired",
        "MarsRL (arXiv:2511.11373)",
        "picking wrong solutions for the Verifier and found errors for the Corrector (adaptive) trains better than a "
        "random or a balanced pick.",
        "ablations_marsrl",
        ("whole", *(f"{pick} picks" for pick in PICKS)),
        "not reproduced: no pick is told from another, and adaptive picks lost a team (seed 1, .740). There the "
        "Solver itself ends at .743, its reward falls from .97 to .55 within the last five steps; and the Verifier, "
        "which was shown mostly wrong solutions, calls 23 right ones of 80 wrong (5 of 79 with the preset's picks) "
        "and finds 74 wrong ones of 79 (67 of 80). All agents are one policy here; which of the two brought the "
        "other is not known.",
        _CRITICS,
    ),
    Claim(
        "Masking tokens that are mastered",
        "UloRL (arXiv:2507.19766)",
        "leaving out well-mastered positive tokens while a sample's entropy is below a target keeps the entropy from "
        "collapsing, and the accuracy rises.",
        "ablations_marsrl",
        ("whole", "gate off", "gate always"),
        "not seen: with the gate off, on, and always on the entropy falls alike, from .11 to .05 nats, and the team "
        "ends alike. 24 steps are short for a collapse; UloRL shows it over hundreds.",
        {**_WHOLE, "entropy_first": "entropy, first quarter", "entropy_last": "entropy, last quarter"},
        curve="actor/entropy",
    ),
    Claim(
        "Segments, and whose log-probs are old",
        "UloRL (arXiv:2507.19766)",
        "segments make steps shorter at the same accuracy; the present policy as the old one of every segment (POIS) "
        "is as good as each segment's own (SAIS), which can let the entropy explode.",
        "ablations_marsrl",
        ("whole", "4 segments", "4 segments, sais"),
        "as claimed: on every seed 4 segments end within .04 of one, and with each segment's own log-probs within .03 "
        "of that. No entropy explodes; with segments it ends higher (+.013 ± .008, told apart). What segments save is "
        "in benchmarks/README.md.",
        {**_TEAM, "entropy_last": "entropy, last quarter"},
    ),
    Claim(
        "A mean of tokens or of samples",
        "MarsRL's equation 2 and DAPO (arXiv:2503.14476) differ",
        "MarsRL averages within a sample first, DAPO over all tokens, so that long samples are not made light.",
        "ablations_marsrl",
        ("whole", "mean of samples"),
        "no difference that three seeds tell. The largest gradient norm is 1.2 to 4 times as large with a mean of "
        "samples.",
        _CRITICS,
    ),
    Claim(
        "Advantages of each agent, one policy",
        "Dr. MAS (arXiv:2602.08847)",
        "a baseline and a deviation of each agent's own keep the gradient's norm from spiking; one over all agents "
        "does not.",
        "ablations_drmas",
        tuple(f"shared, {name}" for name in _NORMALISE),
        "nothing spiked and nothing is told apart; the largest norm is the smallest with each agent's own baseline "
        "and deviation on two seeds of three. These two agents' mean rewards differ by .2 to .3, and the inflation "
        "that the paper's lemma predicts is 0.8 to 1.15: there was little to explode.",
        {"grad_norm_max": "largest gradient norm", **_TEAM, "grad_spikes": "spikes"},
    ),
    Claim(
        "Advantages of each agent, a policy each",
        "Dr. MAS (arXiv:2602.08847)",
        "the same where every agent has weights of its own.",
        "ablations_drmas",
        tuple(f"separate, {name}" for name in _NORMALISE),
        "the same: against one baseline over all agents the largest norm is smaller on every seed, by .09 to .63, and "
        "the accuracy is not told apart.",
        {"grad_norm_max": "largest gradient norm", **_TEAM, "grad_spikes": "spikes"},
    ),
    Claim(
        "System 1 and System 2",
        "MARS (arXiv:2510.04935)",
        "System 1, which reads what tools bring and hands on the gist, the tools, and the balance of its samples each "
        "add to it.",
        "ablations_mars",
        ("whole", "without System 1", "without Python", "without balance", "one mean"),
        "System 1 is needed (-.585 ± .306), but for a reason of this miniature's: its policy was taught to read "
        "distillates and never pages. Python, balance and a mean of each system are not told from their absence.",
        {**_WHOLE, "system2_reward_first": "reward, first quarter", "system2_reward_last": "last quarter"},
    ),
)


def records_of(results: str) -> list[Record]:
    found: list[Record] = json.loads((RESULTS / f"{results}.json").read_text("utf-8"))
    return found


def page() -> str:
    """The whole of docs/evidence.md."""
    return "\n\n".join([BEGINNING, *(section(claim, records_of(claim.results)) for claim in CLAIMS)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(page(), "utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(f"{PAGE}: written; its pictures are as they were: matplotlib is not installed (pip install matplotlib)")
        return 1
    PICTURES.mkdir(exist_ok=True)
    for claim in CLAIMS:
        draw(claim, records_of(claim.results), PICTURES / claim.picture)
    print(f"{PAGE}: written, with {len(CLAIMS)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
