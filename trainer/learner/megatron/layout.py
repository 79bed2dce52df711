"""Parallel layout of a policy: its sizes, whether they fit a model and a number of ranks, and the nearest that fits.

Preflight, the learner and `marsrl plan` all use these rules. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log2

from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.config import LayoutConfig, PolicyConfig


@dataclass(frozen=True)
class Layout:
    """Sizes with defaults filled in; the product of tensor, pipeline and context divides the number of ranks.

    Layout(tensor=2, expert=4, expert_tensor=1, pipeline=1, context=1)      # on 8 GPUs: data-parallel size 4
    """

    tensor: int
    expert: int
    expert_tensor: int
    pipeline: int
    context: int

    @property
    def words(self) -> str:
        """Sizes above 1, as text: `tensor 2, expert 8`."""
        sizes = {"tensor": self.tensor, "expert": self.expert, "pipeline": self.pipeline, "context": self.context}
        if self.expert_tensor != (self.tensor if self.expert == 1 else 1):
            sizes["expert_tensor"] = self.expert_tensor
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data parallel only"

    def data(self, world_size: int) -> int:
        """Return the number of ranks that hold the same non-expert shard, with context-parallel ranks counted once."""
        return world_size // (self.tensor * self.pipeline * self.context)

    def expert_data(self, world_size: int) -> int:
        """Return the number of ranks that hold the same shard of the same experts."""
        return world_size // (self.expert * self.expert_tensor * self.pipeline)


def resolve(config: LayoutConfig) -> Layout:
    """Fill in the default of expert_tensor: `tensor` if expert is 1, else 1."""
    return Layout(config.tensor, config.expert, config.tensor_of_experts, config.pipeline, config.context)


def check(layout: Layout, shape: ModelShape, world_size: int) -> None:
    """Refuse a layout that does not fit the model or the number of ranks, or that would silently train wrongly.

    Raises ValueError with the keys of policies.<name>.layout, both numbers and the nearest layout that fits.
    """
    why = why_not(layout, shape, world_size)
    if why is not None:
        near = nearest(layout, shape, world_size).words
        raise ValueError(f"{why}; on {world_size} rank(s) this would fit: {near}")


def why_not(layout: Layout, shape: ModelShape, world_size: int) -> str | None:
    """Return why the layout does not fit, with numbers; None if it fits."""
    tp, ep, etp, pp, cp = layout.tensor, layout.expert, layout.expert_tensor, layout.pipeline, layout.context
    if ep > 1 and not shape.num_experts:
        return f"layout.expert is {ep}, but {shape.architecture} has no experts; set 1"
    divisions = [
        ("layout.tensor", tp, "attention heads", shape.num_heads),
        ("layout.tensor", tp, "key/value heads", shape.num_kv_heads),
        ("layout.pipeline", pp, "layers", shape.num_layers),
    ]
    if shape.num_experts:
        divisions += [
            ("layout.expert", ep, "experts", shape.num_experts),
            ("layout.expert_tensor", etp, "units of an expert", shape.ffn_size),
        ]
    else:
        divisions.append(("layout.tensor", tp, "units of the MLP", shape.ffn_size))
    divisions.append(("layout.tensor x layout.pipeline x layout.context", tp * pp * cp, "ranks", world_size))
    if shape.num_experts:
        divisions.append(("layout.expert x layout.expert_tensor x layout.pipeline", ep * etp * pp, "ranks", world_size))
    if shape.num_experts and ep == 1 and etp != tp:
        # With megatron-core 0.16.1 we measured gradients up to 140 % off, without an error.
        return (
            f"layout: expert 1 with expert_tensor {etp} and tensor {tp}: Megatron reduces the experts' gradients "
            "over the wrong group; set layout.expert_tensor equal to layout.tensor, or layout.expert above 1"
        )
    for keys, size, meaning, number in divisions:
        if number % size:
            return f"{keys} is {size}, which does not divide the {number} {meaning}"
    return None


def why_not_together(policies: Mapping[str, PolicyConfig]) -> str | None:
    """Return why these policies cannot share ranks and process groups; None if they can."""
    first = next(iter(policies))
    for name, policy in policies.items():
        if resolve(policy.layout) != resolve(policies[first].layout):
            return (
                f"policies.{name}.layout differs from policies.{first}.layout, but all trained policies share one "
                "set of process groups; set the same layout for all"
            )
    return None


def why_not_context(layout: Layout, ratio: str, correction: str) -> str | None:
    """Return why context parallelism does not work with this loss.ratio and loss.correction; None if it does."""
    if layout.context == 1 or (ratio != "sequence" and correction != "sequence_mask"):
        return None
    return (
        f"layout.context is {layout.context}, but loss.ratio={ratio} with loss.correction={correction} needs whole sequences on "
        "a rank; set layout.context=1, or loss.ratio=token and loss.correction=none, tis or icepop"
    )


def fitting(shape: ModelShape, world_size: int) -> Iterator[Layout]:
    """Yield every layout that fits, with expert_tensor 1 or `tensor`: only these layouts' gradients were tested."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tensor in sizes:
        for pipeline in sizes:
            for expert in sizes if shape.num_experts else [1]:
                for expert_tensor in sorted({1, tensor}) if expert > 1 else [tensor]:
                    for context in sizes:
                        layout = Layout(tensor, expert, expert_tensor, pipeline, context)
                        if why_not(layout, shape, world_size) is None:
                            yield layout


def nearest(layout: Layout, shape: ModelShape, world_size: int) -> Layout:
    """Return the layout that fits with the fewest and smallest changes; pure data parallelism always fits."""
    return min(fitting(shape, world_size), key=lambda candidate: (_distance(layout, candidate), candidate.words))


def _distance(asked: Layout, other: Layout) -> float:
    """Return the number of doublings and halvings between two layouts; expert_tensor counts half."""
    weights = {"tensor": 1.0, "expert": 1.0, "expert_tensor": 0.5, "pipeline": 1.0, "context": 1.0}
    return sum(w * abs(log2(getattr(asked, name) / getattr(other, name))) for name, w in weights.items())
