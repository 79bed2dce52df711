"""Train a policy on Kuhn poker in self-play, and compute exactly how far it is from an equilibrium.

    python benchmarks/studies/kuhn.py --folder runs/kuhn                       # 4 arms, 5 seeds, 80 steps each
    python benchmarks/studies/kuhn.py run.steps=3 --folder /tmp/kuhn --arms none anchor --seeds 0

Each player antes 1 and gets one of the cards 1, 2, 3. A move is a digit: 1 bets 1 (or calls a bet), 0 checks (or folds). Both
players share one policy. It has 12 decision points, and starts as a small random model that has imitated bets in 1, 2 or 3 of 4
games, depending on the decision point. Exploitability is what a best response wins from the policy, on average over both seats:
.4583 at the start, 0 in an equilibrium. It is reported for the last quarter of an arm's checkpoints, and for the average policy
of all checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from statistics import fmean
from typing import Any

from games import Chat, Game, Measured, alternating, main, next_words

from marsrl.rollout.tasks.own_task import OwnTask

DEALS = tuple(permutations((1, 2, 3), 2))
POINTS = tuple((card, history) for history in ("", "0", "1", "01") for card in (1, 2, 3))
"""Decision points: the player's card and the moves so far. The first player decides after an even number of moves."""

Bets = Mapping[tuple[int, str], float]
"""Policy, as the probability of the move 1 (bet or call) at each decision point."""


def payoff(deal: Sequence[int], history: str) -> int | None:
    """Return what the first player wins from the second; None if the game is not over."""
    if history in ("00", "11", "011"):
        return (1 if deal[0] > deal[1] else -1) * (1 if history == "00" else 2)
    return {"10": 1, "010": -1}.get(history)


def value(bets: Bets, deal: Sequence[int], history: str = "") -> float:
    """Return the expected payoff of the first player."""
    if (won := payoff(deal, history)) is not None:
        return won
    bet = bets[deal[len(history) % 2], history]
    return (1 - bet) * value(bets, deal, history + "0") + bet * value(bets, deal, history + "1")


def exploitability(bets: Bets) -> float:
    """Return what a best response wins per game, averaged over both seats, by trying all 64 pure policies."""
    best = []
    for seat, sign in enumerate((1, -1)):
        own = [point for point in POINTS if len(point[1]) % 2 == seat]
        responses = (dict(zip(own, moves, strict=True)) for moves in product((0.0, 1.0), repeat=len(own)))
        best.append(max(fmean(sign * value({**bets, **pure}, deal) for deal in DEALS) for pure in responses))
    return fmean(best)


def average(policies: Sequence[Bets]) -> Bets:
    """Return the average policy, which plays as if one of these policies were drawn before each game.

    At each decision point, the moves of a policy are weighted by the probability with which its player reaches the point.
    """
    bets = {}
    for card, history in POINTS:
        reach = [1 - each[card, ""] if history == "01" else 1.0 for each in policies]
        bets[card, history] = sum(r * each[card, history] for r, each in zip(reach, policies, strict=True)) / sum(reach)
    return bets


class Deals(OwnTask):
    """Task whose problems are the six deals; each step plays all of them."""

    def problems(self) -> list[tuple[str, str | None]]:
        return [(f"deal {a}{b}", f"{a}{b}") for a, b in DEALS]

    def held_out(self) -> list[tuple[str, str | None]]:
        return [(f"held-out deal {a}{b}", f"{a}{b}") for a, b in DEALS]


class Kuhn:
    """Environment with the players `first` and `second`. A turn is one token. A player whose token is not a move loses 2."""

    max_tokens = 1

    def reset(self, problem: Any) -> dict[str, str]:
        self.deal, self.history = tuple(map(int, problem.answer)), ""
        return {"first": problem.answer[0]}

    def step(self, text: str) -> dict[str, Any]:
        player, other = ("first", "second") if len(self.history) % 2 == 0 else ("second", "first")
        if text not in ("0", "1"):
            return {player: -2.0, other: 0.0}
        self.history += text
        if (won := payoff(self.deal, self.history)) is not None:
            return {"first": float(won), "second": float(-won)}
        return {other: text if other == "first" else f"{self.deal[1]}{text}"}


def chat(card: int, history: str) -> Chat:
    """Return the chat that the environment shows to the player who decides."""
    return alternating([str(card), "0", "1"] if history == "01" else [f"{card}{history}"])


def scored(model: Path) -> tuple[Bets, float]:
    """Return (probability of a bet among legal moves at each decision point, largest probability of other tokens)."""
    moves = next_words(model, [chat(*point) for point in POINTS], "01")
    bets = {point: bet / (check + bet) for point, (check, bet) in zip(POINTS, moves, strict=True)}
    return bets, max(1 - check - bet for check, bet in moves)


def measure(arm: str, run: Path, models: Sequence[Path]) -> Measured:
    """Measure the policies of a training. The first policy is the initial model, which counts only in the average policy."""
    policies, illegal = zip(*map(scored, models), strict=True)
    curve = [exploitability(bets) for bets in policies]
    num_last = max(1, (len(policies) - 1) // 4)
    numbers = {
        "start": curve[0],
        "last": fmean(curve[-num_last:]),
        "average": exploitability(average(policies)),
        "illegal": max(illegal[-num_last:]),
    }
    return numbers, {"exploitability": [*curve]}


START = {
    (card, history): (card + turn) % 3 + 1 for turn, history in enumerate(("", "0", "1", "01")) for card in (1, 2, 3)
}
"""Number of bets, of four games, that the initial model has imitated at each decision point.

With equal numbers the model would ignore the cards, and RL would move all decision points together."""
KL = ("loss.kl=k3", "loss.kl_coef=0.2")
GAME = Game(
    file=Path(__file__).resolve(),
    task="Deals",
    environment="Kuhn",
    settings=(
        "policies.main={dtype: float32, optimizer: {lr: 3.0e-4}}",
        "agents={first: {policy: main, max_input_tokens: 64}, second: {policy: main, max_input_tokens: 64}}",
        "rollout.prompts_per_step=6", "rollout.max_response_tokens=64", "run.steps=80", "run.checkpoint_every=4",
        "sft={epochs: 100, batch: 24, lr: 0.003, held_out: 0}",
    ),
    arms={
        "none": ("credit.std=none",),
        "std": ("credit.std=biased",),
        "start": ("credit.std=none", *KL, "policies.main.reference=start"),
        "anchor": ("credit.std=none", *KL, "policies.main.reference=past", "policies.main.reference_every=20"),
    },
    demonstrations=tuple(
        {"agent": "first" if len(point[1]) % 2 == 0 else "second",
         "messages": [*chat(*point), {"role": "assistant", "content": move}]}
        for point, bets in START.items() for move in "1" * bets + "0" * (4 - bets)
    ),
    measure=measure,
)  # fmt: skip

if __name__ == "__main__":
    main(GAME, __doc__)
