"""Storage of one policy's part of a checkpoint: Megatron plans which rank stores what; each rank writes without forking.

__R_0.distcp    tensors of rank R, one torch.save after the other (Megatron's torch_dist format)
index.json      location of each part of each tensor: replaces Megatron's .metadata, which is a pickle
common.json     the shared state: number of the optimizer's updates. Replaces Megatron's common.pt, whose
                parameter groups differ between layouts with and without expert parallelism
metadata.json   Megatron's name of the format

    state = policy_state(model, optimizer, is_loading=False)
    pending = begin_save(state, folder, files, copy=True)  # all ranks; training may go on after it
    pending.write()                                   # any thread, no collectives
    pending.finish("was not saved")                   # all ranks, once every rank's write() is done

Tensors are read with torch.load(weights_only=True); nothing else from disk is unpickled.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as formats
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from marsrl.rollout.state import decode, encode
from marsrl.trainer.learner.megatron.checkpoint_index import INDEX, IndexReader, StoredChunk, render_index
from marsrl.trainer.learner.megatron.optimizer import AdapterOptimizer, Optimizer
from marsrl.trainer.runs.collective import gather_bytes, rank, stop_together, stopping_together
from marsrl.trainer.runs.directory import write_atomically, write_json
from marsrl.trainer.runs.manifest import FileSum

COMMON = "common.json"


@dataclass(frozen=True, slots=True)
class _Written:
    """One rank's output: its file ("" if it owns no shard), size and checksum, and the parts in it."""

    file: str
    num_bytes: int
    crc32: int
    chunks: tuple[StoredChunk, ...]


class PendingSave:
    """Planned save. write() touches only this rank's files and may overlap training."""

    def __init__(self, folder: Path, tensors: _Held, metadata: Metadata | None, files: Callable[[Path], None]) -> None:
        self._folder, self._tensors, self._metadata, self._files = folder, tensors, metadata, files
        self._written = _Written("", 0, 0, ())
        self._error: Exception | None = None

    def write(self) -> None:
        """Write this rank's part to disk. finish() raises any error on all ranks."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if rank() == 0:
                self._files(self._folder)
            if self._tensors.items:
                self._written = _write_tensors(self._tensors.items, self._folder)
        except Exception as error:
            self._error = error
        self._tensors.items.clear()  # Free the copies.

    def finish(self, failure: str) -> dict[str, FileSum]:
        """Write the index on rank 0; return all ranks' tensor files with their checksums, by name. Collective.

        Raises RuntimeError on all ranks if any could not write: `failure`, and the ranks with their errors.
        """
        stop_together(self._error, failure)
        parts = [decode(_Written, data) for data in gather_bytes(encode(self._written))]
        with stopping_together(failure, OSError, RuntimeError):
            if rank() == 0:
                assert self._metadata is not None
                index = render_index(self._metadata, [chunk for part in parts for chunk in part.chunks])
                write_atomically(self._folder / INDEX, index)
        return {part.file: FileSum(part.num_bytes, part.crc32) for part in parts if part.file}


def begin_save(state: dict[str, Any], folder: Path, files: Callable[[Path], None], *, copy: bool) -> PendingSave:
    """Plan the save of a sharded state into `folder` without writing yet. Collective.

    files: writes everything besides the tensors; called on rank 0.
    copy: copy to CPU memory, so that the weights may change before write() is done.
    """
    sharded, common = save_preprocess(state)
    keyed = formats._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)[0]
    planner = formats.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    writer = _Held(copy)
    planned = save_state_dict_async_plan(formats.mcore_to_pyt_state_dict(keyed), writer, None, 0, planner=planner)
    updates = {count for optimizer in _optimizers(common) for count in _updates(optimizer)}
    assert len(updates) <= 1, f"parameter groups were updated {updates} times"

    def write_files(folder: Path) -> None:
        write_json(folder / COMMON, {"optimizer_step": updates.pop() if updates else 0})
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        files(folder)

    return PendingSave(folder, writer, planned[0][1], write_files)


def _write_tensors(items: Sequence[tuple[WriteItem, Tensor]], folder: Path) -> _Written:
    name = f"__{rank()}_0.distcp"
    chunks = []
    with open(folder / name, "wb") as raw:
        file = _SummedFile(raw)
        for item, tensor in items:
            start = file.num_bytes
            try:
                torch.save(_alone(tensor), cast(IO[bytes], file))
            except RuntimeError as error:  # torch's zip writer raises this for a failed write
                raise file.error or error from error
            chunks.append(
                StoredChunk(item.index.fqn, tuple(item.index.offset or ()), name, start, file.num_bytes - start)
            )
        raw.flush()
        os.fsync(raw.fileno())
    return _Written(name, file.num_bytes, file.crc32, tuple(chunks))


@torch.no_grad()
def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the state saved in `folder`, sharded as `state`, with the optimizer settings of `state`. Collective."""
    persistent, other_state, factories = load_preprocess(state)
    sharded, common = extract_sharded_base(persistent)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    step = json.loads((folder / COMMON).read_bytes())["optimizer_step"]
    for optimizer in _optimizers(common):
        _set_updates(optimizer, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about names in megatron's format
        for part in (other_state, _load_tensors(sharded, folder)):
            merge(common, part)
    loaded: dict[str, Any] = apply_factory_merges(common, factories)
    return loaded


def _load_tensors(state: Any, folder: Path) -> Any:
    """Load megatron's torch_dist format, with index.json instead of .metadata."""
    tensors = [t for t in formats.nested_values(state) if isinstance(t, formats.ShardedTensor)]
    keyed, flat, renamed = formats._replace_state_dict_keys_with_sharded_keys(state)
    loaded = formats.mcore_to_pyt_state_dict(keyed, True)
    planner = formats.MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
    )
    checkpoint.load_state_dict(loaded, IndexReader(folder), planner=planner)
    unwrapped = {name: formats._unwrap_pyt_sharded_tensor(value) for name, value in loaded.items()}
    restored = formats._replace_sharded_keys_with_state_dict_keys(unwrapped, flat, renamed)
    formats._restore_dict_types(restored, state)
    return restored


