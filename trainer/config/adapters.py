"""Rules of policies with an adapter, and of those that they are built on."""

from __future__ import annotations

from collections.abc import Mapping

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.config.policy import LayoutConfig, PolicyConfig

OF_BASE = (
    "model",
    "shape",
    "dtype",
    "layout",
    "recompute",
    "layers",
    "deterministic",
)  # settings of the one frozen copy


def on_bases(policies: Mapping[str, PolicyConfig]) -> dict[str, PolicyConfig]:
    """The policies with what a base says of its model said of those that are built on it.

    Raises:
        ValueError: a base is missing or is none, or a policy contradicts its base.
    """
    return {
        name: policy if policy.base is None else _on_base(policies, name, policy) for name, policy in policies.items()
    }


def _on_base(policies: Mapping[str, PolicyConfig], name: str, policy: PolicyConfig) -> PolicyConfig:
    base = policies.get(policy.base or "")
    key = f"policies.{name}.base is {policy.base}"
    if base is None or base is policy:
        others = ", ".join(other for other in policies if other != name) or "no other"
        raise ValueError(f"{key}, which is not another policy (there is {others})")
    if base.base is not None:
        raise ValueError(f"{key}, which is built on {base.base} itself: name that one")
    if base.openai is not None or base.engine == "openai":
        raise ValueError(f"{key}, which a server answers for (engine: openai): an adapter needs its weights here")
    if policy.adapter is None:
        raise ValueError(
            f"{key}, and policies.{name}.adapter is not set: an adapter is what is trained of it, set adapter={{}}"
        )
    if policy.frozen:
        raise ValueError(f"{key}, and policies.{name}.frozen is true: a policy is built on another one to be trained")
    for setting in OF_BASE:
        own, given = getattr(policy, setting), getattr(base, setting)
        if setting in policy.model_fields_set and own != given:
            own, given = (value.model_dump() if isinstance(value, LayoutConfig) else value for value in (own, given))
            raise ValueError(
                f"policies.{name}.{setting} is {own}, and it has its base's ({policy.base}: {given}): leave it out"
            )
    return policy.model_copy(update={setting: getattr(base, setting) for setting in OF_BASE})


def why_not_adapter(adapter: AdapterConfig, shape: ModelShape, layout: LayoutConfig) -> str | None:
    """None where the model has what the adapter is for and the layout can hold it, else the reason."""
    if set(adapter.targets) == {"mlp"} and shape.num_experts:
        return f"adapter.targets names mlp alone, and {shape.architecture} has experts in its place: name attention, or experts"
    if "experts" not in adapter.targets:
        return None
    if not shape.num_experts:
        return f"adapter.targets names experts, and {shape.architecture} has none: name mlp"
    expert_tensor = layout.expert_tensor or (layout.tensor if layout.expert == 1 else 1)
    if expert_tensor > 1:
        return (
            f"adapter.targets names experts, and layout.expert_tensor is {expert_tensor}: adapters of experts are not cut, set "
            "layout.expert above 1 with expert_tensor 1, or leave experts out"
        )
    return None
