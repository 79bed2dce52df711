"""Weights of which only what has changed travels, to a small local engine over gloo: about 2 s."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_cases import GivenLearner, pool_of, tensors_of

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import TORN, WeightReceipt, WeightUpdate
from marsrl.rollout.weights.checksum import checksum, fused_checksums
from marsrl.rollout.weights.delta import decode_delta, differs, encode_delta
from marsrl.trainer.weights.comparison import CheckedEngines, TrainerScores
from marsrl.trainer.weights.sync import DirectSync, SyncReport

BLOCK = 65536


class FragileEngine(LocalEngine):
    """What it holds may be damaged between two updates; its next answers may be others."""

    answers: list[WeightReceipt]

    def damage(self, name: str) -> None:
        """Flip one bit of its last number."""
        self._model.weights[name].view(-1)[-1:].view(torch.uint8)[0] ^= 1

    def held(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self._model.weights.items()}

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().update_weights(update)
        return self.answers.pop() if self.answers else receipt


class Desk:
    """An engine in bfloat16 or float32, and publishes to it."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.engine = FragileEngine(model, dtype=dtype, max_model_len=128)
        self.engine.answers = []
        checked = CheckedEngines(pool_of(self.engine), vocab_size=160)
        self.sync = DirectSync(checked, self.dtype, "nccl", verify_every=1000, bucket_bytes=1 << 14, delta=True)
        self.tensors = tensors_of(model)
        self.version = 0

    def change(self, share: float) -> int:
        """Move about so many of the numbers; how many the engine's dtype tells apart."""
        generator = torch.Generator().manual_seed(self.version)
        num_changed = 0
        for name, tensor in self.tensors.items():
            moves = torch.rand(tensor.shape, generator=generator) < share
            changed = torch.where(moves, tensor * 1.25 + 0.01, tensor)
            num_changed += int((changed.to(self.dtype) != tensor.to(self.dtype)).sum())
            self.tensors[name] = changed
        return num_changed

    def publish(self) -> SyncReport:
        """The engine holds the tensors of now then."""
        self.version += 1
        report = self.sync.publish(GivenLearner(self.tensors, no_scores), self.version)  # type: ignore[arg-type]
        assert report is not None and self.engine.held() == fused_checksums(self.tensors, self.dtype)
        return report

    @property
    def num_numbers(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


def no_scores() -> TrainerScores:
    raise AssertionError("no version is compared here")


@pytest.fixture(params=["bfloat16", "float32"])
def desk(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Desk]:
    desk = Desk(checkpoint("qwen3_moe"), request.param)
    yield desk
    desk.sync.close()


def test_changes_alone_bring_what_everything_brings_in_fewer_bytes(desk: Desk) -> None:
    whole = desk.num_numbers * desk.dtype.itemsize
    first = desk.publish()
    assert (first.num_bytes, first.changed_share) == (whole, None)
    for share in (0.02, 0.0, 0.1):
        num_changed = desk.change(share)
        report = desk.publish()
        assert report.changed_share == num_changed / desk.num_numbers
        assert report.metrics["sync/changed_share"] == report.changed_share
        expected = num_changed * (desk.dtype.itemsize + 2)  # and 4 bytes for each of the buckets, of 16 KiB
        assert expected < report.num_bytes < expected + 0.01 * whole
    num_changed = desk.change(1.0)
    report = desk.publish()
    assert (report.num_bytes, report.changed_share) == (whole, num_changed / desk.num_numbers)
    desk.change(0.02)
    assert desk.publish().num_bytes < 0.1 * whole


def test_changes_to_numbers_that_are_damaged_are_seen_and_everything_is_sent(desk: Desk) -> None:
    desk.publish()
    desk.engine.damage("model.norm.weight")
    desk.change(0.0)
    report = desk.publish()  # and the engine holds what was sent
    assert report.changed_share is None and report.num_bytes == desk.num_numbers * desk.dtype.itemsize
    desk.change(0.02)
    assert 0 < (desk.publish().changed_share or 0) < 0.05


def test_an_engine_that_keeps_wrong_numbers_ends_the_run_with_the_tensor_s_name(desk: Desk) -> None:
    desk.publish()
    receipt = WeightReceipt(2, [desk.engine.held() | {"model.norm.weight": 7}], 0.0)
    desk.engine.answers += [receipt, receipt]
    with pytest.raises(
        RuntimeError, match=r"version 2: engine 0 does not hold .* first model\.norm\.weight \(checksum 0x7"
    ):
        desk.publish()
    assert desk.engine.answers == []


def test_everything_is_sent_over_new_connections(desk: Desk) -> None:
    desk.publish()
    desk.engine.answers.append(WeightReceipt(TORN, (), 0.0, broken="the network is down"))
    desk.change(0.02)
    assert desk.publish().changed_share is None
    desk.change(0.02)
    assert desk.publish().changed_share is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])  # blocks that are not full, one, several
def test_a_delta_restores_every_bit(size: int, dtype: torch.dtype) -> None:
    before = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    now = before.clone()
    at = [i for i in (0, 7, BLOCK - 1, BLOCK, size - 1) if i < size]
    now[at] = torch.tensor([math.nan, -0.0, 5.0, math.inf, 1e-3], dtype=dtype)[: len(at)]
    before[7:8] = 0.0  # -0.0 is another number
    changed = differs(now, before)
    message = encode_delta(now, changed, int(changed.count_nonzero()))
    if size == 1:
        assert message is None  # it would be longer
        return
    assert message is not None
    places, values = decode_delta(message, size, dtype)
    assert places.tolist() == sorted(set(at))
    found = before.clone()
    found[places] = values
    assert not differs(found, now).any() and len(message) == len(places) * (dtype.itemsize + 2) + 4 * -(-size // BLOCK)
