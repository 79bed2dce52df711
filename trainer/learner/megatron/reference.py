"""The frozen copy of a policy that a KL term is measured against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module

from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.config import PolicyConfig
from marsrl.trainer.learner.megatron.convert import Converter
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.learner.megatron.model import bare_model, transformer_config


def frozen_model(model_dir: str | Path, layout: Layout, policy: PolicyConfig) -> Any:
    """The weights of model_dir on the policy's layout and dtype, for scoring: no gradients, buffers or optimizer.

    It takes the bytes of this rank's weights, nothing more; its ranks are the policy's.
    """
    shape = read_shape(model_dir)
    config = transformer_config(shape, layout, policy.model_copy(update={"recompute": "none", "router_aux_loss": 0.0}))
    model = bare_model(shape, layout, config)
    wrapped: torch.nn.Module = Float16Module(config, model) if config.bf16 else model
    Converter(model, shape).load(model_dir)
    return wrapped.requires_grad_(False).eval()
