"""Plain training loop with which ours is compared: a Hugging Face model, padded micro-batches, full logits, autograd, AdamW.

A careful researcher would write this loop first. It computes the same update as ours: the token-level policy gradient at ratio 1
(one update per step), divided by the number of sampled tokens in the whole batch, with the gradient norm clipped to 1. With one
adapter per agent, PEFT trains them in turn on the same base, because only one can be active in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.data.packing import TrainSequence


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """Options of the reference loop.

    micro_batch: number of rows, which are padded to the longest. is_sorted: sort rows by length first, and drop sequences with
    advantage 0 (two cheap optimisations). mpt_entropy, mpt_probability: thresholds of DMMPT with sample scope; None = off.
    """

    micro_batch: int = 8
    is_sorted: bool = False
    mpt_entropy: float | None = None
    mpt_probability: float = 0.99
    dtype: str = "float32"
    adapters: tuple[str, ...] = ()  # PEFT directory of each agent; (): the model's weights are trained


def _load(model_dir: str, options: ReferenceOptions) -> Any:
    # grouped_mm is the fastest implementation of experts in transformers, also on CPUs. Dense models reject the setting.
    experts = {"experts_implementation": "grouped_mm"} if read_shape(model_dir).num_experts else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, options.dtype), attn_implementation="sdpa", **experts
    )
    if not options.adapters:
        return model
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, options.adapters[0], adapter_name="0", is_trainable=True)
    for agent, folder in enumerate(options.adapters[1:], start=1):
        model.load_adapter(folder, adapter_name=str(agent), is_trainable=True)
    for name, weight in model.named_parameters():
        if ".experts." in name and ".lora_B." in name:
            # PEFT adapts gate and up as one matrix; each has half of the rank, so the zeros in B must stay zero.
            weight.requires_grad_().register_hook(partial(torch.mul, weight.detach() != 0))
    return model


class ReferenceLoop:
    """Policy with one optimizer, or with an adapter and an optimizer for each agent; `step` trains on the whole batch once."""

    def __init__(self, model_dir: str, options: ReferenceOptions, lr: float = 1e-5) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = _load(model_dir, options).to(self.device)
        self.model.train()
        self.optimizers = []
        for agent in range(len(options.adapters) or 1):
            self._turn_to(agent)
            weights = [weight for weight in self.model.parameters() if weight.requires_grad]
            self.optimizers.append(torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))

    def _turn_to(self, agent: int) -> None:
        if self.options.adapters:
            self.model.set_adapter(str(agent))

    def step(self, sequences: Sequence[TrainSequence]) -> float:
        """Train one step; return the gradient norm before clipping, over all adapters together."""
        norms = []
        for agent, optimizer in enumerate(self.optimizers):
            self._turn_to(agent)
            agent_sequences = [s for s in sequences if s.agent == agent] if self.options.adapters else sequences
            norms.append(self._step(agent_sequences, optimizer))
        return math.hypot(*norms)

    def _step(self, sequences: Sequence[TrainSequence], optimizer: torch.optim.Optimizer) -> float:
        num_tokens = sum(s.num_sampled for s in sequences)
        chosen = [s for s in sequences if s.advantage != 0] if self.options.is_sorted else list(sequences)
        if self.options.is_sorted:
            chosen.sort(key=lambda s: s.num_tokens)
        for start in range(0, len(chosen), self.options.micro_batch):
            loss = self._loss(chosen[start : start + self.options.micro_batch]) / num_tokens
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _loss(self, rows: Sequence[TrainSequence]) -> Tensor:
        longest = max(s.num_tokens for s in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        attends = torch.zeros(len(rows), longest, dtype=torch.int64)
        trained = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
        advantage = torch.tensor([s.advantage for s in rows], dtype=torch.float32)
        for row, s in enumerate(rows):
            ids[row, : s.num_tokens] = torch.cat([torch.from_numpy(s.prompt_ids), torch.from_numpy(s.token_ids)])
            attends[row, : s.num_tokens] = 1
            trained[row, len(s.prompt_ids) - 1 : s.num_tokens - 1] = True
        ids, attends, trained, advantage = (tensor.to(self.device) for tensor in (ids, attends, trained, advantage))
        logits = self.model(input_ids=ids, attention_mask=attends, use_cache=False).logits[:, :-1]
        every = F.log_softmax(logits.float(), dim=-1)
        logprobs = every.gather(-1, ids[:, 1:, None])[..., 0]
        keep = trained.clone()
        if self.options.mpt_entropy is not None:
            with torch.no_grad():
                entropy = -(every.exp() * every).sum(-1)
                mean = (entropy * trained).sum(1) / trained.sum(1).clamp(min=1)
                positive = torch.tensor([s.is_positive for s in rows], device=self.device)
                gate = positive & (mean < self.options.mpt_entropy)
                keep &= ~(gate[:, None] & (logprobs.exp() >= self.options.mpt_probability))
        return -(logprobs * advantage[:, None] * keep).sum()
