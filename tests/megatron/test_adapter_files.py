"""Policies that start from a PEFT adapter directory use everything in it, or fail with the name of what they cannot use.

PEFT writes most of these directories. Our own writer makes those that a test then damages.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_models as tiny
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marsrl.commands import cli
from marsrl.commands.models.export import export
from marsrl.rollout import adapter as adapters
from marsrl.rollout.adapter import AdapterConfig, check_start
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import EngineSpec
from marsrl.rollout.engines.vllm.engine import VllmEngine
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import ConfigError, read_config
from marsrl.trainer.models.init_model import init_model

ATTENTION = [f"{name}_proj" for name in "qkvo"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
START = AdapterConfig(rank=4, alpha=8)
K = "base_model.model.model.layers.0.self_attn.k_proj.lora_"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases of q, k and v, and fewer key heads than query heads."""
    return tiny.save_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


def made_by_peft(model: Path, folder: Path, **settings: Any) -> Any:
    """Write an adapter's directory with random A and B; return its PEFT model. Settings like "KasaConfig" name PEFT's classes."""
    import peft  # imported late: it takes 3 s, which collecting these tests should not cost
    from peft.tuners.lora import config

    torch.manual_seed(1)
    given = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **settings}
    given = {key: getattr(config, value)() if str(value).endswith("Config") else value for key, value in given.items()}
    judge = peft.get_peft_model(tiny.scoring_model(model), peft.LoraConfig(**given)).eval()
    with torch.no_grad():
        for weight in judge.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape))
    judge.save_pretrained(folder)
    return judge


