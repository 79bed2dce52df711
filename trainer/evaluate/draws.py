"""Records of an evaluation, one for each draw of a problem. Every number is computed from them, and a killed evaluation resumes.

draws.jsonl in an evaluation's folder has a line for each finished draw, fixed_answers.jsonl one for each answered fixed input;
their keys encode all that they depend on (trainer/runs/answers.py), so that a line of another problem or team is never reused.
Both files have every prompt and completion; memory keeps only the end of each completion.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from marsrl.rollout.agents.orchestration import is_right
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import Played
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team
from marsrl.rollout.types import Ask, Finish, Problem, Sample
from marsrl.trainer.report.summary import Schema, ToolUsage
from marsrl.trainer.runs.answers import Answers, key_of

DRAWS, EVALUATION = "draws.jsonl", "evaluation.json"
Held = TypeVar("Held")
MAX_ANSWER_CHARS = 200  # characters of a saved answer; two longer answers count as equal if these characters are
MAX_HELD_CHARS = 200  # characters of a completion's end in memory: completions of a long evaluation would fill it


class Call(Schema):
    """A completion. correct: null if its judge failed; verdict: null without one; is_of_right: correctness of the solution that a
    verdict judges, null if unknown or without a verdict. is_read: its answer, verdict, query or route was found, null if an
    engine failed. is_redrawn: replaced by a later draw. seconds: engine time. prompt: index in `prompts` of what the agent
    read, with the chat template's marks; text: the whole completion. is_read, prompt and text are null in files of earlier
    versions."""

    agent: str
    correct: float | None
    verdict: bool | None = None
    is_of_right: bool | None = None
    input_tokens: int
    output_tokens: int
    tokens: int
    is_cut: bool
    is_read: bool | None = None
    is_redrawn: bool = False
    seconds: float = 0.0
    prompt: int | None = None
    text: str | None = None

    def shortened(self) -> Call:
        """The call as kept in memory, without its prompt and most of its text."""
        return self if self.text is None else self.model_copy(update={"text": self.text[-MAX_HELD_CHARS:]})


class Said(Schema):
    """Answer that counts. correct: null if unknown; answer: its beginning, null without one; tokens: of its completion."""

    correct: float | None
    answer: str | None = None
    tokens: int = 0


class Draw(Schema):
    """One draw of one problem. problem: its id; question: a digest of question and answer, the same in every run.

    of: the set of data.eval. alone: null if the first agent does not solve. judge: a model judge's counts since the last draw.
    latency_s: from its first request to its end, in the process that played it (Played); null without requests.
    prompts: the prompts of its calls, without repetition; each call has an index into them.
    """

    of: str
    problem: str
    question: str
    system: Said
    alone: Said | None
    calls: list[Call]
    team: dict[str, float] = Field(default_factory=dict)
    tools: dict[str, ToolUsage] = Field(default_factory=dict)
    judge: dict[str, float] = Field(default_factory=dict)
    latency_s: float | None = None
    error: str = ""
    prompts: list[str] = Field(default_factory=list)

    @classmethod
    def shortened(cls, value: Any) -> Draw:
        """A saved draw as kept in memory, without prompts and most of the texts."""
        draw = cls.model_validate(value)
        return draw.model_copy(update={"prompts": [], "calls": [call.shortened() for call in draw.calls]})


class FixedAnswer(Schema):
    """A completion for one of the fixed inputs. problem: a digest; prompts: as in Draw."""

    problem: str
    call: Call
    prompts: list[str] = Field(default_factory=list)

    @classmethod
    def shortened(cls, value: Any) -> FixedAnswer:
        """A saved answer as kept in memory, without prompts and most of its text."""
        answer = cls.model_validate(value)
        return answer.model_copy(update={"prompts": [], "call": answer.call.shortened()})


class Kept(ExitStack):
    """Saved draws, answers to fixed inputs and the inputs' episodes. folder: None keeps them only in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()

        def answers(name: str, read: Callable[[Any], Held]) -> Answers[Held]:
            return self.enter_context(closing(Answers(folder and folder / name, read)))

        self.draws = answers(DRAWS, Draw.shortened)
        self.fixed = answers("fixed_answers.jsonl", FixedAnswer.shortened)
        self.episodes = answers("input_episodes.jsonl", _unpacked)


def read_draws(folder: Path) -> list[Draw]:
    """Draws in an evaluation's folder, without prompts and with the ends of texts; [] without any."""
    return Answers.read(folder / DRAWS, Draw.shortened) if (folder / DRAWS).is_file() else []


