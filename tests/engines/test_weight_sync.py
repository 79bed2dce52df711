"""Files, comparison and messages of the sync, over a small local engine: about 2 s."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import perturbed, tensors_of

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.pool import EnginePool, LocalReplicas
from marsrl.trainer.weight_sync import ProbeScore, WeightSync, probe_score


def certain(logprobs):
    return [ProbeScore(each, len(each)) for each in logprobs]


@pytest.fixture
def engine(checkpoint):
    return LocalEngine(checkpoint("qwen3"), dtype="float32", max_model_len=128)


@pytest.fixture
def sync(engine, tmp_path):
    sync = WeightSync(EnginePool(LocalReplicas([engine])), vocab_size=160, verify_every=2, directory=tmp_path)
    yield sync
    sync.close()


@pytest.fixture
def tensors(checkpoint):
    return tensors_of(checkpoint("qwen3"))


def test_a_publish_is_counted_and_the_probe_comes_every_second_version(sync, tensors, checkpoint, judge):
    score = lambda seqs: judge.probe(checkpoint("qwen3"), None, list(seqs))  # noqa: E731
    reports = [sync.publish(tensors.items(), version, score) for version in range(3)]
    assert [r.max_probe_difference is None for r in reports] == [False, True, False]
    assert reports[0].num_bytes == sum(t.nbytes for t in tensors.values()) and reports[0].num_tensors == 19
    assert sync.publish(tensors.items(), 4, None).max_probe_difference is None


def test_two_files_are_kept_and_all_are_removed_at_the_end(sync, tensors, tmp_path):
    for version in range(4):
        sync.publish(tensors.items(), version, None)
    assert sorted(p.name for p in tmp_path.glob("*/*")) == ["version_2.safetensors", "version_3.safetensors"]
    sync.close()
    assert list(tmp_path.iterdir()) == []
    sync.close()


def test_other_logprobs_than_the_trainers_are_named_with_their_place(sync, tensors, checkpoint, judge):
    def score(seqs):
        right = judge(checkpoint("qwen3"), None, list(seqs))
        right[1][41] += 0.5
        return certain(right)

    with pytest.raises(RuntimeError, match=r"by up to 0\.5 nats at engine 0, sequence 1, token 42"):
        sync.publish(tensors.items(), 0, score)


def test_a_probe_that_is_not_a_number_fails(sync, tensors):
    with pytest.raises(RuntimeError, match="disagree on the probe"):
        sync.publish(tensors.items(), 0, lambda seqs: certain([np.full(len(s) - 1, np.nan, np.float32) for s in seqs]))


def test_a_tensor_that_an_engine_alters_is_named(sync, engine, tensors, monkeypatch):
    update = engine.update_weights

    def altered(update_info):
        receipt = update(update_info)
        return type(receipt)(receipt.version, {**receipt.checksums, "model.norm.weight": 7}, receipt.seconds)

    monkeypatch.setattr(engine, "update_weights", altered)
    with pytest.raises(RuntimeError, match=r"engine 0 .* 1 of 19 tensors differ, first model\.norm\.weight"):
        sync.publish(tensors.items(), 1, None)


def test_a_tensor_that_was_not_sent_is_named(sync, tensors, engine, checkpoint):
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.self_attn\.q_norm\.weight"):
        sync.publish(tensors.items(), 1, None)


def test_a_full_disk_is_told_and_leaves_no_half_file(sync, tensors, tmp_path, monkeypatch):
    def full(named, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("marsrl.trainer.weight_sync.save_file", full)
    with pytest.raises(RuntimeError, match=r"could not be written to .*MiB free.*No space left"):
        sync.publish(perturbed(tensors, "norm").items(), 1, None)
    assert not list(tmp_path.glob("*/*"))


def test_positions_from_a_router_tie_on_are_not_compared(sync, tensors, checkpoint, judge):
    def off_from(place, num_certain):
        def score(seqs):
            right = judge(checkpoint("qwen3"), None, list(seqs))
            right[1][place:] += 0.03
            return [ProbeScore(x, num_certain if i == 1 else len(x)) for i, x in enumerate(right)]

        return score

    report = sync.publish(tensors.items(), 0, off_from(9, 9))
    assert report.num_probe_tokens == 96 + 9 + 96 and report.max_probe_difference < 1e-4
    with pytest.raises(RuntimeError, match="sequence 1, token 10 of 96"):
        sync.publish(tensors.items(), 2, off_from(9, 10))


def test_a_probe_of_which_nothing_can_be_compared_fails(sync, tensors):
    with pytest.raises(RuntimeError, match="nothing of the probe can be compared"):
        sync.publish(tensors.items(), 0, lambda seqs: [ProbeScore(np.zeros(96, np.float32), 0) for _ in seqs])


def test_a_probe_counts_up_to_the_first_narrow_margin():
    margins = torch.tensor([1.0, 2e-5, 9e-6, 1.0, 0.0])
    assert probe_score(torch.zeros(5), margins, num_tokens=5, tolerance=1e-4).num_certain == 2
    assert probe_score(torch.zeros(5), margins, num_tokens=5, tolerance=1e-5).num_certain == 4  # of 4 targets
