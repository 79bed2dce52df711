"""Checksums, and the plan of a sync without files: every number arrives once, from a rank that has it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import add

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.checksum import block_sum, checksum, checksum_of_sum
from marsrl.rollout.weights.connections import relay_ranks
from marsrl.rollout.weights.layout import (
    Box,
    EngineShard,
    Piece,
    ShardLayout,
    WeightBucket,
    box_of,
    fuse,
    plan_buckets,
    plan_pieces,
    portion_size,
    shard_layout,
    stacked,
    whole_box,
)
from marsrl.trainer.learner.megatron.mapping import held_boxes, hf_shapes, units

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]


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


def test_checksum_values_never_change(implementation):
    """The value must never change, because trainer and engine may run different releases on different devices."""
    assert checksum(torch.arange(50001, dtype=torch.float32)) == 0xCA9367CC560C9C96
    small = torch.arange(10, dtype=torch.bfloat16)
    assert checksum(small.view(2, 5)) == 0x222E2134B4438719
    assert checksum(small[1:]) == checksum(small[1:].clone())  # independent of the offset


@pytest.mark.parametrize(
    ("shape", "start", "end"),
    [((4, 6), (0, 1, 1), (1, 2, 5)), ((4, 6), (0, 1, 0), (1, 2, 3)), ((4, 5), (0, 0, 0), (1, 2, 2))],
    ids=["begins in a word", "ends in a word", "its second row begins in a word"],
)
def test_a_block_that_cuts_a_word_has_no_checksum(shape, start, end):
    block = torch.zeros([b - a for a, b in zip(start, end, strict=True)])
    with pytest.raises(ValueError, match="begins or ends within a word of 8 bytes"):
        block_sum(block, Box(start, end), shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_the_checksum_of_the_cpu():
    values = made_up(100_003, torch.bfloat16, 3)
    assert checksum(values.cuda()) == checksum(values)


def model_shape(*, experts: int, bias: bool, tied: bool) -> ModelShape:
    return ModelShape(
        "Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM", 2, 16, 8, 4, 4, 8, 70, 64,
        1e4, 1e-6, tied, bias, True, experts, 2 if experts else 0, has_proj_bias=bias, has_mlp_bias=bias and not experts,
    )  # fmt: skip


def ranks_of(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int, pipeline: int, world: int
) -> list[dict[str, Box]]:
    """Return the boxes of each rank of a layout, in the order of Megatron's groups: tensor first, pipeline last."""
    held, experts_per_rank = [], shape.num_experts // expert
    for rank in range(world):
        inner, stage = rank % (world // pipeline), rank // (world // pipeline)
        boxes: dict[str, Box] = {}
        for unit in units(shape, pipeline):
            part, parts = inner % tensor, tensor
            if unit.expert is not None:
                part, parts = inner % expert_tensor, expert_tensor
                if unit.expert != inner // expert_tensor % expert * experts_per_rank:
                    continue
            if unit.stage == stage:
                boxes.update(held_boxes(shape, unit, part, parts, 1 if unit.expert is None else experts_per_rank))
        held.append(boxes)
    return held


LAYOUTS = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 3),
    (2, 1, 2, 1, 2),
    (2, 2, 1, 1, 4),
    (4, 2, 2, 1, 4),
    (2, 4, 1, 2, 8),
    (1, 1, 1, 2, 4),
]
WHOLE = EngineShard()
SHARDS = [  # shards of a model with 4 key heads and 4 experts
    [WHOLE],
    [WHOLE] * 3,
    [EngineShard.of(i, 2, 4) for i in range(2)],
    [EngineShard.of(i, 2, 4, spreads_experts=True) for i in range(2)],
    [EngineShard.of(i, 8, 4) for i in range(8)],
]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LAYOUTS), st.sampled_from(SHARDS), st.integers(32, 700), st.booleans(), st.booleans(), st.booleans()
)
def test_every_shard_gets_every_number_once_whatever_the_layout(layout, shards, bucket, is_moe, bias, tied):  # type: ignore[no-untyped-def]
    shape = model_shape(experts=4 if is_moe else 0, bias=bias, tied=tied)
    of_files = {n: s for u in units(shape, 1) for n, s in zip(u.hf, hf_shapes(shape, u), strict=True)}
    sizes = stacked(of_files)
    start = 0.0
    tensors = {}
    for name, size in sizes.items():  # every number of the model is different
        tensors[name] = torch.arange(start, start + torch.Size(size).numel(), dtype=torch.float64).view(size)
        start += tensors[name].numel()
    files = {}
    for name, size in of_files.items():
        stack, box = box_of(name, size)
        files[name] = box.of(tensors[stack]).view(size)
    held = ranks_of(shape, *layout)
    layouts = [shard_layout(sizes, shard) for shard in shards]
    pieces = plan_pieces(held, [each.needs for each in layouts])
    buckets = plan_buckets(pieces, layouts, len(held), bucket)

    for piece in pieces:
        assert held[piece.source][piece.name].overlap(piece.box) == piece.box, "a rank sends only what it has"
    assert all(0 < each.num_elements <= bucket for each in buckets)
    sent = [sum(b.num_elements for b in buckets if b.source == rank) for rank in range(len(held))]
    if layout == (1, 1, 1, 1, 3):  # replicas share the work evenly, to within a tensor
        assert max(sent) - min(sent) <= max(t.numel() for t in tensors.values())
    for number, one in enumerate(layouts):
        taken = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in one.shapes.items()}
        for piece in (piece for each in buckets if each.target == number for piece in each.pieces):
            for fused, position in one.placed(piece.name, piece.box):
                target = position.of(taken[fused])
                assert target.isnan().all(), "written twice"
                target.copy_(piece.box.of(tensors[piece.name]))
        right = dict(fuse(files, shard=shards[number]))
        assert taken.keys() == right.keys() and all(torch.equal(taken[name], right[name]) for name in right)
        assert_portions_fit(one, [each for each in buckets if each.target == number], bucket)