def changed(folder: Path, **settings: Any) -> Path:
    """Set these keys of adapter_config.json, and return the directory."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica", "eva", "converted PiSSA"])
def test_initialisations_that_keep_the_base_are_started(init: bool | str, model: Path, tmp_path: Path) -> None:
    """PEFT and the new learner compute equal log-probs. A converted PiSSA adapter has twice the rank."""
    import peft

    start = AdapterConfig(rank=4, alpha=8, start=str(tmp_path / "a"))
    if init == "converted PiSSA":
        judge = peft.get_peft_model(
            tiny.scoring_model(model),
            peft.LoraConfig(r=2, lora_alpha=4, target_modules=LINEAR, task_type="CAUSAL_LM", init_lora_weights="pissa"),
        ).eval()
        settings = judge.peft_config["default"]
        settings.init_lora_weights = True  # PEFT's guide saves the initial adapter in this way for the conversion
        judge.save_pretrained(tmp_path / "first")
        settings.init_lora_weights = "pissa"
        with torch.no_grad():
            for weight in judge.parameters():
                weight.add_(0.1 * torch.randn(weight.shape) * weight.requires_grad)
        judge.save_pretrained(tmp_path / "a", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    else:
        judge = made_by_peft(model, tmp_path / "a", init_lora_weights=init)
    policy = tiny.learner(model, adapter=start.model_dump())
    (sample,) = tiny.sequences(1, seed=5)
    (batch,) = tiny.micro_batches([sample], 1)
    with torch.no_grad():
        found = policy.score([batch])[0][batch.mask]
        torch.testing.assert_close(found, tiny.hf_logprobs(judge, sample)[0], atol=2e-5, rtol=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "init olora": ({"init_lora_weights": "olora"}, 'init_lora_weights "olora"; .*path_initial_model_for_weight_conv'),
    "init pissa": ({"init_lora_weights": "pissa"}, 'init_lora_weights "pissa"; expected plain pairs A, B'),
    "init pissa, fast": ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights "pissa_niter_4"'),
    "init lora_ga": ({"init_lora_weights": "lora_ga"}, 'init_lora_weights "lora_ga"'),
    "rsLoRA": ({"use_rslora": True}, "use_rslora true; .*: set use_rslora to false and lora_alpha to 16 in that file"),
    "DoRA": ({"use_dora": True}, "use_dora true; .*merge it into its model .* or train plain LoRA"),
    "bias of B": ({"lora_bias": True}, "lora_bias true"),
    "biases": ({"bias": "all"}, 'bias "all";'),
    "biases beside": ({"bias": "lora_only"}, 'bias "lora_only"'),
    "a head": ({"modules_to_save": ["lm_head"]}, r'modules_to_save \["lm_head"\]'),
    "norms": ({"modules_to_save": ["norm"]}, r'modules_to_save \["norm"\]'),
    "tokens": ({"trainable_token_indices": [3, 4]}, r"trainable_token_indices \[3, 4\]"),
    "aLoRA": ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens \[5, 6\]"),
    "QALoRA": ({"use_qalora": True}, "use_qalora true"),
    "VeLoRA": ({"velora_config": "VeloraConfig"}, "velora_config {"),
    "Monte Carlo": ({"monteclora_config": "MontecloraConfig"}, "monteclora_config {"),
    "KaSA": ({"kasa_config": "KasaConfig"}, "kasa_config {"),
    "a task": ({"task_type": "FEATURE_EXTRACTION"}, 'task_type "FEATURE_EXTRACTION"'),
    "a classifier": ({"task_type": "SEQ_CLS"}, r'modules_to_save \["classifier", "score"\], .*task_type "SEQ_CLS"'),
    "embeddings": (
        {"target_modules": [*LINEAR, "embed_tokens"]},
        r"it has base_model.model.model.embed_tokens.base_layer.weight, .*lora_embedding_A, ",
    ),
    "a pair of the head": ({"target_modules": [*LINEAR, "lm_head"]}, "it has .*, base_model.model.lm_head.lora_A.weight"),
    "attention alone": (
        {"target_modules": ATTENTION},
        r"lacks .*layers\.\*\.mlp.gate_proj.lora_A.weight \(2\).*; set adapter.targets=\[attention\]$",
    ),
    "some of attention": (
        {"target_modules": ["q_proj", "v_proj", *LINEAR[4:]]},
        r"lacks base_model.model.model.layers\.\*\.self_attn.k_proj.lora_A.weight \(2\), .* every target matrix",
    ),
    "excluded": ({"exclude_modules": ["k_proj"]}, r"lacks .*k_proj.lora_A.weight \(2\), .*k_proj.lora_B.weight \(2\) of"),
    "a layer": ({"layers_to_transform": [1]}, "lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, "),
    "a rank": ({"r": 8, "lora_alpha": 16}, r"q_proj.lora_A.weight has shape \[8, 32\]; .* \[4, 32\]: set adapter.rank=8"),
    "ranks": ({"rank_pattern": {"v_proj": 2}}, r"v_proj.lora_A.weight has shape \[2, 32\]"),
    "a factor": ({"lora_alpha": 4}, "alpha / rank of .*q_proj is 1; expected .* = 2: set adapter.alpha=4"),
    "factors": (
        {"alpha_pattern": {"layers.1.*v_proj": 4}},
        "of model.layers.1.self_attn.v_proj is 1; expected .*: all matrices must have the same factor, but .* has 2, 1:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_peft_features_beyond_lora_pairs_are_refused_by_name(kind: str, model: Path, tmp_path: Path) -> None:
    settings, reason = REFUSED[kind]
    made_by_peft(model, tmp_path / "a", **settings)
    with pytest.raises(ValueError, match=reason):
        check_start(tmp_path / "a", read_shape(model), START)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers.*_proj"},
        {"task_type": None},
        {"lora_dropout": 0.1, "layers_to_transform": [0, 1], "ensure_weight_tying": True, "qalora_group_size": 8},
        {"r": 8, "rank_pattern": {"self_attn.*": 4, "mlp.*": 4}, "alpha_pattern": {".*": 8}},
    ],
    ids=["all-linear", "a pattern", "no task", "of training", "ranks that end alike"],
)
def test_settings_that_change_no_value_are_started(settings: dict[str, Any], model: Path, tmp_path: Path) -> None:
    made_by_peft(model, tmp_path / "a", **settings)
    check_start(tmp_path / "a", read_shape(model), START)


def test_every_setting_of_peft_is_known_or_refused(model: Path, tmp_path: Path) -> None:
    """Fails if a new version of PEFT has a setting with a non-empty default that we neither use nor refuse."""
    import peft

    known = {*adapters._PLAIN, *adapters._BESIDE_TENSORS}
    given = {field.name: getattr(peft.LoraConfig(), field.name) for field in dataclasses.fields(peft.LoraConfig)}
    assert not {name: value for name, value in given.items() if value and name not in known}
    made_by_peft(model, tmp_path / "a")
    for empty in (None, False, [], {}):
        check_start(changed(tmp_path / "a", of_a_later_peft=empty), read_shape(model), START)
    with pytest.raises(ValueError, match=r'has of_a_later_peft \{"x": 1\}'):
        check_start(changed(tmp_path / "a", of_a_later_peft={"x": 1}), read_shape(model), START)


def moved(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def also(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: tensor}


FILES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "A without B": (lambda tensors: {n: t for n, t in tensors.items() if n != f"{K}B.weight"}, f"lacks {K}B.weight of"),
    "a second name": (also(f"{K}A.weight".removeprefix("base_model.model."), torch.ones(4, 32)), "it has model.layers.0"),
    "no prefix": (moved("base_model.model.", ""), r"it has model.layers\.\*\.mlp.down_proj.lora_A.weight \(2\)"),
    "a part of the model": (moved("model.model.model.", "model.model."), r"it has base_model.model.layers\.\*\.mlp"),
    "PEFT's own names": (moved("lora_A.", "lora_A.default."), r"it has .*down_proj.lora_A.default.weight \(2\)"),
    "a third layer": (also(f"{K}A.weight".replace("0", "2"), torch.ones(4, 32)), "it has .*layers.2.self_attn.k_proj"),
    "other heads": (also(f"{K}B.weight", torch.ones(32, 4)), r"k_proj.lora_B.weight has shape \[32, 4\]; .* \[16, 4\]: "),
    "another width": (also(f"{K}A.weight", torch.ones(4, 64)), r"k_proj.lora_A.weight has shape \[4, 64\]; .* to another model"),
    "a vector": (also(f"{K}A.weight", torch.ones(0)), r"k_proj.lora_A.weight has shape \[0\]; .* to another model"),
    "no number": (also(f"{K}A.weight", torch.full((4, 32), float("nan"))), "k_proj.lora_A.weight has NaN or infinite values"),
    "infinite": (also(f"{K}B.weight", torch.full((16, 4), float("inf"))), "k_proj.lora_B.weight has NaN or infinite values"),
    "integers": (also(f"{K}B.weight", torch.ones(16, 4, dtype=torch.int8)), "k_proj.lora_B.weight is I8; expected BF16, "),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_tensor_that_does_not_fit_is_refused_by_name(kind: str, model: Path, tmp_path: Path) -> None:
    change, reason = FILES[kind]
    folder = tiny.save_adapter(model, tmp_path / "a", START)
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ValueError, match=reason):
        check_start(folder, read_shape(model), START)


def test_a_directory_that_is_no_whole_lora_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    shape, folder = read_shape(model), tiny.save_adapter(model, tmp_path / "a", START)
    for settings, reason in (
        ({"peft_type": "LOHA"}, 'peft_type "LOHA"; expected plain pairs A, B'),
        ({"r": None}, "does not describe a LoRA adapter; expected peft_type"),
        ({"rank_pattern": {"q_proj": 0}}, "values of rank_pattern and alpha_pattern"),
        ({"rank_pattern": {"q_proj": 2}}, "gives model.layers.0.self_attn.q_proj rank 2, but its tensors have rank 4"),
        ({"layer_replication": [[0, 2], [1, 2]]}, r"layer_replication \[\[0, 2\], \[1, 2\]\]"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora {"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config {"),
        ({"megatron_config": {"tensor_model_parallel_size": 2}}, "megatron_config {"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out true"),
        ({"init_lora_weights": "corda"}, 'init_lora_weights "corda"'),
        ({"init_lora_weights": "loftq"}, 'init_lora_weights "loftq"'),
    ):
        shutil.copytree(folder, tmp_path / "b")
        with pytest.raises(ValueError, match=reason):
            check_start(changed(tmp_path / "b", **settings), shape, START)
        shutil.rmtree(tmp_path / "b")
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="adapter_config.json cannot be read"):
        check_start(folder, shape, START)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="has adapter_model.bin but no .*convert it with PEFT"):
        check_start(folder, shape, START)


def words_of(folder: Path) -> list[str]:
    """Return settings of a run on a new random model, folder/model."""
    model = init_model("tiny", "bytes", folder / "model")
    (folder / "d.jsonl").write_text("".join(f'{{"question": "1+{n}?", "answer": "{1 + n}"}}\n' for n in range(20)))
    (folder / "demos.jsonl").write_text('{"agent": "solver", "prompt": "1", "completion": "2"}\n')
    words = [f"policies.main.model={model}", f"run.dir={folder}", "task=math", f"data.train={folder}/d.jsonl"]
    return [*words, f"data.demonstrations={folder}/demos.jsonl"]


def test_every_entry_point_refuses_an_adapter_it_would_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dry run, evaluation, sft, learner and both engines refuse an adapter that has more than they use."""
    words, model = words_of(tmp_path), tmp_path / "model"
    made_by_peft(model, tmp_path / "a", target_modules=[*ATTENTION, "lm_head"])
    start = {"rank": 4, "alpha": 8.0, "targets": ["attention"], "start": str(tmp_path / "a")}
    words.append(f"policies.main.adapter={json.dumps(start)}")
    named = r"it has .*lm_head.lora_A.weight, .* outside adapter.targets=\[attention\]"
    for trains in (True, False):
        with pytest.raises(ConfigError, match=rf"policies.main.adapter.start is .*{named}"):
            preflight(read_config(None, words)[0], world_size=1, trains=trains)
    frozen = ["policies.main.frozen=true", "policies.other={shape: tiny}", "agents.verifier1.policy=other"]
    with pytest.raises(ConfigError, match="adapter is set, but policies.main.frozen is true; adapters are trained"):
        read_config(None, [*words, *frozen, "credit.train_agents=[verifier1]"])
    assert cli.main(["sft", *words]) == 2
    assert "it has base_model.model.lm_head.base_layer.weight" in capsys.readouterr().err
    with pytest.raises(ValueError, match=named):
        tiny.learner(model, adapter=start)
    settings = {"model_dir": str(model), "dtype": "float32", "max_model_len": 64, "device": "cpu"}
    for kind, engine in (("local", LocalEngine), ("vllm", VllmEngine)):
        with pytest.raises(ValueError, match=named):
            engine(EngineSpec(kind, adapters={"main": AdapterConfig.model_validate(start)}, **settings))


