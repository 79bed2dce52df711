"""State of the GPU as its driver reports it: clocks, power, temperature, memory, and throttling."""

from __future__ import annotations

import subprocess

QUERY = (
    "name,driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu,"
    "memory.used,memory.total,persistence_mode,clocks_throttle_reasons.active"
)


def gpu_state() -> str:
    """Return a line per GPU with `field value` for each field of QUERY, or the reason why the state is unknown."""
    try:
        completed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    if completed.returncode:
        return f"unknown: {(completed.stdout + completed.stderr).strip()}"
    named = (zip(QUERY.split(","), line.split(", ")) for line in completed.stdout.strip().splitlines())
    return "\n".join(", ".join(f"{name} {value}" for name, value in line) for line in named)
