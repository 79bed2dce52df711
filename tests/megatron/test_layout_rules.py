"""Which layouts fit a model and a number of ranks: one set of rules, with a way out in every refusal."""

from __future__ import annotations

import pytest

from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.config import LayoutConfig
from marsrl.trainer.learner.megatron.layout import Layout, check, fitting, resolve, why_not

SHAPE = ModelShape("Qwen3MoeForCausalLM", 6, 32, 12, 6, 16, 24, 61, 128, 1e4, 1e-6, False, False, True, 8, 2)


@pytest.mark.parametrize(
    ("layout", "world", "says"),
    [
        ({"tensor": 5}, 5, "layout.tensor is 5, which does not divide the 12 attention heads"),
        ({"tensor": 4, "expert": 2}, 8, "layout.tensor is 4, which does not divide the 6 key/value heads"),
        ({"expert": 3}, 3, "layout.expert is 3, which does not divide the 8 experts"),
        ({"expert": 2, "expert_tensor": 5}, 10, "layout.expert_tensor is 5, which does not divide the 24 units"),
        ({"pipeline": 4}, 4, "layout.pipeline is 4, which does not divide the 6 layers"),
        ({"tensor": 2}, 3, "is 2, which does not divide the 3 ranks"),
        ({"expert": 4}, 2, "is 4, which does not divide the 2 ranks"),
        ({"tensor": 2, "expert_tensor": 1}, 2, "expert 1 with expert_tensor 1 and tensor 2"),
        ({"context": 2}, 3, "layout.context is 2, which does not divide the 3 ranks"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_numbers(layout: dict[str, int], world: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(resolve(LayoutConfig(**layout)), SHAPE, world)


def test_expert_tensor_follows_tensor_only_without_expert_parallelism() -> None:
    assert resolve(LayoutConfig(tensor=2)).expert_tensor == 2
    assert resolve(LayoutConfig(tensor=2, expert=2)).expert_tensor == 1


@pytest.mark.parametrize(
    ("layout", "world", "near"),
    [
        ({"tensor": 4, "expert": 4}, 8, "tensor 2, expert 4"),  # 6 key/value heads
        ({"tensor": 2, "expert_tensor": 1}, 4, "tensor 2"),
        ({"pipeline": 4}, 12, "pipeline 3"),  # 6 layers
        ({"tensor": 7}, 7, "data parallel only"),
        ({"expert": 16}, 16, "expert 8"),
    ],
)
def test_a_refusal_names_the_nearest_layout_that_fits(layout: dict[str, int], world: int, near: str) -> None:
    with pytest.raises(ValueError, match=f"on {world} rank.s. this would fit: {near}$"):
        check(resolve(LayoutConfig(**layout)), SHAPE, world)


def test_every_layout_offered_fits_and_none_is_the_silently_wrong_one() -> None:
    layouts = list(fitting(SHAPE, 48))
    assert len(layouts) == len(set(layouts)) > 20
    for layout in layouts:
        assert why_not(layout, SHAPE, 48) is None
        assert layout.expert > 1 or layout.expert_tensor == layout.tensor
        assert layout.data(48) * layout.tensor * layout.pipeline * layout.context == 48
    assert Layout(2, 8, 1, 3, 1) in layouts
