"""Link between the player and the HTTP server that serves workers and programs; each has its own thread.

player's thread                      server's thread
submit(ToolCall "session")     ->    hand_out: a worker plays the session
take: calls, lost sessions     <-    of_key(...).ask: a call; lose: the sessions of a lost worker
call.reply.set_result(Reply)   ->    the program gets its answer
the future of submit           <-    end: a SessionEnd; tick: an error, if the session takes too long
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from marsrl.rollout.gateway.calls import Call
from marsrl.rollout.gateway.chats import Agent
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.lineage import Lineages
from marsrl.rollout.gateway.session import Session
from marsrl.rollout.types import ToolCall, ToolOutput

_log = logging.getLogger(__name__)

SILENCE_S = 30.0  # a worker that sends no request for this long is lost
_START_S = 120.0  # extra time for a new worker's first request
_MOST_SHOWN = 2000  # characters kept of a program's error


class Gateway:
    """Tool pool with a single tool, for the player. Each call of the tool is a session; see the module.

    agents: agents by name; programs send the name as `model`. clock: returns the time in seconds, for the limits of
    sessions and of workers' silence. sums_turns: see Session.
    """

    def __init__(
        self,
        config: ExternalConfig,
        agents: Mapping[str, Agent],
        clock: Callable[[], float] = time.monotonic,
        sums_turns: bool = False,
    ) -> None:
        self.config, self.agents, self._clock, self._sums_turns = config, agents, clock, sums_turns
        self._news = threading.Condition()  # signals news for the player; its lock guards state of both threads
        # Queued sessions, by Session.trains.
        self._waiting: dict[bool, deque[Session]] = {True: deque(), False: deque()}
        self._calls: dict[str, list[Call]] = {}  # calls not taken yet, by session
        self._lost: list[str] = []
        self._has_news = False
        self._error: str | None = None
        self.num_over = 0  # number of finished sessions
        # Used only by the server's thread.
        self._playing: dict[str, Session] = {}  # running sessions, by key
        self._workers: dict[str, float] = {}  # time of each worker's last request; a new worker's lies _START_S ahead
        self._last_error = ""  # error text of the session that failed last
        self._over: dict[str, list[str]] = {}  # keys of ended sessions that a worker may abandon, by worker

    # Called by the player.

    def submit(self, call: ToolCall) -> Future[ToolOutput]:
        """Queue a session; the returned future resolves to the session's output."""
        output: Future[ToolOutput] = Future()
        with self._news:
            self._wait_for_worker(call.episode_id, json.loads(call.arguments), output, attempt=0)
        return output

    def wait(self, timeout_s: float) -> None:
        """Wait until a call arrives, a session ends or is lost, the gateway fails, or the timeout is over."""
        with self._news:
            self._news.wait_for(lambda: self._has_news, timeout_s)
            self._has_news = False

    def take(self, sessions: Collection[str]) -> tuple[list[str], list[Call]]:
        """Return (ids of sessions that restart because their worker was lost, new calls) since the previous `take`.

        sessions: ids of the sessions to look at. The calls of each session are in order of arrival.

        Raises RuntimeError: no more sessions can be played (`fail`).
        """
        with self._news:
            if self._error is not None:
                raise RuntimeError(self._error)
            lost = [name for name in self._lost if name in sessions]
            self._lost = [name for name in self._lost if name not in sessions]
            names = [name for name in self._calls if name in sessions]
            return lost, [call for name in names for call in self._calls.pop(name)]

    # Called by the server's thread.

    def of_key(self, key: str) -> Session | None:
        return self._playing.get(key)

    def expect(self, worker: str) -> None:
        """Register a worker that is being started; it counts as lost if its first request takes too long."""
        self._workers[worker] = self._clock() + _START_S

    def hand_out(self, worker: str, most: int) -> tuple[list[Session], list[str]]:
        """Return (new sessions for this worker, keys of ended sessions that the worker may abandon).

        most: maximum number of concurrent training sessions. Equally many evaluation sessions may run in addition, because
        training sessions pause during evaluations.
        """
        self._workers[worker] = self._clock()
        sessions: list[Session] = []
        for trains, waiting in self._waiting.items():
            room = most - sum(each.worker == worker and each.trains == trains for each in self._playing.values())
            with self._news:
                sessions += [waiting.popleft() for _ in range(min(max(0, room), len(waiting)))]
        for session in sessions:
            session.start(worker)
            self._playing[session.key] = session
        return sessions, self._over.pop(worker, [])

    def end(self, session: Session, report: Mapping[str, Any]) -> None:
        self._finish(session, session.end(report))

    def lose(self, worker: str, reason: str) -> None:
        """Mark a worker as lost; its sessions restart on another."""
        self._workers.pop(worker, None)
        for session in [each for each in self._playing.values() if each.worker == worker]:
            if session.attempt + 1 >= self.config.attempts:
                text = f"{reason}; this was the last of external.attempts = {self.config.attempts}"
                self._finish(session, ToolOutput(text, is_error=True))
                continue
            self._stop(session)
            with self._news:
                self._lost.append(session.id)
                self._wait_for_worker(session.id, session.problem, session.output, session.attempt + 1)
                self._tell()
        _log.warning("worker %s is lost: %s", worker, reason)

    def tick(self) -> list[str]:
        """End sessions past their limits, and return names of workers that have fallen silent. Called periodically."""
        now, most = self._clock(), self.config.timeout_s
        silent = [name for name, seen in self._workers.items() if now - seen > SILENCE_S]
        for worker in silent:
            self.lose(worker, f"no request for {SILENCE_S:g} s")
        for session in [each for each in self._playing.values() if each.seconds_alone() > most]:
            self._over.setdefault(session.worker, []).append(session.key)
            text = f"the session exceeded external.timeout_s = {most:g} s"
            self._finish(session, ToolOutput(text, is_error=True))
        return silent

    def fail(self, error: str) -> None:
        """Report to the player that no more sessions can be played."""
        with self._news:
            self._error = error
            self._tell()

    def close(self) -> None:
        for session in list(self._playing.values()):
            self._stop(session)

    def _wait_for_worker(self, name: str, problem: Mapping[str, Any], output: Future[ToolOutput], attempt: int) -> None:
        most, masks = self.config.max_calls, self.config.superseded == "mask"
        lineages = Lineages(self.config.max_lineages)
        session = Session(
            name,
            problem,
            output,
            self.agents,
            self._send,
            most,
            attempt,
            self._clock,
            lineages,
            masks,
            self._sums_turns,
        )
        self._waiting[session.trains].append(session)

    def _send(self, call: Call) -> None:
        with self._news:
            self._calls.setdefault(call.session, []).append(call)
            self._tell()

    def _finish(self, session: Session, output: ToolOutput) -> None:
        self._stop(session)
        self.num_over += 1
        if output.is_error:
            is_told, self._last_error = output.text == self._last_error, output.text
            _log.warning("session %s failed: %s", session.id, "as above" if is_told else output.text[-_MOST_SHOWN:])
        session.output.set_result(output)
        with self._news:
            self._tell()

    def _stop(self, session: Session) -> None:
        """Invalidate the session's key and drop its calls."""
        self._playing.pop(session.key, None)
        session.cancel()
        with self._news:
            self._calls.pop(session.id, None)

    def _tell(self) -> None:
        self._has_news = True
        self._news.notify_all()
