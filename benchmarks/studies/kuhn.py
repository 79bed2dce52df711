"""Kuhn poker in self-play: distance of a policy with 12 decision points from an equilibrium, computed exactly.

    python benchmarks/studies/kuhn.py --folder runs/kuhn                       # 4 arms, 5 seeds, 60 steps each
    python benchmarks/studies/kuhn.py --folder /tmp/kuhn --arms none anchor --seeds 0 --steps 3 [key.sub=value ...]

Each player antes 1 and gets one of the cards 1, 2, 3. A move is a digit: 1 bets 1 (or calls a bet), 0 checks (or folds). Both
players share one policy. It starts as a small random model that has imitated both moves equally often, at every decision point.
Exploitability is what a best response wins from the policy, averaged over both seats: .4583 for uniform moves, 0 in an
equilibrium. An arm's checkpoints are scored with transformers; the report has their last quarter, and the average policy of all
checkpoints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from marsrl.rollout.tasks.own_task import OwnTask

MAIN = Path(__file__).resolve().parents[2] / "trainer" / "main.py"
DEALS = tuple(permutations((1, 2, 3), 2))
POINTS = tuple((card, history) for history in ("", "0", "1", "01") for card in (1, 2, 3))
"""Decision points: the player's card and the moves so far. The first player decides after an even number of moves."""

Bets = Mapping[tuple[int, str], float]
"""A policy: probability of the move 1 at each decision point."""


def payoff(deal: Sequence[int], history: str) -> int | None:
    """Return what the first player wins from the second; None if a move is due."""
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
    """Return a best response's win per game, averaged over both seats. Each of its 64 pure policies is tried."""
    best = []
    for seat, sign in enumerate((1, -1)):
        own = [point for point in POINTS if len(point[1]) % 2 == seat]
        responses = (dict(zip(own, moves, strict=True)) for moves in product((0.0, 1.0), repeat=len(own)))
        best.append(max(fmean(sign * value({**bets, **pure}, deal) for deal in DEALS) for pure in responses))
    return fmean(best)


def average(policies: Sequence[Bets]) -> Bets:
    """Return the policy that plays as if one of these were sampled before each game.

    At each decision point a policy's moves are weighted by the probability with which its player reaches the point.
    """
    bets = {}
    for card, history in POINTS:
        reach = [1 - policy[card, ""] if history == "01" else 1.0 for policy in policies]
        bets[card, history] = sum(r * policy[card, history] for r, policy in zip(reach, policies, strict=True)) / sum(
            reach
        )
    return bets


class Deals(OwnTask):
    """The six deals; each step plays all of them."""

    def problems(self) -> list[tuple[str, str | None]]:
        return [(f"deal {a}{b}", f"{a}{b}") for a, b in DEALS]

    def held_out(self) -> list[tuple[str, str | None]]:
        return [(f"held-out deal {a}{b}", f"{a}{b}") for a, b in DEALS]


class Kuhn:
    """Environment of the players first and second. A turn is one token; an invalid move loses 2."""

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


