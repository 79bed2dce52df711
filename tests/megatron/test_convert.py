"""An unusable Hugging Face directory is refused, with its name. test_export.py tests that tensors are exported unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_models import KINDS, learner, save_model, weights
from safetensors.torch import load_file, save_file

from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.weights.files import WeightFiles
from marsrl.trainer.learner.megatron.hf_files import HfReader

SCALING = KINDS["llama"]["rope_parameters"]


def edited(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "qwen3",
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM is not supported; supported: Qwen2ForC.*, Mistral",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias is True; supported: False"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type is 'yarn'"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3", {"num_hidden_layers": "two"}, "num_hidden_layers is 'two', expected an integer"),
        ("qwen3", {"hidden_size": 64}, r"embed_tokens.weight has shape \[61, 32\], but config.json gives \[61, 64\]"),
        ("qwen3", {"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight"),
        (
            "llama",
            {"rope_scaling": {**SCALING, "factor": None}},
            r"rope type llama3 has factor None.* expected four numbers",
        ),
        ("llama", {"rope_scaling": {**SCALING, "low_freq_factor": 4}}, "low_freq_factor below high_freq_factor"),
        ("llama", {"qkv_bias": True}, "qkv_bias is True; supported: False"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5; supported: 1.0"),
        ("mistral", {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling is .*; supported: None"),
        ("mistral", {"mlp_bias": True}, "mlp_bias is True; supported: False"),
        ("mistral", {"rope_parameters": None}, "has no rope_theta"),
    ],
)
def test_unsupported_config_json_is_refused(kind: str, changes: dict[str, object], says: str, tmp_path: Path) -> None:
    folder = edited(save_model(kind, tmp_path / "m"), **changes)
    with pytest.raises(ValueError, match=says) as refusal:
        learner(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("written", "positions"), [({}, 4096), ({"sliding_window": 64}, 64), ({"sliding_window": None}, 8192)]
)
def test_a_mistral_is_used_within_its_sliding_window(
    written: dict[str, object], positions: int, tmp_path: Path
) -> None:
    """If config.json names no sliding window, it is 4096."""
    folder = edited(save_model("mistral", tmp_path / "m"), max_position_embeddings=8192)
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config | written))
    assert read_shape(folder).max_positions == positions


def test_older_llama_configs_with_rope_scaling_are_read(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "m")
    expected = read_shape(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edited(folder, rope_parameters=None, rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert read_shape(folder) == expected and expected.rope_scaling is not None


def test_shards_are_read_as_one_and_an_empty_directory_refused(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        read_shape(folder)
    parts = {file: dict(list(tensors.items())[cut]) for file, cut in (("a", slice(5)), ("b", slice(5, None)))}
    weight_map = {name: f"{file}.safetensors" for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, part in parts.items():
        save_file(part, folder / f"{file}.safetensors")
    assert weights(learner(folder)).keys() == tensors.keys()
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json; found a\.safetensors"):
        read_shape(folder)
    with pytest.raises(ValueError, match=r"to download it: hf download Qwen/Qwen3-0.6B --local-dir"):
        read_shape("Qwen/Qwen3-0.6B")
    with pytest.raises(ValueError, match=r"expected a Hugging Face checkpoint directory$"):
        read_shape("/models/here/not")


def test_a_check_before_the_run_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every host would read all files of a 30B model before anything starts."""
    folder = save_model("qwen3_moe", tmp_path / "m")
    monkeypatch.setattr(WeightFiles, "__getitem__", lambda files, name: pytest.fail(f"{name} is read"))
    HfReader(folder).check(read_shape(folder), is_trained=True)
