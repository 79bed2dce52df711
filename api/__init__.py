"""Reinforcement learning for teams of LLM agents, from Python (docs/python_api.md):

    import marsrl

    run = marsrl.train(orchestration="solver", run={"steps": 4})
    print(run.metrics[-1])

`import marsrl` loads no other module; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marsrl.rollout.agents.orchestration import Orchestration
    from marsrl.rollout.agents.roles import AgentSpec, Role
    from marsrl.rollout.tasks.own_task import OwnTask
    from marsrl.rollout.types import Problem
    from marsrl.runs import Error, Run, evaluate, load_run, sft, train, try_team

__all__ = [
    "AgentSpec",
    "Error",
    "Orchestration",
    "OwnTask",
    "Problem",
    "Role",
    "Run",
    "evaluate",
    "load_run",
    "sft",
    "train",
    "try_team",
]

_ELSEWHERE = {
    "AgentSpec": "rollout.agents.roles",
    "Orchestration": "rollout.agents.orchestration",
    "OwnTask": "rollout.tasks.own_task",
    "Problem": "rollout.types",
    "Role": "rollout.agents.roles",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'marsrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = getattr(importlib.import_module(f"marsrl.{_ELSEWHERE.get(name, 'runs')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
