"""rollout.rebalance: engines of all policies share a pool of GPUs, and one moves to the policy with more to decode.

    rebalancer.note_stage()      -> how busy each policy's engines were in it
    rebalancer.is_due            two stages in a row asked for the same move
    rebalancer.move()            an engine of one policy stops, one of another starts with that policy's current weights

A policy's load is the mean over its engines of the seconds worked on finished requests. An
engine moves if the highest load is more than twice the lowest of a policy with an engine to spare, and the stage's decoding,
predicted from the same seconds, gets at least a tenth shorter: so the reverse move is never due under the same load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from marsrl.rollout.pool.pool import EnginePool

_OFF_BY = 2.0  # loads
_LEAST_S = 1.0  # minimum of the highest load, to be significant
_SHORTER = 0.9  # decoding time after a move over that before
_STAGES = 2  # stages in a row that must ask for the same move


@dataclass(frozen=True, slots=True)
class PolicyEngines:
    """A policy's engines and their work in a stage. busy_s: sum over engines; takes: EnginePool.takes."""

    engines: int
    busy_s: float
    takes: Mapping[str, float]

    @property
    def load(self) -> float:
        return self.busy_s / self.engines


@dataclass(frozen=True, slots=True)
class Move:
    """One engine of a policy makes room for `num` of another. why: for the log."""

    giver: str
    taker: str
    num: int
    why: str


def wanted(policies: Mapping[str, PolicyEngines]) -> Move | None:
    """The move that the loads ask for; policies decode side by side."""
    givers = [name for name, each in policies.items() if each.engines > 1]
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
    if num == 0 or max(each.load for each in after.values()) >= _SHORTER * most.load:
        return None
    why = f"an engine of {taker} was busy for {most.load:.1f} s of a stage, one of {giver} for {least.load:.1f} s"
    return Move(giver, taker, num, why)


def outlook(engines: Mapping[str, int], takes: Mapping[str, Mapping[str, float]]) -> str:
    """One line about the moves possible for rollout.rebalance, given each policy's engines and their resources."""
    moves = [
        f"{giver} to {taker}" + (f" ({num} in its place)" if num > 1 else "")
        for giver in engines
        for taker in engines
        if giver != taker and engines[giver] > 1 and (num := num_fitting(takes[taker], takes[giver]))
    ]
    if moves:
        return (
            f"rollout.rebalance may move an engine from {', '.join(moves)}, by what the engines of each have to decode"
        )
    return (
        "rollout.rebalance has nothing to move: it needs two policies of agents with engines here, one of them with more than "
        "one, and room for the other's on the GPUs of such an engine"
    )


def num_fitting(takes: Mapping[str, float], frees: Mapping[str, float]) -> int:
    """Number of engines that fit in the resources of one stopped engine, all on one host."""
    return min((int(frees.get(name, 0.0) / amount + 1e-6) for name, amount in takes.items()), default=1)


class Rebalancer:
    """Watches the pools of all policies and moves engines between them. Used by one thread; keeps no state across processes:
    a resumed run starts with rollout.engines and measures anew.

    say: called with one line about each move.
    """

    def __init__(self, pools: Mapping[str, EnginePool], *, say: Callable[[str], None]) -> None:
        self._pools, self._say = pools, say
        self._seen_s = dict.fromkeys(pools, 0.0)  # EnginePool.busy_s at the end of the last stage
        self._move: Move | None = None
        self._num_stages = 0  # consecutive stages that asked for it
        self._num_moves = 0

    @property
    def is_due(self) -> bool:
        return self._move is not None and self._num_stages >= _STAGES

    def take_moves(self) -> int:
        """Number of engines moved since the last call."""
        num, self._num_moves = self._num_moves, 0
        return num

    def note_stage(self) -> None:
        """A stage has been played since the last call, or since `forget`."""
        policies = {
            name: PolicyEngines(pool.num_engines, pool.busy_s - self._seen_s[name], pool.takes)
            for name, pool in self._pools.items()
            if pool.takes is not None
        }
        self.forget()
        # first those that were lost get their places back
        move = wanted(policies) if all(pool.is_whole for pool in self._pools.values()) else None
        before, self._move = self._move, move
        is_same = move is not None and before is not None and (move.giver, move.taker) == (before.giver, before.taker)
        self._num_stages = self._num_stages + 1 if is_same else 1

    def forget(self) -> None:
        """Drop the time since the last stage: an evaluation was played, which is no stage."""
        self._seen_s = {name: pool.busy_s for name, pool in self._pools.items()}

    def move(self) -> None:
        """Do what is due. Engines of all policies are at rest, and the trainer's ranks can send weights."""
        assert self._move is not None and self.is_due
        move, self._move = self._move, None
        giver, taker = self._pools[move.giver], self._pools[move.taker]
        giver.give_engine()
        num = sum(taker.take_engine() for _ in range(move.num))
        self._num_moves += bool(num)
        if not num and not giver.take_engine():
            giver.expect_engine()
        done = "has moved" if num else "could not move (the log says why)"
        self._say(
            f"rollout.rebalance: {move.why}: an engine of {move.giver} {done} to {move.taker}; engines now: "
            + ", ".join(f"{name} {pool.num_engines}" for name, pool in self._pools.items())
        )
