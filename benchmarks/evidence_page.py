"""The page docs/evidence.md: claims of the papers, and tables of results. benchmarks/evidence.py writes it.

Two arms are told apart if Student's 95% interval of their mean difference over seeds excludes 0 (arms of a seed share the warm
start, the problems and the seed of the draws). The text under a table is written by hand for exactly that table, and omitted if
the numbers change.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from namespace import ROOT
from studies import NORMALISE, PICKS, POLICIES, interval

PAGE = ROOT / "docs" / "evidence.md"


@dataclass(frozen=True)
class Result:
    """Result of one training or evaluation. stopped: the last line of one that failed."""

    study: str
    arm: str
    seed: int
    settings: list[str]
    commit: str
    stopped: str | None
    found: dict[str, float]
    seconds: float
    surroundings: dict[str, Any]
    curves: dict[str, list[float | None]] = field(default_factory=dict)  # of older results


Results = Mapping[tuple[str, str, int], Result]


@dataclass(frozen=True)
class Claim:
    """says: in our words. groups: arms to compare, the first of a group with each other.

    columns: {number of a result: heading}; the first has its range over seeds, and is compared. seen: by hand, of the table
    whose digest is seen_of.
    """

    title: str
    says: str
    study: str
    groups: tuple[tuple[str, ...], ...]
    columns: Mapping[str, str]
    seen: str = ""
    seen_of: str = ""


def values(claim: Claim, arm: str, column: str, results: Results) -> dict[int, float]:
    """{seed: value} of the finished trainings."""
    return {
        seed: each.found[column]
        for (study, name, seed), each in sorted(results.items())
        if (study, name) == (claim.study, arm) and each.stopped is None and column in each.found
    }


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Mean difference with its 95% interval over common seeds, and "yes" if they are told apart."""
    paired = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if len(paired) < 2:
        return "–"
    mean, half = interval(paired)
    told = "**yes**" if abs(mean) > half else "no"
    return f"{'-' if mean < 0 else '+'}{_short(abs(mean))} ± {_short(half)}, {told}"


