"""Records of an evaluation, one per draw of a problem, from which results are computed and a killed evaluation resumes.

In an evaluation's folder, draws.jsonl has a line for each finished draw, and fixed_answers.jsonl one for each answered fixed
input. A line's key is a hash of everything that the line depends on (trainer/runs/answers.py), so a line of another problem or
team is never reused. Both files have every prompt and completion; memory keeps only the end of each completion.
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
MAX_ANSWER_CHARS = 200  # first characters of an answer to save; answers that agree in them count as equal
MAX_HELD_CHARS = 200  # last characters of a completion to keep in memory, which whole completions would fill


class Call(Schema):
    """A completion of an agent.

    correct: the answer's correctness; null if the judge failed.
    verdict: the verdict; null if the completion gives none.
    is_of_right: True if the solution that the verdict judges is right; null if unknown, or without a verdict.
    input_tokens, output_tokens: tokens that the engine read and sampled. tokens: length of the sample's completion.
    is_cut: the completion reached the maximum length.
    is_read: the parser found an answer, verdict, query or route; null if an engine failed.
    is_redrawn: a later draw replaced this one.
    seconds: engine time.
    prompt: index in `prompts` of the text that the agent read, with the chat template's special tokens.
    text: the whole completion.
    is_read, prompt and text are null in files of earlier versions.
    """

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
        """Return the call as kept in memory: without the prompt, and with only the end of the text."""
        return self if self.text is None else self.model_copy(update={"text": self.text[-MAX_HELD_CHARS:]})


class Said(Schema):
    """Final answer of a draw.

    correct: null if unknown.
    answer: beginning of the answer's text; null if there is no answer.
    tokens: length of the answer's completion.
    """

    correct: float | None
    answer: str | None = None
    tokens: int = 0


class Draw(Schema):
    """One draw of one problem: an episode of the team.

    of: name of the set of data.eval that the problem belongs to.
    problem: id of the problem. question: digest of question and answer, the same in every run.
    system: the team's final answer. alone: the first agent's own answer; null if that agent does not solve.
    team: the orchestration's own metrics. tools: usage by tool.
    judge: the model judge's counts since the previous draw.
    latency_s: seconds from the draw's first request to the end of the draw (Played); null without requests.
    prompts: prompts of the calls, without repetition; each call has an index into them.
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
        """Return a saved draw as kept in memory: without prompts, and with only the ends of texts."""
        draw = cls.model_validate(value)
        return draw.model_copy(update={"prompts": [], "calls": [call.shortened() for call in draw.calls]})


class FixedAnswer(Schema):
    """Completion for one of the fixed inputs. problem: digest of question and answer. prompts: as in Draw."""

    problem: str
    call: Call
    prompts: list[str] = Field(default_factory=list)

    @classmethod
    def shortened(cls, value: Any) -> FixedAnswer:
        """Return a saved answer as kept in memory: without prompts, and with only the end of the text."""
        answer = cls.model_validate(value)
        return answer.model_copy(update={"prompts": [], "call": answer.call.shortened()})


class Kept(ExitStack):
    """Store of draws, of answers to fixed inputs, and of the episodes that the inputs come from. folder: None: in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()

        def answers(name: str, read: Callable[[Any], Held]) -> Answers[Held]:
            return self.enter_context(closing(Answers(folder and folder / name, read)))

        self.draws = answers(DRAWS, Draw.shortened)
        self.fixed = answers("fixed_answers.jsonl", FixedAnswer.shortened)
        self.episodes = answers("input_episodes.jsonl", _unpacked)


def read_draws(folder: Path) -> list[Draw]:
    """Return the draws in an evaluation's folder, without prompts and with only the ends of texts; [] if there are none."""
    return Answers.read(folder / DRAWS, Draw.shortened) if (folder / DRAWS).is_file() else []


def digest(problem: Problem) -> str:
    """Return a digest of question and reference answer, whatever file they come from."""
    return key_of(question=problem.question, answer=problem.answer)


def episode_key(identity: str, episode: Episode) -> str:
    """Return the key of a draw. identity: the team's identity."""
    return key_of(identity=identity, episode=episode.id, question=digest(episode.problem))


def fixed_key(identity: str, episode: Episode, ask: Ask) -> str:
    """Return the key of an answer to a fixed input. The key depends on the agent's prompt."""
    shown = [sample.shown for sample in episode.inputs(ask)]
    return key_of(identity=identity, ask=ask.id, question=digest(episode.problem), shown=shown)


def draw_of(team: Team, set_name: str, played: Played, judge: Mapping[str, float]) -> Draw:
    """Return the record of a finished episode. set_name: set of the problem; judge: the judge's counts since the last draw."""
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
    """Return the record of a completion. sample: must have tokens and text; the other arguments are as in Call.

    usage: (input tokens, output tokens) that a server reported (see Completion); None: count the sample's tokens.
    """
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
    """Return the record of a final answer; a missing answer is wrong."""
    if sample is None:
        return Said(correct=0.0)
    answer = None if sample.answer is None else sample.answer[:MAX_ANSWER_CHARS]
    return Said(correct=_known(sample.reward.correct), answer=answer, tokens=tokens.get(sample.uid, 0))


def _known(correct: float) -> float | None:
    return None if math.isnan(correct) else correct


def packed(episode: Episode) -> dict[str, str]:
    """Return the episode as JSON."""
    return {"episode": base64.b64encode(encode(episode)).decode("ascii")}


def _unpacked(held: Any) -> Episode:
    return decode(Episode, base64.b64decode(held["episode"], validate=True))
