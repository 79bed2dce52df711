"""Tiny random checkpoints, and transformers as the reference for log-probs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import GivenLearner, logprobs_of, spec_of, vllm_of
from megatron_models import save_model, scoring_model
from safetensors.torch import save_file

from marsrl.kernels import library
from marsrl.rollout.config import LocalOptions
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.tasks.word_tokenizer import WordTokenizer
from marsrl.trainer.learner.other_roundings import Precision, other_roundings
from marsrl.trainer.weights.comparison import TrainerScores, comparison_sequences

VOCAB = 160
WORDS = WordTokenizer(tuple(f"w{i:03d}" for i in range(5, VOCAB)), gaps=" +", apart="\n")  # the word of token 7 is w007
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 64}
_CHANGES: dict[str, dict[str, Any]] = {
    # head size 32 = hidden / heads
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3_moe": _EXPERTS,
    # With FP8 weights, vLLM pads experts, and a padded hidden size gives NaN on a CPU.
    "qwen3_moe_wide": {**_EXPERTS, "hidden_size": 128},
    "mistral": {"sliding_window": 256, "max_shard_size": "100KB"},  # at least as long as the sequences of these tests
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint("qwen3_moe") -> HF directory, written once."""

    @functools.cache
    def make(kind: str) -> Path:
        directory = tmp_path_factory.mktemp(kind)
        changes = {"seed": 7, **_SIZES, **_CHANGES.get(kind, {})}
        save_model(kind.removesuffix("_wide"), directory, **changes)
        WORDS.write(directory)
        # Mistral's directories have several weight files, and the model again in a format that we do not read.
        if kind == "mistral":
            (directory / "params.json").write_text("{}")
            (directory / "consolidated.safetensors").write_bytes(b"no safetensors")
        return directory

    return make


@pytest.fixture(params=["csrc/cpu", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with csrc/cpu, and with the PyTorch code that GPUs use in its place."""
    if request.param == "torch":
        monkeypatch.setattr(library, "why_no_cpu_library", lambda: "left out by the test")
    elif reason := library.why_no_cpu_library():
        pytest.skip(reason)


class Judge:
    """Log-probs by transformers in float32."""

    def __init__(self) -> None:
        self._unchanged = functools.cache(scoring_model)
        # The last tensors, and a model with them.
        self._changed: tuple[dict[str, torch.Tensor] | None, Any] = (
            None,
            None,
        )

    def __call__(
        self, directory: Path, tensors: dict[str, torch.Tensor] | None, sequences: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Return log-probs [N-1] of each sequence. tensors: weights to use instead of the checkpoint's."""
        return [logprobs_of(self.model(directory, tensors), sequence) for sequence in sequences]

    def scores(
        self, directory: Path, tensors: dict[str, torch.Tensor] | None, precision: Precision | None = None
    ) -> TrainerScores:
        """Return a trainer's probe scores under these weights."""
        model, sequences = self.model(directory, tensors), comparison_sequences(VOCAB)
        with other_roundings(model, precision or Precision(torch.float32)):
            rounded = [logprobs_of(model, sequence) for sequence in sequences]
        return TrainerScores([logprobs_of(model, sequence) for sequence in sequences], rounded)

    def learner(self, directory: Path, tensors: dict[str, torch.Tensor]) -> GivenLearner:
        """Return a learner with these weights and the scores of a model with them."""
        return GivenLearner(tensors, lambda: self.scores(directory, tensors))

    def model(self, directory: Path, tensors: dict[str, torch.Tensor] | None) -> Any:
        if tensors is None:
            return self._unchanged(directory)
        if self._changed[0] is not tensors:
            changed = directory.parent / (directory.name + "_changed")
            changed.mkdir(exist_ok=True)
            (changed / "config.json").write_bytes((directory / "config.json").read_bytes())
            save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
            self._changed = tensors, scoring_model(changed)
        return self._changed[1]


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()


_OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "": {"extra": {"max_num_batched_tokens": 64}},  # longer prefills are split
    "engine": {"sampler": "engine"},
    "fp8": {"kv_cache_dtype": "fp8", "extra": {"max_num_batched_tokens": 512}},
    "fp8_weights": {"quantization": "fp8", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def vllm_engine(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Any]]:
    """vllm_engine("qwen3") -> the real vLLM with that checkpoint; "qwen3+NAME" adds _OTHER_OPTIONS[NAME].

    Only one engine runs at a time.
    """
    open_engine: dict[str, Any] = {}

    def start(kind: str) -> Any:
        if kind not in open_engine:
            for engine in open_engine.values():
                engine.close()
                gc.freeze()  # close() unfreezes all imported objects, and the next start's collection would scan them
            open_engine.clear()
            model, _, other = kind.partition("+")
            open_engine[kind] = vllm_of(checkpoint(model), _OTHER_OPTIONS[other])
        return open_engine[kind]

    yield start
    for engine in open_engine.values():
        engine.close()


@pytest.fixture
def directory(kind: str, checkpoint: Callable[[str], Path]) -> Path:
    """Checkpoint directory for the test's `kind`: "qwen3", "local qwen3" or "qwen3+..."."""
    return checkpoint(kind.removeprefix("local ").partition("+")[0])


@pytest.fixture
def engine(kind: str, directory: Path, request: pytest.FixtureRequest) -> Any:
    """Engine of the test's `kind`: vllm_engine's, or our own."""
    if kind.startswith("local "):
        return LocalEngine(spec_of(directory, local=LocalOptions(max_num_seqs=6)))
    return request.getfixturevalue("vllm_engine")(kind)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests that share the real vLLM to the end, sorted by model.

    Thus each engine starts once per module, and no other test creates process groups while it runs.
    """
    order = ["qwen3_moe", "qwen3", "qwen3+engine", "qwen3+fp8", "qwen2", "llama", "mistral"]
    order += ["qwen3+fp8_weights", "qwen3_moe_wide+fp8_weights"]

    def place(item: pytest.Item) -> int:
        kind = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
        return order.index(kind) if item.path.name == "test_engines.py" and kind in order else -1

    items.sort(key=place)  # the sort is stable: other tests stay in order


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # with tiny tensors, more threads only wait for each other
