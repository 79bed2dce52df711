"""Tiny random checkpoints made with transformers, which is also the judge of log-probs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import GivenLearner

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.protocol import EngineSpec
from marsrl.rollout.imports import imports_for_good
from marsrl.rollout.tasks.word_tokenizer import WordTokenizer
from marsrl.trainer.learner.other_roundings import Precision, other_roundings
from marsrl.trainer.weights.comparison import TrainerScores, comparison_sequences

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


WORDS = WordTokenizer(tuple(f"w{i:03d}" for i in range(5, 160)), gaps=" +", apart="\n")  # the word of token 7 is w007
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    # head size 32 = hidden / heads
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": False},
    "qwen3_tied": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 32, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    | _EXPERTS,
    # in FP8 vLLM pads experts, and on a CPU a padded hidden size gives NaN
    "qwen3_moe_wide": {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False, "mlp_only_layers": []}
    | _EXPERTS,
    "llama": {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3},
    "mistral": {"head_dim": 32, "sliding_window": 256},  # as long as these tests' sequences can be
}


def _save(kind: str, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(kind.removesuffix("_tied").removesuffix("_wide"), **SHAPE | _CHANGES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases start at 0 and norms at 1: what is never different would never be tested
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, max_shard_size="100KB" if kind == "mistral" else "50GB")
    WORDS.write(directory)
    if kind == "mistral":  # its directories have several files, and the model in another form, which is not read
        (directory / "params.json").write_text("{}")
        (directory / "consolidated.safetensors").write_bytes(b"no safetensors")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint("qwen3_moe") -> HF directory, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            _save(kind, made[kind])
        return made[kind]

    return make


class Judge:
    """Log-probs as transformers computes them, float32."""

    def __init__(self) -> None:
        self._models: dict[Path, Any] = {}
        self._changed: tuple[dict[str, torch.Tensor], Any] | None = None  # the last tensors, and a model of them

    def __call__(
        self,
        directory: Path,
        tensors: dict[str, torch.Tensor] | None,
        sequences: list[np.ndarray],
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Log-probs [N-1] of each sequence under the checkpoint, or under other tensors of its shape."""
        model = self.model(directory, tensors)
        return [self._logprobs(model, sequence, temperature).numpy() for sequence in sequences]

    def scores(
        self, directory: Path, tensors: dict[str, torch.Tensor] | None, precision: Precision | None = None
    ) -> TrainerScores:
        """A trainer's scores of the probe, with these weights."""
        model, sequences = self.model(directory, tensors), comparison_sequences(SHAPE["vocab_size"])
        with other_roundings(model, precision or Precision(torch.float32)):
            rounded = [self._logprobs(model, sequence, 1.0).numpy() for sequence in sequences]
        return TrainerScores([self._logprobs(model, sequence, 1.0).numpy() for sequence in sequences], rounded)

    def learner(self, directory: Path, tensors: dict[str, torch.Tensor]) -> GivenLearner:
        """One that has come to these weights."""
        return GivenLearner(tensors, lambda: self.scores(directory, tensors))

    @torch.no_grad()
    def _logprobs(self, model: Any, sequence: np.ndarray, temperature: float) -> torch.Tensor:
        ids = torch.from_numpy(sequence.astype(np.int64))[None]
        logprobs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0]

    def model(self, directory: Path, tensors: dict[str, torch.Tensor] | None) -> Any:
        from transformers import AutoModelForCausalLM

        if tensors is not None:
            if self._changed is not None and self._changed[0] is tensors:
                return self._changed[1]
            from safetensors.torch import save_file

            changed = directory.parent / (directory.name + "_changed")
            changed.mkdir(exist_ok=True)
            (changed / "config.json").write_bytes((directory / "config.json").read_bytes())
            save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
            self._changed = tensors, AutoModelForCausalLM.from_pretrained(changed, dtype=torch.float32).eval()
            return self._changed[1]
        if directory not in self._models:
            self._models[directory] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return self._models[directory]


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()


_OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "": {"extra": {"max_num_batched_tokens": 64}},  # longer prefills are cut
    "engine": {"sampler": "engine"},
    "fp8": {"kv_cache_dtype": "fp8", "extra": {"max_num_batched_tokens": 512}},
    "fp8_weights": {"quantization": "fp8", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def vllm_engine(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Any]]:
    """vllm_engine("qwen3") -> real vLLM on that checkpoint, one at a time; "qwen3+...": with _OTHER_OPTIONS."""
    pytest.importorskip("vllm")
    from marsrl.rollout.engines.vllm.arguments import vllm_environment
    from marsrl.rollout.engines.vllm.engine import VllmEngine

    os.environ.update(vllm_environment(threads=1))
    with imports_for_good():
        import vllm.entrypoints.llm  # noqa: F401
    open_engine: dict[str, Any] = {}

    def start(kind: str) -> Any:
        if kind not in open_engine:
            for engine in open_engine.values():
                engine.close()
                gc.freeze()  # vLLM has undone that of all imports, and looks for garbage as it starts
            open_engine.clear()
            model, _, other = kind.partition("+")
            options = VllmOptions.model_validate({"max_num_seqs": 32, "kv_cache_mib": 32, **_OTHER_OPTIONS[other]})
            spec = EngineSpec("vllm", str(checkpoint(model)), options.dtype or "float32", 256, vllm=options)
            open_engine[kind] = VllmEngine(spec)
        return open_engine[kind]

    yield start
    for engine in open_engine.values():
        engine.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share the real vLLM come last, by model, so that each is started once in its module, and no other test makes
    process groups meanwhile."""
    order = ["qwen3_moe", "qwen3", "qwen3+engine", "qwen3+fp8", "qwen3_tied", "qwen2", "llama", "mistral"]

    def place(item: pytest.Item) -> int:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.name == "test_vllm_engine.py":
            return order.index(params.get("kind", order[0]))
        if item.path.name == "test_submit_and_abort.py" and params.get("engine") == "vllm":
            return order.index("qwen3")
        return -1

    items.sort(key=place)  # stable


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
