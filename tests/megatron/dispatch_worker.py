"""A job of two gloo ranks: the same steps with every dispatcher, under layouts that split the experts. See test_dispatch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import fake_deep_ep
import megatron_models as tiny
import torch
import torch.distributed as dist

from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel, shim

shim.install()
from marsrl.trainer.learner.megatron.attention import PackedAttention  # noqa: E402
from marsrl.trainer.learner.megatron.experts import DeepEPExchange  # noqa: E402

DISPATCHERS = ("alltoall", "deepep", "hybridep")
# A smaller eps would magnify rounding errors of small gradients.
OPTIMIZER = tiny.OPTIMIZER.model_copy(update={"eps": 1e-2})


def batches(samples: list[TrainSequence], layout: dict[str, int], num_shared: int) -> list[PackedBatch]:
    """Return this rank's two micro-batches.

    With two data ranks, they have different lengths, and the last one of rank 1 is empty. num_shared: number of leading tokens
    that the second sample of the first micro-batch shares with its first sample; they are computed once.
    """
    if layout.get("tensor", 1) > 1:
        return [pack(samples[i::2], align=2) for i in range(2)]
    local = samples[dist.get_rank() :: 2]
    return [pack(local[:2], shared=[0, num_shared]), pack(local[2:] if dist.get_rank() == 0 else [])]


def steps(model: str, layout: dict[str, int], settings: dict[str, Any], dispatcher: str) -> dict[str, Any]:
    """Return statistics and weights of two steps, and the methods of fake_deep_ep that were called."""
    settings = dict(settings)
    num_shared = settings.pop("num_shared", 0)
    arguments = {"layout": layout, "dispatcher": dispatcher, "optimizer": OPTIMIZER, **settings}
    policy: Learner = tiny.learner(model, **arguments)
    replays = settings.get("router_replay") == "rollout"
    samples = tiny.sequences(9, seed=1, multiple=2 if replays else 1)
    if replays:
        samples = tiny.with_random_experts(samples)
    local = batches(samples, layout, num_shared)
    fake_deep_ep.CALLS.clear()
    stats = [tiny.step(policy, local, normaliser=tiny.num_trained(samples)) for _ in range(2)]
    calls = sorted(set(fake_deep_ep.CALLS))
    manager = getattr(policy.model.decoder.layers[0].mlp.token_dispatcher, "_comm_manager", None)
    assert (dispatcher == "deepep") == isinstance(manager, DeepEPExchange)
    results = {
        "stats": [[each.loss, each.grad_norm] for each in stats],
        "weights": tiny.weights(policy),
        "calls": calls,
    }
    parallel.stop(keep_world=True)
    return results


def overlapped(model: str, layout: dict[str, int], settings: dict[str, Any], dispatcher: str) -> list[dict[str, Any]]:
    """Return the results of `steps` without and with overlap_dispatch, and the order in which layers ran."""
    results = []
    for overlaps in (False, True):
        order: list[str] = []
        with mock.patch.object(PackedAttention, "forward", noted(PackedAttention.forward, order)):
            results.append(
                steps(model, layout, {**settings, "dtype": "bfloat16", "overlap_dispatch": overlaps}, dispatcher)
            )
        results[-1]["order"] = order
    return results


def noted(forward: Any, order: list[str]) -> Any:
    """Wrap `forward` of a layer's attention to list its forward and backward passes in `order`.

    Forward passes without a gradient are left out.
    """

    def run(self: Any, *inputs: Any, **options: Any) -> Any:
        output = forward(self, *inputs, **options)
        if output.requires_grad:
            order.append(f"forward {self.layer_number}")
            output.register_hook(lambda gradient: order.append(f"backward {self.layer_number}"))
        return output

    return run


def job(out: str, model: str, cases: dict[str, Any], overlaps: dict[str, Any]) -> None:
    """Save {case/dispatcher: results} of rank 0 to `out`."""
    fake_deep_ep.install()
    results: dict[str, Any] = {
        f"{name}/{dispatcher}": job(model, layout, settings, dispatcher)
        for job, jobs in ((steps, cases), (overlapped, overlaps))
        for name, (layout, settings) in jobs.items()
        for dispatcher in DISPATCHERS
    }
    if dist.get_rank() == 0:
        torch.save(results, out)
