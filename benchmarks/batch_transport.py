"""A step's batch with the experts of decoding, from rank 0 to two data ranks over gloo: seconds and memory of each (scale.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.routed_experts import expert_dtype
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import BatchShard, MiniBatch, scatter
from marsrl.trainer.runs.collective import Routes, gather_bytes, rank

NUM_RANKS = 2


@dataclass(frozen=True)
class Transport:
    """One rank's. cpu_s: of the scatter, packing included; held: of its packed share, bytes; beside: memory that it took at most
    for the scatter, beyond the share, bytes of RSS."""

    rank: int
    cpu_s: float
    wall_s: float
    held: int
    beside: int


def measure(shape: ModelShape, num_sequences: int, num_tokens: int, max_tokens: int) -> list[Transport]:
    """By rank, each in a process of its own. num_tokens: of each sequence, half of them prompt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = [shape.num_layers, shape.experts_per_token, shape.num_experts, num_sequences, num_tokens, max_tokens]
    place = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("scale.py")), "--transport", json.dumps(sizes)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(NUM_RANKS)
    ]
    told = [process.communicate()[0] for process in ranks]
    assert not any(process.returncode for process in ranks)
    return [Transport(**each) for each in json.loads(told[0].splitlines()[-1])]


def rank_of_two(
    num_layers: int, top_k: int, num_experts: int, num_sequences: int, num_tokens: int, max_tokens: int
) -> list[dict[str, float]]:
    """What both ranks found; in the process of one."""
    dist.init_process_group("gloo")
    alone = [dist.new_group([r]) for r in range(NUM_RANKS)]
    world = dist.group.WORLD
    assert world is not None
    shard = BatchShard(rank(), NUM_RANKS, max_tokens, 1, Routes(world, alone[rank()]))
    dtype = expert_dtype(num_experts)
    rng = np.random.default_rng(0)

    def sequence(number: int) -> TrainSequence:
        n = num_tokens // 2
        ids = rng.integers(0, 150_000, num_tokens, np.int32)
        experts = rng.integers(0, num_experts, (num_tokens - 1, num_layers, top_k), dtype)
        own = ids[:-n], ids[-n:], np.ones(n, bool), np.zeros(n, np.float32)
        return TrainSequence(str(number), *own, 1.0, 0, 1.0, routed_experts=experts)

    batch = (MiniBatch(tuple(map(sequence, range(num_sequences))), 1.0),) if rank() == 0 else None
    scatter((MiniBatch((), 1.0),) if rank() == 0 else None, shard)  # what is made once
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, cpu, wall = _resident("VmRSS"), time.process_time(), time.monotonic()
    (update,) = scatter(batch, shard)
    cpu_s, wall_s = time.process_time() - cpu, time.monotonic() - wall
    held = sum(
        value.nbytes
        for each in update.micro_batches
        for value in (getattr(each, name) for name in each.__dataclass_fields__)
        if hasattr(value, "nbytes")
    )
    mine = Transport(rank(), cpu_s, wall_s, held, _resident("VmHWM") - before - held)
    found = [json.loads(each) for each in gather_bytes(json.dumps(asdict(mine)).encode())]
    dist.destroy_process_group()
    return found


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
