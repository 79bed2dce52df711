"""A weight sync to a small local engine: its files, checksums, deltas and messages, and transfers that are aborted. 8 s."""

from __future__ import annotations

import functools
import math
import random
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import GivenLearner, WholeModel, files_up_to, perturbed, pool_of, spec_of, tensors_of
from safetensors.torch import load_file
from torch.distributed import TCPStore

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import TORN, WeightReceipt, WeightUpdate, WrongVersion
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.state import encode
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.connections import GroupConnection, Rendezvous, SharedBuffer, TransferBroken, TransferStore
from marsrl.rollout.weights.delta import decode_delta, differs, encode_delta
from marsrl.rollout.weights.direct import ReceivePlan, WeightReceiver
from marsrl.rollout.weights.files import WeightFiles, write_shards, write_version
from marsrl.rollout.weights.layout import EngineShard, fuse
from marsrl.trainer import build
from marsrl.trainer.config.read import read_config
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import DirectSync, FileSync, SyncReport, due_now


class ListeningEngine(LocalEngine):
    """Engine that calls `listener` before each update, and returns `alters(receipt)` after it."""

    listener = staticmethod(lambda: None)
    alters = staticmethod(lambda receipt: receipt)
    num_broken = 0  # number of coming updates whose receipts report a broken transfer

    def update_weights(self, update):
        self.listener()
        receipt = self.alters(super().update_weights(update))
        self.num_broken -= 1
        return receipt if self.num_broken < 0 else WeightReceipt(TORN, (), broken="the network is down")

    def held(self):
        return {name: checksum(tensor) for name, tensor in self._model.weights.items()}


@pytest.fixture
def engine(checkpoint):
    return ListeningEngine(spec_of(checkpoint("qwen3"), 128))


@pytest.fixture
def checked(engine):
    return CheckedEngines(pool_of(engine), vocab_size=160)


@pytest.fixture
def sync(checked, tmp_path):
    sync = FileSync(checked, torch.float32, verify_every=2, directory=tmp_path)
    yield sync
    sync.close()


@pytest.fixture
def tensors(checkpoint):
    return tensors_of(checkpoint("qwen3"))


@pytest.fixture
def given(checkpoint, judge):
    """given(tensors) -> a learner with these tensors and the checkpoint's scores.

    exported: tensors that a sync by files writes; default: `tensors`.
    """
    return lambda named, exported=None: GivenLearner(named, lambda: judge.scores(checkpoint("qwen3"), None), exported)


@pytest.fixture(params=["nccl", "ipc"])
def direct(request, checked):
    """Direct sync by gloo and a mapped file, between two threads of this process."""
    sync = DirectSync(checked, torch.float32, request.param, verify_every=2, bucket_bytes=1 << 14)
    yield sync
    sync.close()


def versions_in(folder):
    return sorted(path.name for path in folder.glob("*/*"))


def test_publishes_are_timed_and_every_second_one_is_probed(sync, tensors, given):
    reports = [sync.publish(given(tensors), version) for version in range(4)]
    assert [r.comparison is None for r in reports] == [False, True, False, True]
    assert reports[0].num_bytes == sum(t.nbytes for t in tensors.values())
    parts = {"export", "checksum", "write", "load", "engine_checksum"}
    assert [set(report.seconds_of) - parts for report in reports[:2]] == [{"scores", "probe"}, set()]
    assert 0 < sum(reports[0].seconds_of.values()) <= reports[0].seconds
    assert reports[0].metrics["sync/direct"] == 0


def test_policies_are_probed_in_turn_and_all_at_first():
    syncs = {str(turn): FileSync(None, torch.float32, verify_every=3, turn=turn) for turn in range(4)}
    due = ["".join(due_now(syncs, dict.fromkeys(syncs, version))) for version in range(5)]
    assert due == ["0123", "1", "2", "03", "1"]


