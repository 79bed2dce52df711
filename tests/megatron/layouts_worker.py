"""Started once by torchrun with two gloo ranks: the same two steps under every layout. See test_layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from megatron_models import num_trained, sequences

from marsrl.kernels import PolicyObjective
from marsrl.trainer.config import MptConfig, OptimizerConfig, PolicyConfig
from marsrl.trainer.learner import Learner
from marsrl.trainer.megatron import parallel
from marsrl.trainer.megatron.hf_files import HfReader
from marsrl.trainer.packing import pack

SAMPLES = 8
_READ = HfReader._read


def reads_of_this_process() -> list[int]:
    """How many numbers each read from a Hugging Face file brings, from now on."""
    read: list[int] = []

    def counted(self: HfReader, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor = _READ(self, name, index)
        read.append(tensor.numel())
        return tensor

    HfReader._read = counted  # type: ignore[method-assign]
    return read


def run(model: str, layout: dict[str, int], checkpoint: Path | None = None) -> dict[str, Any]:
    """Two steps on the ranks of this world: statistics, scores, router margins, weights before and after; a checkpoint."""
    policy = PolicyConfig(
        dtype="float32",
        layout=layout,  # type: ignore[arg-type]
        router_aux_loss=0.05 if "moe" in model else 0.0,
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5),
    )
    mpt = MptConfig(scope="sample", entropy=3.98, probability=0.02)
    read = reads_of_this_process()
    learner = Learner(policy, model, objective=PolicyObjective(), mpt=mpt, num_agents=2, total_steps=4, seed=0)
    loaded = [sum(read), sum(p.numel() for p in learner._model.parameters())]
    samples = sequences(SAMPLES)
    batches = [
        pack(samples[::2], align=2),
        pack(samples[1::2], align=2),
    ]  # the same two, so that the router loss agrees
    ranks_of_data = dist.get_world_size() // (layout.get("tensor", 1) * layout.get("pipeline", 1))
    mine = batches if ranks_of_data == 1 else batches[dist.get_rank() :: ranks_of_data]
    untouched = dict(learner.export())
    stats = []
    for _ in range(2):
        s = learner.step(mine, normaliser=num_trained(samples))
        stats.append(
            [s.loss, s.grad_norm, float(s.gated_samples), *[x for v in s.agent_sums.values() for x in v], s.k3]
        )
    found = learner.score_with_margins(mine)
    sums = [(logprobs.sum(), margins.clamp(max=9).sum(), margins.min()) for logprobs, margins in found]
    total = torch.stack([torch.stack(each) for each in sums]).sum(0)
    total /= 1 if ranks_of_data > 1 else dist.get_world_size()
    dist.all_reduce(total)
    if checkpoint is not None:
        learner.save(checkpoint)
    return {
        "stats": stats,
        "scores": total.tolist(),
        "weights": dict(learner.export()),
        "untouched": untouched,
        "loaded": loaded,
    }


def main() -> None:
    torch.set_num_threads(1)
    out, models, layouts = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    report = {}
    for kind, model in models.items():
        for name, layout in layouts[kind].items():
            is_cut = layout.get("tensor", 1) * layout.get("pipeline", 1) > 1  # else rank 0 has every shard anyway
            found = run(model, layout, out.parent / "checkpoints" / kind / name if is_cut else None)
            parallel.stop(keep_world=True)
            if dist.get_rank() == 0:
                report[f"{kind}/{name}"] = found
    if dist.get_rank() == 0:
        torch.save(report, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # checkpoints fork processes
    main()
