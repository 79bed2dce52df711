"""Placement of ranks and engines on GPUs, and the transport of weights, from settings alone."""

from __future__ import annotations

from typing import Any

import pytest

from marsrl.rollout.engines.refusals import TrainerHost
from marsrl.trainer.config import RunConfig
from marsrl.trainer.plan.placement import placement_lines, with_backend

NODE = TrainerHost(num_gpus=8, num_ranks=4, has_others=False)


def config_of(rollout: dict[str, Any], sync: dict[str, Any] | None = None, **others: Any) -> RunConfig:
    return RunConfig.model_validate({"rollout": rollout, "sync": sync or {}, **others})


@pytest.mark.parametrize(
    ("rollout", "sync", "on_gpus", "backend"),
    [
        ({}, {}, True, "nccl"),  # on one host too
        ({"ray_address": "here"}, {}, True, "nccl"),
        ({"placement": "colocated"}, {}, True, "ipc"),
        ({"placement": "local"}, {}, True, "shm"),
        ({}, {"directory": "/shared"}, True, "shm"),
        ({}, {"backend": "shm"}, True, "shm"),
        ({"placement": "colocated"}, {}, False, "shm"),
        ({}, {"cpu_twin": True}, False, "nccl"),
        ({"placement": "colocated"}, {"cpu_twin": True}, False, "ipc"),
    ],
)
def test_the_way_of_weights_follows_from_the_placement(
    rollout: dict[str, Any], sync: dict[str, Any], on_gpus: bool, backend: str
) -> None:
    decided = with_backend(config_of(rollout, sync), on_gpus=on_gpus)
    assert decided.sync.backend == backend
    assert with_backend(decided, on_gpus=not on_gpus) == decided
    RunConfig.model_validate(decided.model_dump())  # config.yaml of the run


def lines(host: TrainerHost, world_size: int, rollout: dict[str, Any], **others: Any) -> list[str]:
    """Without the last, which is the way of weights, and without this host's name."""
    config = with_backend(config_of(rollout, **others), on_gpus=host.num_gpus > 0)
    found = placement_lines(config, host, world_size)
    assert found[-1].startswith(f"weights: sync.backend={config.sync.backend}, ")
    return [line.partition(": ")[2] if i == 0 else line for i, line in enumerate(found[:-1])]


def test_ranks_have_the_first_gpus_and_engines_the_rest() -> None:
    assert lines(NODE, 4, {"engines": 3}) == ["GPU 0-3: ranks 0-3; GPU 4-6: main engines 0-2"]
    two = {"main": {}, "judge": {"frozen": True, "model": "/m", "engines": 1, "vllm": {"tensor_parallel": 2}}}
    found = lines(NODE, 4, {"engines": 2}, policies=two)
    assert found == ["GPU 0-3: ranks 0-3; GPU 4-5: main engines 0-1; GPU 6-7: judge engine 0, 2 GPUs each"]
    both = lines(NODE, 4, {"engines": 4, "placement": "colocated"})
    assert both == ["GPU 0-3: ranks 0-3; GPU 0-3: main engines 0-3"]
    assert lines(TrainerHost(1, 1, False), 1, {"placement": "local"}) == ["GPU 0: rank 0; GPU 0: main engine 0"]
    assert lines(TrainerHost(8, 0, False), 1, {"engines": 2}) == ["GPU 0-1: main engines 0-1"]  # marsrl evaluate


def test_engines_go_on_to_hosts_that_are_not_known_yet() -> None:
    host = TrainerHost(8, 6, True)
    wide = {"engines": 11, "ray_address": "here", "vllm": {"tensor_parallel": 2}}
    assert lines(host, 18, wide) == [
        "GPU 0-5: ranks 0-5; GPU 6-7: main engine 0, 2 GPUs each",
        "trainer hosts 2-3: GPU 0-5: ranks 6-17",
        "engine hosts 1-2: GPU 0-7: main engines 1-8, 2 GPUs each",
        "engine host 3: GPU 0-3: main engines 9-10, 2 GPUs each (taken to have 8 GPUs each, and not known yet)",
    ]
    other = lines(TrainerHost(8, 8, True), 8, {"engines": 8, "ray_address": "head:6379"})
    assert other[1:] == ["engine host 1: GPU 0-7: main engines 0-7 (taken to have 8 GPUs each, and not known yet)"]
