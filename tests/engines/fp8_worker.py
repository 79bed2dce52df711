"""vLLM's FP8 layers of an H100, on a machine without one.

Usage: `python fp8_worker.py FOLDER RANK WORLD CASE...`; prints JSON.

This process makes PyTorch and vLLM believe that it has H100s. That cannot be undone, so it runs nothing else. vLLM's code builds
layers, loads a checkpoint and rounds it, with all tensors in this host's memory; no kernel uses the results. Then our worker
receives another checkpoint. The case NAME uses two checkpoints in FOLDER, NAME and NAME_changed. In the case NAME+spread, each
GPU also has whole experts (expert parallelism). The first case must have experts; otherwise vLLM would create no process group
for them.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_cases import WholeModel, tensors_of
from preset_worker import pretend_cuda, pretend_vllm_on_cuda
from torch import nn

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.build import environment_of
from marsrl.rollout.engines.protocol import EngineSpec
from marsrl.rollout.engines.vllm import worker_fp8
from marsrl.rollout.engines.vllm.arguments import engine_arguments
from marsrl.rollout.engines.vllm.worker import WorkerExtension
from marsrl.rollout.weights.direct import GroupSender, Ranks, SharedSender

BUCKET = 40_000  # bytes: a few experts, and less than a matrix of attention


def loaded(config: Any) -> nn.Module:
    """Return the model with its checkpoint, as vLLM's worker loads it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    with set_current_vllm_config(config):
        model = get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
    assert isinstance(model, nn.Module)
    return model


def config_of(folder: Path, world: int, *, spreads: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {
        "quantization": "fp8",
        "tensor_parallel": world,
        "expert_parallel": spreads,
        "extra": {"enforce_eager": True},
    }
    spec = EngineSpec("vllm", str(folder), "bfloat16", 256, device="cuda", vllm=VllmOptions.model_validate(options))
    os.environ.update(environment_of(spec))
    made = EngineArgs(**engine_arguments(spec)).create_engine_config()
    made.load_config.device = "cpu"
    return made


def start_ranks(config: Any, folder: Path, rank: int, world: int) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"file://{folder}/rendezvous{world}", rank, backend="gloo")
        initialize_model_parallel(world, 1)


def held(model: nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.data.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in model.named_parameters()
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def publish(worker: Any, folder: Path, kind: type[GroupSender | SharedSender]) -> tuple[dict[str, int], dict[str, int]]:
    """Publish the folder's weights; return the checksums that the sender expects and the worker reports."""
    sender = kind(Ranks(0, 1, lambda data: data or b"", lambda data: [data]), torch.bfloat16, bucket_bytes=BUCKET)
    weights = WholeModel(tensors_of(folder), ())
    sender.agree(weights, [worker.marsrl_shard()])

    def receive() -> None:
        try:
            assert worker.marsrl_receive(sender.plans * (worker.rank + 1)) == ""
        except BaseException:
            sender.give_up("the worker has failed")
            raise

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(receive)
        expected = sender.send(weights)
        answer.result()
    sender.close()
    return expected[0], worker.marsrl_received_checksums()


def flips(worker: Any, model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """For each FP8 parameter, flip a bit; yield its name and the tensors whose checksums change."""
    right = worker.marsrl_received_checksums()
    for name, tensor in model.named_parameters():
        if tensor.dtype == torch.float8_e4m3fn or name.endswith("_scale_inv"):
            byte = tensor.data.view(-1).view(torch.uint8)[-1:]
            byte ^= 1
            yield name, differing(right, worker.marsrl_received_checksums())
            byte ^= 1


def reasons(model: nn.Module) -> dict[str, str]:
    """Return why a sync without files refuses layers whose kernels pack, transpose or shuffle weights."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    linear: Any = next(each for each in model.modules() if hasattr(each, "weight_scale_inv"))
    experts: Any = next((each for each in model.modules() if hasattr(each, "w13_weight")), None)
    reasons_found, kernel = {}, linear.quant_method.fp8_linear

    def transpose(layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)

    def reverse_scales(layer: Any) -> None:
        layer.weight_scale_inv.data.copy_(layer.weight_scale_inv.flip(0))

    for other in (transpose, reverse_scales):
        linear.quant_method.fp8_linear = copy.copy(kernel)
        linear.quant_method.fp8_linear.process_weights_after_loading = other
        reasons_found[other.__name__] = worker_fp8.why_not_written(model)
    linear.quant_method.fp8_linear = kernel
    if experts is not None:
        plain, experts.quant_method.fp8_backend = experts.quant_method.fp8_backend, Fp8MoeBackend.FLASHINFER_CUTLASS
        reasons_found["swap"] = worker_fp8.why_not_written(model)
        experts.quant_method.fp8_backend = plain
    packed, plain = linear.weight.data.view(torch.int32), linear.weight.data
    linear.weight = nn.Parameter(packed, requires_grad=False)
    reasons_found["packed"] = worker_fp8.why_not_written(model)
    linear.weight = nn.Parameter(plain, requires_grad=False)
    return reasons_found


def findings(folder: Path, case: str, rank: int, world: int) -> dict[str, Any]:
    name, _, spread = case.partition("+")
    config = config_of(folder / name, world, spreads=bool(spread))
    if not torch.distributed.is_initialized():
        start_ranks(config, folder, rank, world)
    models = [loaded(config_of(folder / each, world, spreads=bool(spread))) for each in (name, f"{name}_changed")]
    initial, changed = map(held, models)
    worker = WorkerExtension()
    worker.model_runner, worker.vllm_config, worker.rank = SimpleNamespace(get_model=lambda: models[0]), config, rank
    places = {each: tensor.data_ptr() for each, tensor in models[0].named_parameters()}
    results: dict[str, Any] = {
        "kernels": sorted(
            {type(each.quant_method).__name__ for each in models[0].modules() if hasattr(each, "quant_method")}
        ),
        "why": worker_fp8.why_not_written(models[0]),
        "changed": differing(initial, changed),
    }
    for version, (kind, right) in enumerate(((GroupSender, changed), (SharedSender, initial), (GroupSender, changed))):
        expected, reported = publish(worker, folder / (name if right is initial else f"{name}_changed"), kind)
        results[f"{version} {kind.kind}"] = [differing(right, held(models[0])), differing(expected, reported)]
    results["moved"] = differing(places, {each: tensor.data_ptr() for each, tensor in models[0].named_parameters()})
    results["flips"] = dict(flips(worker, models[0]))
    results["reasons"] = reasons(models[0])
    return results


def main(folder: Path, rank: int, world: int, cases: list[str]) -> None:
    pretend_cuda()
    pretend_vllm_on_cuda()
    torch.ops._C.silu_and_mul = None  # the CPU build lacks this op; it is never called
    accelerator: Any = torch.accelerator
    accelerator.empty_cache, accelerator.max_memory_allocated = lambda: None, lambda: 0
    from vllm.model_executor.models.registry import _LazyRegisteredModel
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    # The two halves of an engine load independently, without NCCL.
    alone = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    NonNvmlCudaPlatform.get_device_communicator_cls = classmethod(lambda cls: alone)  # type: ignore[method-assign, assignment]

    # Keep vLLM from caching facts about a model class in ~/.cache.
    _LazyRegisteredModel._save_modelinfo_to_cache = lambda self, *info: None  # type: ignore[method-assign]
    print(json.dumps({case: findings(folder, case, rank, world) for case in cases}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
