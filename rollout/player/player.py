"""Player of episodes: asks agents, has completions decoded and judged, calls tools, and continues with the team's next asks.

    begin -> open -> submit -> result -> sample -> judged -> closed -> next asks
              ^                            '-> waits for a tool, another agent or its next turn, then continues
              '-------------------------------------------------------------------------------'

A Game decides what is played and consumes the results: stages of training (stages.py), or episodes of an evaluation
(evaluation.py).

This module has no threads and no clocks: the driver calls submit, collect and take, round after round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.completion import Completion, OpenAsk, State
from marsrl.rollout.player.sessions import OpenSessions
from marsrl.rollout.team import Prompt, Team
from marsrl.rollout.types import Ask, Finish, Reward, Sample, ToolCall, ToolOutput

NOTHING_OPEN = "the episode waits, but it has no open ask or call"
_BESIDE_S = 0.01  # timeout of one collect while judges or tools work
_TOO_LONG = Prompt(np.zeros(0, np.int32), "(the prompt is longer than max_input_tokens)")


class Game(Protocol):
    """Source and sink of played episodes, and rules for decoding them.

    has_segments: True if completions may be decoded in several requests.
    answers_too_long: True if an ask whose prompt is too long gets empty completions that count as overlong; False if it ends
        without any.
    """

    has_segments: bool
    answers_too_long: bool

    def most_tokens(self, agent: str) -> int:
        """Return the maximum tokens of a completion of the agent."""

    def request(self, completion: Completion) -> DecodeRequest:
        """Build the request for a completion's next segment, submitted now. It may name another adapter of the policy's pool."""

    def goes_on(self, completion: Completion, result: DecodeResult) -> bool:
        """Return True if the next segment starts now. Called when a segment has reached its limit or was aborted."""

    def judged(self, completion: Completion) -> None:
        """Record a finished, judged completion."""

    def closed(self, ask: OpenAsk, samples: tuple[Sample, ...]) -> None:
        """Record the samples of a finished ask."""

    def is_followed(self, episode: Episode) -> bool:
        """Return True if the episode continues with the team's next asks."""

    def followed(self, episode: Episode, asks: Sequence[Ask]) -> None:
        """Receive the team's next asks, and pass them to Player.ask now or later."""

    def ended(self, episode: Episode) -> None:
        """Handle the end of an episode."""


