"""The learning rate schedule, by table."""

from __future__ import annotations

import pytest

from marsrl.trainer.config import OptimizerConfig
from marsrl.trainer.learner.megatron import shim

shim.install()

from marsrl.trainer.learner.megatron.optimizer import lr_at  # noqa: E402  (megatron comes after the shim)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.775, 0.325, 0.1, 0.1]),
    ],
)
def test_warm_up_then_decay_to_the_final_ratio(decay: str, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay=decay, final_lr_ratio=0.1)  # type: ignore[arg-type]
    assert [lr_at(step, 6, config) for step in range(7)] == pytest.approx(expected)
