"""Team: agents, prompts, engines and judge of a run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from marsrl.rollout.agents import returned
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.parsers import THINK_CLOSE, THINK_OPEN, read_calls, visible
from marsrl.rollout.agents.prompts import without_tags
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.engines.protocol import Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.player.completion import Completion
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.rewards.judge import Judge
from marsrl.rollout.rewards.model_judge import ModelJudge
from marsrl.rollout.text import without_surrogates
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.types import (
    Ask,
    Finish,
    FloatArray,
    IntArray,
    Message,
    Reward,
    Sample,
    ToolCall,
    ToolFunction,
    ToolOutput,
)

_log = logging.getLogger(__name__)

Found = TypeVar("Found")


class Prompt(NamedTuple):
    """A rendered prompt: ids [N] int32, and text for display. is_cut: the prompt was too long, and parts were removed."""

    ids: IntArray
    text: str
    is_cut: bool = False


class WatchedJudge:
    """Judge of answers that measures its busy periods.

    `model` judges the episodes whose purpose it serves; `judge`, the task's, judges all others. on_call, if set, receives each
    period with pending answers: (number of answers, start, end), in seconds of time.time().
    """

    def __init__(self, judge: Judge, model: ModelJudge | None = None) -> None:
        self._judge, self.model = judge, model
        self.on_call: Callable[[int, float, float], None] | None = None
        self._lock = threading.Lock()  # judgements end in other threads
        self._num_open = self._num_asked = 0
        self._start = 0.0

    def __call__(self, answers: Sequence[tuple[Episode, str]]) -> list[Future[Reward]]:
        """Start judging answers to their episodes' problems."""
        with self._lock:
            if not self._num_open:
                self._start, self._num_asked = time.time(), 0
            self._num_open += len(answers)
            self._num_asked += len(answers)
        # Programs may send lone surrogates.
        rewards = [self._begin(episode, without_surrogates(answer)) for episode, answer in answers]
        for reward in rewards:
            reward.add_done_callback(self._note_end)
        return rewards

    def _begin(self, episode: Episode, answer: str) -> Future[Reward]:
        if self.model is not None and self.model.serves(episode.purpose):
            return self.model.submit(episode.problem, answer, episode.purpose)
        return self._judge(episode.problem, answer)

    def _note_end(self, _: Future[Reward]) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                return
            num_asked, start = self._num_asked, self._start
        if self.on_call is not None:
            self.on_call(num_asked, start, time.time())


