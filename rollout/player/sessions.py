"""The player's side of external programs: open sessions and calls.

    call   -> a new sample of the agent, or an earlier sample continued after the call's new messages
    turn   -> the reply with the turn's tokens; the sample waits for the session's next call
    end    -> all samples of the session end and are judged, and its asks are closed
    lost   -> all samples are dropped; the session restarts, with new uids

No sample ends before its session, so a checkpoint has only finished sessions. Running ones are replayed from the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from marsrl.rollout.episode import Episode
from marsrl.rollout.gateway.calls import Call, Reply, SessionEnd
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.player.completion import Completion, OpenAsk, State
from marsrl.rollout.types import Ask, Fate, ToolOutput, Turn


class OpenSessions:
    """Open sessions of programs; see the module. open: the player's unfinished asks, by id. counts: the player's metrics."""

    def __init__(self, gateway: Gateway, open_asks: dict[str, OpenAsk], counts: Counter[str]) -> None:
        self._gateway, self._open, self._counts = gateway, open_asks, counts
        self._episodes: dict[str, Episode] = {}  # episodes of running sessions, by id

    def restore(self, open_asks: dict[str, OpenAsk], episodes: Sequence[Episode]) -> None:
        """Continue from a checkpoint, dropping unfinished sessions."""
        self._open = open_asks
        for episode in episodes:
            if episode.open_calls:
                self._counts["rollout/replayed_sessions"] += 1
                for name in episode.asks:
                    open_asks.pop(name, None)
                episode.asks.clear()

    def begin(self, episode: Episode) -> None:
        """Register a running session."""
        self._episodes[episode.id] = episode

    def end(self, episode: Episode, output: ToolOutput) -> list[Completion]:
        """End a session and return its completions that wait for a call.

        Other completions end with their current turn, which counts as unread.
        """
        del self._episodes[episode.id]
        completions = list(self._completions(episode))
        if not output.is_error:
            end = SessionEnd.decode(output.text)
            for each in completions:
                each.turns = tuple(replace(turn, fate=Fate(end.fates[turn.call - 1])) for turn in each.turns)
                if (origin := end.origins.get(each.uid)) is not None:
                    each.parent, each.behind, each.caller = origin.parent, origin.behind, origin.caller
                    each.rewritten = origin.rewritten
        return [each for each in completions if each.state is State.WAITING]

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a call or the end of a session to process, at most timeout_s."""
        self._gateway.wait(timeout_s)

    def take(self, version_of: dict[str, int]) -> tuple[list[Completion], list[Completion]]:
        """Return (completions with a turn to decode, completions of lost sessions). version_of: the policy version by agent."""
        lost, calls = self._gateway.take(self._episodes)
        dropped = [each for name in lost for each in self._forget(self._episodes[name])]
        due = [self._asked(self._episodes[call.session], call, version_of[call.agent]) for call in calls]
        return due, dropped

    def hold(self, completion: Completion) -> bool:
        """Reply at the end of a turn; return True if the session continues and the completion waits."""
        is_over = completion.episode.id not in self._episodes
        if completion.call is not None:
            fate = Fate.UNREAD if is_over else Fate.READ  # provisional: `end` sets the final fate
            turn = Turn(
                completion.call.place + 1, completion.call_start, len(completion.token_ids), completion.finish, fate
            )
            completion.turns = (*completion.turns, turn)
            tokens, logprobs = (
                completion.token_ids[completion.call_start :],
                completion.logprobs[completion.call_start :],
            )
            if completion.call.reply.set_running_or_notify_cancel():
                completion.call.reply.set_result(
                    Reply(completion.uid, tokens, logprobs, completion.finish, completion.error)
                )
            completion.call = None
        if is_over:
            return False
        completion.state = State.WAITING
        return True

    def _asked(self, episode: Episode, call: Call, version: int) -> Completion:
        if call.uid:
            completion = self._open[call.uid.rpartition(":")[0]].completions[0]
            self._counts["rollout/foreign_tokens"] += len(call.token_ids)
            completion.go_on_with(call.token_ids)
            completion.state = State.DUE
        else:
            ask = episode.ask(call.agent, turn=call.number, index=call.attempt)
            completion = Completion()
            of = OpenAsk(ask, call.token_ids, call.text, version, [completion])
            of.episode = episode
            self._open[ask.id] = of
            episode.enter([ask])
        completion.call, completion.call_start = call, len(completion.token_ids)
        return completion

    def _forget(self, episode: Episode) -> list[Completion]:
        """Detach and return all completions of the session; results of those still decoding are ignored."""
        self._counts["rollout/replayed_sessions"] += 1
        dropped = list(self._completions(episode))
        for ask in self._asks(episode):
            del self._open[ask.id]
            del episode.asks[ask.id]
        return dropped

    def _completions(self, episode: Episode) -> Iterator[Completion]:
        for ask in self._asks(episode):
            yield from self._open[ask.id].completions

    def _asks(self, episode: Episode) -> list[Ask]:
        return [ask for ask in episode.asks.values() if ask.id in self._open]
