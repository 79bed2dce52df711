"""Tiny Hugging Face models, batches and learners for tests of the Megatron side. Imports no megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.rollout.adapter import AdapterConfig, tensor_shapes, write_adapter
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.rollout.types import Finish, Group, Sample
from marsrl.trainer.config import MptConfig, OptimizerConfig, PolicyConfig
from marsrl.trainer.data.credit import Credited
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack
from marsrl.trainer.data.scatter import MiniBatch, Update
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.step_stats import StepStats

VOCAB = 61  # odd, so tensor parallelism pads it
OPTIMIZER = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip=0.5)
OF_LEARNER = ("old_policy", "router_replay", "reference_dir", "reward_kl_coef", "base", "sleeps")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 8.0}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
    "llama": {
        "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "mistral": {"sliding_window": None},
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_groups() -> Iterator[None]:
    """In folders whose conftest.py imports this fixture, give each test its own process groups."""
    torch.set_num_threads(1)
    yield
    from marsrl.trainer.learner.megatron import parallel

    parallel.stop()


def save_model(kind: str, folder: Path, *, seed: int = 0, max_shard_size: str = "50GB", **changes: object) -> Path:
    """Write the directory of a random model.

    Kinds: qwen2 (bias, untied), qwen3 (tied), qwen3_moe (untied), llama (all biases, tied; RoPE scaling keeps one frequency,
    stretches five fully and two partly), mistral (untied, no head size in its config).
    """
    # Imported late: it takes seconds, which ranks that only read batches save.
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **KINDS[kind], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide a swap
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


def random_adapter(shape: ModelShape, adapter: AdapterConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return normally distributed tensors A and B of each adapted matrix."""
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.1 * torch.randn(size, generator=generator) for n, size in tensor_shapes(shape, adapter).items()}


def save_adapter(model: Path, folder: Path, adapter: AdapterConfig, seed: int = 0) -> Path:
    """Write random_adapter's tensors to a new directory in PEFT's format."""
    shape = read_shape(model)
    folder.mkdir(parents=True)
    write_adapter(folder, shape, adapter, random_adapter(shape, adapter, seed), str(model))
    return folder


def sequences(num: int, *, seed: int = 0, num_agents: int = 2, multiple: int = 1) -> list[TrainSequence]:
    """Return random samples with advantages, some tool tokens, and rollout log-probs.

    Every third sample is positive. multiple: a divisor of every length, so that no rank pads; replayed experts of padding would
    be counted.
    """
    rng = np.random.default_rng(seed)
    out = []
    for i in range(num):
        prompt, n = rng.integers(2, 6), int(rng.integers(6, 24))
        n += -(int(prompt) + n) % multiple
        is_sampled = rng.random(n) > 0.15
        is_sampled[-1] = True
        out.append(
            TrainSequence(
                uid=f"s{i}",
                prompt_ids=rng.integers(0, VOCAB, prompt).astype(np.int32),
                token_ids=rng.integers(0, VOCAB, n).astype(np.int32),
                is_sampled=is_sampled,
                rollout_logprobs=(-rng.random(n) * 6).astype(np.float32),
                advantage=float(rng.normal()),
                agent=i % num_agents,
                temperature=1.0,
                is_positive=i % 3 == 0,
            )
        )
    return out


def with_random_experts(samples: list[TrainSequence]) -> list[TrainSequence]:
    """Return the samples with recorded experts for every token but the last.

    In each of two layers, they are a random two of four.
    """
    rng = np.random.default_rng(3)
    chosen = [rng.random((s.num_tokens - 1, 2, 4)).argsort(-1)[..., :2].astype(np.uint8) for s in samples]
    return [replace(s, routed_experts=experts) for s, experts in zip(samples, chosen, strict=True)]


def micro_batches(samples: list[TrainSequence], cuts: int, *, align: int = 1) -> list[PackedBatch]:
    return [pack(samples[i::cuts], align=align) for i in range(cuts)]


def averaged(samples: list[TrainSequence], average: Average) -> MiniBatch:
    """Return the samples as one update, each in a group of its own."""
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


def learner(
    folder: str | Path,
    *,
    objective: PolicyObjective | Sequence[PolicyObjective] | None = None,
    mpt: MptConfig | None = None,
    **settings: Any,
) -> Learner:
    """Build a learner of two agents. settings: arguments in OF_LEARNER, and fields of its PolicyConfig."""
    arguments = {name: settings.pop(name) for name in OF_LEARNER if name in settings}
    policy = PolicyConfig.model_validate({"dtype": "float32", "optimizer": OPTIMIZER, **settings})
    objectives = [objective or PolicyObjective()] * 2 if not isinstance(objective, Sequence) else objective
    return Learner(
        policy, folder, objectives=objectives, mpt=mpt or MptConfig(scope="off"), total_steps=10, seed=0, **arguments
    )


def on_one_base(
    folder: str | Path, adapters: Mapping[str, Any], optimizers: Mapping[str, Any], **settings: Any
) -> dict[str, Learner]:
    """Build policies with these adapters on one base."""
    learners: dict[str, Learner] = {}
    for name, adapter in adapters.items():
        base = next((each.base for each in learners.values()), None)
        learners[name] = learner(folder, adapter=adapter, base=base, optimizer=optimizers[name], **settings)
    return learners


