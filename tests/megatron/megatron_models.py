"""Tiny Hugging Face models and batches for the tests of the Megatron side; no megatron imports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from marsrl.rollout.types import Finish, Group, Sample
from marsrl.trainer.data.credit import Credited
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack
from marsrl.trainer.data.scatter import MiniBatch

VOCAB = 61  # odd: tensor parallelism pads it


def save_model(kind: str, folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """A random model directory: qwen2 (bias, untied), qwen3 (tied), qwen3_moe (untied), llama (every bias, scaled rotary
    frequencies of which one stays, two are between and five are stretched, tied), mistral (untied, sizes of heads not given)."""
    import transformers  # seconds, which ranks that read batches from here do not spend

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.1,
        "tie_word_embeddings": kind in ("qwen3", "llama"),
    }
    if kind == "qwen2":
        config = transformers.Qwen2Config(**{**shape, **changes})
        model = transformers.Qwen2ForCausalLM(config)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**{**shape, "head_dim": 16, **changes})
        model = transformers.Qwen3ForCausalLM(config)
    elif kind == "llama":
        scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **scaling}
        biases = {"attention_bias": True, "mlp_bias": True}
        config = transformers.LlamaConfig(**{**shape, "head_dim": 16, "rope_parameters": rope, **biases, **changes})
        model = transformers.LlamaForCausalLM(config)
    elif kind == "mistral":
        config = transformers.MistralConfig(**{**shape, "sliding_window": None, **changes})
        model = transformers.MistralForCausalLM(config)
    else:
        moe = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**{**shape, **moe, "norm_topk_prob": True, **changes})
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide a swap
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


def sequences(
    num: int, *, seed: int = 0, num_agents: int = 2, mean: int = 12, vocab: int = VOCAB, multiple: int = 1
) -> list[TrainSequence]:
    """Random samples with an advantage, some tool tokens in them, log-probs of a rollout, every third positive.

    multiple: of which every length is one, so that context parallelism pads nothing (padding enters the router's loss).
    """
    rng = np.random.default_rng(seed)
    out = []
    for i in range(num):
        prompt, n = rng.integers(2, 6), int(rng.integers(mean // 2, mean * 2))
        n += -(int(prompt) + n) % multiple
        is_sampled = rng.random(n) > 0.15
        is_sampled[-1] = True
        out.append(
            TrainSequence(
                uid=f"s{i}",
                prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
                token_ids=rng.integers(0, vocab, n).astype(np.int32),
                is_sampled=is_sampled,
                rollout_logprobs=(-rng.random(n) * 6).astype(np.float32),
                advantage=float(rng.normal()),
                agent=i % num_agents,
                temperature=1.0,
                is_positive=i % 3 == 0,
            )
        )
    return out


def micro_batches(samples: list[TrainSequence], cuts: int, *, align: int = 1) -> list[PackedBatch]:
    return [pack(samples[i::cuts], align=align) for i in range(cuts)]


def averaged(samples: list[TrainSequence], average: Average) -> MiniBatch:
    """All of them as one update, each a group of its own."""
    groups = []
    for s in samples:
        nothing = (s.rollout_logprobs, (), Finish.STOP)
        sample = Sample(s.uid, s.uid, "p", str(s.agent), s.uid, None, s.prompt_ids, s.token_ids, s.is_sampled, *nothing)
        groups.append(Group(s.uid, s.uid, str(s.agent), (sample,)))
    credited = Credited(tuple(groups), tuple(samples), {s.uid: s.num_sampled for s in samples})
    (update,) = mini_batches(credited, 1, average, seed=0, step=1)
    return update


def num_trained(samples: list[TrainSequence]) -> float:
    return float(sum(s.num_sampled for s in samples))
