"""Sources of trace.json: engines, judges, the scheduler's stages, and ranks other than 0."""

from __future__ import annotations

from collections.abc import Sequence

from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team
from marsrl.trainer.report.trace import Span, TraceLog
from marsrl.trainer.runs.collective import gather_bytes, rank, world_size

_ENGINE_WORK = {
    "collect": "decode",
    "update_weights": "load weights",
    "restart": "lost: restarted",
    "sleep": "go to sleep",
    "wake": "wake up",
}


def watch_engines(pools: Sequence[EnginePool], trace: TraceLog) -> None:
    """Add a lane for every engine: engine/0, engine/1, ... over all policies, in the order of the pools.

    The lane of an engine that rollout.rebalance adds to a policy later is named by the policy.
    """
    first = 0
    for pool in pools:
        lanes = [f"engine/{first + replica}" for replica in pool.engines]

        def note(
            replica: int, method: str, start: float, end: float, lanes: list[str] = lanes, name: str = pool.name
        ) -> None:
            lane = lanes[replica] if replica < len(lanes) else f"engine/{name} {replica}"
            trace.add_wall(Span(lane, _ENGINE_WORK.get(method, method), start, end))

        pool.on_call = note
        first += pool.num_engines


def watch_judge(team: Team, trace: TraceLog) -> None:
    """Add the lane reward/pool: periods of judging, with the number of answers."""

    def note(num_answers: int, start: float, end: float) -> None:
        trace.add_wall(Span("reward/pool", "judge", start, end, {"answers": num_answers}))

    team.judge.on_call = note


def gather_rank_spans(trace: TraceLog) -> None:
    """Add the other ranks' spans since the last call to rank 0's trace. Collective."""
    if world_size() == 1:
        return
    encoded = gather_bytes(encode(trace.take() if rank() else ()))
    if rank() == 0:
        for span in (span for part in encoded for span in decode(list[Span], part)):
            trace.add_wall(span)