class Player:
    """Player of a game's episodes; see the module.

        player = Player(team, game)
        player.resume({"main": 0}); player.begin(episode)
        while player.is_busy:
            player.submit()
            player.take(player.collect(timeout_s=0.2))

    in_step: True to close asks, and submit requests, only when no decoding, judging or tool call is running. Both happen in a
    fixed order, and requests ignore slots, so that the composition of an engine's batches does not depend on timing.
    open: unfinished asks, by id. counts: metrics of decoding.
    """

    def __init__(self, team: Team, game: Game, *, in_step: bool = False) -> None:
        self.team, self.versions = team, dict[str, int]()
        self.open: dict[str, OpenAsk] = {}
        self.counts: Counter[str] = Counter()
        self._game, self._in_step = game, in_step
        self.is_resting = True
        self._due: dict[Completion, None] = {}  # completions with a due segment, in order
        # Completions in the engines and their requests, by uid.
        self._decoding: dict[str, tuple[Completion, DecodeRequest]] = {}
        self._judging: dict[Completion, Future[Reward] | None] = {}
        self._calling: dict[Future[ToolOutput], tuple[Episode, ToolCall]] = {}
        self._answered: deque[Future[ToolOutput]] = deque()  # finished tool calls; any thread appends
        self._complete: list[OpenAsk] = []  # asks ready to be closed
        self._ended: list[Episode] = []
        self._dirty: dict[int, Episode] = {}  # episodes whose waiting completions may now continue
        gateway = team.gateway
        self._sessions = None if gateway is None else OpenSessions(gateway, self.open, self.counts)

    @property
    def is_decoding(self) -> bool:
        return bool(self._decoding)

    @property
    def is_working(self) -> bool:
        """True if any decoding, judging or tool call is running."""
        return bool(self._decoding or self._judging or self._calling)

    @property
    def has_room(self) -> bool:
        """True if nothing is due and every pool has a free slot."""
        return not self._due and all(pool.has_room for pool in self.team.pools.values())

    @property
    def is_calling(self) -> bool:
        """True if tool calls are running."""
        return bool(self._calling)

    @property
    def is_busy(self) -> bool:
        """True if there is more to do."""
        return bool(self._due or self.is_working)

    # Episodes and asks.

    def begin(self, episode: Episode) -> None:
        """Begin an episode with the team's first asks."""
        self._game.followed(episode, self._follow(episode))

    def restore(self, opened: dict[str, OpenAsk], episodes: Sequence[Episode]) -> None:
        """Continue from a checkpoint: repeat interrupted decoding and judging, and tool calls without output."""
        self.open = opened
        if self._sessions is not None:
            self._sessions.restore(opened, episodes)
        by_id = {episode.id: episode for episode in episodes}
        judging = []
        for ask in opened.values():
            ask.episode = by_id[ask.ask.episode_id]
            for each in ask.completions:
                if each.state is State.DECODING:
                    each.state = State.DUE
                elif each.state is State.JUDGING:
                    judging.append(each)
            if not ask.unfinished:
                self._complete.append(ask)
        self._end(judging)
        for episode in episodes:
            self._call(episode, episode.open_calls)
            self._mark(episode)

    def ask(self, episode: Episode, asks: Sequence[Ask]) -> list[OpenAsk]:
        """Open asks, and handle prompts that are too long."""
        opened, left = [], deque(asks)
        while left:
            ask = left.popleft()
            prompt = self.team.prompt(episode, ask)
            if prompt is None:
                self.counts["rollout/prompts_too_long"] += not episode.error
                if not self._game.answers_too_long:
                    left.extend(self._over(episode, ask, ()))
                    continue
            elif prompt.is_cut:
                self.counts["rollout/prompts_cut"] += 1
            ids, text, _ = prompt or _TOO_LONG
            version = self.versions[self._policy(ask.agent)]
            opened_ask = OpenAsk(ask, ids, text, version, [Completion() for _ in range(ask.num_samples)])
            opened_ask.episode = episode
            self.open[ask.id] = opened_ask
            opened.append(opened_ask)
            if prompt is not None:
                self.due(opened_ask.completions)
                continue
            for each in opened_ask.completions:
                each.finish = Finish.LENGTH
            self._end(opened_ask.completions)
        return opened

    def due(self, completions: Iterable[Completion]) -> None:
        """Mark completions whose next segments must be decoded."""
        self._due.update(dict.fromkeys(completions))

    # One round.

    def submit(self) -> None:
        """Submit due requests to the engines, tagged with their policy's version."""
        if self.is_resting or (self._in_step and self.is_working):
            return
        by_policy: dict[str, list[Completion]] = {}
        for completion in sorted(self._due, key=_place) if self._in_step else self._due:
            by_policy.setdefault(self._policy(completion.agent), []).append(completion)
        self._due = {}
        by_pool: dict[str, list[DecodeRequest]] = {}
        for policy, completions in by_policy.items():
            requests = [self._game.request(completion) for completion in completions]
            if policy in self.team.adapters:
                version = self.versions[policy]
                requests = [
                    each if each.adapter else replace(each, adapter=policy, adapter_version=version)
                    for each in requests
                ]
            for completion, request in zip(completions, requests, strict=True):
                completion.state = State.DECODING
                self._decoding[request.uid] = completion, request
            by_pool.setdefault(self.team.adapters.get(policy, policy), []).extend(requests)
        for name, requests in by_pool.items():
            # The base weights under adapters do not change.
            version = 0 if name in self.team.adapters else self.versions[name]
            self.team.pools[name].submit(requests, version=version, at_once=self._in_step)

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        """Return finished results, waiting at most timeout_s for at least one, or for judges and tools.

        The player's state does not change.
        """
        pools = [pool for pool in self.team.pools.values() if pool.num_under_way]
        if not pools and self._sessions is not None:
            self._sessions.wait(min(timeout_s, _BESIDE_S) if self._judging else timeout_s)
            return []
        if not pools:
            futures: list[Future[Any]] = [each for each in self._judging.values() if each is not None]
            wait([*futures, *self._calling], timeout_s, FIRST_COMPLETED)
            return []
        if not self._in_step and (self._judging or self._calling):
            timeout_s = min(timeout_s, _BESIDE_S)
        timeout_s /= len(pools)
        return [result for pool in pools for result in pool.collect(timeout_s, is_urgent=not self._in_step)]

    def take(self, results: Sequence[DecodeResult]) -> None:
        """Process results, and everything that they and finished judgements and tool calls make possible."""
        ended = []
        for result in results:
            completion, request = self._decoding.pop(result.uid)
            self._count(completion, request, result)
            if self.open.get(completion.of.ask.id) is not completion.of:
                continue  # the completion's session was lost meanwhile
            completion.extend(result)
            completion.finish, completion.error = self._finish(completion, result), result.error
            if completion.finish is not Finish.UNFINISHED:
                completion.num_decoded, completion.text = 0, result.text
                ended.append(completion)
                continue
            completion.state = State.DUE
            if self._game.goes_on(completion, result):
                self.due([completion])
        self._end(ended)
        self.settle()

    def settle(self) -> None:
        """Process finished judgements, tool calls and asks, until nothing more follows."""
        while self._go_on():
            pass

    def drain(self, adapter: str | None = None) -> None:
        """Abort decoding (of this adapter; None: of all policies) and keep the tokens.

        Judging continues: a judge has its own engines or processes.
        """
        pools = self.team.pools.values() if adapter is None else [self.team.pool_of(adapter)]
        for pool in pools:
            self.take(pool.drain(adapter))

    def rest(self, adapters: Sequence[str] | None = None) -> None:
        """Drain, and submit nothing until `resume`.

        The engines are then free for other calls, or for an update of these adapters while they decode for others.
        """
        self.is_resting = True
        for adapter in [None] if adapters is None else adapters:
            self.drain(adapter)

    def resume(self, versions: Mapping[str, int]) -> None:
        """Resume under the given policy versions, which apply to the next segments."""
        self.versions, self.is_resting = dict(versions), False

    def close(self, ask: OpenAsk) -> None:
        """End an ask with its finished samples and open its successors.

        An ask with unfinished completions may be closed only while the player rests.
        """
        for each in ask.completions:
            self._due.pop(each, None)
            self._judging.pop(each, None)
        del self.open[ask.ask.id]
        samples = ask.samples
        self._game.closed(ask, samples)
        self._game.followed(ask.episode, self._over(ask.episode, ask.ask, samples))

    def _policy(self, agent: str) -> str:
        return self.team.agents[agent].policy

    def _count(self, completion: Completion, request: DecodeRequest, result: DecodeResult) -> None:
        of_agent, (num_read, num_drawn) = f"cost/{completion.agent}", result.usage_of(request)
        for total, agent_metric, count in (
            ("rollout/tokens", "output_tokens", num_drawn),
            ("rollout/prompt_tokens", "input_tokens", num_read),
            ("rollout/cached_tokens", "cached_tokens", result.num_cached_tokens),
        ):
            self.counts[total] += count
            self.counts[f"{of_agent}/{agent_metric}"] += count
        self.counts.update({f"{of_agent}/seconds": result.seconds})
        if result.num_accepted is not None:
            self.counts["rollout/accepted_tokens"] += result.num_accepted
        if result.kept_tokens is not None:
            self.counts["rollout/kept_tokens"] += len(result.kept_tokens.ids)
        elif len(result.token_ids) and request.sampling.records_kept:
            raise RuntimeError(
                f"{result.uid}: agents.{completion.agent}.top_p and top_k truncate, but the engine did not return the kept "
                "tokens that loss.truncation=renormalise needs; set loss.truncation to another value, or turn off top_p and top_k"
            )

    def _finish(self, completion: Completion, result: DecodeResult) -> Finish:
        if result.finish in (Finish.STOP, Finish.ERROR):
            return result.finish
        most_tokens = self._game.most_tokens(completion.agent)
        is_full = len(completion.token_ids) >= most_tokens or completion.tokens_left_of_call <= 0
        if is_full or (result.finish is Finish.LENGTH and not self._game.has_segments):
            return Finish.LENGTH
        return Finish.UNFINISHED

    def _end(self, ended: Sequence[Completion]) -> None:
        """Judge completions that have ended; one that still needs an input, such as a tool's output, waits instead."""
        unjudged = []
        for completion in ended:
            if self._sessions is not None and self._sessions.hold(completion):
                continue
            sample = self.team.sample(completion)
            if sample.finish is Finish.WAITING:
                completion.state = State.WAITING
                completion.episode.wait(sample)
                self._game.followed(completion.episode, self._follow(completion.episode))
            else:
                completion.state, completion.sample = State.JUDGING, sample
                unjudged.append(completion)
        self._judging.update(zip(unjudged, self.team.begin_judging(unjudged), strict=True))

    def _go_on(self) -> bool:
        """Process finished judgements, tool calls and asks once; return True if new requests followed."""
        self._take_judged()
        self._take_outputs()
        self._take_calls()
        if self._in_step and self.is_working:
            return False
        complete, self._complete = self._complete, []
        for ask in sorted(complete, key=lambda ask: ask.ask.id):
            self.close(ask)
        ended, self._ended = self._ended, []
        for episode in sorted(ended, key=lambda episode: episode.id):
            self._game.ended(episode)
        dirty, self._dirty = self._dirty, {}
        for episode in dirty.values():
            self._resume(episode)
        return bool(complete or ended or dirty)

    def _take_judged(self) -> None:
        for completion in [each for each, reward in self._judging.items() if reward is None or reward.done()]:
            reward = self._judging.pop(completion)
            completion.sample = self.team.rewarded(completion, None if reward is None else reward.result())
            completion.state = State.OVER
            self._game.judged(completion)
            if not completion.of.unfinished:
                self._complete.append(completion.of)

    def _take_outputs(self) -> None:
        while self._answered:
            future = self._answered.popleft()
            episode, call = self._calling.pop(future)
            episode.outputs[call.id] = output = future.result()
            if self._sessions is not None:
                episode.error = output.text if output.is_error else ""
                self._end(self._sessions.end(episode, output))
            self._game.followed(episode, self._follow(episode))

    def _take_calls(self) -> None:
        """Process calls of programs."""
        if self._sessions is not None and self._calling and not self.is_resting:
            versions = {name: self.versions[agent.policy] for name, agent in self.team.agents.items()}
            due, dropped = self._sessions.take(versions)
            for each in dropped:
                self._due.pop(each, None)
            self.due(due)

    def _over(self, episode: Episode, ask: Ask, samples: tuple[Sample, ...]) -> list[Ask]:
        episode.close(ask, samples)
        return self._follow(episode)

    def _follow(self, episode: Episode) -> list[Ask]:
        """Open new asks and start tool calls; end an episode with nothing open."""
        asks: list[Ask] = []
        if self._game.is_followed(episode):
            asks, calls = self.team.follow(episode)
            self._call(episode, calls)
        self._mark(episode)
        if episode.is_at_its_end:
            self._ended.append(episode)
        return asks

    def _call(self, episode: Episode, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            if self._sessions is not None:
                self._sessions.begin(episode)
            tools = self.team.gateway or self.team.tools
            assert tools is not None  # without tools, Team.follow rejects calls
            future = tools.submit(call)
            self._calling[future] = episode, call
            future.add_done_callback(self._answered.append)

    def _mark(self, episode: Episode) -> None:
        if episode.waiting:
            self._dirty[id(episode)] = episode

    def _resume(self, episode: Episode) -> None:
        """Continue waiting completions whose inputs are available. A completion whose input can never arrive ends as an error."""
        said = {uid: self.team.continuation(episode, sample) for uid, sample in episode.waiting.items()}
        is_over = bool(episode.error) or (all(tokens is None for tokens in said.values()) and self._is_stuck(episode))
        ended = []
        for uid, tokens in said.items():
            if tokens is None and not is_over:
                continue
            del episode.waiting[uid]
            name, _, index = uid.rpartition(":")
            completion = self.open[name].completions[int(index)]
            if tokens is None:
                completion.finish, completion.error = Finish.ERROR, episode.error or NOTHING_OPEN
                ended.append(completion)
            elif len(completion.token_ids) + len(tokens) >= self._game.most_tokens(completion.agent):
                completion.finish = Finish.LENGTH
                ended.append(completion)
            else:
                self.counts["rollout/foreign_tokens"] += len(tokens)
                completion.go_on_with(tokens)
                completion.state = State.DUE
                self.due([completion])
        self._end(ended)

    def _is_stuck(self, episode: Episode) -> bool:
        """Return True if only waiting completions are open in the episode."""
        open_asks = [name for name in episode.asks if name not in episode.answers]
        return not episode.open_calls and all(
            name in self.open
            and (unfinished := self.open[name].unfinished)
            and all(each.state is State.WAITING for each in unfinished)
            for name in open_asks
        )


def _place(completion: Completion) -> tuple[str, int]:
    return completion.of.ask.id, completion.index