@dataclass(frozen=True, slots=True)
class Team:
    """Resources for playing and judging: agents, orchestration, engines, tools and judges.

    renderers, pools: chat renderers and engine pools of the agents' policies, by policy name. adapters: {policy that is an
    adapter: policy whose pool decodes for it}, which may be the same policy. records_experts: policies whose engines record the
    experts of each token for training. max_turns: limit of agent and tool calls in one episode. tools: pool of the tools that
    agents and orchestration call. gateway: serves programs that play episodes; None for other teams.
    teachers: engines, by policy, that score agents' samples (agents.<name>.teacher).
    max_kept: {agent that is trained with top_p or top_k: maximum number of tokens that its sampler keeps at a position}. The ids
    of kept tokens are recorded for these agents.

    If the orchestration's code, which may be a user's, raises, only that episode or sample ends as an error
    (rollout.max_error_share).
    """

    agents: Mapping[str, AgentConfig]
    orchestration: Orchestration
    renderers: Mapping[str, ChatRenderer]
    pools: Mapping[str, EnginePool]
    judge: WatchedJudge
    records_experts: frozenset[str] = frozenset()
    max_turns: int = 256
    tools: ToolPool | None = None
    max_kept: Mapping[str, int] = field(default_factory=dict)
    teachers: Mapping[str, EnginePool] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    gateway: Gateway | None = None

    def pool_of(self, policy: str) -> EnginePool:
        return self.pools[self.adapters.get(policy, policy)]

    def renderer(self, agent: str) -> ChatRenderer:
        return self.renderers[self.agents[agent].policy]

    def follow(self, episode: Episode) -> tuple[list[Ask], list[ToolCall]]:
        """Add an episode's new asks and tool calls to it, and return them."""
        if episode.error:
            return [], []
        try:
            asked = returned.asks(self.orchestration.follow(episode))
            if self._is_own and asked != returned.asks(self.orchestration.follow(episode)):
                raise ValueError(
                    "two calls with the same answers returned different asks; use episode.rng(name) for all random draws"
                )
            for item in asked:
                self._check(episode, item)
            agent_calls = [c for s in episode.waiting.values() for c in self._calls(s) if isinstance(c, ToolCall)]
            # Calls of agents' own tools are not counted here: max_tool_turns bounds them.
            known = episode.asks if any(agent.tools for agent in self.agents.values()) else episode.asks | episode.calls
            num_turns = len({item.id for item in asked}.union(known))
            if num_turns > self.max_turns and self.gateway is None:  # sessions have their own limit, external.max_calls
                raise ValueError(f"{num_turns} calls of agents and tools exceed rollout.max_turns = {self.max_turns}")
            return episode.enter([*asked, *agent_calls])
        except Exception as error:
            self._fail(episode, "follow", error)
            return [], []

    @property
    def _is_own(self) -> bool:
        """Return True for a user's team, False for a built-in one."""
        return not type(self.orchestration).__module__.startswith("marsrl.")

    def continuation(self, episode: Episode, sample: Sample) -> IntArray | None:
        """Return the tokens [N] int32 that continue a waiting sample, or None until they are available."""
        renderer, options = self.renderer(sample.agent), self.agents[sample.agent].template_options
        try:
            goes_on = self._outputs if self.agents[sample.agent].tools else self.orchestration.continuation
            addition = returned.continuation(goes_on(episode, sample))
            if addition is None:
                return None
            if sample.turn >= self.max_turns:
                raise ValueError(
                    f"sample {sample.uid} continues more often than rollout.max_turns = {self.max_turns} times"
                )
            return (
                renderer.completion_ids(addition)
                if isinstance(addition, str)
                else renderer.next_turn(addition, **options)
            )
        except Exception as error:
            self._fail(episode, "continuation", error)
            return None

    def _functions(self, agent: str) -> dict[str, ToolFunction]:
        """Return the functions, by name, that the agent can call through its chat template (agents.<name>.tools)."""
        if not (names := self.agents[agent].tools):
            return {}
        assert self.tools is not None, names
        return {function.name: function for name in names for function in self.tools.functions(name)}

    def _calls(self, sample: Sample) -> list[ToolCall | str]:
        """Return the calls in a sample's current turn, and an error text for each invalid call; [] for agents without tools."""
        functions = self._functions(sample.agent)
        return read_calls(sample, functions) if functions else []

    def _outputs(self, episode: Episode, sample: Sample) -> list[Message] | None:
        """Return messages with the outputs of the sample's calls, or None until all calls have finished."""
        outputs: list[str] = []
        for call in self._calls(sample):
            output = ToolOutput(f"error: {call}") if isinstance(call, str) else episode.output(call)
            if output is None:
                return None
            outputs.append(output.text)
        texts = self.renderer(sample.agent).cut_longest(outputs, self.agents[sample.agent].max_tool_tokens)
        # The template encloses an output in tags, so the same tags within the output lose their brackets.
        return [Message("tool", without_tags("tool_response", without_tags("tool_call", text))) for text in texts]

    def prompt(self, episode: Episode, ask: Ask) -> Prompt | None:
        """Render the agent's prompt; None if it exceeds max_input_tokens and is not cut (long_prompts), or if the team's code
        fails."""
        renderer, settings = self.renderer(ask.agent), self.agents[ask.agent]
        try:
            messages = returned.messages(self.orchestration.messages(episode, ask))
            self.orchestration.check_words(ask.agent, messages)
            tools = list(self._functions(ask.agent).values())
            prompt_ids, text = renderer.render(messages, tools, **settings.template_options)
        except Exception as error:
            self._fail(episode, "messages", error)
            return None
        if len(prompt_ids) <= settings.max_input_tokens:
            return Prompt(prompt_ids, text)
        if settings.long_prompts == "skip":
            return None
        side: Literal["middle", "left"] = "middle" if settings.long_prompts == "cut_middle" else "left"
        cut = renderer.render_cut(messages, settings.max_input_tokens, side, tools, **settings.template_options)
        return None if cut is None else Prompt(*cut, is_cut=True)

    def outcome(self, episode: Episode) -> Sample | None:
        """Return the sample whose answer counts in a finished episode, or None."""
        return self._of_ended(episode, self.orchestration.outcome, returned.sample_or_none, None)

    def alone(self, episode: Episode) -> Sample | None:
        """Return the sample with the first agent's own answer in a finished episode, or None."""
        return self._of_ended(episode, self.orchestration.alone, returned.sample_or_none, None)

    def redrawn(self, episode: Episode) -> Collection[str]:
        """Return the uids of samples that a later draw has replaced."""
        return self._of_ended(episode, self.orchestration.redrawn, returned.uids, ())

    def outcomes(self, episode: Episode) -> Mapping[str, float]:
        """Return rewards of credit.reward_scheme=outcome by uid; empty for a failed episode."""
        return self._of_ended(episode, self.orchestration.outcomes, returned.numbers, {})

    def with_outcome(self, sample: Sample, outcome: float) -> Sample:
        """Return the sample with its episode's outcome; for an adviser the outcome is also the reward."""
        sample = replace(sample, outcome=outcome)
        is_whole = sample.finish is Finish.STOP or self.orchestration.plays_sessions
        if not self.orchestration.spec(sample.agent).advises or not is_whole or sample.finish is Finish.ERROR:
            return sample
        if not sample.reward.is_missing:
            return sample  # already rewarded by the team's own rule, or overlong
        reward = Reward(outcome, outcome, {"outcome": outcome}, turns=sample.reward.turns)
        return replace(sample, reward=self._penalised(sample, reward))

    def is_read(self, sample: Sample) -> bool:
        """Return True if the agent's parser found an answer, verdict or text in an ended sample."""
        return sample.finish is Finish.STOP and self.orchestration.is_readable(sample)

    def metrics(self, episode: Episode) -> Mapping[str, float]:
        """Return the team's own metrics of a finished episode; empty for a failed one."""
        return self._of_ended(episode, self.orchestration.metrics, returned.metrics, {})

    def _of_ended(
        self, episode: Episode, method: Callable[[Episode], object], check: Callable[[object], Found], otherwise: Found
    ) -> Found:
        """Call this method of the orchestration and check the result; return `otherwise` if the episode has failed or fails
        now."""
        if not episode.error:
            try:
                return check(method(episode))
            except Exception as error:
                self._fail(episode, method.__name__, error)
        return otherwise

    def _check(self, episode: Episode, item: Ask | ToolCall) -> None:
        if item.episode_id != episode.id:
            raise ValueError(f"{item.id}: expected an ask or call of episode {episode.id}")
        if isinstance(item, ToolCall):
            if item.tool not in self.orchestration.tools or not (self.tools or self.gateway):
                raise ValueError(f"{item.id}: {type(self.orchestration).__name__}.tools does not name {item.tool!r}")
        elif item.agent not in self.agents:
            raise ValueError(f"{item.id}: no agent named {item.agent!r}; expected one of {', '.join(self.agents)}")
        elif not isinstance(item.num_samples, int) or item.num_samples < 1:
            raise ValueError(f"{item.id}: num_samples is {item.num_samples!r}; expected an integer of at least 1")

    def _fail(self, episode: Episode, method: str, error: Exception) -> None:
        episode.error = self._why(method, error)
        _log.warning("episode %s ends: %s", episode.id, episode.error, exc_info=None if self._is_own else error)

    def _why(self, method: str, error: Exception) -> str:
        """Describe an error in one line: the method, the error, and the line in the user's file."""
        place = returned.place_of(error, self.orchestration, method) if self._is_own else ""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{self.orchestration.name}.{method}: {words}" + (f" ({place})" if place else "")

    def sampling(self, agent: str) -> Sampling:
        """Return the agent's sampling settings for training."""
        config = self.agents[agent]
        stops = self.renderer(agent).stop_ids
        most = self.max_kept.get(agent)
        top_k = config.top_k if most is None or 0 < config.top_k <= most else most
        return Sampling(config.temperature, config.top_p, top_k, stops, tuple(config.stop), most is not None)

    def sample(self, completion: Completion) -> Sample:
        """Parse an ended or paused completion into a Sample without reward; an error sample if the orchestration's parser
        raises."""
        episode, ask, prompt_text, read = (
            completion.episode,
            completion.of.ask,
            completion.of.prompt_text,
            completion.until_read(),
        )
        renderer, finish = self.renderer(ask.agent), read.finish
        # The text is None after a restart or an error.
        text = renderer.decode(completion.token_ids) if completion.text is None else completion.text
        read_text = text if read is completion else renderer.decode(read.token_ids)
        turn_start, in_thought = present_turn(renderer, prompt_text, read, read_text)
        sample = Sample(
            uid=completion.uid,
            rollout_id=episode.rollout_id,
            problem_id=episode.problem.id,
            agent=ask.agent,
            group_id=ask.group,
            parent_uid=ask.parent_uid or completion.parent or None,
            prompt_ids=completion.of.prompt_ids,
            token_ids=completion.token_ids,
            is_sampled=completion.is_trained,
            rollout_logprobs=completion.logprobs,
            segments=completion.segments,
            finish=finish,
            full_text=text,
            prompt_text=prompt_text,
            reward=Reward(np.nan, np.nan, note=completion.error or "not judged"),
            routed_experts=completion.routed_experts,
            kept_tokens=completion.kept_tokens,
            turn=completion.turn,
            turn_start=turn_start,
            in_thought=in_thought,
            turns=completion.turns,
            turn_end=None if read is completion else len(read_text),
            behind=completion.behind,
            caller=completion.caller,
            rewritten=completion.rewritten,
        )
        settings = self.agents[ask.agent]
        if settings.tools and finish is Finish.STOP and completion.turn < min(settings.max_tool_turns, self.max_turns):
            waiting = replace(sample, shown=visible(sample.turn_text, in_thought) or "", finish=Finish.WAITING)
            if calls := self._calls(waiting):
                assert self.tools is not None, settings.tools
                self.tools.count_unmade(sum(isinstance(call, str) for call in calls))
                return waiting
        try:
            parsed = returned.parsed(self.orchestration.parse(sample), sample)
            # parse() may set WAITING, which is valid only if the model itself ended the turn.
            return replace(parsed, finish=finish) if finish is not Finish.STOP else parsed
        except Exception as raised:
            return self._failed(sample, "parse", raised)

    def begin_judging(self, ended: Sequence[Completion]) -> list[Future[Reward] | None]:
        """Start a judgement for each completion; None for a completion whose reward needs none."""
        answers = []
        for each in ended:
            assert each.sample is not None, f"{each.uid} has not ended"
            is_error = each.sample.finish is Finish.ERROR
            answers.append(None if is_error else self.orchestration.to_judge(each.episode, each.sample))
        asked = [(each.episode, answer) for each, answer in zip(ended, answers, strict=True) if answer is not None]
        judgements = iter(self.judge(asked))
        return [None if answer is None else next(judgements) for answer in answers]

    def rewarded(self, completion: Completion, judgement: Reward | None) -> Sample:
        """Return the completion's sample with its reward by the orchestration. judgement: None if the reward needs none."""
        sample = completion.sample
        assert sample is not None, f"{completion.uid} has not ended"
        if sample.finish is Finish.ERROR:
            return sample  # the sample keeps its missing reward and the reason
        try:
            method = "reward"
            reward = returned.reward(
                self.orchestration.reward(completion.episode, completion.of.ask, sample, judgement)
            )
            method = "turn_rewards"
            turns = returned.turn_rewards(self.orchestration.turn_rewards(completion.episode, sample), sample)
            return replace(sample, reward=self._penalised(sample, replace(reward, turns=turns)))
        except Exception as raised:
            return self._failed(sample, method, raised)

    def teacher_logprobs(self, samples: Sequence[Sample]) -> dict[str, FloatArray]:
        """Return {uid: [N] float32, nats} for samples whose agents have teachers: the teacher's log-probs of the completion.

        The log-probs are at the agent's temperature, over the whole vocabulary. Teachers score one after the other; each scores
        all samples with the same temperature at once.
        """
        asked: dict[tuple[str, float], list[Sample]] = {}
        for sample in samples:
            agent = self.agents[sample.agent]
            if agent.teacher is not None:
                asked.setdefault((agent.teacher.policy, agent.temperature), []).append(sample)
        logprobs: dict[str, FloatArray] = {}
        for (policy, temperature), policy_samples in asked.items():
            sequences = [np.concatenate([s.prompt_ids, s.token_ids]) for s in policy_samples]
            scores = self.teachers[policy].score_shared(sequences, temperature)
            logprobs |= {s.uid: score[len(s.prompt_ids) - 1 :] for s, score in zip(policy_samples, scores, strict=True)}
        return logprobs

    @property
    def all_pools(self) -> list[EnginePool]:
        """Return the pools of agents, judge and teachers."""
        model = self.judge.model
        return [*self.pools.values(), *self.teachers.values(), *([] if model is None else [model.pool])]

    def sleep(self, renewed: Collection[str]) -> None:
        """Free all engines' memory for the trainer if they share its GPUs; else do nothing.

        renewed: policies whose engines get new weights before their next request, and therefore may discard the old weights.
            After an update of an adapter only, the weights that it adapts are still needed.
        """
        for policy, pool in self.pools.items():
            pool.sleep(keeps_weights=policy not in renewed or policy in self.adapters.values())
        for pool in self.teachers.values():
            pool.sleep(keeps_weights=True)
        if self.judge.model is not None:
            self.judge.model.sleep()

    def _penalised(self, sample: Sample, reward: Reward) -> Reward:
        """Return the reward plus the rewards of single turns, minus penalties (agents.<name>.format_penalty and overlong).

        `correct` does not change.
        """
        settings = self.agents[sample.agent]
        if reward.is_missing:
            return reward
        added = {"turns": sum(reward.turns)} if reward.turns else {}
        if settings.format_penalty and not self.orchestration.is_readable(sample):
            added["format"] = -settings.format_penalty
        if (overlong := settings.overlong) is not None:
            longest = settings.max_response_tokens or self.orchestration.max_response_tokens
            num_over = len(sample.token_ids) - (longest - overlong.buffer)
            added["overlong"] = -overlong.penalty * min(max(num_over / overlong.buffer, 0.0), 1.0)
        if not added:
            return reward
        return replace(reward, value=reward.value + sum(added.values()), parts={**reward.parts, **added})

    def _failed(self, sample: Sample, method: str, error: Exception) -> Sample:
        """Return an error sample after the orchestration's code failed; it counts towards rollout.max_error_share."""
        note = self._why(method, error)
        _log.warning("sample %s ends as an error: %s", sample.uid, note, exc_info=None if self._is_own else error)
        return replace(sample, finish=Finish.ERROR, answer=None, verdict=None, reward=Reward(np.nan, np.nan, note=note))