@pytest.mark.parametrize("num", range(1, 14))
def test_adapters_are_probed_in_turn_at_different_versions(num: int) -> None:
    """Adapters miss publishes at random; one begins at version 0 later than the others, and one has its version sent again."""
    generator, versions = random.Random(num), {str(i): 10 + i for i in range(num)} | {"0": 0}
    syncs = {name: FileSync(None, torch.float32) for name in versions}
    since = dict.fromkeys(syncs, 0)
    for _ in range(200):
        sent = generator.sample(sorted(syncs), generator.randint(1, num))
        due = due_now({name: syncs[name] for name in sent}, versions)
        assert len(due) == min(4, len(sent)) or ("0" in due and versions["0"] == 0)
        since |= {name: 0 if name in due else since[name] + 1 for name in sent}
        assert max(since.values()) < math.ceil(num / 4)
        versions |= {name: versions[name] + 1 for name in sent if name != "1"}


def test_runs_resumed_at_other_versions_probe_other_adapters() -> None:
    firsts = []
    for version in (10, 14):
        syncs = {str(i): FileSync(None, torch.float32, turn=i) for i in range(8)}
        firsts.append(set(due_now(syncs, dict.fromkeys(syncs, version))))
    assert firsts == [set("2345"), set("6701")]


@pytest.mark.parametrize(
    ("words", "num_due"),
    [([], [5, 4, 4, 4]), (["sync.verify_every=1"], [5] * 4), (["sync.verify_every=4"], [5, 1, 1, 1])],
)
def test_a_publish_probes_at_most_four_of_five_adapters(
    words: list[str], num_due: list[int], checkpoint: Callable[[str], Path]
) -> None:
    config, _ = read_config("configs/cpu_adapters.yaml", ["policies.main.dtype=float32", *words])
    syncs = {policy: build._sync(config, policy, str(checkpoint("qwen3")), None) for policy in config.trained_policies}
    assert [len(due_now(syncs, dict.fromkeys(syncs, version))) for version in range(4)] == num_due


def test_a_broken_transfer_is_retried_once_and_reconnects(direct, engine, tensors, given):
    engine.num_broken = 1
    report = direct.publish(given(tensors), 1)
    assert report.version == 1 and set(report.seconds_of) == {"load", "engine_checksum"} and engine.num_broken < 0
    assert report.metrics["sync/direct"] == 1
    engine.num_broken = 2
    with pytest.raises(RuntimeError, match=r"version 2 did not arrive, .*: the network is down; .* sync\.timeout_s"):
        direct.publish(given(tensors), 2)


def test_a_version_stays_until_the_next_is_verified(sync, given, engine, tensors, tmp_path):
    sync.publish(given(tensors), 0)
    present = []
    engine.listener = lambda: present.append(versions_in(tmp_path))
    sync.publish(given(tensors), 1)
    sync.publish(given(tensors), 1)  # a version may be published again
    assert present == [["version_0", "version_1"], ["version_1"]] and versions_in(tmp_path) == ["version_1"]
    for _ in range(2):
        sync.close()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_hold_what_one_file_would(checkpoint, tmp_path, dtype):
    tensors = {name: t.to(dtype) for name, t in tensors_of(checkpoint("qwen3_moe")).items()}
    largest = max(t.nbytes for t in tensors.values())
    num_bytes = write_shards(tmp_path / "new", tensors.items(), shard_bytes=20_000)
    files = WeightFiles(tmp_path / "new")
    assert num_bytes == sum(t.nbytes for t in tensors.values()) and set(files) == set(tensors)
    assert all(torch.equal(files[name], tensor) for name, tensor in tensors.items())
    shards = list((tmp_path / "new").glob("model-*.safetensors"))
    assert sum(len(load_file(path)) for path in shards) == len(tensors) and len(shards) > 1
    assert all(path.stat().st_size < max(largest, 20_000) + 8192 for path in shards)  # 8192: more than a header


