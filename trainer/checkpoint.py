"""A checkpoint: every policy's learner, the rollout's state, and what they belong to, written whole or not at all.

checkpoints/step_12/policies/main/...   Megatron distributed checkpoint (all ranks write their part)
checkpoints/step_12/rollout.msgpack     scheduler and problem source (rank 0)
checkpoints/step_12/meta.json           step, policy versions (rank 0)
checkpoints/latest                      moved last, when everything above is on disk
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from marsrl.rollout.ledger import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.trainer.collective import barrier, rank
from marsrl.trainer.learner import Learner
from marsrl.trainer.run_directory import RunDirectory, sync_tree, write_atomically, write_json


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a run goes on: step = the last one the checkpoint contains."""

    step: int
    versions: dict[str, int]
    rollout: RolloutState


def save_checkpoint(
    run: RunDirectory,
    step: int,
    versions: Mapping[str, int],
    learners: Mapping[str, Learner],
    rollout: RolloutState | None,
    keep: int,
) -> None:
    """Collective. `rollout` is rank 0's; older checkpoints beyond `keep` are removed once `latest` points at this one."""
    final = run.checkpoint(step)
    part = final.with_name(f"{final.name}.part")
    is_first = rank() == 0
    if is_first:
        shutil.rmtree(part, ignore_errors=True)  # left by a run that died while saving
        part.mkdir(parents=True)
    barrier()
    for name, learner in learners.items():
        learner.save(part / "policies" / name)
    if is_first:
        assert rollout is not None
        write_atomically(part / "rollout.msgpack", encode(rollout))
        write_json(part / "meta.json", {"step": step, "versions": dict(versions)})
    barrier()
    if is_first:
        sync_tree(part)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(part, final)
        run.mark_latest(step)
        _remove_old(run, keep)
    barrier()


def load_checkpoint(run: RunDirectory, learners: Mapping[str, Learner]) -> Restored | None:
    """Collective: restore every learner and return the rest; None where the run has no whole checkpoint yet.

    Raises:
        RuntimeError: the checkpoint that `latest` names is damaged; says which file.
    """
    found = run.latest_checkpoint()
    if found is None:
        return None
    for name, learner in learners.items():
        learner.load(found.path / "policies" / name)
    try:
        meta = json.loads((found.path / "meta.json").read_bytes())
        rollout = decode(RolloutState, (found.path / "rollout.msgpack").read_bytes())
        return Restored(int(meta["step"]), {str(k): int(v) for k, v in meta["versions"].items()}, rollout)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"checkpoint {found.path} is damaged ({error}); write an older one into checkpoints/latest"
        ) from error


def _remove_old(run: RunDirectory, keep: int) -> None:
    steps = sorted(int(p.name.removeprefix("step_")) for p in run.checkpoints.glob("step_*") if p.name[5:].isdecimal())
    for step in steps[:-keep]:
        shutil.rmtree(run.checkpoint(step))