def present_turn(renderer: ChatRenderer, prompt_text: str, completion: Completion, text: str) -> tuple[int, bool]:
    """Return (index in `text` where the current turn begins, True if the turn begins within a thought).

    Whether a thought is open at the beginning follows from the prompt (first turn), from the messages after the last turn (if the
    policy ended that turn), or from the policy's own earlier text (after a pause). Text by tools or other agents is ignored.
    """
    begins = in_thought = prompt_text.rstrip().endswith(THINK_OPEN)
    if not completion.turn:
        return 0, begins
    ids, is_sampled = completion.token_ids, completion.is_sampled
    # Split into runs of tokens that the policy sampled, and runs of other tokens.
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(is_sampled)) + 1)
    ended = [is_sampled[run[0]] and int(ids[run[-1]]) in renderer.stop_ids for run in runs[:-1]]
    # Only runs after the last ended turn matter.
    first = max((place for place, has in enumerate(ended, 1) if has), default=0)
    last, has_ended = "", first > 0
    for run in runs[first:]:
        words = renderer.decode(ids[run])
        if is_sampled[run[0]]:
            last, begins = words, in_thought
            opened, closed = words.rfind(THINK_OPEN), words.rfind(THINK_CLOSE)
            in_thought = opened > closed or (begins and closed < 0)
            has_ended = int(ids[run[-1]]) in renderer.stop_ids
        else:
            if has_ended:
                in_thought = words.rstrip().endswith(THINK_OPEN)
            last, begins = "", in_thought
    return len(text) - len(last), begins