def test_export_keeps_at_most_a_tensor_and_a_shard_alive(sync, given, tensors, monkeypatch):
    alive, most = [], 0

    def export():
        nonlocal most
        for name, tensor in tensors.items():
            fresh = tensor.clone()
            alive.append((weakref.ref(fresh), name))
            most = max(most, sum(t.nbytes for ref, _ in alive if (t := ref()) is not None))
            yield name, fresh
            del fresh

    small = functools.partial(write_shards, shard_bytes=1)
    monkeypatch.setattr("marsrl.rollout.weights.files.write_shards", small)
    sync.publish(given(tensors, export()), 1)
    largest = max(t.nbytes for t in tensors.values())
    assert most <= 2 * largest < sum(t.nbytes for t in tensors.values())


def test_a_full_disk_is_reported_and_leaves_no_half_version(sync, given, tensors, tmp_path):
    sync.publish(given(tensors), 0)
    message = r"version 1 could not be written to .*File too large.*; free space"
    with files_up_to(10_000), pytest.raises(RuntimeError, match=message):
        sync.publish(given(perturbed(tensors, "norm")), 1)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(RuntimeError, match=r"version 1 .* MiB are needed, but only .* MiB are free; free space"):
        write_version(tmp_path, torch.float32, {"all": (free // 3,)}, [], 1, [], {})
    assert versions_in(tmp_path) == ["version_0"]
    shutil.rmtree(tmp_path)  # another process removes the folder, and closing raises no error


@pytest.mark.parametrize("setting", ["rope_theta", "norm_eps", "has_qk_norm"])
def test_an_engine_of_other_settings_is_rejected_before_sending(engine, checkpoint, setting):
    settings = read_shape(checkpoint("qwen3")).settings()
    pool = pool_of(engine)
    CheckedEngines(pool, vocab_size=160, settings=settings)
    with pytest.raises(ValueError, match=rf"engine 0 .*Engine\) computes with {setting} \S+, the trainer with \d"):
        CheckedEngines(pool, vocab_size=160, settings=settings | {setting: 7 + settings[setting]})


HALVES = [{"a": 1, "b": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("sent", "held", "message"),
    [
        (HALVES[:1], [{"a": 0, "c": 0, "d": 0}], r"4 of 2 .*0x0, expected 0x1\); b \(not in .*; c \(not sent\)$"),
        (HALVES, [HALVES[0], {"a": 1}], r"1 of 3 .* first shard 1 of 2: a \(checksum 0x1, expected 0x3\)$"),
        (HALVES, [{"a": 1}, {"a": 1}], r"2 of 3 .* first shard 0 of 2: b \(not in the engine\); shard 1 of 2: a \("),
    ],
)
def test_missing_extra_and_wrong_tensors_are_reported(checked, sent, held, message):
    checked.check(sent, {1: WeightReceipt(5, sent)}, version=5)
    with pytest.raises(RuntimeError, match=f"version 5: engine 1 does not hold what was sent: {message}"):
        checked.check(sent, {1: WeightReceipt(5, held)}, version=5)
    with pytest.raises(RuntimeError, match="engine 1 reports version 4 after version 5 was sent"):
        checked.check(sent, {0: WeightReceipt(5, sent), 1: WeightReceipt(4, sent)}, version=5)


BLOCK = 65536


class Desk:
    """An engine in bfloat16 or float32, and a sync that publishes to it and sends deltas."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.engine = ListeningEngine(spec_of(model, 128, dtype=dtype))
        checked = CheckedEngines(pool_of(self.engine), vocab_size=160)
        self.sync = DirectSync(checked, self.dtype, "nccl", verify_every=1000, bucket_bytes=1 << 14, sends_deltas=True)
        self.tensors = tensors_of(model)
        self.num_numbers = sum(tensor.numel() for tensor in self.tensors.values())
        self.learner: Any = GivenLearner(self.tensors, lambda: pytest.fail("no version is compared here"))
        self.version = 0

    def change(self, share: float) -> int:
        """Change about this share of the weights; return the number of weights that change in the engine's dtype."""
        generator = torch.Generator().manual_seed(self.version)
        num_changed = 0
        for name, tensor in self.tensors.items():
            moves = torch.rand(tensor.shape, generator=generator) < share
            changed = torch.where(moves, tensor * 1.25 + 0.01, tensor)
            num_changed += int((changed.to(self.dtype) != tensor.to(self.dtype)).sum())
            self.tensors[name] = changed
        return num_changed

    def publish(self) -> SyncReport:
        """Publish, and check that the engine holds the current tensors."""
        self.version += 1
        now = WholeModel(self.tensors, ())
        for name in now.shapes:  # in place, as an optimizer changes them
            self.learner.held().stack(name).copy_(now.stack(name))
        report = self.sync.publish(self.learner, self.version)
        assert report is not None and self.engine.held() == {
            name: checksum(tensor) for name, tensor in fuse(self.tensors, self.dtype)
        }
        return report


@pytest.fixture(params=["bfloat16", "float32"])
def desk(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Desk]:
    desk = Desk(checkpoint("qwen3_moe"), request.param)
    yield desk
    desk.sync.close()


def test_changes_alone_give_the_same_weights_in_fewer_bytes(desk: Desk) -> None:
    whole = desk.num_numbers * desk.dtype.itemsize
    first = desk.publish()
    assert (first.num_bytes, first.changed_share) == (whole, None)
    for share in (0.02, 0.0, 0.1):
        num_changed = desk.change(share)
        report = desk.publish()
        assert report.changed_share == num_changed / desk.num_numbers
        assert report.metrics["sync/changed_share"] == report.changed_share
        expected = num_changed * (desk.dtype.itemsize + 2)  # bytes of the changes; each 16 KiB bucket adds 4
        assert expected < report.num_bytes < expected + 0.01 * whole
    num_changed = desk.change(1.0)
    report = desk.publish()
    assert (report.num_bytes, report.changed_share) == (whole, num_changed / desk.num_numbers)
    desk.engine.num_broken = 1
    desk.change(0.02)
    assert desk.publish().changed_share is None  # all weights were sent, over new connections
    desk.change(0.02)
    assert desk.publish().num_bytes < 0.1 * whole


def test_wrong_engine_weights_end_the_run_naming_the_tensor(desk: Desk) -> None:
    desk.publish()
    wrong = [desk.engine.held() | {"model.norm.weight": 7}]
    versions = list[int]()
    desk.engine.alters = lambda receipt: versions.append(receipt.version) or WeightReceipt(2, wrong)
    with pytest.raises(RuntimeError, match=r"engine 0 does not hold .* first model\.norm\.weight \(checksum 0x7"):
        desk.publish()
    assert versions == [2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])  # less than a block, one block, several
def test_a_delta_restores_every_bit(size: int, dtype: torch.dtype) -> None:
    before = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    now = before.clone()
    at = [i for i in (0, 7, BLOCK - 1, BLOCK, size - 1) if i < size]
    now[at] = torch.tensor([math.nan, -0.0, 5.0, math.inf, 1e-3], dtype=dtype)[: len(at)]
    before[7:8] = 0.0  # -0.0 differs from 0.0
    changed = differs(now, before)
    message = encode_delta(now, changed, int(changed.count_nonzero()))
    if size == 1:
        assert message is None  # a delta would be longer than the whole
        return
    assert message is not None
    positions, values = decode_delta(message, size, dtype)
    assert positions.tolist() == sorted(set(at))
    restored = before.clone()
    restored[positions] = values
    assert not differs(restored, now).any() and len(message) == len(positions) * (dtype.itemsize + 2) + 4 * -(
        -size // BLOCK
    )


CPU = torch.device("cpu")
HUNG_S = 240.0  # longer than any wait in these tests
MANY = 1 << 20  # elements of a bucket; more than sockets can buffer


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    """Yield the rendezvous of one trainer rank and one engine shard.

    Waits time out after HUNG_S, which no test may reach.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HUNG_S))
    yield Rendezvous("session", "127.0.0.1", server.port, "nccl", 1, 1, "float32", MANY, HUNG_S)


def connected(rendezvous: Rendezvous, member: int) -> GroupConnection:
    return GroupConnection(TransferStore(rendezvous), member, CPU)


Wait = Callable[[], object]


def between(move: Callable[[GroupConnection, GroupConnection], object]) -> Callable[[Rendezvous], Wait]:
    """Return a function that connects a rank and a shard, and returns a wait for `move` between them."""

    def met(rendezvous: Rendezvous) -> Wait:
        with ThreadPoolExecutor(2) as threads:
            rank, shard = threads.map(connected, (rendezvous, rendezvous), (0, 1))
        return lambda: move(rank, shard)

    return met


def hand_over_to_nobody(rendezvous: Rendezvous) -> Wait:
    relay = SharedBuffer(TransferStore(rendezvous), 0, CPU, is_relay=True)

    def hand_over() -> None:
        with closing(relay):
            relay.hand_over()

    return hand_over


WAITS: dict[str, Callable[[Rendezvous], Wait]] = {
    "a rank, for an engine that does not connect": lambda meeting: lambda: connected(meeting, 0),
    "a rank, in a send": between(lambda rank, shard: rank.send(torch.zeros(MANY), 0)),
    "an engine, for a bucket": between(lambda rank, shard: shard.receive(0, MANY)),
    "a relay, for an engine": hand_over_to_nobody,
    "an engine, for its relay": lambda meeting: lambda: SharedBuffer(TransferStore(meeting), 0, CPU, is_relay=False),
}


@pytest.mark.parametrize("who", WAITS)
def test_giving_up_a_transfer_ends_every_wait(rendezvous: Rendezvous, who: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(WAITS[who](rendezvous))  # `between` has connected both sides already
        assert not wait([waiting], timeout=0.5).done
        store = TransferStore(rendezvous)
        store.give_up("its process has died")
        store.give_up("another reason")
        with pytest.raises(TransferBroken, match="^its process has died$"):
            waiting.result(HUNG_S / 4)


def test_a_transfer_whose_member_is_late_is_given_up(rendezvous: Rendezvous) -> None:
    start = time.monotonic()
    with pytest.raises(TransferBroken, match=r"^waiting for member1 exceeded sync\.timeout_s = 0\.3 s"):
        store = TransferStore(replace(rendezvous, timeout_s=0.3), rendezvous.client())
        GroupConnection(store, 0, CPU)
    assert time.monotonic() - start >= 0.3
    with pytest.raises(TransferBroken, match="waiting for member1"):  # the other members get the same reason
        TransferStore(rendezvous).check()
    TransferStore(replace(rendezvous, session="another")).check()


@pytest.mark.parametrize("held", [None, (7, 8), (9, 7), (9, 9), (8,)])
def test_a_tensor_that_the_engine_cannot_hold_is_named(rendezvous: Rendezvous, held: Sequence[int] | None) -> None:
    plan = ReceivePlan(rendezvous, 0, EngineShard(), {"norm": (8, 8)}, ())
    with pytest.raises(ValueError, match=re.escape(f"norm has shape {held} in the engine; expected (8, 8)")):
        WeightReceiver(CPU).receive(plan, lambda name: None if held is None else torch.zeros(held))
    TransferStore(rendezvous).give_up("it had a place")
    with pytest.raises(TransferBroken, match="it had a place"):
        # A tensor of nine rows is accepted: the ninth is padding.
        WeightReceiver(CPU).receive(plan, lambda name: torch.zeros(9, 8))


def test_an_engine_lacking_weights_says_why_and_rejects_requests(
    rendezvous: Rendezvous, checkpoint: Callable[[str], str]
) -> None:
    engine = LocalEngine(spec_of(checkpoint("qwen3"), 128))
    TransferStore(rendezvous).give_up("rank 3 cannot reach it")
    receipt = engine.update_weights(WeightUpdate("", 1, (encode(ReceivePlan(rendezvous, 0, EngineShard(), {}, ())),)))
    assert (receipt.version, receipt.checksums, receipt.broken) == (TORN, (), "rank 3 cannot reach it")
    for version in (0, 1):
        with pytest.raises(WrongVersion, match=f"version {TORN} is loaded"):
            engine.submit([], version=version)
