"""While rank 0 has the engines decode, or prove new weights, the other ranks stand by: an engine that is lost gets its weights
from all of them.

    rank 0         work ... engine 3 is lost, a new one is made -> "main" -> send its part ... work -> ""
    other ranks    wait .............................................. "main" -> send their part ... wait ... "" -> go on

Only sync.backend=nccl and ipc need it; files are there for whoever comes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import Lost, Timed
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.runs.collective import broadcast_bytes
from marsrl.trainer.runs.stop import Stopped
from marsrl.trainer.weights.channel import WeightChannel

_T = TypeVar("_T")
_STOPPED = "\0"  # in a policy's place


class Standby:
    """What the ranks do while rank 0 plays, evaluates or proves weights: send a policy's to an engine that it asks for.

    Every rank has one, for all trained policies. pools: rank 0's; None elsewhere. versions: those of now, whenever looked at.
    """

    def __init__(
        self,
        channels: Mapping[str, WeightChannel],
        learners: Mapping[str, Learner],
        versions: Mapping[str, int],
        pools: Mapping[str, EnginePool] | None,
    ) -> None:
        self._channels, self._learners, self._versions = channels, learners, versions
        self._pools = None if pools is None else {policy: pools[policy] for policy in learners}
        self._thread: int | None = None  # rank 0's, while the others stand by
        for policy, pool in (self._pools or {}).items():
            pool.set_feed(functools.partial(self._feed, policy))

    def during(self, work: Callable[[], _T]) -> _T | None:
        """What rank 0's work returns; None elsewhere. Collective; the learners hold what the engines are to hold.

        Raises:
            Stopped: rank 0's work did, on all ranks.
        """
        if self._pools is None:
            while policy := broadcast_bytes(None).decode():
                if policy == _STOPPED:
                    raise Stopped
                self._send(policy, None)
            return None
        self._thread = threading.get_ident()
        try:
            done = work()
        except Stopped:
            broadcast_bytes(_STOPPED.encode())
            raise
        finally:
            self._thread = None
        broadcast_bytes(b"")
        return done

    def feed_unfed(self) -> None:
        """Rank 0, in its work: weights for engines that another thread has found lost."""
        for pool in (self._pools or {}).values():
            pool.feed_unfed()

    def _feed(self, policy: str, engine: int) -> Timed | Lost | None:
        """None where the others do not stand by: in the middle of a step, or where it is not rank 0's thread that asks."""
        if self._thread != threading.get_ident():
            return None
        broadcast_bytes(policy.encode())
        return self._send(policy, engine)

    def _send(self, policy: str, engine: int | None) -> Timed | Lost | None:
        return self._channels[policy].send_again(self._learners[policy], self._versions[policy], engine)
