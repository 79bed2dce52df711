"""Under a second."""

import pytest
import torch
from engine_cases import tensors_of

from marsrl.rollout.engines.checksum import checksum
from marsrl.rollout.engines.fused_layout import fuse, fused_checksums, fusion_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 7, 9, 32768 * 2, 32768 * 2 + 3])  # around one word and one block
def test_any_changed_bit_changes_the_checksum(dtype, size):
    values = (torch.arange(size) % 251).to(dtype)
    first = checksum(values)
    assert first == checksum(values.clone())
    for place in {0, size // 2, size - 1} if size else ():
        changed = values.clone()
        changed[place] += 1
        assert checksum(changed) != first


def test_order_and_length_enter_the_checksum():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    swapped = values.clone()
    swapped[[3, 900]] = swapped[[900, 3]]
    far = torch.randn(70000, generator=torch.Generator().manual_seed(1))
    blocks = torch.cat([far[65536:], far[:65536]])  # the same words in another block
    assert len({checksum(values), checksum(swapped), checksum(values.flip(0)), checksum(values[:-1])}) == 4
    assert checksum(far) != checksum(blocks)
    assert checksum(torch.zeros(8)) != checksum(torch.zeros(9))


def test_a_view_has_the_checksum_of_its_values():
    values = torch.randn(33, 17, generator=torch.Generator().manual_seed(0))
    assert checksum(values.t()) == checksum(values.t().contiguous()) != checksum(values)
    assert checksum(values.view(-1)[1:]) == checksum(values.view(-1)[1:].clone())


def test_the_checksum_is_this_number():
    """A fixed value: trainer and engine may run different releases."""
    assert checksum(torch.arange(5, dtype=torch.float32)) == 8744860380635678958


def test_rows_are_fused_in_the_order_that_engines_use(checkpoint):
    tensors = tensors_of(checkpoint("qwen3_moe"))
    fused = dict(fuse(tensors))
    at = "model.layers.1"
    qkv = torch.cat([tensors[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(fused[f"{at}.self_attn.qkv_proj.weight"], qkv)
    third = torch.cat([tensors[f"{at}.mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(fused[f"{at}.mlp.experts.w13_weight"][3], third)
    assert torch.equal(fused[f"{at}.mlp.experts.w2_weight"][3], tensors[f"{at}.mlp.experts.3.down_proj.weight"])


def test_every_tensor_is_in_the_plan_once_and_order_of_names_does_not_matter(checkpoint):
    tensors = tensors_of(checkpoint("qwen3_moe"))
    used = [name for fusion in fusion_plan(tensors).values() for parts in fusion.parts for name in parts]
    assert sorted(used) == sorted(tensors)
    backwards = dict(reversed(tensors.items()))
    assert fused_checksums(backwards, torch.float32) == fused_checksums(tensors, torch.float32)


def test_a_tied_head_is_the_embedding(checkpoint):
    sums = fused_checksums(tensors_of(checkpoint("qwen3_tied")), torch.float32)
    assert sums["lm_head.weight"] == sums["model.embed_tokens.weight"]


def test_a_missing_part_is_named(checkpoint):
    tensors = tensors_of(checkpoint("qwen3_moe"))
    del tensors["model.layers.0.mlp.experts.4.up_proj.weight"]
    with pytest.raises(ValueError, match="up_proj of expert 4"):
        fusion_plan(tensors)
