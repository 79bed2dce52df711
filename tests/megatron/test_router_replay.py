"""Replaying the trainer's own experts changes no bit; with other experts, gradients equal those of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megatron_models as tiny
import numpy as np
import pytest
import torch
from torch import Tensor

from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.checks.policy_files import check_trainable
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.packing import TrainSequence, pack
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.learner import Learner

LAYERS = 2


class Judge:
    """A transformers model; `experts` [tokens, layers, top_k] forces the experts of the first tokens."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny.scoring_model(folder)
        self.experts: np.ndarray | None = None
        self.seen: list[Tensor] = []  # experts chosen in each layer, in order
        for index, layer in enumerate(self.model.model.layers):
            layer.mlp.gate.register_forward_hook(partial(self.routed, index))

    def routed(self, index: int, router: Any, _: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, scores, chosen = outputs
        self.seen.append(chosen)
        if self.experts is not None:
            chosen = chosen.clone()
            chosen[: len(self.experts)] = torch.from_numpy(self.experts[:, index]).long()
            scores = logits.softmax(-1).gather(1, chosen)
            scores = scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores
        return logits, scores, chosen

    def gradient(self, samples: list[TrainSequence]) -> tuple[float, dict[str, Tensor]]:
        """Return (loss, {name: gradient}) of an on-policy step, with the samples' recorded experts forced."""
        total = torch.zeros(())
        for s in samples:
            self.experts = s.routed_experts
            logp = tiny.hf_logprobs(self.model, s)[0]
            total = total - ((logp - logp.detach()).exp() * s.advantage).sum()
        self.experts = None
        loss = total / tiny.num_trained(samples)
        self.model.zero_grad()
        loss.backward()
        return float(loss.detach()), {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def compared(policy: Learner, theirs: dict[str, Tensor]) -> float:
    """Return the largest difference between both models' gradients of routers, experts, norms, embedding and head."""
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    of_layer = {
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.down": "mlp.experts.down_proj",
        "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    }
    for i in range(LAYERS):
        names |= {f"decoder.layers.{i}.{name}": f"model.layers.{i}.{hf}" for name, hf in of_layer.items()}
    ours, off = tiny.gradients(policy), []
    for name, hf in names.items():
        expected = theirs[hf]
        rows = expected.shape[0]  # embedding and head are padded
        off.append((ours[name][:rows].reshape(expected.shape) - expected).abs().max())
    return float(max(off))


@pytest.mark.parametrize("normalises", [True, False])
def test_forced_experts_give_the_gradient_of_transformers(normalises: bool, tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m", norm_topk_prob=normalises)
    samples = tiny.with_random_experts(tiny.sequences(5))
    unclipped = tiny.OPTIMIZER.model_copy(update={"grad_clip": 1e9})
    policy = tiny.learner(folder, router_replay="rollout", optimizer=unclipped)
    stats = tiny.step(policy, tiny.micro_batches(samples, 2))
    judge = Judge(folder)
    loss, gradient = judge.gradient(samples)
    assert stats.loss == pytest.approx(loss, abs=5e-7)
    assert compared(policy, gradient) < 1e-6
    assert float(gradient["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3  # the trainer's router has a gradient
    assert stats.replay is not None
    differ = choices = 0
    layers = [torch.stack(judge.seen[i : i + LAYERS], 1) for i in range(0, len(judge.seen), LAYERS)]
    for s, chosen in zip(samples, layers, strict=True):
        assert s.routed_experts is not None
        forced = torch.from_numpy(s.routed_experts).long().sort(-1).values
        is_other = (chosen[:-1].sort(-1).values != forced).any(-1)
        differ, choices = differ + int(is_other.any(-1).sum()), choices + int(is_other.sum())
    assert (stats.replay.tokens_differ, stats.replay.choices_differ) == (differ, choices)
    assert stats.replay.tokens == sum(s.num_tokens - 1 for s in samples) > differ > 0
    without = tiny.learner(folder, router_replay="none", optimizer=unclipped)
    tiny.step(without, tiny.micro_batches(samples, 2))
    assert compared(without, gradient) > 1e-3  # the test would detect experts that are not forced


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replaying_the_trainers_own_experts_changes_no_bit(recompute: str, tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    samples = tiny.sequences(6)
    runs = []
    for router_replay in ("none", "recompute"):
        policy = tiny.learner(folder, router_replay=router_replay, recompute=recompute)
        stats = [tiny.step(policy, tiny.micro_batches(samples, 2)) for _ in range(2)]
        runs.append((stats, tiny.weights(policy)))
    (plain, expected), (replayed, same) = runs
    assert tiny.largest_difference(expected, same) == 0.0
    assert [(s.loss, s.grad_norm) for s in plain] == [(s.loss, s.grad_norm) for s in replayed]
    assert [s.replay for s in plain] == [None, None]
    for each in replayed:
        assert each.replay is not None
        assert each.replay.tokens == sum(s.num_tokens for s in samples)
        assert each.replay.choices == LAYERS * each.replay.tokens and each.replay.choices_differ == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_later_updates_force_the_steps_initial_experts(recompute: str, tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    samples = tiny.sequences(8)
    parts = [samples[:4], samples[4:]]
    judge = Judge(folder)  # the experts that the initial weights choose
    recorded = []
    with torch.no_grad():
        for s in samples:
            judge.seen.clear()
            tiny.hf_logprobs(judge.model, s)
            recorded.append(torch.stack(judge.seen, 1)[:-1].numpy().astype(np.uint8))
    forced = [replace(s, routed_experts=e) for s, e in zip(samples, recorded, strict=True)]
    stats, after = [], []
    for router_replay, batches in (("recompute", parts), ("rollout", [forced[:4], forced[4:]]), ("none", parts)):
        policy = tiny.learner(folder, router_replay=router_replay, recompute=recompute)
        stats.append(policy.train_step([Update(tuple(tiny.micro_batches(p, 2)), tiny.num_trained(p)) for p in batches]))
        after.append(tiny.weights(policy))
    assert stats[0].replay is not None and stats[1].replay is not None
    assert stats[0].replay.tokens_differ == stats[1].replay.tokens_differ > 0  # the first update changed some choices
    # `recompute` and `rollout` force the same experts, except for each sample's last token, which a rollout does not record and
    # which predicts nothing.
    assert tiny.largest_difference(after[0], after[1]) < 1e-6
    assert tiny.largest_difference(after[0], after[2]) > 1e-3


def test_a_sample_without_a_record_is_refused_and_padding_is_not(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    samples = tiny.sequences(3)
    policy = tiny.learner(folder, router_replay="rollout")
    with pytest.raises(ValueError, match="needs the experts chosen in decoding"):
        tiny.step(policy, tiny.micro_batches(samples, 1), normaliser=9.0)
    stats = tiny.step(policy, [pack(tiny.with_random_experts(samples)), pack([])], normaliser=9.0)
    assert stats.replay is not None and stats.replay.tokens == sum(s.num_tokens - 1 for s in samples)
    other = [replace(s, routed_experts=s.routed_experts[:, :1]) for s in tiny.with_random_experts(samples)]  # type: ignore[index]
    with pytest.raises(ValueError, match="1 layers x 2 experts per token, but the policy has 2 x 2"):
        tiny.step(policy, [pack(other)], normaliser=9.0)
    dense = read_shape(tiny.save_model("qwen3", tmp_path / "d"))
    config, _ = read_config(None, ["trainer.router_replay=rollout"])
    with pytest.raises(ValueError, match="router_replay=rollout, but policies.main.model is a Qwen3ForCausalLM"):
        check_trainable(config, "main", dense, world_size=1)
