"""Files, checksums and messages of a weight sync, over a small local engine: about 2 s."""

import resource
import weakref

import pytest
import torch
from engine_cases import GivenLearner, perturbed, pool_of, tensors_of
from safetensors.torch import load_file

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import TORN, WeightReceipt
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.weights.checksum import fused_checksums
from marsrl.rollout.weights.files import WeightFiles, write_shards
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import DirectSync, FileSync


class ListeningEngine(LocalEngine):
    """Calls `listener`, if there is one, before an update, and passes its receipt through `alters`."""

    listener = staticmethod(lambda: None)
    alters = staticmethod(lambda receipt: receipt)

    def update_weights(self, update):
        self.listener()
        return self.alters(super().update_weights(update))


@pytest.fixture
def engine(checkpoint):
    return ListeningEngine(checkpoint("qwen3"), dtype="float32", max_model_len=128)


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
    """given(tensors): a learner that has them and scores as the checkpoint does; exported: what goes to files."""
    return lambda named, exported=None: GivenLearner(named, lambda: judge.scores(checkpoint("qwen3"), None), exported)


@pytest.fixture(params=["nccl", "ipc"])
def direct(request, checked):
    """By gloo and a mapped file, between two threads of this process."""
    sync = DirectSync(checked, torch.float32, request.param, verify_every=2, bucket_bytes=1 << 14)
    yield sync
    sync.close()


def versions_in(folder):
    return sorted(path.name for path in folder.glob("*/*"))


def test_a_publish_is_counted_and_timed_and_the_probe_comes_every_second_version(sync, tensors, given):
    reports = [sync.publish(given(tensors), version) for version in range(4)]
    assert [r.comparison is None for r in reports] == [False, True, False, True]
    assert reports[0].num_bytes == sum(t.nbytes for t in tensors.values()) and reports[0].num_tensors == 19
    assert set(reports[0].seconds_of) == {"export", "checksum", "write", "load", "engine_checksum", "probe"}
    assert 0 < sum(reports[0].seconds_of.values()) <= reports[0].seconds


def test_weights_without_files_arrive_as_they_were_sent(direct, engine, tensors, given):
    changed = perturbed(tensors, "norm")
    for version, sent in enumerate((tensors, changed)):  # the second over the same connection
        report = direct.publish(given(sent), version)
        assert report.num_bytes == sum(t.nbytes for t in tensors.values()) and report.num_tensors == 19
        assert set(report.seconds_of) == {"load", "engine_checksum"} | ({"probe"} if version == 0 else set())
    held = {}
    engine.alters = lambda receipt: held.update(receipt.checksums[0]) or receipt
    direct.publish(given(changed), 1)
    assert held == fused_checksums(changed, torch.float32) and direct.is_direct


def test_a_transfer_that_breaks_is_repeated_over_new_connections_once(direct, engine, tensors, given):
    breaks = [True]
    broken = WeightReceipt(TORN, (), 0.0, broken="the network is down")
    engine.alters = lambda receipt: broken if breaks and breaks.pop() else receipt
    assert direct.publish(given(tensors), 1).version == 1 and not breaks
    breaks += [True, True]
    expected = (
        r"version 2 does not arrive, and no engine of policy main is lost: the network is down; .* sync\.timeout_s"
    )
    with pytest.raises(RuntimeError, match=expected):
        direct.publish(given(tensors), 2)


def test_a_version_stays_until_the_next_is_proven_and_none_stays_at_the_end(sync, given, engine, tensors, tmp_path):
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
    shards = list((tmp_path / "new").glob("shard_*.safetensors"))
    assert sum(len(load_file(path)) for path in shards) == len(tensors) and len(shards) > 1
    assert all(path.stat().st_size < max(largest, 20_000) + 8192 for path in shards)  # 8192: more than a header


def test_no_more_than_a_tensor_and_a_shard_of_exported_tensors_is_alive(checked, given, tensors, tmp_path):
    alive, most = [], 0

    def export():
        nonlocal most
        for name, tensor in tensors.items():
            fresh = tensor.clone()
            alive.append((weakref.ref(fresh), name))
            most = max(most, sum(t.nbytes for ref, _ in alive if (t := ref()) is not None))
            yield name, fresh
            del fresh

    small = FileSync(checked, torch.float32, verify_every=2, directory=tmp_path, shard_bytes=1)
    small.publish(given(tensors, export()), 1)
    small.close()
    largest = max(t.nbytes for t in tensors.values())
    assert most <= 2 * largest < sum(t.nbytes for t in tensors.values())


def test_a_file_system_that_takes_no_more_is_told_and_leaves_no_half_version(sync, given, tensors, tmp_path):
    sync.publish(given(tensors), 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"version 1 could not be written to .*File too large.*; make room"):
            sync.publish(given(perturbed(tensors, "norm")), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert versions_in(tmp_path) == ["version_0"]


def test_an_engine_that_computes_otherwise_than_the_trainer_is_named(sync, tensors, checkpoint, judge):
    def other():
        return judge.scores(checkpoint("qwen3"), perturbed(tensors, "layers.1.mlp.down_proj", scale=1e-3))

    with pytest.raises(
        RuntimeError, match=r"version 0: trainer and engine 0 disagree on the probe .* median .* checksum agreed"
    ):
        sync.publish(GivenLearner(tensors, other), 0)


@pytest.mark.parametrize("setting", ["rope_theta", "norm_eps", "has_qk_norm"])
def test_an_engine_of_other_settings_is_refused_before_anything_is_sent(engine, checkpoint, setting):
    settings = read_shape(checkpoint("qwen3")).settings()
    pool = pool_of(engine)
    CheckedEngines(pool, vocab_size=160, settings=settings)
    with pytest.raises(ValueError, match=rf"engine 0 .*Engine\) computes with {setting} \S+, the trainer with \d"):
        CheckedEngines(pool, vocab_size=160, settings=settings | {setting: 7 + settings[setting]})


HALVES = [{"a": 1, "b": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("sent", "held", "said"),
    [
        (HALVES[:1], [{"a": 1, "b": 3}], r"1 of 2 tensors differ, first b \(checksum 0x3, expected 0x2\)$"),
        (HALVES[:1], [{"a": 1}], r"1 of 2 tensors differ, first b \(not in the engine\)$"),
        (
            HALVES[:1],
            [{"a": 0, "c": 0, "d": 0}],
            r"4 of 2 .* first a \(checksum 0x0, expected 0x1\); b \(not in the engine\); c \(not sent\)$",
        ),
        (HALVES, [HALVES[0], {"a": 1}], r"1 of 3 .* first shard 1 of 2: a \(checksum 0x1, expected 0x3\)$"),
        (HALVES, [{"a": 1}, {"a": 1}], r"2 of 3 .* first shard 0 of 2: b \(not in the engine\); shard 1 of 2: a \("),
    ],
)
def test_an_engine_holds_what_was_sent_no_less_no_more_no_other(checked, sent, held, said):
    checked.check(sent, {1: WeightReceipt(5, sent, 0.0)}, version=5)
    with pytest.raises(RuntimeError, match=f"version 5: engine 1 does not hold what was sent: {said}"):
        checked.check(sent, {1: WeightReceipt(5, held, 0.0)}, version=5)
    with pytest.raises(RuntimeError, match="engine 1 reports version 4 after version 5 was sent"):
        checked.check(sent, {0: WeightReceipt(5, sent, 0.0), 1: WeightReceipt(4, sent, 0.0)}, version=5)