def digest(problem: Problem) -> str:
    """A digest of question and reference answer, independent of the file."""
    return key_of(question=problem.question, answer=problem.answer)


def episode_key(identity: str, episode: Episode) -> str:
    """Return the key of a draw. identity: the team's identity."""
    return key_of(identity=identity, episode=episode.id, question=digest(episode.problem))


def fixed_key(identity: str, episode: Episode, ask: Ask) -> str:
    """The key of a fixed answer; includes the agent's prompt."""
    shown = [sample.shown for sample in episode.inputs(ask)]
    return key_of(identity=identity, ask=ask.id, question=digest(episode.problem), shown=shown)


def draw_of(team: Team, set_name: str, played: Played, judge: Mapping[str, float]) -> Draw:
    """Return the record of a finished episode. set_name: its set; judge: the judge's counts since the last draw."""
    episode = played.episode
    tokens = {sample.uid: len(sample.token_ids) for sample in played.samples}
    redrawn = team.redrawn(episode)
    asks = {f"{ask.id}:{i}": ask for ask in episode.asks.values() for i in range(ask.num_samples)}
    first = team.orchestration.agents[0]
    prompts = {text: i for i, text in enumerate(dict.fromkeys(sample.prompt_text for sample in played.samples))}
    return Draw(
        of=set_name,
        problem=episode.problem.id,
        question=digest(episode.problem),
        system=_said(team.outcome(episode), tokens),
        alone=_said(team.alone(episode), tokens) if first.solves else None,
        calls=[
            call_of(
                team,
                episode,
                asks[s.uid],
                s,
                played.seconds[s.uid],
                played.usage[s.uid],
                prompt=prompts[s.prompt_text],
                is_redrawn=s.uid in redrawn,
            )
            for s in played.samples
        ],
        team=dict(team.metrics(episode)),
        tools=_tools(episode),
        judge=dict(judge),
        latency_s=played.latency_s,
        error=episode.error,
        prompts=list(prompts),
    )


def _tools(episode: Episode) -> dict[str, ToolUsage]:
    usage: dict[str, ToolUsage] = {}
    for call_id, output in episode.outputs.items():
        name = episode.calls[call_id].tool
        usage[name] = usage.get(name, ToolUsage()) + ToolUsage(calls=1, seconds=output.seconds)
    return usage


def call_of(
    team: Team,
    episode: Episode,
    ask: Ask,
    sample: Sample,
    seconds: float,
    usage: tuple[int, int] | None,
    *,
    prompt: int = 0,
    is_redrawn: bool = False,
) -> Call:
    """Return the record of a completion. sample: with its tokens and text; seconds: engine time; usage: see Completion; prompt:
    index of its prompt."""
    written = sum(turn.end - turn.start for turn in sample.turns) if sample.turns else int(sample.is_sampled.sum())
    judged = episode.sample(ask.inputs[0]) if ask.inputs else None
    is_known = judged is not None and not math.isnan(judged.reward.correct)
    return Call(
        agent=sample.agent,
        correct=_known(sample.reward.correct),
        verdict=sample.verdict,
        is_of_right=is_right(judged) if judged is not None and is_known else None,
        input_tokens=len(sample.prompt_ids) + len(sample.token_ids) - written if usage is None else usage[0],
        output_tokens=written if usage is None else usage[1],
        tokens=len(sample.token_ids),
        is_cut=sample.finish is Finish.LENGTH,
        is_read=None if sample.finish is Finish.ERROR else team.is_read(sample),
        is_redrawn=is_redrawn,
        seconds=seconds,
        prompt=prompt,
        text=sample.text,
    )


def _said(sample: Sample | None, tokens: Mapping[str, int]) -> Said:
    """Record of an answer that counts; a missing answer is wrong."""
    if sample is None:
        return Said(correct=0.0)
    answer = None if sample.answer is None else sample.answer[:MAX_ANSWER_CHARS]
    return Said(correct=_known(sample.reward.correct), answer=answer, tokens=tokens.get(sample.uid, 0))


def _known(correct: float) -> float | None:
    return None if math.isnan(correct) else correct


def packed(episode: Episode) -> dict[str, str]:
    """The episode as JSON."""
    return {"episode": base64.b64encode(encode(episode)).decode("ascii")}


def _unpacked(held: Any) -> Episode:
    return decode(Episode, base64.b64decode(held["episode"], validate=True))
