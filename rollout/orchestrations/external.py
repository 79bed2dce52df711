"""Team played by an external program, which calls agents by HTTP and sets their rewards (docs/external.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.parsers import visible
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.gateway.calls import SESSION, SessionEnd
from marsrl.rollout.types import MISSING, Ask, Fate, Finish, Reward, Sample, ToolCall


class External(Orchestration):
    """Team of the agents in the section `agents`. A program's session is one tool call, during which the program calls agents.

    A sample ends with its session. The program sets the rewards of samples. If it sets none, all samples get the task's judgement
    of the program's answer, or of the last answer by an agent. Rewards apply to answers that the program read and did not
    discard; a sample without such answers has no reward.
    """

    name = "external"
    plays_sessions = True

    def __init__(self, agents: Mapping[str, AgentConfig], *given: Any, **options: Any) -> None:
        self.agents = tuple(AgentSpec(name, Role.ADVISER) for name in agents)
        super().__init__(agents, *given, **options)
        self.tools = (SESSION,)

    @classmethod
    def whole_team(cls, agents: Mapping[str, AgentConfig]) -> dict[str, AgentConfig]:
        if not agents or not all(name.replace("-", "_").isidentifier() for name in agents):
            raise ValueError(
                f"agents names {', '.join(agents) or 'none'}; with orchestration=external, expected at least one agent, with a "
                "name of letters, digits, _ and -, which programs send as the model"
            )
        for name, agent in agents.items():
            if given := [key for key in ("system", "suffix") if getattr(agent, key) is not None]:
                raise ValueError(
                    f"agents.{name}.{given[0]} is set, but with orchestration=external the program writes the prompts; "
                    "put the text into the program's messages"
                )
        return dict(agents)

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        problem = episode.problem
        given = {"id": problem.id, "question": problem.question, "answer": problem.answer, "task": problem.task}
        given["purpose"] = episode.purpose
        return [ToolCall(f"{episode.id}/{SESSION}", SESSION, json.dumps(given)), *episode.asks.values()]

    def parse(self, sample: Sample) -> Sample:
        """Read the answer of the last turn that the program read, with the task's prompt set."""
        shown = visible(sample.turn_text, sample.in_thought)
        read = replace(sample, shown=shown or "", answer=None, verdict=None)
        parser = self._prompts[sample.agent].parsers.get("answer")
        if parser is None or shown is None or sample.finish is not Finish.STOP:
            return read
        said = parser.read(shown)
        return replace(read, answer=said if isinstance(said, str) else None)

    def to_judge(self, episode: Episode, sample: Sample) -> str | None:
        end = self.end(episode)
        if end is None or end.is_judged or sample.uid not in end.read:
            return None
        if end.answer is None:
            return sample.answer
        return end.answer if sample.uid == end.read[-1] else None

    def reward(self, episode: Episode, ask: Ask, sample: Sample, judged: Reward | None = None) -> Reward:
        """Return the program's reward, or else the task's judgement of the program's answer or of the last answer by an
        agent."""
        end = self.end(episode)
        if end is None:
            return Reward(MISSING, MISSING, note=episode.error)
        reward = self._reward(end, sample, judged)
        return replace(reward, note="; ".join(filter(None, [reward.note, end.calls_of(sample.turns)])))

    def _reward(self, end: SessionEnd, sample: Sample, judged: Reward | None) -> Reward:
        if sample.uid not in end.read:
            is_superseded = any(turn.fate is Fate.SUPERSEDED for turn in sample.turns)
            why = "has discarded its answer and asked again" if is_superseded else "has not read its answer"
            return Reward(MISSING, MISSING, note=f"the program {why}")
        if not end.is_judged:
            correct = MISSING if judged is None else judged.correct
            return Reward(MISSING, correct, note="" if judged is None else judged.note)
        value = end.reward_of(sample.uid, sample.agent)
        if value is None:
            return Reward(MISSING, MISSING, note="the program set no reward")
        return Reward(value, min(max(value, 0.0), 1.0), {"program": value})

    def turn_rewards(self, episode: Episode, sample: Sample) -> Sequence[float]:
        """Return the program's rewards of single answers that it read."""
        end = self.end(episode)
        if end is None or not end.turn_rewards:
            return ()
        return [end.turn_rewards[turn.call - 1] for turn in sample.trained_turns]

    def outcome(self, episode: Episode) -> Sample | None:
        """Return the last sample that the program read; if the task judges agents' answers, the last of these with an answer."""
        end = self.end(episode)
        samples = [] if end is None else [episode.sample(uid) for uid in end.read]
        if end is not None and not end.is_judged and end.answer is None:
            samples = [sample for sample in samples if sample.answer is not None]
        return samples[-1] if samples else None

    def outcomes(self, episode: Episode) -> dict[str, float]:
        end, outcomes = self.end(episode), super().outcomes(episode)
        if end is None:
            return {}
        if end.is_judged:
            return {
                uid: value
                for uid in outcomes
                if uid in end.read and (value := end.reward_of(uid, episode.sample(uid).agent)) is not None
            }
        return {uid: value for uid, value in outcomes.items() if uid in end.read}

    def metrics(self, episode: Episode) -> Mapping[str, float]:
        """Return the number of samples and of calls of a session."""
        end = self.end(episode)
        return {"samples": len(episode.asks), "calls": 0 if end is None else len(end.fates)}

    def end(self, episode: Episode) -> SessionEnd | None:
        """Return the end of the episode's session; None while it runs, and if it failed."""
        output = episode.outputs.get(f"{episode.id}/{SESSION}")
        return None if output is None or output.is_error else SessionEnd.decode(output.text)
