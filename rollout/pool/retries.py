"""Which requests of an engine that was lost are decoded again, beside which others, and which are given up.

An engine takes all of its requests with it, and at most one of them is to blame. So a request is given up only when it
has been on `attempts` lost engines and was the only one on the last of them:

    1st .. attempts-2'th loss    again at once, wherever there is room      (most engines die of nothing they were asked)
    attempts-1'th                again, all that were lost together, and nobody else
    each loss after that         one half of them, then the other half      (n requests: log2(n) losses find the one)
    alone on the lost engine     given up
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from marsrl.rollout.engines.protocol import DecodeRequest


@dataclass(frozen=True, slots=True)
class AfterLoss:
    """What becomes of the requests of a lost engine.

    free: go back into the queue. companies: each is decoded on an engine that has nothing else. given_up: are errors.
    """

    free: list[DecodeRequest]
    companies: list[list[DecodeRequest]]
    given_up: list[DecodeRequest]


class Retries:
    """Counts, for every request, the engines that were lost with it. See the module.

    attempts: engines that a request may take down before it is an error.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._losses: Counter[str] = Counter()  # by uid

    def after_loss(self, requests: Sequence[DecodeRequest]) -> AfterLoss:
        """All requests that one lost engine had."""
        self._losses.update(request.uid for request in requests)
        after = AfterLoss([], [], [])
        together, halved = [], []
        for request in requests:
            losses = self._losses[request.uid]
            if losses >= self._attempts and len(requests) == 1:
                after.given_up.append(request)
                self.ended(request.uid)
            elif losses >= self._attempts:
                halved.append(request)
            elif losses == self._attempts - 1:
                together.append(request)
            else:
                after.free.append(request)
        middle = (len(halved) + 1) // 2
        after.companies.extend(company for company in (together, halved[:middle], halved[middle:]) if company)
        return after

    def ended(self, uid: str) -> None:
        """The request came back whole: what was lost with it before was not its doing."""
        self._losses.pop(uid, None)


class Probation:
    """Companies that wait for the engine that they were lost with, or for another where that is not replaced.

    Until the last has been served it gets nothing else.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[list[DecodeRequest]]] = {}  # by replica

    @property
    def replicas(self) -> Collection[int]:
        """Engines that are kept for companies."""
        return self._waiting.keys()

    @property
    def num_waiting(self) -> int:
        return sum(len(company) for companies in self._waiting.values() for company in companies)

    def add(self, replica: int, companies: Sequence[list[DecodeRequest]]) -> None:
        """The halves of a company come before those that wait already."""
        if companies:
            self._waiting.setdefault(replica, deque()).extendleft(reversed(companies))

    def next(self, replica: int) -> list[DecodeRequest]:
        """The next company of an engine that is idle; [] where there is none: the engine is anybody's again."""
        if self._waiting[replica]:
            return self._waiting[replica].popleft()
        del self._waiting[replica]
        return []

    def move(self, replica: int, to: int) -> None:
        """The companies of an engine that is not replaced wait for another."""
        self.add(to, list(self._waiting.pop(replica, ())))

    def drop(self) -> list[DecodeRequest]:
        """Take back everybody who waits."""
        dropped = [request for companies in self._waiting.values() for company in companies for request in company]
        self._waiting.clear()
        return dropped