def assert_portions_fit(layout: ShardLayout, buckets: Sequence[WeightBucket], bucket: int) -> None:
    """Check that incomplete portions together take no more memory than a bucket, or than one larger matrix."""
    missing: dict[tuple[str, int], int] = {}
    sizes: dict[tuple[str, int], int] = {}
    for each in buckets:
        for piece in each.pieces:
            (fused, box), *_ = layout.placed(piece.name, piece.box)
            step, whole = portion_size(layout.shapes[fused], bucket), whole_box(layout.shapes[fused])
            first = box.start[0] // step * step
            portion = whole.cut(0, first, first + step).overlap(whole)
            assert box.overlap(portion) == box, "a piece lies in one portion"
            sizes[fused, first] = portion.num_elements
            missing.setdefault((fused, first), portion.num_elements)
            missing[fused, first] -= box.num_elements
        assert sum(sizes[key] for key in missing) <= bucket or len(missing) == 1
        missing = {key: number for key, number in missing.items() if number}
    assert not missing


@pytest.mark.parametrize("wrong", [{0: (4, 8), 2: (4, 8)}, {0: (4, 8), 1: (8, 4)}])
def test_missing_or_unequal_experts_are_refused(wrong):
    with pytest.raises(ValueError, match=r"experts\S+ found experts .*; expected experts 0 to 1 of one shape"):
        stacked({f"model.layers.3.mlp.experts.{expert}.up_proj.weight": shape for expert, shape in wrong.items()})


