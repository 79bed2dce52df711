"""Run two steps of configs/single_gpu.yaml with a random model, as a user would: with vLLM if installed, else with our engine.

    python benchmarks/first_steps.py --folder DIR [--engine vllm|local] [--tiny] [--json FILE]

A random model gets no reward, so no token has an advantage. An entropy bonus gives each token a gradient, so that a whole step is
played, trained and published, and its log-probs are compared.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from namespace import ROOT

from marsrl.trainer.models.init_model import SHAPES, SMALL, init_model

# The model has 0.3 B parameters; its head over bytes is negligible.
MODEL = replace(
    SMALL, num_layers=8, hidden_size=1024, num_heads=16, num_kv_heads=8, head_size=128, ffn_size=512, max_positions=32768,
    num_experts=16, experts_per_token=4,
)  # fmt: skip
STEPS = 2


def settings(folder: Path, engine: str, is_tiny: bool) -> list[str]:
    """Return settings that make the preset fast and need no real model."""
    tokens = 16 if is_tiny else 256
    changed = [
        f"policies.main.model={folder / 'model'}", f"data.train={folder / 'problems.jsonl'}", f"run.dir={folder / 'runs'}",
        "run.name=first", f"run.steps={STEPS}", "run.checkpoint_every=0", "run.evaluate=false", f"rollout.engine={engine}",
        "rollout.prompts_per_step=2", f"rollout.max_response_tokens={tokens}", "loss.entropy_coef=0.01",
    ]  # fmt: skip
    for_cpu = ["run.device=auto", "rollout.group_size=2", "rollout.picks=1", "orchestration=solver"]
    return [*changed, *for_cpu] if is_tiny else changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for model, problems and run")
    parser.add_argument("--engine", choices=("vllm", "local"), default="vllm" if find_spec("vllm") else "local")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--json", type=Path, help="write the steps' metrics to this file")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    init_model(SHAPES["tiny"] if options.tiny else MODEL, "bytes", folder / "model", seed=0, dtype="bfloat16")
    problems = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(64)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    trainer = ROOT / "trainer" / "main.py"
    sys.argv = [str(trainer), "--config", str(ROOT / "configs" / "single_gpu.yaml")]
    sys.argv += settings(folder, options.engine, options.tiny)
    print(f"rollout.engine={options.engine}: {' '.join(sys.argv)}", flush=True)
    try:
        runpy.run_path(str(trainer), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    steps = [json.loads(line) for line in (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()]
    if options.json:
        options.json.write_text(json.dumps({"engine": options.engine, "steps": steps}, indent=1) + "\n")
    unmoved = [step["step"] for step in steps if not step.get("actor/grad_norm", 0.0) > 0]
    if len(steps) != STEPS or unmoved:
        print(f"first_steps: expected {STEPS} steps with a gradient; found {len(steps)}, without one: {unmoved}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
