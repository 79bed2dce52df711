"""Test whether a policy learns to pay a toll for hints, with credit for whole sessions and for single turns.

    python benchmarks/studies/toll.py --folder runs/toll                       # 4 arms, 5 seeds, 16 steps each
    python benchmarks/studies/toll.py run.steps=3 --folder /tmp/toll --arms none turns --seeds 0

A question has two digits. One of them is the answer; the policy does not know which. A turn is one token. A digit ends the
session, and the right digit earns 1. "?" costs 0.1, and is followed by a hint: the answer. The fourth "?" ends the session.
Without hints a session returns 0.5 at best; with one, 0.9. The policy starts as a small random model that has imitated asking
for a hint in a third of the sessions; it often ignores the hint.

Expected return and number of hints are computed exactly for held-out questions, from the policy's probabilities of "?" and of the
answer at each turn. The variance of an arm's advantages is divided by the variance of the advantages that the arm `none` would
give to the same sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from games import Chat, Game, Measured, alternating, main, next_words

from marsrl.rollout.tasks.own_task import OwnTask

HINT, COST, MOST = "?", 0.1, 4
QUESTIONS = [f"{a}{b}" for a in range(6) for b in range(6) if a != b]
HELD_OUT = QUESTIONS[3::4]
TAUGHT = [question for question in QUESTIONS if question not in HELD_OUT]


class Questions(OwnTask):
    """Questions with either digit as the answer."""

    def problems(self) -> list[tuple[str, str | None]]:
        return [(f"{question}, {answer}", answer) for question in TAUGHT for answer in question]

    def held_out(self) -> list[tuple[str, str | None]]:
        return [(f"{question}, {answer}", answer) for question in HELD_OUT for answer in question]


class Toll:
    """Environment with one agent."""

    max_tokens = 1

    def reset(self, problem: Any) -> str:
        self.answer, self.hints = problem.answer, 0
        return str(problem.question[:2])

    def step(self, text: str) -> Any:
        if text != HINT:
            return float(text == self.answer)
        self.hints += 1
        return (self.answer if self.hints < MOST else 0.0), -COST


def chat(question: str, answer: str, hints: int) -> Chat:
    """Return the chat that the environment shows after this number of hints."""
    return alternating([question, *[HINT, answer] * hints])


def outlook(turns: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return (expected return, expected number of hints) of a session. turns: probabilities of "?" and of the answer per turn."""
    gain, hints, reach = 0.0, 0.0, 1.0
    for hint, right in turns:
        gain += reach * (right - COST * hint)
        hints += reach * hint
        reach *= hint
    return gain, hints


def scored(model: Path) -> tuple[float, float]:
    """Return the exact (expected return, expected number of hints) of a session, averaged over held-out problems."""
    problems = [(question, answer) for question in HELD_OUT for answer in question]
    outlooks = []
    for question, answer in problems:
        chats = [chat(question, answer, hints) for hints in range(MOST)]
        outlooks.append(outlook((p[0], p[1]) for p in next_words(model, chats, [HINT, answer])))
    return fmean(gain for gain, _ in outlooks), fmean(hints for _, hints in outlooks)


def session(text: str, reward: float) -> list[float]:
    """Return the reward of each turn of a logged session. text: the session after the question. reward: the session's reward."""
    hints = text.count(HINT)
    return [-COST] * hints + ([reward + COST * hints] if hints < MOST else [])


def variances(groups: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """Return the variance, over all turns of these groups of sessions, of the advantages by each arm's estimator."""
    from turn_credit import group_std, leave_one_out, ours, summed_means

    estimators = {"none": leave_one_out, "std": group_std, "turns": ours, "summed means": summed_means}
    return {
        arm: pvariance([each for group in groups for own in estimator(group) for each in own])
        for arm, estimator in estimators.items()
    }


def measure(arm: str, run: Path, models: Sequence[Path]) -> Measured:
    """Measure the policies of a training. variance: of the arm's advantages, divided by that of `none`, averaged over steps."""
    from marsrl.trainer.report.samples_log import read_samples

    gains, hints = zip(*map(scored, models), strict=True)
    ratios = []
    for file in (run / "samples").glob("step_*.parquet"):
        groups: dict[str, list[list[float]]] = {}
        for sample in read_samples(file):
            if sample.reward is not None:
                groups.setdefault(sample.group_id, []).append(session(sample.text, sample.reward))
        found = variances([*groups.values()])
        if found["none"]:
            ratios.append(found[arm] / found["none"])
    numbers = {"return": gains[-1], "hints": hints[-1], "variance": fmean(ratios)}
    numbers |= {"return_before": gains[0], "hints_before": hints[0]}
    return numbers, {"return": [*gains], "hints": [*hints]}


GAME = Game(
    file=Path(__file__).resolve(),
    task="Questions",
    environment="Toll",
    settings=(
        "policies.main={dtype: float32, optimizer: {lr: 3.0e-4}}",
        "agents={solver: {policy: main, max_input_tokens: 64}}", "loss.aggregation=token",
        "rollout.prompts_per_step=6", "rollout.max_response_tokens=256", "run.steps=16", "run.checkpoint_every=4",
        "sft={epochs: 25, batch: 48, lr: 0.003, held_out: 0}",
    ),
    arms={
        "none": ("credit.std=none",),
        "std": ("credit.std=biased",),
        "turns": ("credit.std=none", "credit.turns=returns"),
        "summed means": ("credit.std=none", "credit.turns=returns"),
    },
    demonstrations=tuple(
        {"agent": "solver", "messages": [*chat(question, answer, hints), {"role": "assistant", "content": word}]}
        for question in TAUGHT for answer in question for hints in range(MOST - 1)
        for word in ([HINT, *question] if hints == 0 else [HINT, answer, answer, answer])
    ),
    measure=measure,
    programs={"summed means": Path(__file__).with_name("summed_means.py")},
)  # fmt: skip

if __name__ == "__main__":
    main(GAME, __doc__)
