"""Simulated team: the project's Verifier-Corrector rules, with one token in place of each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.orchestrations.solver import Solver
from marsrl.rollout.orchestrations.verifier_corrector import VerifierCorrector
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.rewards.judge import known
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.types import IntArray, Message, Problem, Reward
from simulation.cost_model import Constants
from simulation.lengths import Lengths, Outcomes
from simulation.simulated_pool import TOKEN_GRAIN, SimulatedReplicas, Written

# Text of a completion, by its last token; 7 is the right answer of every problem.
_TEXTS = ("", "\\boxed{7}", "\\boxed{8}", "Verdict: correct", "Verdict: wrong")


def last_token(outcomes: Outcomes, uid: str) -> int:
    """Return the token that represents a completion's text."""
    if uid[uid.rindex("/") + 1 :].startswith("verifier"):
        return 3 if outcomes.says_correct(uid) else 4
    return 1 if outcomes.is_right(uid) else 2


def outcomes_of(constants: Constants, lengths: Lengths) -> Outcomes:
    return Outcomes(constants.solver_accuracy, constants.verifier_agreement, lengths.seed)


def one_token_texts(outcomes: Outcomes) -> Written:
    """Return a writer of completions of zeros, whose last token represents the text."""

    def written(uid: str, num_tokens: int, num_left: int) -> IntArray:
        token_ids = np.zeros(num_tokens, np.int32)
        if not num_left:
            token_ids[-1] = last_token(outcomes, uid)
        return token_ids

    return written


@dataclass(frozen=True)
class StandInRenderer:
    """Renderer whose prompts have the constants' lengths; a completion's last token represents its text."""

    constants: Constants
    stop_ids: tuple[int, ...] = (1, 2, 3, 4)

    def render(self, messages: Sequence[Message], tools: object = ()) -> tuple[IntArray, str]:
        # Texts in a prompt: 1 for a Solver; instructions and solution for a Verifier; problem, solution and report for a
        # Corrector.
        num_shown = len(messages) - 1
        tokens = self.constants.solver_prompt + num_shown * self.constants.shown_tokens
        return np.zeros(-(-int(tokens) // TOKEN_GRAIN), np.int32), ""

    def decode(self, ids: IntArray) -> str:
        return _TEXTS[ids[-1]] if len(ids) else ""


def problem_stream(text: Callable[[int], str] = lambda n: "?", answer: str = "7") -> ProblemSource:
    """Return an endless stream of problems that differ in their ids. text: returns the text of the n-th problem, from 1."""
    return lambda n: Problem(f"p{n + 1}", text(n + 1), answer, "math")


def judge(problem: Problem, answer: str) -> Future[Reward]:
    """Judge without delay: judges work while the engines decode."""
    return known(_RIGHT if answer == problem.answer else _WRONG)


_RIGHT, _WRONG = Reward(1.0, 1.0), Reward(0.0, 0.0)


def simulated_team(
    replicas: SimulatedReplicas,
    constants: Constants,
    rollout: RolloutConfig,
    *,
    is_solver_only: bool = False,
    renderer: ChatRenderer | None = None,
) -> Team:
    """Return the simulated team. renderer: renderer of real texts; None: a completion's text is its last token."""
    kind = Solver if is_solver_only else VerifierCorrector
    agents = {spec.name: AgentConfig() for spec in kind.agents}
    renderer = renderer or cast(ChatRenderer, StandInRenderer(constants))
    pool = EnginePool(replicas, slots=int(constants.max_num_seqs), clock=lambda: replicas.clock.now_s)
    return Team(agents, kind(agents, "math", rollout=rollout), {"main": renderer}, {"main": pool}, WatchedJudge(judge))
