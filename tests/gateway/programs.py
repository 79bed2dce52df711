"""Programs that play sessions of a small team, with real workers, a real port, and a real engine with random weights."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_cases import pool_of, spec_of
from letters import make_team

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import Engine
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.server import open_gateway
from marsrl.rollout.gateway.vllm_reader import agents_of
from marsrl.rollout.orchestrations.external import External
from marsrl.rollout.player.refill import Counting
from marsrl.rollout.player.stages import Stages, StepBatch
from marsrl.rollout.tasks.arithmetic import arithmetic_task
from marsrl.rollout.tasks.config import ArithmeticOptions
from marsrl.rollout.team import Team
from marsrl.rollout.types import Sample

AGENTS = {"solver": AgentConfig(max_input_tokens=1500), "verifier": AgentConfig(max_input_tokens=1500)}
VERSIONS = {"main": 0}


def rollout_config(**options: Any) -> RolloutConfig:
    base = {"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 1500}
    return RolloutConfig.model_validate({"engine": "local", "placement": "local", **base, **options})


@dataclass
class Played:
    """A team of programs, and the stages that play its batches."""

    stages: Stages
    team: Team

    def batch(self) -> StepBatch:
        self.begin()
        return self.rest_of_batch()

    def begin(self) -> None:
        self.stages.resume(VERSIONS)
        self.stages.want()

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.stages.advance(0.05)

    def rest_of_batch(self) -> StepBatch:
        while (batch := self.stages.take()) is None:
            self.stages.advance(0.2)
        return batch

    def samples(self) -> dict[str, Sample]:
        return {sample.uid: sample for group in self.batch().groups for sample in group.samples}


def program(folder: Path, text: str) -> str:
    """Write the text, which defines a function `run`, to a file; return the value of external.function that names it."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return f"{path}:run"


def team_of(
    model: Path,
    config: RolloutConfig,
    orchestration: Callable[..., Orchestration] = External,
    gateway: Gateway | None = None,
    agents: Mapping[str, AgentConfig] = AGENTS,
    engine: Engine | None = None,
    counting: Counting | None = None,
) -> Played:
    engine = engine or LocalEngine(spec_of(model, 4096))
    pool = pool_of(engine, slots=64, deadline_s=config.deadline_s)
    team = make_team(agents, orchestration(agents, "chain", None, config), pool, ChatRenderer(model), gateway=gateway)
    source = arithmetic_task(ArithmeticOptions()).problems(3)
    return Played(Stages(config, team, source, seed=3, trains_whole=True, counting=counting), team)


@contextmanager
def playing(
    model: Path,
    config: RolloutConfig,
    external: str | Mapping[str, Any],
    *,
    agents: Mapping[str, AgentConfig] = AGENTS,
    engine: Engine | None = None,
    parsers: tuple[str | None, str | None] = (None, None),
    key: str | None = None,
    renderer: ChatRenderer | None = None,
    clock: Callable[[], float] = time.monotonic,
    sums_turns: bool = False,
    counting: Counting | None = None,
) -> Iterator[Played]:
    """Open a team whose sessions are played by a program, ready for the first batch.

    external: settings of `external`, or only external.function. parsers: parsers of tool calls and of thoughts. key: the workers'
    API key. renderer: renderer of all agents; None: the model's. clock, sums_turns: arguments of the gateway.
    """
    settings = ExternalConfig.model_validate({"function": external} if isinstance(external, str) else external)
    doors = agents_of(agents, {"main": renderer or ChatRenderer(model)}, config.max_response_tokens, {"main": parsers})
    with open_gateway(settings, doors, key, clock, sums_turns=sums_turns) as gateway:
        yield team_of(model, config, gateway=gateway, agents=agents, engine=engine, counting=counting)


def turns_of(sample: Sample) -> Sequence[int]:
    """Split a sample's tokens into runs that are all sampled or all not sampled, and return the runs' lengths."""
    lengths, last = list[int](), None
    for own in sample.is_sampled.tolist():
        if own != last:
            lengths.append(0)
        lengths[-1] += 1
        last = own
    return lengths