def table(claim: Claim, results: Results) -> str:
    """Markdown: the range of the first column over seeds, means of all, the difference to the group's first arm."""
    first, heading = next(iter(claim.columns.items()))
    headings = ["", "seeds", f"{heading}, range", *claim.columns.values(), "to the first; told apart?"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for group in claim.groups:
        for arm in group:
            by_seed = values(claim, arm, first, results)
            if not by_seed:
                lines.append(f"| {arm} | not run |" + " |" * (len(headings) - 2))
                continue
            stopped = sum(each.stopped is not None for key, each in results.items() if key[:2] == (claim.study, arm))
            seeds = f"{len(by_seed)}" + (f" ({stopped} stopped)" if stopped else "")
            span = f"{_short(min(by_seed.values()))}-{_short(max(by_seed.values()))}"
            mean, half = interval(list(by_seed.values()))
            shown = [
                _short(mean) + (f" ± {_short(half)}" if len(by_seed) > 1 else ""),
                *(_mean(claim, arm, name, results) for name in [*claim.columns][1:]),
            ]
            against = "–" if arm == group[0] else difference(by_seed, values(claim, group[0], first, results))
            lines.append(f"| {' | '.join([arm, seeds, span, *shown, against])} |")
    return "\n".join(lines)


def _mean(claim: Claim, arm: str, column: str, results: Results) -> str:
    known = list(values(claim, arm, column, results).values())
    return _short(sum(known) / len(known)) if known else "–"


def _short(value: float) -> str:
    """Three digits: .843, 1.46, 12,300."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}".replace("0.", ".", 1) if value else "0"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def section(claim: Claim, results: Results) -> str:
    found = table(claim, results)
    parts = [f"## {claim.title}", claim.says, found]
    if claim.seen_of == digest(found):
        parts.append(f"**Seen**: {claim.seen}")
    return "\n\n".join(parts)


def sections(results: Results) -> list[str]:
    return [section(claim, results) for claim in CLAIMS]


def unsaid(results: Results) -> list[str]:
    """Claims whose text is for another table, with the current table's digest."""
    found = {claim.title: (claim.seen_of, digest(table(claim, results))) for claim in CLAIMS}
    return [f"{title}: seen_of={today}" for title, (of, today) in found.items() if of != today]


def provenance(results: Results) -> str:
    """A sentence with the commits of the results."""
    used = {(claim.study, arm) for claim in CLAIMS for group in claim.groups for arm in group}
    commits = Counter(each.commit for key, each in results.items() if key[:2] in used)
    if not commits:
        return "Nothing has been run yet."
    named = ", ".join(f"{commit[:7]}{'+' * commit.endswith('+')} ({num})" for commit, num in commits.most_common())
    whole = len(commits) == 1 and not any(commit.endswith("+") for commit in commits)
    return f"Results by commit: {named}." + (
        ""
        if whole
        else " **Not yet of one clean commit** (+: files differed from it); `python benchmarks/evidence.py` lists what is to run."
    )


BEGINNING = """\
# Evidence

What the papers claim, tried on teams that a CPU trains in minutes; written by `python benchmarks/evidence.py`. What a tiny policy
does not show on arithmetic can be true of 30 billion parameters on olympiad problems, and the other way round.

An arm is a whole training from its seed's warm start, no seed left out; accuracies are of the run's evaluation after it, on
the same 200 or 300 held-out problems for all seeds. Differences are paired by seed; `±` is Student's 95% interval of a mean
over seeds. *Told apart*: the difference's interval leaves out 0, as one in twenty does by chance. *Idle*: steps that trained
nothing. Values by seed: `benchmarks/results/cpu_xeon_2core/evidence/`."""

_WHOLE = {"system": "team"}
_TEAM = {**_WHOLE, "solver": "Solver", "verifier1": "Verifier"}

CLAIMS = (
    Claim(
        "Whose training improves the Solver",
        "MarsRL, Table 2: the Solver gains more when the whole team is trained (AIME-25: 91.1), and even when Verifier and "
        "Corrector alone are (90.4), than by its own samples alone (89.5). In `a mean of each agent` the Solver's tokens weigh "
        "as much as when it is trained alone; `strong Solver` begins mostly right, as the paper's does.",
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
        "the paper's order is reversed for Verifier and Corrector alone (.802 for .891, lower on every seed; the interval just "
        "includes 0), and the whole team's Solver is not told from one trained alone; neither the number of its tokens nor "
        "their weight explains it. With a strong Solver the order is the same. Here the agents share 0.57 M weights, and what "
        "Verifier and Corrector learn helps the Solver less than its own samples do.",
        seen_of="9795bf1e",
    ),
    Claim(
        "Agents' own rewards, not the outcome's",
        "MarsRL: rewards of their own (is the answer right, is the verdict true) are less noisy than the last answer's, shared. "
        "Both arms train whole trajectories.",
        "marsrl",
        (("own rewards", "outcome reward"),),
        _TEAM,
        "own rewards lead by .041, not told apart on five seeds. The Verifier's accuracy differs most, .830 and .745.",
        seen_of="b88139fe",
    ),
    Claim(
        "Another Solver's answers",
        "MarsRL, Table 3: a trained Verifier and Corrector help Solvers that they were not trained with: here one of another "
        "seed, and one of another kind (other shape, tutor and mistakes).",
        "foreign",
        (("untrained", "trained", "own team"), ("untrained, another kind", "trained, another kind")),
        {"added": "team less Solver", "alone": "Solver", "system": "team"},
        "as claimed, for both kinds: the trained Verifier and Corrector add .11 to .39 on every seed, the untrained .00 to "
        ".07. Their own Solver, whose mistakes the training removed, leaves little to add.",
        seen_of="8c331b00",
    ),
    Claim(
        "Which answers are judged and repaired",
        "MarsRL: picking wrong solutions and found errors (adaptive) trains better than a random or balanced pick.",
        "marsrl",
        (("whole", *(f"{pick} picks" for pick in PICKS)),),
        _WHOLE,
        "nothing is told apart.",
        seen_of="0752fa63",
    ),
    Claim(
        "Masking tokens that are mastered",
        "UloRL: masking them while entropy is below a target keeps entropy from collapsing, and accuracy rises.",
        "marsrl",
        (("whole", "gate off", "gate always"),),
        {**_WHOLE, "entropy_first": "entropy, first quarter", "entropy_last": "last quarter"},
        "entropy falls alike in all three; 24 steps are short for a collapse, which UloRL shows over hundreds.",
        seen_of="cf061f46",
    ),
    Claim(
        "Segments, and whose log-probs are old",
        "UloRL: segments cost no accuracy; the present policy as the old one (POIS) is as good as each segment's own (SAIS), "
        "which can let entropy explode.",
        "marsrl",
        (("whole", "4 segments", "4 segments, sais"),),
        {**_WHOLE, "entropy_last": "entropy, last quarter", "empty_steps": "idle"},
        "not told apart, as is claimed, which proves nothing; nothing explodes.",
        seen_of="4355f3d6",
    ),
    Claim(
        "A mean of tokens or of samples",
        "MarsRL's equation 2 averages within a sample first, DAPO (arXiv:2503.14476) over all tokens.",
        "marsrl",
        (("whole", "mean of samples"),),
        {**_WHOLE, "grad_norm_max": "largest gradient norm"},
        "accuracy is not told apart.",
        seen_of="bf278faf",
    ),
    Claim(
        "Advantages of each agent",
        "Dr. MAS: a baseline and deviation of each agent's own keep the gradient's norm from spiking, where one over all agents "
        "(`global`, and `trajectory`, the published GRPO baseline) does not; with shared, separate and adapted policies.",
        "drmas",
        tuple(tuple(f"{policies}, {name}" for name in NORMALISE) for policies in POLICIES),
        {"grad_norm_max": "largest gradient norm", **_WHOLE, "grad_spikes": "spikes"},
        "no norm is told apart; two of 63 trainings spike. By the lemma, mean rewards .2 to .3 apart inflate by 0.8 to 1.15: "
        "little could explode. Adapters end below whole weights, whose seeds 2 to 4 are of earlier code and warm starts.",
        seen_of="34d97e6e",
    ),
    Claim(
        "System 1 and System 2",
        "MARS: System 1, the tools, and the balance of its samples each add to System 2.",
        "mars",
        (("whole", "without System 1", "without Python", "without balance", "one mean"),),
        {
            **_WHOLE,
            "system2_reward_first": "reward, first quarter",
            "system2_reward_last": "last quarter",
            "empty_steps": "idle",
        },
        "System 1 is needed, but here because the policy was taught to read distillates and never pages. Python adds .07. "
        "Balance and the mean are not told from their absence.",
        seen_of="1cc669e2",
    ),
    Claim(
        "Adapters in place of whole weights",
        "LoRA Without Regret (Thinking Machines Lab, 2025): in RL, adapters of a small rank learn what whole weights do, at ten "
        "times their learning rate. Arms: an adapter for each of five agents, one policy for all, a policy for each. CPU seconds "
        "and memory: of one process, which trains and decodes.",
        "adapters",
        (("adapters", "shared weights", "separate weights"),),
        {
            **_TEAM,
            "corrector1": "Corrector",
            "system_before": "team before",
            "sync/bytes": "bytes a publish",
            "cpu_seconds": "CPU seconds",
            "peak_bytes": "bytes of memory",
        },
        "every seed gains .32 or more with adapters, and the team is not told from those of whole weights.",
        seen_of="58169295",
    ),
)


def page(results: Results) -> str:
    """The whole page docs/evidence.md."""
    return "\n\n".join([BEGINNING, provenance(results), *sections(results)]) + "\n"