def policy_state(
    model: Any, optimizer: Optimizer | AdapterOptimizer, past: Any | None = None, *, is_loading: bool
) -> dict[str, Any]:
    """Return a policy's sharded state (weights and optimizer) for begin_save, or with is_loading for load.

    past: the reference of the KL term, if it is an earlier version of the policy; it is saved too.
    """
    metadata = {
        # Only this format reshards exactly between TP/EP/PP/DP layouts.
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {}
    for part, module in {"model": model, "reference": past}.items():
        if module is not None:
            # Leave out TransformerEngine's FP8 objects: they are pickles, and empty in float32 and bfloat16.
            state[part] = {
                name: value
                for name, value in module.sharded_state_dict(metadata=metadata).items()
                if not (isinstance(value, ShardedObject) and name.endswith("_extra_state"))
            }
    add_prefix_for_sharding(state.get("reference", {}), "reference.")
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata, is_loading=is_loading)
    return state


class _Held:
    """Storage writer for torch's save planner: holds this rank's tensors until they are written."""

    can_run_decentralized_global_plan = True  # Every rank knows its file name.

    def __init__(self, copy: bool) -> None:
        self._copy = copy
        self.items: list[tuple[WriteItem, Tensor]] = []

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Do nothing: the folder exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
            self.items.append((item, tensor.detach().to("cpu", copy=True) if self._copy else tensor.detach()))


class _SummedFile:
    """Append-only file for torch.save, with its running size and CRC-32."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.num_bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at the end."""


def _optimizers(common: Any) -> Iterator[dict[str, Any]]:
    """Yield the state dicts of all optimizers: megatron's nesting depends on whether there are several."""
    if isinstance(common, dict):
        if "param_groups" in common:
            yield common
        else:
            for value in common.values():
                yield from _optimizers(value)


def _updates(optimizer: dict[str, Any]) -> list[float]:
    """Return the numbers of updates so far: common_step, and `step` of each parameter group that has one."""
    common = [optimizer["state"]["common_step"]] if "common_step" in optimizer.get("state", {}) else []
    return [float(count) for count in [*common, *(g["step"] for g in optimizer["param_groups"] if "step" in g)]]


def _set_updates(optimizer: dict[str, Any], step: float) -> None:
    groups = [group for group in optimizer["param_groups"] if "step" in group]
    for group in groups:
        group["step"] = type(group["step"])(step)
    if not groups:
        optimizer.setdefault("state", {})["common_step"] = torch.tensor(step)


def _alone(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that owns its storage: torch.save writes the whole storage of a view."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
