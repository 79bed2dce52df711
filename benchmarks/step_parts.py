"""What one of our training steps spends its time in, beside its GEMMs: by part of the model and of the optimizer.

    python benchmarks/step_parts.py [--model bench] [--steps 3] [--json FILE]

By torch's profiler, on one thread of a CPU, or on one GPU by the kernels that each operation launched. A part is the module in
whose forward an operation stands; one of the backward belongs to the operation of the forward that it differentiates. The same
table for GPUs, by FLOPs and bytes, is the update that `marsrl plan` prints. `ratio:` is the share of the GEMMs and of attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from step_problem import PROBLEMS, batch
from step_variants import OURS, build
from torch.profiler import ProfilerActivity, profile, record_function

from marsrl.trainer.machine import commit, device_name
from marsrl.trainer.models.init_model import init_model

PREFIX = "part: "
GEMMS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"}
# the class of a module -> the part that its own operations belong to, those of modules inside it excepted
MODULES = {
    "LanguageModelEmbedding": "embedding",
    "RMSNorm": "norms",
    "SelfAttention": "rotary positions, heads apart and together",
    "PackedAttention": "attention",
    "ColumnParallelLinear": "linear layers",
    "RowParallelLinear": "linear layers",
    "TopKRouter": "router",
    "MoELayer": "tokens to their experts and back",
    "GroupedExperts": "experts",
    "Swiglu": "activation",
    "TransformerLayer": "residuals",
    "FusedHead": "head and loss",
}
FUNCTIONS = {"swiglu": "activation", "AccumulateGrad": "gradients into their buffers"}  # by the name of an event
METHODS = {"zero_grad": "gradients set to 0", "grad_norm": "gradient norm", "apply": "optimizer"}  # of our Optimizer
REST = "packing, statistics and the rest"


@dataclass(frozen=True)
class Part:
    """Milliseconds of a step: in GEMMs, in other operations."""

    name: str
    gemms: float
    others: float


def parts_of(events: Any, *, on_device: bool, steps: int) -> list[Part]:
    """The profiler's events by part, the largest first."""
    part_of_forward: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and (found := _scope(event)) is not None:
            part_of_forward.setdefault(event.sequence_nr, found)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        micros = event.self_device_time_total if on_device else event.self_cpu_time_total
        name = _scope(event) or part_of_forward.get(_differentiated(event), REST)
        spent[name][event.name not in GEMMS] += micros / 1e3 / steps
    rows = [Part(name, *times) for name, times in spent.items()]
    return sorted(rows, key=lambda row: -(row.gemms + row.others))


def _scope(event: Any) -> str | None:
    """The part that an event stands in by itself; None: it is of the backward, or outside of all."""
    above = event
    while above is not None:
        if above.name.startswith(PREFIX):
            return str(above.name.removeprefix(PREFIX))
        for name, part in FUNCTIONS.items():
            if name in above.name:
                return part
        above = above.cpu_parent
    return None


def _differentiated(event: Any) -> int:
    """The number of the forward's operation whose gradient this event forms; -1: it is none."""
    above = event
    while above is not None:
        if above.name.startswith("autograd::engine::evaluate_function"):
            return int(above.sequence_nr)
        above = above.cpu_parent
    return -1


@contextmanager
def scopes(model: Any, optimizer: Any) -> Iterator[None]:
    """Marks the forward of the modules that have a part, and the methods of the optimizer."""
    handles, open_scopes = [], []
    for module in model.modules():
        if (part := MODULES.get(type(module).__name__)) is not None:

            def enter(*_: Any, part: str = part) -> None:
                open_scopes.append(record_function(PREFIX + part))
                open_scopes[-1].__enter__()

            def leave(*_: Any) -> None:
                open_scopes.pop().__exit__(None, None, None)

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    for name, part in METHODS.items():
        setattr(optimizer, name, _marked(getattr(optimizer, name), part))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name in METHODS:
            delattr(optimizer, name)


def _marked(method: Callable[..., Any], part: str) -> Callable[..., Any]:
    def run(*words: Any, **named: Any) -> Any:
        with record_function(PREFIX + part):
            return method(*words, **named)

    return run


def measure(model: str, steps: int) -> list[Part]:
    problem = PROBLEMS[model]
    sequences, num_tokens = batch(problem)
    on_device = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        init_model(problem.shape, "bytes", Path(folder) / "model", seed=0, dtype=problem.dtype)
        variant = build(OURS, f"{folder}/model", problem, sequences, num_tokens, layout={}, experts="eager", mpt=None)
        learner: Any = variant.learner
        variant.step()
        variant.step()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        with scopes(learner._model, learner._optimizer), profile(activities=activities) as seen:
            for _ in range(steps):
                variant.step()
        rows = parts_of(seen.events(), on_device=on_device, steps=steps)
        variant.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PROBLEMS), default="bench")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(words.model, words.steps)
    total = sum(row.gemms + row.others for row in rows)
    print(f"{'':44}{'GEMMs, ms':>12}{'others, ms':>12}{'of the step':>12}")
    for row in rows:
        print(f"{row.name:44}{row.gemms:12.1f}{row.others:12.1f}{(row.gemms + row.others) / total:12.1%}")
    gemms = sum(row.gemms for row in rows) + sum(row.others for row in rows if row.name == "attention")
    print(f"{'all':44}{sum(row.gemms for row in rows):12.1f}{sum(row.others for row in rows):12.1f}")
    print(f"ratio: {gemms / total:.2f}")
    if words.json:
        record = {
            "device": device_name(),
            "commit": commit(),
            "torch": torch.__version__,
            "model": words.model,
            "parts": [dataclasses.asdict(row) for row in rows],
        }
        words.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