def chat(card: int, history: str) -> list[dict[str, str]]:
    """Return the chat of the player who decides, as the environment conducts it."""
    if history == "01":
        texts = [str(card), "0", "1"]
    else:
        texts = [f"{card}{history}"]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def scored(model: Path) -> tuple[Bets, float]:
    """Score both moves at each decision point: (bets among legal moves, largest probability of other tokens)."""
    import torch
    from transformers import AutoModelForCausalLM

    from marsrl.rollout.agents.render import ChatRenderer

    renderer, network = ChatRenderer(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    moves = [int(renderer.encode_trusted(move)[0]) for move in "01"]
    bets: dict[tuple[int, str], float] = {}
    illegal = 0.0
    for point in POINTS:
        ids = torch.from_numpy(renderer.render(chat(*point))[0]).long()[None]
        with torch.no_grad():
            check, bet = network(ids).logits[0, -1].double().softmax(-1)[moves].tolist()
        bets[point] = bet / (check + bet)
        illegal = max(illegal, 1 - check - bet)
    return bets, illegal


KL = ("loss.kl=k3", "loss.kl_coef=0.2")
ARMS = {
    "std": (),
    "none": ("credit.std=none",),
    "start": ("credit.std=none", *KL, "policies.main.reference=start"),
    "anchor": ("credit.std=none", *KL, "policies.main.reference=past", "policies.main.reference_every=10"),
}


def settings(folder: Path, model: Path) -> list[str]:
    """Return settings common to all arms, and to the imitation."""
    return [
        f"task={__file__}:Deals", f"data.demonstrations={folder / 'moves.jsonl'}", "orchestration=external",
        f"external.environment={__file__}:Kuhn", f"run.dir={folder}", "run.evaluate=false",
        f"policies.main={{model: {model}, dtype: float32, optimizer: {{lr: 0.001}}}}",
        "agents={first: {policy: main, max_input_tokens: 64}, second: {policy: main, max_input_tokens: 64}}",
        "rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=6", "rollout.group_size=16",
        "rollout.max_response_tokens=64", "mpt.scope=off", "run.token_log_every=0", "run.checkpoint_every=3",
        "run.keep_checkpoints=1000",
        "sft={epochs: 100, batch: 24, lr: 0.003, held_out: 0}",
    ]  # fmt: skip


def start(folder: Path, seed: int) -> Path:
    """Write a model that plays both moves about equally often; returns its directory."""
    from marsrl.trainer.models.init_model import init_model

    lines = [
        {"agent": "first" if len(point[1]) % 2 == 0 else "second",
         "messages": [*chat(*point), {"role": "assistant", "content": move}]}
        for point in POINTS for move in "01"
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "moves.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    model = init_model("tiny", "bytes", folder / f"random{seed}", seed)
    command = [sys.executable, "-m", "marsrl.commands.cli", "sft", *settings(folder, model)]
    subprocess.run([*command, f"run.seed={seed}", f"run.name=start{seed}"], check=True, stdout=subprocess.DEVNULL)
    return folder / f"start{seed}" / "hf"


def train(folder: Path, arm: str, seed: int, more: Sequence[str], model: Path) -> dict[str, float]:
    """Train an arm and return its numbers."""
    from marsrl.commands.models.export import export

    name = f"{arm}{seed}"
    command = [sys.executable, str(MAIN), *settings(folder, model), *ARMS[arm], *more]
    subprocess.run([*command, f"run.seed={seed}", f"run.name={name}"], check=True, stdout=subprocess.DEVNULL)
    checkpoints = sorted((folder / name / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    scores = [scored(model)]
    for checkpoint in checkpoints:
        export(checkpoint, folder / name / "exported" / checkpoint.name)
        scores.append(scored(folder / name / "exported" / checkpoint.name))
    policies = [bets for bets, _ in scores]
    last = scores[-max(1, len(checkpoints) // 4) :]
    return {
        "start": exploitability(policies[0]),
        "last": fmean(exploitability(bets) for bets, _ in last),
        "average": exploitability(average(policies)),
        "illegal": max(illegal for _, illegal in last),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="new directory for models and runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="of every training")
    words = parser.parse_intermixed_args()
    more = [f"run.steps={words.steps}", *words.settings]
    folder, records = words.folder.absolute(), list[dict[str, Any]]()
    for seed in words.seeds:
        model = start(folder, seed)
        for arm in words.arms:
            records.append({"arm": arm, "seed": seed, **train(folder, arm, seed, more, model)})
            print(json.dumps(records[-1]), flush=True)
            if words.json:
                words.json.write_text(json.dumps(records, indent=1))
    for arm in words.arms:
        arm_records = [each for each in records if each["arm"] == arm]
        shown = (
            f"{name} {fmean(e[name] for e in arm_records):.3f} ± {pstdev(e[name] for e in arm_records):.3f}"
            for name in arm_records[0]
            if name not in ("arm", "seed")
        )
        print(f"{arm}: {', '.join(shown)}")


if __name__ == "__main__":
    main()
