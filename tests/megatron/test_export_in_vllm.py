"""vLLM loads the directory of `marsrl export` as it is, and scores tokens as the trainer does: about 40 s on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from megatron_models import sequences
from test_export import export, learner, save_model

from marsrl.rollout.engines.vllm.engine import vllm_environment
from marsrl.trainer.data.packing import pack

# not importorskip: vLLM changes torch.cuda where it is imported, which the shim of the other tests must not see
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")]


def test_vllm_loads_a_trained_and_exported_model_with_the_trainers_log_probs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 128}  # the least that vLLM takes
    asked, expected = {}, {}
    for kind in (
        "qwen3_moe",
        "qwen3",
        "llama",
        "mistral",
    ):  # mixtures first: vLLM makes its expert group with a process's first model only
        changes = {"moe_intermediate_size": 64} if kind == "qwen3_moe" else {}
        policy = learner(save_model(kind, tmp_path / kind, **sizes, **changes))
        (sample,) = sequences(1, mean=40, vocab=128)
        every = pack([replace(sample, is_sampled=np.ones(len(sample.token_ids), bool))])
        before = policy.score([every])[0]
        policy.step([every], normaliser=10.0)
        scores = policy.score([every])[0][every.mask]
        assert float((scores - before[every.mask]).abs().max()) > 0.1  # the step shows
        policy.save(tmp_path / f"{kind}_saved")
        export(tmp_path / f"{kind}_saved", tmp_path / f"{kind}_out")
        asked[kind] = (str(tmp_path / f"{kind}_out"), every.token_ids.tolist())
        expected[kind] = scores.numpy()
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "vllm_scores.py"), json.dumps(asked)]
    environment = {**os.environ, **vllm_environment(threads=1)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, logprobs in expected.items():
        theirs = np.asarray(found[kind], np.float32)[-len(logprobs) :]  # the completion's
        np.testing.assert_allclose(theirs, logprobs, atol=1e-4, rtol=0, err_msg=kind)
