"""Bytes that the real learner allocates in one step, under one layout; also a job of two gloo ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "megatron"))

from live_bytes import CudaBytes, LiveBytes
from megatron_models import learner, save_model
from megatron_models import sequences as random_sequences

from marsrl.commands.plan.memory import RouterReplay, Training, most_loaded_rank, rank_memory
from marsrl.kernels import PolicyObjective
from marsrl.kernels.head import chunked_head, gemms, tiles
from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.routed_experts import not_recorded
from marsrl.trainer.config import LayoutConfig, PolicyConfig
from marsrl.trainer.data.packing import TrainSequence, pack
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.megatron import parallel, shim
from marsrl.trainer.learner.megatron.layout import resolve

VOCAB, SEQUENCES, LENGTH = 212, 4, 128


@contextmanager
def device_head() -> Iterator[None]:
    """Make the host's head use memory like a device's, which the planner counts.

    A device multiplies bfloat16. The host converts pieces of the weight to float32, which are kept small here. A device frees the
    buffer of logits, which the host keeps between calls.
    """
    with ExitStack() as changes:
        changes.enter_context(patch.object(gemms, "HOST_TILE_ROWS", 32))
        for where in (chunked_head, tiles):
            changes.enter_context(patch.object(where, "host_buffer", torch.empty))
        yield


@contextmanager
def inputs_on_host() -> Iterator[None]:
    """Hide layers' inputs from the count, as if they were in another memory than the device's."""
    shim.install()
    from marsrl.trainer.learner.megatron import model

    def offloading(shape: Any, layout: Any, policy: PolicyConfig) -> Any:
        return build(shape, layout, policy.model_copy(update={"recompute": "full_offload"}))

    def to_host(tensor: torch.Tensor) -> Any:
        return tensor.detach().view(torch.uint8).numpy().copy(), tensor.dtype

    def to_device(kept: Any, device: torch.device) -> torch.Tensor:
        return torch.tensor(kept[0], device=device).view(kept[1])

    build = model.build_model
    with patch.multiple(model, build_model=offloading, to_host=to_host, to_device=to_device):
        yield


@contextmanager
def rows_of_experts() -> Iterator[list[int]]:
    """Yield a list of how many rows this rank's experts get in each call.

    An untrained router distributes rows unevenly.
    """
    shim.install()
    from marsrl.trainer.learner.megatron.experts import GroupedExperts

    seen: list[int] = []
    forward = GroupedExperts.forward

    def counted(experts: Any, rows: torch.Tensor, *others: Any) -> Any:
        seen.append(len(rows))
        return forward(experts, rows, *others)

    with patch.object(GroupedExperts, "forward", counted):
        yield seen


def model(kind: str, folder: Path, **changes: object) -> Path:
    """Write a model whose sizes all differ, so that no term of a formula can replace another."""
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "max_position_embeddings": 512,
    }
    if kind == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3}
    return save_model(kind, folder, **{**sizes, **changes})


def sequences(num: int) -> list[TrainSequence]:
    """Return samples of equal length: attention pads shorter ones on CPUs, but not on GPUs."""
    rng, num_sampled = np.random.default_rng(0), LENGTH - 4
    alike: dict[str, Any] = {
        "is_sampled": np.ones(num_sampled, bool),
        "rollout_logprobs": np.zeros(num_sampled, np.float32),
    }
    ids = [rng.integers(0, VOCAB, LENGTH).astype(np.int32) for _ in range(num)]
    samples = zip(random_sequences(num, num_agents=1), ids, strict=True)
    return [replace(sample, prompt_ids=each[:4], token_ids=each[4:], **alike) for sample, each in samples]


def compare(
    folder: Path,
    layout: dict[str, int],
    recompute: str = "none",
    dtype: str = "bfloat16",
    num_sequences: int = SEQUENCES,
    reference: Path | None = None,
    is_distributed: bool = True,
    router_replay: RouterReplay = "none",
    adapter: dict[str, Any] | None = None,
    overlap_dispatch: bool = False,
) -> dict[str, Any]:
    """Return {static, peak, working: [measured, planned]} in bytes, of the rank that needs most memory.

    reference: directory of a KL term's reference. adapter: settings of an adapter that is trained in place of the model. With
    router_replay=rollout, every token has a record, but no recorded experts, so the routing does not change.
    """
    on_cpu = "full" if recompute == "full_offload" else recompute  # a CPU refuses full_offload
    shape, resolved = read_shape(folder), resolve(LayoutConfig(**layout))
    elsewhere = inputs_on_host() if recompute == "full_offload" else nullcontext()
    counted = CudaBytes() if torch.cuda.is_available() else LiveBytes()
    with device_head(), elsewhere, rows_of_experts() as rows, counted as memory:
        policy = learner(
            folder,
            objective=[PolicyObjective(kl="k3", kl_coef=0.1) if reference else PolicyObjective()],
            dtype=dtype,
            recompute=on_cpu,
            layout=layout,
            optimizer={"distributed": is_distributed},
            adapter=adapter,
            overlap_dispatch=overlap_dispatch,
            reference_dir=reference,
            router_replay=router_replay,
        )
        policy.allocate()
        static = memory.live
        memory.forget_peak()
        world = dist.get_world_size()
        given = sequences(num_sequences)
        if router_replay == "rollout":
            places = (given[0].num_tokens - 1, shape.num_layers, shape.experts_per_token)
            given = [replace(each, routed_experts=np.full(places, not_recorded(np.uint8), np.uint8)) for each in given]
        batches = [pack(given, align=policy.align) for _ in range(2)]
        policy.train_step([Update(tuple(batches), 100.0)])
        peak = memory.peak
    setup = Training(
        shape=shape,
        layout=resolved,
        world_size=world,
        dtype=dtype,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        tokens=batches[0].num_tokens,
        num_micro_batches=len(batches),
        head_rows=batches[0].num_tokens,
        distributes_optimizer=is_distributed,
        reference=read_shape(reference) if reference else None,
        router_replay=router_replay,
        adapters=(AdapterConfig.model_validate(adapter),) if adapter else (),
        overlaps_dispatch=overlap_dispatch,
    )
    if rows:
        setup = replace(setup, expert_imbalance=max(rows) / setup.rows)
    stage = dist.get_rank() * resolved.pipeline // world
    planned = rank_memory(setup, stage)
    parallel.stop(keep_world=True)
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, (peak, static, planned.peak, planned.static, planned.stage))
    peak, static, planned_peak, planned_static, stage = max(ranks)
    return {
        "static": [static, planned_static],
        "peak": [peak, planned_peak],
        "working": [peak - static, planned_peak - planned_static],
        "stage": [stage, most_loaded_rank(setup).stage],
    }


def job(models: dict[str, str], cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return compare() of each case; kind and reference name models."""
    paths = {name: Path(path) for name, path in models.items()}
    results = {}
    for name, case in cases.items():
        kind, reference = case.pop("kind", "qwen3_moe"), paths.get(case.pop("reference", ""))
        results[name] = compare(paths[kind], **case, reference=reference)
    return results