def test_an_export_of_fused_experts_leaves_nothing_out(tmp_path: Path) -> None:
    """PEFT's all-linear also adapts the router; by default it gives gate and up twice the rank of down."""
    model = tiny.save_model("qwen3_moe", tmp_path / "model")
    made_by_peft(model, tmp_path / "all", target_modules="all-linear")
    with pytest.raises(ValueError, match=r"mlp.gate.lora_A.weight \(2\)"):
        export(tmp_path / "all", tmp_path / "out")
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ATTENTION}
    made_by_peft(model, tmp_path / "factors", **experts, alpha_pattern={"down_proj": 4})
    with pytest.raises(
        ValueError, match="model.layers.0.mlp.experts.down_proj has alpha / rank = 1, but lora_alpha / r is 2"
    ):
        export(tmp_path / "factors", tmp_path / "out")
    made_by_peft(model, tmp_path / "pissa", **experts)
    with pytest.raises(ValueError, match='init_lora_weights "pissa"'):
        export(changed(tmp_path / "pissa", init_lora_weights="pissa"), tmp_path / "out")
    made_by_peft(model, tmp_path / "right", **experts)
    export(tmp_path / "right", tmp_path / "out")
    check_start(
        tmp_path / "out",
        read_shape(model),
        AdapterConfig(rank=4, expert_rank=4, alpha=8, targets=("attention", "experts")),
    )