def step(policy: Learner, batches: Sequence[PackedBatch], normaliser: float | None = None, **options: Any) -> StepStats:
    """Take a step of one update. normaliser: by default the number of trained tokens."""
    tokens = float(sum(len(batch.trained_rows) for batch in batches)) if normaliser is None else normaliser
    return policy.train_step([Update(tuple(batches), tokens)], **options)


def save(policy: Learner, folder: Path) -> None:
    pending = policy.begin_save(folder, copy=False)
    pending.write()
    pending.finish(f"{folder} was not saved")
    dist.barrier()


def weights(policy: Learner) -> dict[str, Tensor]:
    """Return all weights by Hugging Face name, as copies, on rank 0."""
    return dict(policy.held().export())


def gradients(policy: Learner) -> dict[str, Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in policy.model.named_parameters()}  # type: ignore[attr-defined]


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def scoring_model(folder: Path, adapter: Path | None = None) -> Any:
    """Return transformers' float32 model of the directory, with PEFT's adapter if given: the reference for log-probs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter)).eval()


def hf_logprobs(model: Any, sample: TrainSequence) -> tuple[Tensor, Tensor]:
    """Return (log-probs [N], entropy [N]) of one sequence's sampled tokens, computed by transformers."""
    ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.token_ids.tolist()])
    logits = model(ids[None]).logits[0].float() / sample.temperature
    rows = torch.arange(len(sample.prompt_ids) - 1, len(ids) - 1)[torch.from_numpy(sample.is_sampled)]
    logp = logits[rows].log_softmax(-1)
    return logp.gather(1, ids[rows + 1, None])[:, 0], -(logp.exp() * logp).sum(-1)


@dataclass
class Plain:
    """Results of a step in plain PyTorch.

    weights: after the step. losses, norms: losses and gradient norms of its updates. clipped, masked: numbers of tokens. kl: sum
    over tokens.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: int = 0
    masked: int = 0
    kl: float = 0.0


def plain_step(
    folder: Path,
    updates: list[list[TrainSequence]],
    *,
    objectives: Sequence[PolicyObjective] = (PolicyObjective(),) * 2,
    mpt: MptConfig | None = None,
    average: Average | None = None,
    reference: Path | None = None,
) -> Plain:
    """Take the step by its definition, with a transformers model, one sequence at a time.

    objectives: one per agent.
    """
    model, frozen, result = scoring_model(folder), scoring_model(reference or folder), Plain()
    mpt, average = mpt or MptConfig(scope="off"), average or Average()
    with torch.no_grad():
        old = {s.uid: hf_logprobs(model, s)[0] for part in updates for s in part}
        of_reference = {s.uid: hf_logprobs(frozen, s)[0] for part in updates for s in part}
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for part in updates:
        terms: dict[int, list[Tensor]] = {}  # terms of each sample's tokens, by agent
        for sample in part:
            logp, entropy = logp_of_gate, _ = hf_logprobs(model, sample)
            if mpt.temperature == 1:
                logp_of_gate, entropy = hf_logprobs(model, replace(sample, temperature=1.0))
            keep = torch.ones_like(logp)
            if mpt.scope == "sample" and sample.is_positive and float(entropy.detach().mean()) < mpt.entropy:
                keep = (logp_of_gate.detach().exp() < mpt.probability).float()
            objective, ratio = objectives[sample.agent], (logp - old[sample.uid]).exp()
            clamped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            surrogate = torch.minimum(ratio * sample.advantage, clamped * sample.advantage)
            assert sample.rollout_logprobs is not None
            x = logp - of_reference[sample.uid]
            i = (logp - torch.from_numpy(sample.rollout_logprobs[sample.is_sampled])).exp()
            held, slope = i.detach(), x - x.detach()
            kl = {
                "none": 0 * x,
                "k1": held * x.detach() * (1 + slope),  # the score function's gradient
                "k2": held * x**2 / 2,
                "k3": i * ((-x).exp() + x - 1),
            }[objective.kl]
            result.masked += int((keep == 0).sum())
            result.clipped += int((surrogate < ratio * sample.advantage).sum())
            result.kl += float(kl.detach().sum())
            agent = sample.agent if average.denominator == "agent" else 0
            terms.setdefault(agent, []).append(keep * (objective.kl_coef * kl - surrogate))
        mean = {
            "token": lambda each: torch.cat(each).mean(),
            "sequence": lambda each: torch.stack([tokens.mean() for tokens in each]).mean(),
            "sequence_sum_constant": lambda each: torch.stack([t.sum() for t in each]).mean() / average.max_tokens,
        }[average.aggregation]
        loss = torch.stack([mean(each) for each in terms.values()]).sum()
        adam.zero_grad()
        loss.backward()
        result.losses.append(float(loss.detach()))
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.grad_clip)))
        adam.step()
    model.save_pretrained(folder.parent / "after")
    result.weights = load_file(folder.parent / "after" / "model.safetensors")
    return result
