"""The real vLLM with weights in FP8, a dense model and one with experts: about 40 s on one core."""

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import GivenLearner, perturbed, pool_of, prompt, tensors_of

from marsrl.rollout.engines.protocol import WeightUpdate
from marsrl.rollout.weights.checksum import fused_checksums
from marsrl.rollout.weights.files import FileSender
from marsrl.rollout.weights.fp8 import dequantised, quantised
from marsrl.rollout.weights.layout import as_matrix, fuse, shard_layout
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import FileSync

pytestmark = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's FP8 on a CPU wants AMX")
FP8 = Precision(torch.bfloat16, weights=torch.float8_e4m3fn)
MATRICES = (
    ".qkv_proj.weight",
    ".o_proj.weight",
    ".gate_up_proj.weight",
    ".down_proj.weight",
    "w13_weight",
    "w2_weight",
)


def test_a_matrix_is_rounded_in_blocks_that_begin_at_its_corner() -> None:
    weight = torch.randn(2, 200, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).bfloat16()
    weight[0, 130, 5], weight[1, :128, :128] = 1000, 0  # alone with its block; a block without a scale
    numbers, scales = quantised(weight)
    assert numbers.dtype == torch.float8_e4m3fn and numbers.shape == weight.shape and scales.shape == (2, 2, 3)
    assert scales[0, 1, 0] == 1000 / 448 and (scales[0].flatten()[[0, 1, 2, 4, 5]] < 5 / 448).all()
    off = (dequantised(numbers, scales) - weight.float()).abs()
    spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :300]
    bound = torch.maximum(weight.float().abs() / 16, spread / 2**10)  # half a unit of 4 bits, or of the smallest number
    assert (off <= bound * (1 + 1e-5)).all() and not off[1, :128, :128].any()


def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """HF tensors as an engine computes with them."""
    layout, found = shard_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}), {}
    for name, fused in fuse(tensors, torch.bfloat16):
        whole = as_matrix(dequantised(*quantised(fused)) if name.endswith(MATRICES) else fused.float())
        for part in layout.parts[name]:
            (row,) = [place.row for place in layout.places[part] if place.fused == name]
            found[part] = whole[row : row + len(tensors[part])].reshape(tensors[part].shape).contiguous()
    return found


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe_wide"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def engine(kind: str, vllm_engine: Any) -> Any:
    return vllm_engine(f"{kind}+fp8_weights")


@pytest.fixture
def sync(engine: Any) -> Any:
    """sync(learner, version)"""
    made = FileSync(CheckedEngines(pool_of(engine), vocab_size=160), torch.bfloat16, precision=FP8)
    yield made.publish
    made.close()


def test_every_version_is_rounded_anew_and_computed_with(engine, kind, sync, checkpoint, judge):
    old, probe = tensors_of(checkpoint(kind)), [prompt(97, seed=5), prompt(60, seed=6)]
    for version, part in enumerate(("proj", "self_attn", "mlp", "norm", "embed_tokens"), start=1):
        new = perturbed(old, part)
        report = sync(GivenLearner(new, lambda new=new: judge.scores(checkpoint(kind), new, FP8)), version)
        assert report.comparison.ratio < 2 and report.comparison.noise > 1e-2, part
        found = np.concatenate(engine.score(probe))
        off = [np.abs(found - np.concatenate(judge(checkpoint(kind), each, probe))) for each in (rounded(new), new)]
        assert np.median(off[0]) < np.median(off[1]) / 2, part  # bfloat16's roundings, beside FP8's


def test_a_flipped_bit_of_a_number_or_a_scale_shows_in_its_tensor_s_checksum(engine, kind, checkpoint):
    path = str(checkpoint(kind))
    sent = fused_checksums(tensors_of(checkpoint(kind)), torch.bfloat16)
    assert dict(engine.update_weights(WeightUpdate(path, 0)).checksums[0]) == sent
    (model,) = engine._llm.apply_model(lambda model: model)
    held = dict(model.named_parameters())
    rounds = [name for name in held if name.endswith("_scale_inv")]
    assert len(rounds) == 8 and not any(".gate." in name for name in rounds)  # routers choose in full
    for scale in rounds:
        weight = scale.removesuffix("_scale_inv")
        for name in (weight, scale):
            byte = held[name].data.view(-1).view(torch.uint8)[-1:]
            byte ^= 1
            (found,) = engine._llm.collective_rpc("marsrl_checksums", args=(path,))
            assert {each for each in sent | found if sent.get(each) != found.get(each)} == {
                weight.replace(".routed_experts", "")
            }
            byte ^= 1
    assert engine._llm.collective_rpc("marsrl_checksums", args=(path,)) == [sent]


def test_the_probe_finds_another_program_beside_the_noise_of_fp8(engine, kind, sync, checkpoint, judge):
    tensors, directory = tensors_of(checkpoint(kind)), checkpoint(kind)
    sync(GivenLearner(tensors, lambda: judge.scores(directory, tensors, FP8)), 0)
    for other in (
        lambda: judge.scores(directory, tensors, Precision(torch.bfloat16)),  # no allowance for rounded weights
        lambda: judge.scores(directory, perturbed(tensors, "layers.1.self_attn"), FP8),  # older weights
    ):
        with pytest.raises(RuntimeError, match="disagree on the probe by more than rounding explains"):
            sync(GivenLearner(tensors, other), 1)


def test_weights_of_another_version_are_refused_by_name(engine, kind, checkpoint, tmp_path):
    """An engine that keeps what it had reports other checksums than those of what is sent."""
    tensors = tensors_of(checkpoint(kind))
    engine.update_weights(WeightUpdate(str(checkpoint(kind)), 0))
    sender = FileSender(tmp_path, torch.bfloat16)
    written = sender.write(
        {name: tuple(t.shape) for name, t in tensors.items()}, perturbed(tensors, "o_proj", scale=0.01).items(), 1,
        engine.info().shards,
    )  # fmt: skip
    (found,) = engine._llm.collective_rpc("marsrl_checksums", args=(str(written.folder),))
    wrong = {name for name, each in written.expected[0].items() if found[name] != each}
    assert wrong == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2)}
    sender.close()
