from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marsrl.trainer.models.init_model import init_model


def test_weights_have_the_recipes_scale_and_the_seed_decides_them(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> dict[str, torch.Tensor]:
        return load_file(str(init_model("cpu_default", "arithmetic", tmp_path / name, seed) / "model.safetensors"))

    one, same, other = weights("a", 1), weights("b", 1), weights("c", 2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])
    assert one["lm_head.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    for name in ("self_attn.o_proj", "mlp.experts.3.down_proj"):
        assert one[f"model.layers.1.{name}.weight"].std().item() == pytest.approx(0.05 / 6**0.5, rel=0.05)


def test_nothing_is_overwritten_and_wrong_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty directory"):
        init_model("tiny", "bytes", tmp_path / "full")
    with pytest.raises(ValueError, match="tiny, cpu_default"):
        init_model("huge", "bytes", tmp_path / "x")
    with pytest.raises(ValueError, match="bytes, arithmetic"):
        init_model("tiny", "letters", tmp_path / "y")
