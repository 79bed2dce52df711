"""About two seconds."""

import pytest
import torch
from engine_cases import tensors_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marsrl.kernels import library
from marsrl.rollout.weights.checksum import ShardSums, checksum
from marsrl.rollout.weights.layout import EngineShard, fuse, shard_layout

WHOLE = EngineShard()
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]


@pytest.fixture(params=["csrc/cpu", "torch"])
def implementation(request, monkeypatch):
    """Both forms of the sum; that of PyTorch is what runs on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(library, "why_no_cpu_library", lambda: "left out by the test")
    elif reason := library.why_no_cpu_library():
        pytest.skip(reason)


def made_up(count, dtype, seed):
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_seen(implementation, data):
    values = made_up(data.draw(st.integers(1, 300)), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 99)))
    bit = data.draw(st.integers(0, values.nbytes * 8 - 1))
    flipped = values.clone()
    flipped.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum(flipped) != checksum(values) == checksum(values.clone())


def test_swapped_opposites_are_seen(implementation):
    """x and -x differ in the top bit alone: a hash that ends in a multiplication misses half of these swaps."""
    values = torch.ones(64)
    values[33::2] = -1.0
    first = checksum(values)
    for i in range(1, 32, 2):
        for j in range(33, 64, 2):
            values[i], values[j] = -1.0, 1.0
            assert checksum(values) != first
            values[i], values[j] = 1.0, -1.0


def test_shape_dtype_length_and_place_enter(implementation):
    zeros = torch.zeros(64, dtype=torch.uint8)
    others = [
        zeros.view(8, 8), zeros.view(4, 16), zeros.view(1, 64), zeros.view(torch.float32), zeros.view(torch.bfloat16),
        zeros.view(torch.float16), zeros[:63], zeros[:0], torch.zeros(65, dtype=torch.uint8),
    ]  # fmt: skip
    assert len({checksum(each) for each in [zeros, *others]}) == 10
    far = torch.randn(70000, generator=torch.Generator().manual_seed(1))
    assert checksum(far) != checksum(torch.cat([far[65536:], far[:65536]]))  # the same words in another round


def test_a_view_has_the_checksum_of_its_values(implementation):
    values = torch.randn(33, 33, generator=torch.Generator().manual_seed(0))
    assert checksum(values.t()) == checksum(values.t().contiguous()) != checksum(values)
    assert checksum(values.view(-1)[1:]) == checksum(values.view(-1)[1:].clone())


def test_the_checksum_is_this_number(implementation):
    """A fixed value: trainer and engine may run different releases, on different devices."""
    assert checksum(torch.arange(50001, dtype=torch.float32)) == 0xCA9367CC560C9C96
    assert checksum(torch.arange(10, dtype=torch.bfloat16).view(2, 5)) == 0x222E2134B4438719


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_the_checksum_of_the_cpu():
    values = made_up(100_003, torch.bfloat16, 3)
    assert checksum(values.cuda()) == checksum(values)


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def sums_of(tensors, dtype, shard=WHOLE):
    """Checksums of a shard's fused tensors, none of which is put together."""
    sums = ShardSums(shard_layout(shapes_of(tensors), shard), dtype)
    for name, box in sums.layout.needs.items():
        sums.add(name, box, box.of(tensors[name]))
    return sums.checksums()


def test_a_tied_head_is_the_embedding(checkpoint):
    sums = sums_of(tensors_of(checkpoint("qwen3_tied")), torch.float32)
    assert sums["lm_head.weight"] == sums["model.embed_tokens.weight"]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "qwen3_tied", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_without_fusing_are_those_of_the_fused_tensors(checkpoint, kind, dtype):
    tensors = tensors_of(checkpoint(kind))
    assert sums_of(tensors, dtype) == {name: checksum(tensor) for name, tensor in fuse(tensors, dtype)}


