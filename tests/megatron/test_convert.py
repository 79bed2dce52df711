"""A Hugging Face directory that cannot be used is refused by name; that its tensors come back: test_export.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_models import learner, save_model, weights
from safetensors.torch import load_file, save_file

from marsrl.rollout.model_shape import read_shape


def edited(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "LlamaForCausalLM is not supported; supported: Qwen2ForCausalLM, Qwen3F",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type is 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', expected an integer"),
        ({"hidden_size": 64}, r"embed_tokens.weight has shape \[61, 32\], config.json gives \[61, 64\]"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight"),
    ],
)
def test_what_config_json_may_not_say(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    folder = edited(save_model("qwen3", tmp_path / "m"), **changes)
    with pytest.raises(ValueError, match=says):
        learner(folder)


def test_a_half_there_directory_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        read_shape(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json; found nothing"):
        read_shape(tmp_path / "empty")
    folder = save_model("qwen3", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        read_shape(folder)
    names = list(tensors)
    save_file({n: tensors[n] for n in names[:5]}, folder / "a.safetensors")
    weight_map = {n: "a.safetensors" if i < 5 else "b.safetensors" for i, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"half there: .* missing: b\.safetensors"):
        read_shape(folder)
    save_file({n: tensors[n] for n in names[5:]}, folder / "b.safetensors")
    assert weights(learner(folder)).keys() == set(names)  # several files are read as one
