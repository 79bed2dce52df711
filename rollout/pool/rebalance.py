"""rollout.rebalance: policies share GPUs for engines, and one engine at a time moves to the policy with more to decode.

    rebalancer.note_stage()      -> records how busy each policy's engines were
    rebalancer.is_due            True after two stages in a row with the same best move
    rebalancer.move()            stops an engine of one policy, and starts one of another with that policy's current weights

A policy's load is the mean over its engines of the seconds worked on finished requests. An engine moves if the highest load
is more than twice the lowest load of a policy with an engine to spare, and the stage's decoding time, predicted from the same
seconds, shrinks by at least a tenth. So the reverse move is never due under the same load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from marsrl.rollout.pool.pool import EnginePool

_OFF_BY = 2.0  # minimum ratio of the highest to the lowest load
_LEAST_S = 1.0  # a move is considered only if the highest load is at least this
_SHORTER = 0.9  # maximum decoding time after a move, relative to the time before it
_STAGES = 2  # stages in a row with the same best move


@dataclass(frozen=True, slots=True)
class PolicyEngines:
    """A policy's engines and their work in a stage. busy_s: total over engines; takes: EnginePool.takes."""

    engines: int
    busy_s: float
    takes: Mapping[str, float]

    @property
    def load(self) -> float:
        return self.busy_s / self.engines


@dataclass(frozen=True, slots=True)
class Move:
    """Replacement of one engine of a policy by `num` engines of another. why: reason, for the log."""

    giver: str
    taker: str
    num: int
    why: str


def wanted(policies: Mapping[str, PolicyEngines]) -> Move | None:
    """Return the move that the loads suggest; None if no move shortens a stage enough.

    Policies decode at the same time, so the highest load determines the decoding time of a stage.
    """
    givers = [name for name, engines in policies.items() if engines.engines > 1]
    if not givers:
        return None
    taker = max(policies, key=lambda name: policies[name].load)
    giver = min(givers, key=lambda name: policies[name].load)
    most, least = policies[taker], policies[giver]
    if most.load <= max(_OFF_BY * least.load, _LEAST_S):
        return None
    num = num_fitting(most.takes, least.takes)
    after = {
        **policies,
        taker: replace(most, engines=most.engines + num),
        giver: replace(least, engines=least.engines - 1),
    }
    if num == 0 or max(engines.load for engines in after.values()) >= _SHORTER * most.load:
        return None
    why = f"an engine of {taker} worked {most.load:.1f} s in a stage, one of {giver} {least.load:.1f} s"
    return Move(giver, taker, num, why)


def outlook(engines: Mapping[str, int], takes: Mapping[str, Mapping[str, float]]) -> str:
    """Describe in one line the moves possible for rollout.rebalance, given each policy's engines and their resources."""
    moves = [
        f"{giver} to {taker}" + (f" ({num} in its place)" if num > 1 else "")
        for giver in engines
        for taker in engines
        if giver != taker and engines[giver] > 1 and (num := num_fitting(takes[taker], takes[giver]))
    ]
    if moves:
        return f"rollout.rebalance may move an engine from {', '.join(moves)}, depending on their load"
    return (
        "rollout.rebalance cannot move engines: it needs two agents' policies with engines here, one of them with two "
        "or more engines, each with GPUs that have room for an engine of the other policy"
    )


def num_fitting(takes: Mapping[str, float], frees: Mapping[str, float]) -> int:
    """Return how many engines fit in the resources of one stopped engine, all on one host."""
    return min((int(frees.get(name, 0.0) / amount + 1e-6) for name, amount in takes.items()), default=1)


class Rebalancer:
    """Rebalancer of the pools of all policies: moves engines between them. Used by one thread.

    No state is saved: a resumed run starts with rollout.engines and measures again.

    say: called with one line about each move.
    """

    def __init__(self, pools: Mapping[str, EnginePool], *, say: Callable[[str], None]) -> None:
        self._pools, self._say = pools, say
        self._seen_s = dict.fromkeys(pools, 0.0)  # EnginePool.busy_s at the end of the last stage
        self._move: Move | None = None
        self._num_stages = 0  # consecutive stages with this best move
        self._num_moves = 0

    @property
    def is_due(self) -> bool:
        return self._move is not None and self._num_stages >= _STAGES

    def take_moves(self) -> int:
        """Return the number of moves since the last call; each stops one engine."""
        num, self._num_moves = self._num_moves, 0
        return num

    def note_stage(self) -> None:
        """Record the stage played since the last call, or since `forget`."""
        policies = {
            name: PolicyEngines(pool.num_engines, pool.busy_s - self._seen_s[name], pool.takes)
            for name, pool in self._pools.items()
            if pool.takes is not None
        }
        self.forget()
        # Lost engines are replaced before any move.
        move = wanted(policies) if all(pool.is_whole for pool in self._pools.values()) else None
        before, self._move = self._move, move
        is_same = move is not None and before is not None and (move.giver, move.taker) == (before.giver, before.taker)
        self._num_stages = self._num_stages + 1 if is_same else 1

    def forget(self) -> None:
        """Start measuring busy time anew; called after an evaluation, which does not count."""
        self._seen_s = {name: pool.busy_s for name, pool in self._pools.items()}

    def move(self) -> None:
        """Execute the due move. Engines of all policies must be idle, and the trainer's ranks able to send weights."""
        assert self._move is not None and self.is_due
        move, self._move = self._move, None
        giver, taker = self._pools[move.giver], self._pools[move.taker]
        giver.give_engine()
        num = sum(taker.take_engine() for _ in range(move.num))
        self._num_moves += bool(num)
        if not num and not giver.take_engine():
            giver.expect_engine()
        done = "has moved" if num else "could not move (see the log)"
        self._say(
            f"rollout.rebalance: {move.why}: an engine of {move.giver} {done} to {move.taker}; engines now: "
            + ", ".join(f"{name} {pool.num_engines}" for name, pool in self._pools.items())
        )