UP, GATE, DOWN = (f"m.mlp.{name}_proj.weight" for name in ("up", "gate", "down"))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: shard_layout({UP: (4, 8)}), r"m\.mlp\.gate_up_proj\.weight lacks gate_proj; found only .*up_proj"),
        (
            lambda: shard_layout({UP: (4, 6), GATE: (4, 8)}),
            r"\[4, 6\], but another part of .*gate_up_proj.* has \[4, 8\]",
        ),
        (lambda: shard_layout({DOWN: (8, 6)}, EngineShard(1, 4)), "has size 6, which is not divisible by 4 shards"),
        (lambda: plan_pieces([{"a": whole_box((2, 8))}], [{"a": whole_box((3, 8))}]), "needs 24 numbers .* hold 16 of"),
        (
            lambda: plan_buckets([Piece("a", whole_box((2, 8)), 0, 0)], [shard_layout({"a": (2, 8)})], 1, 7),
            r"7 numbers has no room .* a \(8\); raise",
        ),
    ],
)
def test_tensors_that_cannot_be_sent_are_named(work, message):
    with pytest.raises(ValueError, match=message):
        work()


def test_fuse_copies_a_single_part_only_if_a_device_is_given():
    part = torch.ones(4)
    for device in (None, part.device):
        ((_, fused),) = fuse({"a": part}, device=device)
        assert (fused.data_ptr() == part.data_ptr()) == (device is None)


def test_uneven_experts_stay_whole_in_one_part_each():
    parts = [EngineShard(part, 3, spreads_experts=True).experts(8) for part in range(3)]
    assert parts == [range(3), range(3, 6), range(6, 8)]


def test_concurrent_senders_send_to_different_shards():
    pieces = plan_pieces([{"a": whole_box((3, 4)).cut(1, i, i + 1)} for i in range(3)], [{"a": whole_box((3, 4))}] * 3)
    pairs = [(bucket.source, bucket.target) for bucket in plan_buckets(pieces, [shard_layout({"a": (3, 4)})] * 3, 3, 4)]
    assert len(pairs) == 9 and all(
        len(set(ends)) == 3 for i in (0, 3, 6) for ends in zip(*pairs[i : i + 3], strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("blocks", "size"),  # number and size of blocks in each dimension; some blocks need several rounds
    [
        ((1, 2, 2), (1, 300, 1000)),
        ((1, 3, 1), (1, 300, 500)),
        ((1, 1, 4), (1, 75, 4000)),
        ((1, 2, 3), (1, 1, 4)),
        ((2, 3, 1), (5, 30, 400)),
        ((2, 1, 3), (5, 30, 400)),
        ((3, 1, 1), (2, 3, 4)),
    ],
)
def test_shares_of_a_checksum_add_up_to_it(
    implementation: None, blocks: tuple[int, int, int], size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    shape = [number * each for number, each in zip(blocks, size, strict=True)]
    whole, total = torch.randn(shape).to(dtype), 0
    for i, j, k in itertools.product(*map(range, blocks)):
        start = (i * size[0], j * size[1], k * size[2])
        box = Box(start, tuple(map(add, start, size)))
        total += block_sum(box.of(whole), box, shape)
    assert checksum_of_sum(total, dtype, shape) == checksum(whole)


def test_a_vector_may_end_within_a_word(implementation: None) -> None:
    bias = torch.randn(10, generator=torch.Generator().manual_seed(0)).bfloat16()
    boxes = whole_box(bias.shape).cut(1, 0, 8), whole_box(bias.shape).cut(1, 8, 10)
    total = sum(block_sum(box.of(bias), box, bias.shape) for box in boxes)
    assert checksum_of_sum(total, bias.dtype, bias.shape) == checksum(bias)


def test_an_engine_is_served_by_the_rank_on_its_gpu():
    ranks = ["a gpu0", "a gpu1", "b gpu2"]
    assert relay_ranks(ranks, ["b gpu2", "a gpu0"]) == [2, 0]
    with pytest.raises(RuntimeError, match=r"ipc: engine shard 0 is on .*gpu9.* one GPU: set sync\.backend=nccl"):
        relay_ranks(ranks, ["a gpu9"])
    assert relay_ranks(["a", "a"], ["a"] * 3) == [0, 1, 0]  # on CPUs, round robin