def test_a_plain_adapter_is_exported_as_it_is(model: Path, tmp_path: Path) -> None:
    made_by_peft(model, tmp_path / "a")
    export(tmp_path / "a", tmp_path / "out")
    given, out = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("a", "out"))
    assert tiny.largest_difference(given, out) == 0
    check_start(tmp_path / "out", read_shape(model), START)


def test_a_model_directory_with_an_adapter_in_it_is_refused(tmp_path: Path) -> None:
    """transformers would load such a directory as the adapter on its base."""
    model = tiny.save_model("qwen2", tmp_path / "model")
    made_by_peft(model, tmp_path / "a")
    for folder in (tmp_path / "a", model):
        shutil.copy(tmp_path / "a/adapter_config.json", model)
        with pytest.raises(
            ValueError, match=f"model: {folder} contains an adapter .*: set `model` to the adapter's base"
        ):
            read_shape(folder)


def test_a_head_beside_tied_embeddings_must_be_the_embedding(tmp_path: Path) -> None:
    """transformers decodes with the file's head, but the trainer would train the embedding. References are checked too."""
    words = words_of(tmp_path)
    tied, file = tmp_path / "tied", tmp_path / "tied/model.safetensors"
    shutil.copytree(tmp_path / "model", tied)
    of_model = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**of_model, "tie_word_embeddings": True}))
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    overrides = [f"policies.main.model={tied}"], ["loss.kl=k2", f"policies.main.reference={tied}"]
    configs = [read_config(None, [*words, *override])[0] for override in overrides]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file)
    for config in configs:
        preflight(config, world_size=1)
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (other, embedding[:-1].clone()):
        save_file({**tensors, "lm_head.weight": head}, file)
        for config in configs:
            with pytest.raises(
                ValueError, match="tie_word_embeddings true, but lm_head.weight in its files differs from model"
            ):
                preflight(config, world_size=1)


def test_a_start_trained_on_another_base_gets_a_warning(tmp_path: Path) -> None:
    words = words_of(tmp_path)
    model, copy = tmp_path / "model", tmp_path / "copy"
    shutil.copytree(model, copy)
    other = init_model("tiny", "bytes", tmp_path / "other", seed=1)
    adapter = AdapterConfig(rank=4, targets=("attention",))
    folder = tiny.save_adapter(model, tmp_path / "a", adapter)
    start = f"policies.main.adapter={{rank: 4, targets: [attention], start: {folder}}}"

    def warnings(*more: str) -> list[str]:
        return [
            each
            for each in preflight(read_config(None, [*words, start, *more])[0], 1).warnings
            if "check that these are the same weights" in each
        ]

    assert not warnings() and not warnings(f"policies.main.model={copy}")
    (warning,) = warnings(f"policies.main.model={other}")
    assert warning.startswith(f"policies.main.adapter.start was trained on {model}, but policies.main.model is {other}")
    changed(folder, base_model_name_or_path="Hub/Model")
    assert not warnings() and len(warnings(f"policies.main.model={other}")) == 1