def test_a_shard_holds_what_vllm_gives_it():
    """Two key heads of 4 on four parts, a vocabulary of 70 in parts of 32 (128 with its padding), and 5 experts on 4."""
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    rows = {f"{attention}q_proj.weight": 16, f"{attention}k_proj.weight": 8, f"{attention}v_proj.weight": 8}
    tensors = {name: torch.arange(8.0 * size).view(size, 8) for name, size in rows.items()}
    tensors |= {f"{attention}o_proj.weight": torch.arange(128.0).view(8, 16), "model.norm.weight": torch.arange(8.0)}
    tensors |= {
        f"{mlp}experts.{e}.{p}_proj.weight": e + torch.rand(8, 8) for e in range(5) for p in ("gate", "up", "down")
    }
    tensors |= {"lm_head.weight": torch.arange(560.0).view(70, 8)}
    q, k, v, head = (tensors[name] for name in (*rows, "lm_head.weight"))
    tensors |= {f"{attention}{part}_proj.bias": torch.arange(16.0 if part == "q" else 8.0) for part in "qkv"}
    for part in range(4):
        cut = dict(fuse(tensors, shard=EngineShard.of(part, 4, 2)))
        spread = dict(fuse(tensors, shard=EngineShard.of(part, 4, 2, spreads_experts=True)))
        kv = slice(4 * (part // 2), 4 * (part // 2) + 4)
        qkv = torch.cat([q[4 * part : 4 * part + 4], k[kv], v[kv]])
        for held in (cut, spread):
            assert torch.equal(held[f"{attention}qkv_proj.weight"], qkv)
            assert len(held[f"{attention}qkv_proj.bias"]) == 12
            assert torch.equal(
                held[f"{attention}o_proj.weight"], tensors[f"{attention}o_proj.weight"][:, 4 * part :][:, :4]
            )
            assert torch.equal(held["lm_head.weight"], head[32 * part : 32 * part + 32])  # 32, 32, 6 and none
            assert torch.equal(held["model.norm.weight"], tensors["model.norm.weight"])
        gate, up, down = (
            [tensors[f"{mlp}experts.{e}.{p}_proj.weight"] for e in range(5)] for p in ("gate", "up", "down")
        )
        own = slice(2 * part, 2 * part + 2)
        assert torch.equal(
            cut[f"{mlp}experts.w13_weight"],
            torch.stack([torch.cat([g[own], u[own]]) for g, u in zip(gate, up, strict=True)]),
        )
        assert torch.equal(cut[f"{mlp}experts.w2_weight"], torch.stack([d[:, own] for d in down]))
        mine = [[0, 1], [2], [3], [4]][part]
        assert torch.equal(spread[f"{mlp}experts.w2_weight"], torch.stack([down[e] for e in mine]))
        found = sums_of(tensors, torch.float32, EngineShard.of(part, 4, 2))
        assert found == {name: checksum(tensor) for name, tensor in cut.items()}


def test_a_shard_holds_its_part_of_the_biases_of_what_is_cut_by_rows_and_the_others_whole(checkpoint):
    tensors = tensors_of(checkpoint("llama"))
    at = "model.layers.1."
    gate, up = (tensors[f"{at}mlp.{part}_proj.bias"] for part in ("gate", "up"))
    for part in range(2):
        held, own = dict(fuse(tensors, shard=EngineShard.of(part, 2, 2))), slice(48 * part, 48 * part + 48)
        assert torch.equal(held[f"{at}mlp.gate_up_proj.bias"], torch.cat([gate[own], up[own]]))
        for whole in (f"{at}mlp.down_proj.bias", f"{at}self_attn.o_proj.bias"):
            assert torch.equal(held[whole], tensors[whole])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.0.mlp.experts.4.up_proj.weight", None, "up_proj of expert 4"),
        # one row would be copied into all of them
        (
            "model.layers.0.mlp.experts.4.up_proj.weight",
            torch.zeros(1, 64),
            r"has shape \[1, .*as a part of .*w13_weight",
        ),
        ("model.layers.0.self_attn.o_proj.weight", torch.zeros(64, 6), "has 6 to cut, which 4 shards do not divide"),
    ],
    ids=["missing", "shape", "uneven"],
)
def test_a_part_that_does_not_fit_is_named(checkpoint, name, value, said):
    tensors = tensors_of(checkpoint("qwen3_moe"))
    del tensors[name]
    tensors |= {} if value is None else {name: value}
    with pytest.raises(ValueError, match=said):
        dict(fuse(tensors, shard=EngineShard.of(0, 4, 4) if "o_proj" in name else WHOLE))
