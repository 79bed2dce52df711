"""Files, comparison and messages of the sync, over a small local engine: about 2 s."""

import os
import shutil
import threading
import weakref

import pytest
import torch
from engine_cases import perturbed, tensors_of
from safetensors.torch import load_file

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import WeightReceipt
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.weights.fused_layout import WeightFiles
from marsrl.trainer.weights.carriers import FileCarrier, _side_by_side
from marsrl.trainer.weights.files import write_shards
from marsrl.trainer.weights.sync import WeightSync, _compare


@pytest.fixture
def engine(checkpoint):
    return LocalEngine(checkpoint("qwen3"), dtype="float32", max_model_len=128)


@pytest.fixture
def sync(engine, tmp_path):
    carrier = FileCarrier(torch.float32, tmp_path)
    sync = WeightSync(EnginePool(LocalReplicas([engine])), vocab_size=160, verify_every=2, carrier=carrier)
    yield sync
    sync.close()


@pytest.fixture
def tensors(checkpoint):
    return tensors_of(checkpoint("qwen3"))


def test_a_publish_is_counted_and_the_probe_comes_every_second_version(sync, tensors, checkpoint, judge):
    score = lambda seqs: judge.probe(checkpoint("qwen3"), None, list(seqs))  # noqa: E731
    reports = [sync.publish(tensors.items(), version, score) for version in range(3)]
    assert [r.probe is None for r in reports] == [False, True, False]
    assert reports[0].num_bytes == sum(t.nbytes for t in tensors.values()) and reports[0].num_tensors == 19
    assert sync.publish(tensors.items(), 4, None).probe is None


def test_the_newest_version_is_kept_and_all_are_removed_at_the_end(sync, tensors, tmp_path):
    for version in range(3):
        sync.publish(tensors.items(), version, None)
    assert [p.name for p in tmp_path.glob("*/*")] == ["version_2"]
    sync.publish(tensors.items(), 2, None)  # a version may be published again
    sync.close()
    assert list(tmp_path.iterdir()) == []
    sync.close()


def test_the_version_before_stays_until_the_new_one_is_proven(sync, engine, tensors, tmp_path, monkeypatch):
    sync.publish(tensors.items(), 0, None)
    present = []
    update = engine.update_weights
    monkeypatch.setattr(
        engine, "update_weights", lambda new: present.extend(p.name for p in tmp_path.glob("*/*")) or update(new)
    )
    sync.publish(tensors.items(), 1, None)
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


def test_no_more_than_a_layer_and_a_shard_of_exported_tensors_is_alive(sync, checkpoint, tmp_path):
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

    small = WeightSync(sync._pool, vocab_size=160, carrier=FileCarrier(torch.float32, tmp_path, shard_bytes=1))
    small.publish(export(), 1, None)
    small.close()
    layer = sum(t.nbytes for n, t in tensors.items() if ".layers.0." in n)
    largest = max(t.nbytes for t in tensors.values())
    assert most <= layer + 2 * largest < sum(t.nbytes for t in tensors.values())


def test_no_room_is_told_before_anything_is_written(sync, tensors, tmp_path, monkeypatch):
    sync.publish(tensors.items(), 0, None)
    room = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("marsrl.trainer.weights.files.shutil.disk_usage", lambda path: room)
    with pytest.raises(
        RuntimeError, match=r"version 1 could not be written .*MiB are to be written and 0\.0 MiB are free.*shm-size"
    ):
        sync.publish(iter(lambda: pytest.fail("exported in vain"), None), 1, None)
    assert [p.name for p in tmp_path.glob("*/*")] == ["version_0"]


def test_the_parts_of_a_sync_add_up(sync, tensors, checkpoint, judge):
    report = sync.publish(tensors.items(), 0, lambda seqs: judge.probe(checkpoint("qwen3"), None, list(seqs)))
    assert set(report.seconds_of) == {"export", "checksum", "write", "load", "engine_checksum", "probe"}
    assert 0.5 * report.seconds < sum(report.seconds_of.values()) <= report.seconds


def test_an_engine_that_computes_otherwise_than_the_trainer_is_named(sync, tensors, checkpoint, judge, monkeypatch):
    def other(seqs):
        return judge.probe(checkpoint("qwen3"), perturbed(tensors, "layers.1.mlp.down_proj", scale=1e-3), list(seqs))

    with pytest.raises(
        RuntimeError, match=r"version 0: trainer and engine 0 disagree on the probe .* median .* checksum agreed"
    ):
        sync.publish(tensors.items(), 0, other)


@pytest.mark.parametrize("setting", ["rope_theta", "norm_eps", "has_qk_norm"])
def test_an_engine_of_other_settings_is_refused_before_anything_is_sent(engine, checkpoint, setting):
    settings = read_shape(checkpoint("qwen3")).settings()
    pool = EnginePool(LocalReplicas([engine]))
    WeightSync(pool, vocab_size=160, settings=settings).close()
    with pytest.raises(ValueError, match=rf"engine 0 .*LocalEngine\) computes with {setting} \S+, the trainer with \d"):
        WeightSync(pool, vocab_size=160, settings=settings | {setting: 7 + settings[setting]})


def test_a_tensor_that_an_engine_alters_is_named(sync, engine, tensors, monkeypatch):
    update = engine.update_weights

    def altered(update_info):
        receipt = update(update_info)
        return type(receipt)(receipt.version, {**receipt.checksums, "model.norm.weight": 7}, receipt.seconds)

    monkeypatch.setattr(engine, "update_weights", altered)
    with pytest.raises(RuntimeError, match=r"engine 0 .* 1 of 19 tensors differ, first model\.norm\.weight"):
        sync.publish(tensors.items(), 1, None)


def test_a_tensor_that_nobody_sent_is_named(sync, engine, tensors, monkeypatch):
    update = engine.update_weights

    def more(update_info):
        receipt = update(update_info)
        return type(receipt)(receipt.version, {**receipt.checksums, "model.norm.bias": 0}, receipt.seconds)

    monkeypatch.setattr(engine, "update_weights", more)
    with pytest.raises(RuntimeError, match=r"1 of 19 tensors differ, first model\.norm\.bias \(not sent\)"):
        sync.publish(tensors.items(), 1, None)


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
    _compare(expected, WeightReceipt(5, expected, 0.0), version=5, engine=1)
    with pytest.raises(RuntimeError, match=f"version 5: engine 1 does not hold what was sent: {said}"):
        _compare(expected, WeightReceipt(5, held, 0.0), version=5, engine=1)


def test_an_engine_that_reports_another_version_is_named():
    for version in (4, 6):
        with pytest.raises(RuntimeError, match=f"engine 1 reports version {version} after version 5 was sent"):
            _compare({"a": 1}, WeightReceipt(version, {"a": 1}, 0.0), version=5, engine=1)


def test_a_tensor_that_was_not_sent_is_named(sync, tensors, engine, checkpoint):
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.self_attn\.q_norm\.weight"):
        sync.publish(tensors.items(), 1, None)


def test_a_disk_that_gets_full_is_told_and_leaves_no_half_version(sync, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr("marsrl.trainer.weights.files._write", Full())
    with pytest.raises(RuntimeError, match=r"could not be written to .*No space left on device; make room"):
        sync.publish(perturbed(tensors, "norm").items(), 1, None)
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
