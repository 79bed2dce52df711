"""One training step, ours against the reference loop, on one long-tailed batch: tokens/s and peak memory.

    python benchmarks/train_step.py [--json FILE] [--repeats 5] [--mpt]

Ours: packed sequences, groups without spread left out, fused head (no full logits). The reference computes the same
update (the gradient norms are compared first: no number for a wrong step). Each variant runs in a process of its own
with one thread. tokens/s = all non-padding tokens of the given batch / process time of the step, for everybody.
Memory: peak RSS of the process minus its RSS once model and optimizer stand.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent
VARIANTS = ("ours", "reference", "reference, sorted and dropped")
SHAPE = "bench"


def batch(seed: int = 0) -> tuple[list, int]:  # type: ignore[type-arg]
    """64 sequences in groups of 8: prompts of 20-60 tokens, lognormal responses (sigma 1.0, mean 120, at most 512);
    every second group has no spread (advantage 0). Returns the sequences and the number of sampled tokens."""
    from marsrl.trainer.packing import TrainSequence

    rng = np.random.default_rng(seed)
    sequences = []
    for group in range(8):
        prompt = rng.integers(4, 8192, rng.integers(20, 61)).astype(np.int32)
        rewards = np.array([1, 0, 1, 1, 0, 0, 1, 0], float)
        advantages = (rewards - rewards.mean()) / rewards.std() if group % 2 else np.zeros(8)
        for i in range(8):
            n = int(np.clip(rng.lognormal(math.log(120) - 0.5, 1.0), 1, 512))
            tokens = rng.integers(4, 8192, n).astype(np.int32)
            sequences.append(
                TrainSequence(
                    f"{group}:{i}",
                    prompt,
                    tokens,
                    np.ones(n, bool),
                    np.full(n, -9.0, np.float32),
                    float(advantages[i]),
                    0,
                    1.0,
                    bool(rewards[i]),
                )
            )
    return sequences, sum(s.num_sampled for s in sequences)


def child(variant: str, model_dir: str, experts: str, mpt: float | None, repeats: int) -> None:
    """Runs one variant and prints one JSON line."""
    import torch

    torch.set_num_threads(1)
    sequences, num_tokens = batch()
    if variant == "ours":
        step, close = _ours(model_dir, sequences, num_tokens, mpt)
    else:
        from reference_loop import ReferenceLoop, ReferenceOptions

        options = ReferenceOptions(is_sorted=variant != "reference", experts=experts, mpt_entropy=mpt)
        loop = ReferenceLoop(model_dir, options)

        def step() -> float:
            return loop.step(sequences, num_tokens)[1]

        def close() -> None:
            return None

    standing = _rss_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: loading the model had its own
    norms, seconds = [], []
    for _ in range(repeats + 1):  # the first is a warm-up
        start = time.process_time()
        norms.append(step())
        seconds.append(time.process_time() - start)
    peak = _peak_rss_bytes()
    close()
    total = sum(s.num_tokens for s in sequences)
    print(json.dumps({"seconds": seconds[1:], "norm": norms[0], "extra_bytes": peak - standing, "tokens": total}))


def _ours(model_dir, sequences, num_tokens, mpt):  # type: ignore[no-untyped-def]
    from marsrl.kernels import PolicyObjective
    from marsrl.trainer.config import MptConfig, OptimizerConfig, PolicyConfig
    from marsrl.trainer.learner import Learner
    from marsrl.trainer.share import Share, micro_batches

    learner = Learner(
        PolicyConfig(dtype="float32", optimizer=OptimizerConfig(lr=1e-5)),
        model_dir,
        objective=PolicyObjective(),
        mpt=MptConfig(scope="sample" if mpt is not None else "off", entropy=mpt or 0.2),
        num_agents=1,
        total_steps=100,
        seed=0,
    )

    def step() -> float:
        trained = [s for s in sequences if s.advantage != 0]
        place = Share(0, 1, 2048, learner.align)
        return learner.step(micro_batches(trained, place), normaliser=float(num_tokens)).grad_norm

    return step, learner.close


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak_rss_bytes() -> int:
    """VmHWM. Not getrusage: its maximum is inherited from the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure(variant: str, model_dir: str, experts: str, mpt: float | None, repeats: int) -> dict:  # type: ignore[type-arg]
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        variant,
        "--model",
        model_dir,
        "--experts",
        experts,
    ]
    command += ["--repeats", str(repeats)] + (["--mpt-entropy", str(mpt)] if mpt is not None else [])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{variant} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--experts", default="eager", help=argparse.SUPPRESS)
    parser.add_argument("--mpt-entropy", type=float, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        child(words.child, words.model, words.experts, words.mpt_entropy, words.repeats)
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from reference_loop import fastest_experts

    from marsrl.trainer.init_model import init_model
    from marsrl.trainer.machine import commit, device_name

    torch.set_num_threads(1)
    sequences, _ = batch()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = f"{folder}/model"
        init_model(SHAPE, "bytes", Path(model_dir), seed=0, dtype="float32")
        experts, times = fastest_experts(model_dir, sequences)
        print(
            "experts implementation of the reference: "
            + ", ".join(f"{k} {v:.2f} s" for k, v in times.items())
            + f" -> {experts}"
        )
        results = {}
        for label, mpt in (
            ("DMMPT off", None),
            ("DMMPT on", 20.0),
        ):  # 20 nats: above ln V, so every positive sample is gated
            rows = {variant: measure(variant, model_dir, experts, mpt, words.repeats) for variant in VARIANTS}
            check_same_update(label, rows)
            results[label] = table(label, rows)
    if words.json:
        record = {
            "device": device_name(),
            "commit": commit(),
            "torch": torch.__version__,
            "experts": times,
            "results": results,
        }
        Path(words.json).write_text(json.dumps(record, indent=1))
    print(f"ratio: {min(r['ratio'] for r in results.values()):.2f}")
    return 0


def check_same_update(label: str, rows: dict) -> None:  # type: ignore[type-arg]
    norms = {variant: row["norm"] for variant, row in rows.items()}
    reference = norms["reference"]
    if any(abs(n - reference) > 1e-4 * abs(reference) for n in norms.values()):
        raise SystemExit(f"{label}: the variants do not compute the same update; gradient norms {norms}")


def table(label: str, rows: dict) -> dict:  # type: ignore[type-arg]
    print(f"{label}\n  {'':32}{'tokens/s':>10}{'spread':>9}{'s/step':>9}{'extra MiB':>11}")
    speed = {}
    for variant, row in rows.items():
        median = statistics.median(row["seconds"])
        spread = (max(row["seconds"]) - min(row["seconds"])) / median
        speed[variant] = row["tokens"] / median
        print(f"  {variant:32}{speed[variant]:>10,.0f}{spread:>8.0%} {median:>8.2f}{row['extra_bytes'] / 2**20:>11.0f}")
    ratio = speed["ours"] / speed["reference"]
    sorted_ratio = speed["ours"] / speed["reference, sorted and dropped"]
    memory = rows["ours"]["extra_bytes"] / rows["reference"]["extra_bytes"]
    print(
        f"  ours over reference {ratio:.2f}x (wanted 3), over sorted and dropped {sorted_ratio:.2f}x (wanted 1.2), "
        f"memory {memory:.2f} (wanted 0.5)"
    )
    return {"rows": rows, "ratio": ratio, "ratio_sorted": sorted_ratio, "memory": memory}


if __name__ == "__main__":
    sys.exit(main())
