"""Train a tiny policy in a small game whose values can be computed exactly. The games are kuhn.py and toll.py.

A policy starts as a random model that has imitated the game's demonstrations. Its checkpoints are scored with transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAIN = Path(__file__).resolve().parents[2] / "trainer" / "main.py"
Chat = list[dict[str, str]]
Measured = tuple[dict[str, float], dict[str, list[float | None]]]
"""Numbers of a training, and curves over its checkpoints; each curve begins with the initial model's value."""


@dataclass(frozen=True)
class Game:
    """Game with the arms of its study. settings: settings that all arms share, without paths.

    file: script that defines the classes `task` and `environment`. demonstrations: objects for data.demonstrations.
    measure: function of (arm, run directory, model directories of the run's policies) that returns the numbers.
    programs: {arm: script that trains the arm in place of trainer/main.py}.
    """

    file: Path
    task: str
    environment: str
    settings: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    demonstrations: tuple[Mapping[str, Any], ...]
    measure: Callable[[str, Path, Sequence[Path]], Measured]
    programs: Mapping[str, Path] = field(default_factory=dict)

    def run_name(self, arm: str, seed: int) -> str:
        return f"{arm.replace(' ', '_')}{seed}"


SETTINGS = (
    "orchestration=external", "rollout.engine=local", "rollout.placement=local", "rollout.group_size=16", "mpt.scope=off",
    "run.evaluate=false", "run.token_log_every=0", "run.keep_checkpoints=1000",
)  # fmt: skip


def start(game: Game, folder: Path, seed: int) -> Path:
    """Return the directory of the seed's initial model, which is made unless the folder has it."""
    from marsrl.trainer.models.init_model import init_model

    recipe = json.dumps([game.settings, game.demonstrations])
    name = f"start{seed}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
    if not (folder / name / "hf").exists():
        for left in (folder / name, folder / f"{name}-random"):
            shutil.rmtree(left, ignore_errors=True)  # left by a killed command
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "moves.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in game.demonstrations))
        model = init_model("tiny", "bytes", folder / f"{name}-random", seed)
        command = [sys.executable, "-m", "marsrl.commands.cli", "sft", *_settings(game, folder, model)]
        subprocess.run([*command, f"run.seed={seed}", f"run.name={name}"], check=True, stdout=subprocess.DEVNULL)
    return folder / name / "hf"


def _settings(game: Game, folder: Path, model: Path) -> list[str]:
    paths = [
        f"task={game.file}:{game.task}", f"external.environment={game.file}:{game.environment}", f"run.dir={folder}",
        f"policies.main.model={model}", f"data.demonstrations={folder / 'moves.jsonl'}",
    ]  # fmt: skip
    return [*SETTINGS, *game.settings, *paths]


def train(game: Game, folder: Path, arm: str, seed: int, more: Sequence[str] = ()) -> Measured:
    """Train an arm and measure it. more: additional settings."""
    from marsrl.commands.models.export import export

    model, run = start(game, folder, seed), folder / game.run_name(arm, seed)
    command = [sys.executable, str(game.programs.get(arm, MAIN)), *_settings(game, folder, model), *game.arms[arm]]
    command += [f"run.seed={seed}", f"run.name={run.name}", *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    policies = [model]
    for checkpoint in sorted((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:])):
        policies.append(run / "exported" / checkpoint.name)
        export(checkpoint, policies[-1])
    return game.measure(arm, run, policies)


def next_words(model: Path, chats: Sequence[Chat], words: Sequence[str]) -> list[list[float]]:
    """Return the probability of each word, which must be one token, as the next token of each chat."""
    import torch
    from transformers import AutoModelForCausalLM

    from marsrl.rollout.agents.render import ChatRenderer

    renderer, network = ChatRenderer(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    token_ids = [int(renderer.encode_trusted(word)[0]) for word in words]
    probabilities = []
    with torch.no_grad():
        for chat in chats:
            ids = torch.from_numpy(renderer.render(chat)[0]).long()[None]
            probabilities.append(network(ids).logits[0, -1].double().softmax(-1)[token_ids].tolist())
    return probabilities


def alternating(texts: Sequence[str]) -> Chat:
    """Return a chat in which user and assistant say these texts in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def main(game: Game, description: str | None) -> None:
    """Train arms and seeds, and print a line of JSON for each."""
    from marsrl.trainer.machine import LIBRARIES, commit, device_name, library_versions

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="directory for models and runs")
    parser.add_argument(
        "--arms",
        nargs="*",
        choices=game.arms,
        default=list(game.arms),
        help="arms to train (default: all); without names, only make the initial models",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path, help="write all numbers, with commit and versions")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="additional settings of every training")
    options = parser.parse_intermixed_args()
    folder, records = options.folder.absolute(), list[dict[str, Any]]()
    around = {"device": device_name(), "versions": library_versions(LIBRARIES), "commit": commit()}
    for seed in options.seeds:
        start(game, folder, seed)
        for arm in options.arms:
            numbers, curves = train(game, folder, arm, seed, options.settings)
            records.append({"arm": arm, "seed": seed, "found": numbers, "curves": curves})
            print(json.dumps(records[-1]), flush=True)
            if options.json:
                options.json.write_text(
                    json.dumps({**around, "settings": [*game.settings, *options.settings], "trainings": records}) + "\n"
                )
