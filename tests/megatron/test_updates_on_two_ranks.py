"""Several updates, the KL reference and replayed experts do not depend on the layout: two gloo ranks against one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_models import save_model
from updates_worker import run

from marsrl.trainer.megatron import parallel

CASES = {
    "dp2": ({}, "rollout"),
    "tp2_ep2": ({"tensor": 2, "expert": 2}, "rollout"),
    "pp2": ({"pipeline": 2}, "rollout"),
    "cp2": ({"context": 2}, "rollout"),
    "tp2_ep2_r2": ({"tensor": 2, "expert": 2}, "recompute"),
    "pp2_r2": ({"pipeline": 2}, "recompute"),
}


def test_two_ranks_do_the_updates_of_one(tmp_path: Path) -> None:
    model, reference = save_model("qwen3_moe", tmp_path / "m"), save_model("qwen3_moe", tmp_path / "r", seed=1)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        str(Path(__file__).parent / "updates_worker.py"),
        str(tmp_path / "two.json"),
        str(model),
        str(reference),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, json.dumps(CASES)], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    two = json.loads((tmp_path / "two.json").read_text())
    one = {}
    for router_replay in ("rollout", "recompute"):
        one[router_replay] = run(str(model), str(reference), {}, router_replay)
        parallel.stop(keep_world=True)
    for name, (_, router_replay) in CASES.items():
        for found, expected in zip(two[name], one[router_replay], strict=True):
            assert found[:4] == pytest.approx(expected[:4], rel=2e-4), name  # after three AdamW updates by rounding
            tokens, differ, choices, choices_differ = found[4:]
            assert (tokens, choices) == (expected[4], expected[6]), name
            assert abs(differ - expected[5]) <= 1 and abs(choices_differ - expected[7]) <= 1, name
    assert 0 < one["recompute"][1][5] < one["rollout"][0][5]
