"""Files, comparison and messages of the sync, over a small local engine: about 2 s."""

import os
import shutil
import threading
import weakref

import pytest
import torch
from engine_cases import GivenLearner, perturbed, tensors_of
from safetensors.torch import load_file

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import WeightReceipt
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.weights.fused_layout import WeightFiles
from marsrl.trainer.weights.checked_engines import CheckedEngines, _compare
from marsrl.trainer.weights.direct_channel import _side_by_side
from marsrl.trainer.weights.file_channel import FileChannel
from marsrl.trainer.weights.files import write_shards


@pytest.fixture
def engine(checkpoint):
    return LocalEngine(checkpoint("qwen3"), dtype="float32", max_model_len=128)


@pytest.fixture
def channel(engine, tmp_path):
    engines = CheckedEngines(EnginePool(LocalReplicas([engine])), vocab_size=160)
    channel = FileChannel(engines, torch.float32, verify_every=2, directory=tmp_path)
    yield channel
    channel.close()


@pytest.fixture
def tensors(checkpoint):
    return tensors_of(checkpoint("qwen3"))


@pytest.fixture
def given(checkpoint, judge):
    """given(named tensors): a learner that exports them and scores as the checkpoint does."""
    return lambda named: GivenLearner(named, lambda: judge.scores(checkpoint("qwen3"), None))


def test_a_publish_is_counted_and_the_probe_comes_every_second_version(channel, tensors, given):
    reports = [channel.publish(given(tensors.items()), version) for version in range(4)]
    assert [r.comparison is None for r in reports] == [False, True, False, True]
    assert reports[0].num_bytes == sum(t.nbytes for t in tensors.values()) and reports[0].num_tensors == 19


def test_the_newest_version_is_kept_and_all_are_removed_at_the_end(channel, given, tensors, tmp_path):
    for version in range(3):
        channel.publish(given(tensors.items()), version)
    assert [p.name for p in tmp_path.glob("*/*")] == ["version_2"]
    channel.publish(given(tensors.items()), 2)  # a version may be published again
    channel.close()
    assert list(tmp_path.iterdir()) == []
    channel.close()


def test_the_version_before_stays_until_the_new_one_is_proven(channel, given, engine, tensors, tmp_path, monkeypatch):
    channel.publish(given(tensors.items()), 0)
    present = []
    update = engine.update_weights
    monkeypatch.setattr(
        engine, "update_weights", lambda new: present.extend(p.name for p in tmp_path.glob("*/*")) or update(new)
    )
    channel.publish(given(tensors.items()), 1)
    assert sorted(present) == ["version_0", "version_1"]


def test_shards_hold_what_one_file_would(checkpoint, tmp_path):
    tensors = tensors_of(checkpoint("qwen3_moe"))
    largest = max(t.nbytes for t in tensors.values())
    num_bytes = write_shards(tmp_path / "new", tensors.items(), shard_bytes=20_000)
    files = WeightFiles(tmp_path / "new")
    assert num_bytes == sum(t.nbytes for t in tensors.values()) and set(files) == set(tensors)
    assert all(torch.equal(files[name], tensor) for name, tensor in tensors.items())
    shards = list((tmp_path / "new").glob("shard_*.safetensors"))
    assert len(shards) >= num_bytes // max(largest, 20_000)
    assert all(path.stat().st_size < max(largest, 20_000) + 8192 for path in shards)  # 8192: more than a header


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shard_is_what_the_format_says(tmp_path, dtype):
    tensors = {
        "a": torch.arange(7).to(dtype),
        "b": torch.arange(6).view(2, 3).to(dtype),
        "none": torch.zeros(0, 3).to(dtype),
    }
    write_shards(tmp_path / "new", tensors.items())
    found = load_file(tmp_path / "new" / "shard_00000.safetensors")
    assert all(found[n].dtype == dtype and torch.equal(found[n], t) for n, t in tensors.items())


def test_no_more_than_a_layer_and_a_shard_of_exported_tensors_is_alive(channel, given, checkpoint, tmp_path):
    tensors = tensors_of(checkpoint("qwen3"))
    alive, most = [], 0

    def export():
        nonlocal most
        for name, tensor in tensors.items():
            fresh = tensor.clone()
            alive.append((weakref.ref(fresh), name))
            most = max(most, sum(t.nbytes for ref, _ in alive if (t := ref()) is not None))
            yield name, fresh
            del fresh

    small = FileChannel(channel._engines, torch.float32, verify_every=2, directory=tmp_path, shard_bytes=1)
    small.publish(given(export()), 1)
    small.close()
    layer = sum(t.nbytes for n, t in tensors.items() if ".layers.0." in n)
    largest = max(t.nbytes for t in tensors.values())
    assert most <= layer + 2 * largest < sum(t.nbytes for t in tensors.values())


def test_no_room_is_told_before_anything_is_written(channel, given, tensors, tmp_path, monkeypatch):
    channel.publish(given(tensors.items()), 0)
    room = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("marsrl.trainer.weights.files.shutil.disk_usage", lambda path: room)
    with pytest.raises(
        RuntimeError, match=r"version 1 could not be written .*MiB are to be written and 0\.0 MiB are free.*shm-size"
    ):
        channel.publish(given(iter(lambda: pytest.fail("exported in vain"), None)), 1)
    assert [p.name for p in tmp_path.glob("*/*")] == ["version_0"]


