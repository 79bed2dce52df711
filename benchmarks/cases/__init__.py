"""Cases of run.py. Each has a module, named in ORDER, with a Case called CASE."""

from __future__ import annotations

import importlib

from case import Case

ORDER = (
    "linear_policy_loss",
    "linear_logprob",
    "policy_rows",
    "policy_loss",
    "group_advantage",
    "mpt_gate",
    "packing",
    "attention_varlen",
    "attention_decode",
    "grouped_linear",
    "moe_permute",
    "swiglu",
    "rms_norm",
)


def load(name: str) -> Case:
    """Return the case of this name. Raises ValueError for an unknown name."""
    if name not in ORDER:
        raise ValueError(f"benchmark case {name!r}: expected one of {', '.join(ORDER)}")
    case: Case = importlib.import_module(f"cases.{name}").CASE
    return case
