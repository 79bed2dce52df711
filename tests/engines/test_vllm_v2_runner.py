"""vLLM as GPUs run it: Model Runner V2, its sampler, async scheduling; kernels by Triton's interpreter, 40 s of one process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import ROUNDING, assert_drawn_from, decoded, perturbed, tensors_of

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.types import Finish


@pytest.fixture(scope="module")
def told(checkpoint: Any, judge: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm")
    pytest.importorskip("triton")
    directory, out = checkpoint("qwen3_moe"), tmp_path_factory.mktemp("v2") / "told"
    judge.model(directory, perturbed(tensors_of(directory), "self_attn"))  # which saves them beside it
    changed = directory.parent / (directory.name + "_changed")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "v2_worker.py"), directory, changed, out]
    done = subprocess.run(command, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = pickle.loads(out.read_bytes())
    return found


def test_the_runner_is_that_of_gpus(told: dict[str, Any]) -> None:
    assert told["runner"] and told["async"]


@pytest.mark.parametrize("name", ["cut", "whole", "on", "aborted"])
def test_logprobs_and_kept_tokens_are_of_the_distribution_drawn_from(
    name: str, told: dict[str, Any], checkpoint: Any, judge: Any
) -> None:
    model = judge.model(checkpoint("qwen3_moe"), None)
    for ask, result in zip(*told[name], strict=True):
        assert_drawn_from(model, ask, result)


def test_a_seed_draws_the_same_again_and_another_one_something_else(told: dict[str, Any]) -> None:
    for first, second in zip(told["cut"][1], told["again"][1], strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        assert second.num_cached_tokens and not first.num_cached_tokens
    assert len({result.token_ids.tobytes() for result in told["whole"][1]}) == 4  # of one prompt


@pytest.mark.parametrize("name", ["cut", "again", "on", "aborted", "whole"])
def test_experts_are_those_of_our_engine(name: str, told: dict[str, Any], checkpoint: Any) -> None:
    """Also those of a cached prefix, of a later segment, and of what was given up."""
    asks, results = told[name]
    if name == "whole":
        assert all(result.routed_experts is None for result in results)  # not asked for
        return
    local = LocalEngine(checkpoint("qwen3_moe"), dtype="float32", max_model_len=256)
    for ask, result in zip(asks, results, strict=True):
        whole = np.concatenate([ask.token_ids, result.token_ids[:-1]])
        of_ours = type(ask)(ask.uid, whole, 1, ask.sampling, 0, "", experts_from=ask.experts_from)
        right = decoded(local, [of_ours])[0].routed_experts
        assert result.routed_experts.dtype == right.dtype and result.routed_experts.shape == right.shape
        np.testing.assert_array_equal(np.sort(result.routed_experts), np.sort(right))


def test_what_is_given_up_comes_back_as_far_as_it_got(told: dict[str, Any]) -> None:
    asks, results = told["aborted"]
    for ask, result in zip(asks, results, strict=True):
        n = len(result.token_ids)
        assert result.finish is Finish.UNFINISHED and 3 < n < 12
        assert len(result.logprobs) == len(result.kept_tokens.counts) == n
        assert len(result.routed_experts) == len(ask.token_ids) + n - 1 - ask.experts_from
    every = [r for name in ("cut", "again", "whole", "on", "aborted", "changed") for r in told[name][1]]
    assert told["num_decoded"] == sum(len(result.token_ids) for result in every)


def test_new_weights_are_those_that_decode_and_score(told: dict[str, Any], checkpoint: Any, judge: Any) -> None:
    """After requests were given up while a step was under way, and no prefix of the old ones is left."""
    changed = perturbed(tensors_of(checkpoint("qwen3_moe")), "self_attn")
    asks, results = told["changed"]
    whole = [np.concatenate([ask.token_ids, result.token_ids]) for ask, result in zip(asks, results, strict=True)]
    for score, right in zip(told["scores"], judge(checkpoint("qwen3_moe"), changed, whole), strict=True):
        np.testing.assert_allclose(score, right, atol=ROUNDING, rtol=0)
    model = judge.model(checkpoint("qwen3_moe"), changed)
    for ask, result in zip(asks, results, strict=True):
        assert_drawn_from(model, ask, result)


def test_temperatures_that_vllm_would_change_are_refused(told: dict[str, Any]) -> None:
    greedy, cold = told["cold"]
    assert greedy.finish is Finish.ERROR and "draws above it only" in greedy.error
    assert cold.finish is Finish.ERROR and "takes 0.01 for all below it" in cold.error
