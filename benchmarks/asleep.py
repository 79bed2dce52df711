"""Check that an engine in another process on this GPU sleeps (level 2), wakes up, and receives new weights by CUDA IPC.

    python benchmarks/asleep.py --folder DIR [--engine vllm|local] [--tiny] [--json FILE]

This is what rollout.placement=colocated does at each step, without Ray. The engine scores, sleeps without its weights, is woken,
receives changed weights into its own memory, and scores again. The checksum of each received tensor is compared with that of the
sent one. --tiny is for a CPU: it uses our engine, which has nothing to free, and the CPU twin of IPC.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from engine_process import EngineProcess
from first_steps import MODEL
from weight_sync import Whole

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.build import build_engine, environment_of
from marsrl.rollout.engines.protocol import EngineSpec

ROUNDS = 3


def engine(kind: str, device: str, model_dir: str, dtype: str) -> Any:
    """Build the engine; called in the engine's process."""
    options = VllmOptions(gpu_memory_utilization=0.35, max_num_seqs=16)
    spec = EngineSpec(kind, model_dir, dtype, 1024, device=device, vllm=options, sleeps=True)
    os.environ.update(environment_of(spec))
    return build_engine(spec)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for the model")
    parser.add_argument("--engine", choices=("vllm", "local"), default="vllm")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument(
        "--json", type=Path, help="write the seconds, freed bytes and sent bytes of each round to this file"
    )
    options = parser.parse_args()
    import torch

    from marsrl.rollout.model_shape import read_shape
    from marsrl.rollout.pool.pool import EnginePool
    from marsrl.rollout.weights.files import WeightFiles
    from marsrl.trainer.models.init_model import SHAPES, init_model
    from marsrl.trainer.weights.comparison import CheckedEngines, comparison_sequences
    from marsrl.trainer.weights.sync import DirectSync

    device = torch.device("cpu" if options.tiny else "cuda")
    kind, shape = ("local", SHAPES["tiny"]) if options.tiny else (options.engine, MODEL)
    model = options.folder.resolve() / "model"
    init_model(shape, "bytes", model, seed=0, dtype="bfloat16")
    files = WeightFiles(model)
    learner = Whole({name: files[name].to(device) for name in files}, device)

    def free() -> int:
        return torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0

    make = partial(engine, kind, device.type)
    pool = EnginePool(EngineProcess(str(model), "bfloat16", make, "spawn"), sleeps=True)  # type: ignore[arg-type]
    rounds = []
    with pool:
        vocab_size = read_shape(model).vocab_size
        engines = CheckedEngines(pool, vocab_size=vocab_size)
        sync = DirectSync(engines, torch.bfloat16, "ipc", verify_every=ROUNDS + 2, bucket_bytes=64 << 20)
        for version in range(1, ROUNDS + 1):
            learner.change(0.05)
            awake = free()
            start = time.perf_counter()
            pool.sleep(keeps_weights=False)
            asleep_s, asleep = time.perf_counter() - start, free()
            start = time.perf_counter()
            report = sync.publish(learner, version)  # type: ignore[arg-type]
            assert report is not None
            woken_s = time.perf_counter() - start
            pool.score(comparison_sequences(vocab_size))  # wakes the KV cache too
            rounds.append({
                "sleep_s": asleep_s, "freed_bytes": asleep - awake, "wake_and_publish_s": woken_s,
                "publish_s": report.seconds, "sent_bytes": report.num_bytes, "seconds_of": dict(report.seconds_of),
            })  # fmt: skip
            print(json.dumps(rounds[-1]), flush=True)
        sync.close()
    if options.json:
        options.json.write_text(json.dumps({"engine": kind, "device": device.type, "rounds": rounds}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
