"""Resolution of dtype=auto. A resumed run keeps its dtypes."""

from __future__ import annotations

from marsrl.trainer.config import RunConfig
from marsrl.trainer.machine import native_dtype


def decide_dtypes(config: RunConfig, began: RunConfig | None = None) -> tuple[RunConfig, list[str]]:
    """Resolve dtype=auto; return the config, and lines with the dtypes and the reasons.

    began: settings of the run or evaluation to resume, whose dtypes are kept; None for a new one.
    """
    native, why = native_dtype()
    dtypes, reasons = dict[str, str](), dict[tuple[str, str], list[str]]()
    for name in config.undecided:
        before = began.policies[name].dtype if began is not None and name in began.policies else "auto"
        dtypes[name], reason = (native, why) if before == "auto" else (before, "kept from its start")
        reasons.setdefault((dtypes[name], reason), []).append(f"policies.{name}.dtype")
    lines = [f"{', '.join(names)}=auto: {dtype} ({reason})" for (dtype, reason), names in reasons.items()]
    return config.with_dtypes(dtypes), lines