def test_the_parts_of_a_sync_add_up(channel, tensors, given):
    report = channel.publish(given(tensors.items()), 0)
    assert set(report.seconds_of) == {"export", "checksum", "write", "load", "engine_checksum", "probe"}
    assert 0.5 * report.seconds < sum(report.seconds_of.values()) <= report.seconds


def test_an_engine_that_computes_otherwise_than_the_trainer_is_named(channel, tensors, checkpoint, judge):
    def other():
        return judge.scores(checkpoint("qwen3"), perturbed(tensors, "layers.1.mlp.down_proj", scale=1e-3))

    with pytest.raises(
        RuntimeError, match=r"version 0: trainer and engine 0 disagree on the probe .* median .* checksum agreed"
    ):
        channel.publish(GivenLearner(tensors.items(), other), 0)


@pytest.mark.parametrize("setting", ["rope_theta", "norm_eps", "has_qk_norm"])
def test_an_engine_of_other_settings_is_refused_before_anything_is_sent(engine, checkpoint, setting):
    settings = read_shape(checkpoint("qwen3")).settings()
    pool = EnginePool(LocalReplicas([engine]))
    CheckedEngines(pool, vocab_size=160, settings=settings)
    with pytest.raises(ValueError, match=rf"engine 0 .*LocalEngine\) computes with {setting} \S+, the trainer with \d"):
        CheckedEngines(pool, vocab_size=160, settings=settings | {setting: 7 + settings[setting]})


@pytest.mark.parametrize(
    ("held", "said"),
    [({"model.norm.weight": 7}, r"model\.norm\.weight"), ({"model.norm.bias": 0}, r"model\.norm\.bias \(not sent\)")],
    ids=["altered", "sent by nobody"],
)
def test_a_tensor_that_an_engine_holds_otherwise_is_named(channel, given, engine, tensors, monkeypatch, held, said):
    update = engine.update_weights

    def other(update_info):
        receipt = update(update_info)
        return type(receipt)(receipt.version, [{**receipt.checksums[0], **held}], receipt.seconds)

    monkeypatch.setattr(engine, "update_weights", other)
    with pytest.raises(RuntimeError, match=rf"engine 0 .* 1 of 19 tensors differ, first {said}"):
        channel.publish(given(tensors.items()), 1)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"a": 1, "b": 3}, r"1 of 2 tensors differ, first b \(checksum 0x3, expected 0x2\)$"),
        ({"a": 1}, r"1 of 2 tensors differ, first b \(not in the engine\)$"),
        ({"a": 1, "b": 2, "c": 0}, r"1 of 2 tensors differ, first c \(not sent\)$"),
        (
            {"a": 0, "c": 0, "d": 0},
            r"4 of 2 .* first a \(checksum 0x0, expected 0x1\); b \(not in the engine\); c \(not sent\)$",
        ),
    ],
)
def test_an_engine_holds_what_was_sent_no_less_no_more_no_other(held, said):
    expected = {"a": 1, "b": 2}
    _compare([expected], WeightReceipt(5, [expected], 0.0), version=5, engine=1)
    with pytest.raises(RuntimeError, match=f"version 5: engine 1 does not hold what was sent: {said}"):
        _compare([expected], WeightReceipt(5, [held], 0.0), version=5, engine=1)


def test_an_engine_that_reports_another_version_is_named():
    for version in (4, 6):
        with pytest.raises(RuntimeError, match=f"engine 1 reports version {version} after version 5 was sent"):
            _compare([{"a": 1}], WeightReceipt(version, [{"a": 1}], 0.0), version=5, engine=1)


def test_a_shard_that_holds_something_else_is_named():
    first, second = {"a": 1, "b": 2}, {"a": 3}
    _compare([first, second], WeightReceipt(5, [first, second], 0.0), version=5, engine=1)
    said = r"engine 1 does not hold what was sent: 1 of 3 tensors differ, first shard 1 of 2: a \(checksum 0x1, expected 0x3\)"
    with pytest.raises(RuntimeError, match=said):
        _compare([first, second], WeightReceipt(5, [first, {"a": 1}], 0.0), version=5, engine=1)
    said = r"2 of 3 .* first shard 0 of 2: b \(not in the engine\); shard 1 of 2: a \(checksum 0x1, expected 0x3\)$"
    with pytest.raises(RuntimeError, match=said):
        _compare([first, second], WeightReceipt(5, [{"a": 1}, {"a": 1}], 0.0), version=5, engine=1)


def test_a_tensor_that_was_not_sent_is_named(channel, given, tensors, engine, checkpoint):
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.self_attn\.q_norm\.weight"):
        channel.publish(given(tensors.items()), 1)


def test_a_disk_that_gets_full_is_told_and_leaves_no_half_version(channel, given, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr("marsrl.trainer.weights.files._write", Full())
    with pytest.raises(RuntimeError, match=r"could not be written to .*No space left on device; make room"):
        channel.publish(given(perturbed(tensors, "norm").items()), 1)
    assert not list(tmp_path.glob("*/*"))


class Full:
    """Takes the header, then has no room."""

    def __init__(self):
        self._num_calls = 0

    def __call__(self, descriptor, data):
        self._num_calls += 1
        if self._num_calls > 2:
            raise OSError(28, "No space left on device")
        os.write(descriptor, data)


def test_a_side_that_fails_is_raised_while_the_other_still_waits():
    forever = threading.Event()
    with pytest.raises(RuntimeError, match="an engine died"):
        _side_by_side(lambda: forever.wait(60), lambda: fail("an engine died"))
    forever.set()
    assert _side_by_side(lambda: 1, lambda: "a") == (1, "a")


def fail(message):
    raise RuntimeError(message)
