"""An agent that calls tools, and whoever reads what they find: played by scripts, on tokens of bytes, to an episode's end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import EvaluationPlay
from marsrl.rollout.team import Team
from marsrl.rollout.types import Problem, Sample

PROBLEM = Problem("p", "what ?", "7", "math")


class Says:
    """A script: the agent's turns, whatever it is asked, and what a reader makes of its prompt. prompts: of each sample."""

    def __init__(self, renderer: ChatRenderer, turns: Sequence[str], reads: Callable[[str], str] | None = None) -> None:
        self.renderer, self.turns, self.reads = renderer, turns, reads
        self.prompts: dict[str, np.ndarray] = {}

    def __call__(self, request: DecodeRequest) -> list[int]:
        ids, marks = request.token_ids, self.renderer.encode_trusted("<|im_start|>assistant\n")
        starts = [i for i in np.flatnonzero(ids == marks[0]) if ids[i : i + len(marks)].tolist() == marks.tolist()]
        self.prompts.setdefault(request.uid, ids[: starts[0] + len(marks)])
        is_reader = self.reads is not None and "/system1" in request.uid
        words = self.reads(self.renderer.decode(ids)) if is_reader else self.turns[len(starts) - 1]
        whole = [*self.renderer.completion_ids(words).tolist(), self.renderer.eos_id]
        begun = ids[starts[-1] + len(marks) :].tolist()
        assert whole[: len(begun)] == begun
        return whole[len(begun) :]

    def prompt(self, uid: str) -> str:
        return self.renderer.decode(self.prompts[uid])


def play(team: Team, renderer: ChatRenderer, length: int) -> tuple[Episode, Sample]:
    """An episode, and the sample that its first ask got, with its whole text."""
    answered: list[Sample] = []
    note = lambda played: answered.extend(played.samples)  # noqa: E731
    play = EvaluationPlay(team, {"main": 0}, length, Sampling(), on_end=note)
    episode = Episode("e.0", "e", PROBLEM, purpose="evaluate")
    play.add([episode], 0)
    play.finish()
    assert episode.is_at_its_end and not episode.error and not episode.waiting
    first = next(iter(episode.asks))
    (said,) = [sample for sample in answered if sample.uid == f"{first}:0"]
    return episode, replace(said, full_text=renderer.decode(said.token_ids))


def transcript(sample: Sample) -> list[str]:
    """The turns, and what came between them."""
    return re.split(r"<\|im_end\|>\n?(?:<\|im_start\|>(?:user|assistant)\n)?", sample.text)
