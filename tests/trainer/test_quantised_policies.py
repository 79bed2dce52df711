"""Policies whose engines round weights to FP8: what a config must say beside it."""

from __future__ import annotations

from typing import Any

import pytest

from marsrl.trainer.config import RunConfig
from marsrl.trainer.plan.placement import with_backend

LOSS = {"correction": "tis", "old_policy": "pois"}


def config(policy: dict[str, Any] | None = None, **others: Any) -> RunConfig:
    rollout = {"vllm": {"quantization": "fp8"}, **others.pop("rollout", {})}
    policies = {"main": {"model": "/models/base", "dtype": "bfloat16", **(policy or {})}}
    return RunConfig.model_validate({"policies": policies, "loss": LOSS, "rollout": rollout, **others})


def test_rounded_weights_travel_as_files() -> None:
    assert with_backend(config(), on_gpus=True).sync.backend == "shm"
    assert with_backend(config(rollout={"engine": "local"}), on_gpus=True).sync.backend == "nccl"  # it rounds none


@pytest.mark.parametrize(
    ("policy", "others", "says"),
    [
        ({}, {"loss": {"correction": "none"}}, "which loss.correction=none takes for the trainer's: set loss.correction=tis"),
        ({}, {"sync": {"backend": "nccl"}}, "set sync.backend=shm, with sync.directory"),
        ({"adapter": {}}, {}, "a trained adapter needs the base as the trainer has it: set it to null"),
        ({"dtype": "float32"}, {}, "computes in 16 bits alone: set rollout.vllm.dtype=bfloat16"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_them_is_refused(policy: dict[str, Any], others: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(policy, **others)


def test_frozen_policies_and_ratios_to_the_engine_s_log_probs_need_no_correction() -> None:
    assert config(loss={"old_policy": "sais"}).has_quantised
    of = {name: {"model": f"/models/{name}", "dtype": "bfloat16"} for name in ("main", "judge")}
    of["judge"] |= {"frozen": True, "vllm": {"quantization": "fp8"}}
    assert not RunConfig.model_validate({"policies": of}).has_quantised
