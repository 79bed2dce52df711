"""Engine options that depend on the model: draft models and FP8 caches. test_vllm_v2_runner.py runs drafts in vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_model import save_published
from pydantic import ValidationError
from safetensors.torch import save_file

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.draft import DraftSize, read_draft
from marsrl.rollout.engines.vllm.arguments import who_draws
from marsrl.trainer.checks.models import KNOWN
from marsrl.trainer.checks.policy_files import checked_policy
from marsrl.trainer.checks.refusals import ignored_settings
from marsrl.trainer.config.read import ConfigError, read_config

QWEN3_8B = KNOWN["Qwen3-8B"]
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "vocab_size": 151_936, "draft_vocab_size": 32_000,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def written(folder: Path, config: Any, weights: bool = True) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        save_file({"fc.weight": torch.zeros(100, 10)}, folder / "model.safetensors")
    return str(folder)


def test_a_draft_for_the_model_is_read(tmp_path: Path) -> None:
    size = read_draft(written(tmp_path / "plain", CONFIG), QWEN3_8B)
    assert size == DraftSize((tmp_path / "plain" / "model.safetensors").stat().st_size, 2 * 8 * 128)
    assert size.num_bytes >= 4000
    body = {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "draft_vocab_size")}
    nested = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": 32_000, "transformer_layer_config": body}
    assert read_draft(written(tmp_path / "nested", nested), QWEN3_8B) == size
    wide = CONFIG | {"hidden_size": 2048, "target_hidden_size": 4096, "head_dim": None}  # 64 per head
    assert read_draft(written(tmp_path / "wide", wide), QWEN3_8B).kv_numbers == 2 * 8 * 64


@pytest.mark.parametrize(
    ("config", "weights", "says"),
    [
        (
            CONFIG | {"architectures": ["Qwen3ForCausalLM"]},
            True,
            "architecture Qwen3ForCausalLM; expected an EAGLE-3 draft",
        ),
        (
            CONFIG | {"vocab_size": 128_256},
            True,
            "vocabulary of 128256 .* has 151936 and 4096; set a draft for this model in policies",
        ),
        (CONFIG | {"hidden_size": 2048}, True, "hidden size of 2048, but the policy's model has 151936 and 4096"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            True,
            r"not the config of an EAGLE-3 draft \(KeyError\('vocab_size",
        ),
        ("[]", True, "not the config of an EAGLE-3 draft"),
        (CONFIG, False, r"has no weights; expected \*.safetensors or \*.bin"),
    ],
)
def test_other_folders_are_refused_with_the_reason(config: Any, weights: bool, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^rollout.vllm.draft_model: .*{says}"):
        read_draft(written(tmp_path / "draft", config, weights), QWEN3_8B)
    with pytest.raises(ValueError, match="has no config.json; expected the folder of an EAGLE-3 draft"):
        read_draft(str(tmp_path), QWEN3_8B)


def test_a_draft_model_needs_a_number_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="draft_model is set, but rollout.vllm.draft_tokens is 0"):
        VllmOptions(draft_model="d")
    options = VllmOptions(draft_model="d", draft_tokens=3)
    assert "after drafts of 3 by draft_model, on its Model Runner V2" in who_draws(options, "cuda")
    file = tmp_path / "run.yaml"
    file.write_text("preset: qwen3_8b\nrollout: {vllm: {draft_tokens: 3, draft_model: draft}}")
    # As other paths: relative to the file.
    assert read_config(file)[0].rollout.vllm.draft_model == str(tmp_path / "draft")


@pytest.mark.parametrize(("model", "warned"), [("Qwen2.5-7B", True), ("Qwen3-8B", False)])
def test_a_warning_names_models_whose_keys_may_not_fit_fp8(model: str, warned: bool, tmp_path: Path) -> None:
    save_published(KNOWN[model], tmp_path / model)
    words = [f"policies.main.model={tmp_path / model}", "policies.main.layout={pipeline: 1}"]
    for cache, expected in ("fp8", warned), ("auto", False):
        config, _ = read_config("qwen3_8b", [*words, f"rollout.vllm.kv_cache_dtype={cache}"])
        _, warnings = checked_policy(config, "main", 1, trains=True)
        assert any("keys too large for FP8" in each for each in warnings) == expected


def test_the_preflight_names_the_policy_of_a_wrong_draft(tmp_path: Path) -> None:
    """Policies inherit rollout.vllm, and with it a draft that fits one of them."""
    model, draft = tmp_path / "model", written(tmp_path / "draft", CONFIG)
    save_published(replace(QWEN3_8B, hidden_size=2048), model)
    words = [f"policies.main.model={model}", "rollout.vllm.draft_tokens=3", f"rollout.vllm.draft_model={draft}"]
    config, _ = read_config("qwen3_8b", words)
    with pytest.raises(
        ConfigError, match=r"^policies.main: rollout.vllm.draft_model: .* set a draft for this model in policies"
    ):
        checked_policy(config, "main", 3, trains=True)
    ignored, _ = read_config("qwen3_8b", [*words, "rollout.engine=local", "policies.main.layout.pipeline=1"])
    checked_policy(ignored, "main", 1, trains=True)
    assert any(
        "ignores rollout.vllm.draft_model, rollout.vllm.draft_tokens" in each for each in ignored_settings(ignored)
    )
