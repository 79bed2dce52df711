"""`marsrl export` writes a checkpoint's weights, bit for bit, to a directory like the one that training started from."""

from __future__ import annotations

import json
from pathlib import Path

import megatron_models as tiny
import pytest
import torch
from megatron_models import largest_difference, learner, save, save_model, sequences, step, weights
from safetensors.torch import load_file

from marsrl.commands import cli, evaluate
from marsrl.commands.models.export import export, hf_tensors
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.config.origin import ConfigOrigin
from marsrl.trainer.config.run_config import RunConfig
from marsrl.trainer.data.packing import pack
from marsrl.trainer.learner.megatron.hf_files import write_hf
from marsrl.trainer.learner.megatron.mapping import units
from marsrl.trainer.report.summary import Evaluation
from marsrl.trainer.runs.directory import RunDirectory, write_json
from marsrl.trainer.runs.manifest import write_manifest


def whole_run(folder: Path, *policies: Path) -> RunDirectory:
    """Build a run directory with one checkpoint, into which these folders of policies are moved."""
    run = RunDirectory.create(folder, "run", "preset")
    run.write_config({})
    (run.checkpoint(3) / "policies").mkdir(parents=True)
    for policy in policies:
        policy.rename(run.checkpoint(3) / "policies" / policy.name)
    write_manifest(run.checkpoint(3), {})
    run.mark_latest(3)
    return run


@pytest.mark.parametrize(
    ("kind", "dtype", "changes"),
    [
        ("qwen3_moe", "float32", {}),
        ("qwen3_moe", "bfloat16", {"tie_word_embeddings": True}),
        ("qwen3", "bfloat16", {}),
        ("qwen3", "float32", {"tie_word_embeddings": False}),
        ("qwen2", "bfloat16", {}),
        ("llama", "float32", {}),
        ("llama", "float32", {"attention_bias": False}),
        ("llama", "float32", {"mlp_bias": False, "tie_word_embeddings": False}),
        ("mistral", "float32", {"head_dim": 16, "sliding_window": 64}),
        ("mistral", "bfloat16", {}),
    ],
)
def test_export_returns_loaded_and_trained_weights_bit_for_bit(
    kind: str, dtype: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """Weights are exported from the learner and from its checkpoint; transformers computes the learner's log-probs with them."""
    source = save_model(kind, tmp_path / "in", **changes)
    policy, given = learner(source, dtype=dtype), load_file(source / "model.safetensors")
    untouched = weights(policy)
    assert untouched.keys() == given.keys()
    assert all(torch.equal(untouched[n], given[n].to(getattr(torch, dtype))) for n in given)
    sample = sequences(3)[0]
    step(policy, [batch := pack([sample])])
    trained = weights(policy)
    assert not torch.equal(trained["model.norm.weight"], untouched["model.norm.weight"])
    save(policy, tmp_path / "main")
    _, num_bytes = export(whole_run(tmp_path, tmp_path / "main").path, tmp_path / "out")
    policy.held().save_hf(tmp_path / "direct", source)
    for folder in (tmp_path / "out", tmp_path / "direct"):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == trained.keys() and all(torch.equal(found[n], trained[n]) for n in trained)
        assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in source.iterdir())
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    assert num_bytes == sum(t.nbytes for t in trained.values())
    with pytest.raises(ValueError, match="exists"):
        policy.held().save_hf(tmp_path / "direct", source)
    if dtype == "float32":
        logprobs, _ = tiny.hf_logprobs(tiny.scoring_model(tmp_path / "out"), sample)
        assert float((logprobs.detach() - policy.score([batch])[0][batch.mask]).abs().max()) < 1e-5


def test_a_large_model_is_cut_into_files_and_read_layer_by_layer(tmp_path: Path) -> None:
    source = save_model("qwen3_moe", tmp_path / "in", num_hidden_layers=6, num_experts=8)
    save(learner(source), tmp_path / "main")
    limit = 60_000
    shape = read_shape(source)
    total = write_hf(tmp_path / "out", hf_tensors(tmp_path / "main", shape, units(shape, 1)), source, shard_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert len(sizes) > 3 and max(sizes) <= limit and sum(sizes) == total
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert largest_difference(weights(learner(tmp_path / "out")), weights(learner(source))) == 0.0


def test_unsuitable_export_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "learner.json").write_text("{}")
    run = str(whole_run(tmp_path, tmp_path / "big", tmp_path / "small").path)
    for words, says in [
        ([str(tmp_path), "out"], "out exists and is never overwritten"),
        ([str(tmp_path), "new"], "is not a run directory (config.yaml), a checkpoint (policies/)"),
        ([run, "new"], "has several policies, big, small; choose one with --policy"),
        ([run, "new", "--policy", "main"], "--policy main: "),
        ([run, "new", "--policy", "big"], "has no hf/ folder"),
    ]:
        assert cli.main(["export", words[0], str(tmp_path / words[1]), *words[2:]]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_evaluate_exports_the_latest_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model("qwen3", tmp_path / "in")
    save(learner(source), tmp_path / "main")
    run = whole_run(tmp_path, tmp_path / "main")
    called: list[tuple[RunConfig, ConfigOrigin]] = []

    def fake(config: RunConfig, origin: ConfigOrigin, *_: object, **__: object) -> Evaluation:
        called.append((config, origin))
        return Evaluation.model_construct()

    monkeypatch.setattr(evaluate, "evaluate_alone", fake)

    def evaluated() -> Path:
        assert cli.main(["evaluate", str(run.path), "evaluate.repeat=2"]) == 0
        config, origin = called[-1]
        assert str(run.config) in str(origin) and config.evaluate.repeat == 2
        weights = config.policies["main"].model
        assert weights is not None and f"policies.main.model={weights}" in capsys.readouterr().err
        return Path(weights)

    first = evaluated()
    assert first.is_relative_to(run.path / "exported") and "step_3" in first.parent.name
    before, after = (load_file(folder / "model.safetensors") for folder in (source, first))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert evaluated() == first and (first / "model.safetensors").stat().st_mtime_ns == written
    (run.checkpoint(3) / "more").write_text("the step was played again")
    write_manifest(run.checkpoint(3), {})
    again = evaluated()
    assert again != first and again.is_dir() and not first.exists()
    write_json(run.evaluation(3) / "evaluation.json", {"system": {"mean": 0.5}})
    assert run.mark_best() == 3
    assert cli.main(["evaluate", str(run.checkpoints / "best")]) == 0
    config, origin = called[-1]
    assert (
        str(run.config) in str(origin) and config.policies["main"].model == str(again) and config.evaluate.repeat == 1
    )
    assert export(run.checkpoints / "best", tmp_path / "best")[0] == run.checkpoint(3) / "policies/main"
    young = RunDirectory.create(tmp_path, "young", "p").path
    for words, says in [
        ([tmp_path], "is not a setting (key.sub=value), a run directory"),
        ([run.path, run.path], "or one run's directory"),
        ([young], "it has no config.yaml"),
    ]:
        assert cli.main(["evaluate", *map(str, words)]) == 2
        assert says in capsys.readouterr().err


def test_export_of_an_incomplete_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    save(learner(save_model("qwen3", tmp_path / "in")), tmp_path / "main")
    config = json.loads((tmp_path / "main/hf/config.json").read_text())
    (tmp_path / "main/hf/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="has no tensor output_layer.weight, which its config.json requires"):
        export(tmp_path / "main", tmp_path / "out")
    assert not [p.name for p in tmp_path.iterdir() if "out" in p.name]
