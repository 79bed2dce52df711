"""The inference loop of a team for one problem, as a state machine that decodes nothing.

thread = EvaluationThread(team, problem, "eval/7")
while (ask := thread.next_ask()) is not None:
    thread.receive(sample)          # one parsed sample for this ask; a driver runs many threads in batches
thread.outcome.final                # the sample whose answer counts
"""

from __future__ import annotations

from dataclasses import dataclass

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.types import Ask, Finish, Problem, Sample


@dataclass(frozen=True, slots=True)
class Candidate:
    """A solution that was put before the Verifier, and how it fared."""

    sample: Sample
    num_correct: int = 0
    num_verdicts: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a thread ended. final: the answer that counts; num_iterations: Verifier calls; reason: why it stopped."""

    final: Sample
    is_accepted: bool
    num_iterations: int
    candidates: tuple[Candidate, ...]
    reason: str


class EvaluationThread:
    """One problem through Solver, then Verifier and Corrector in turn; in a team without Verifier the solution counts.

    A candidate is accepted after `accept_after` consecutive "correct" verdicts. Otherwise the thread ends after
    `max_iterations` Verifier calls or at a truncated correction, and the candidate most often judged correct counts
    (the earliest of equals). `compat` counts completed Verifier calls instead and hands on empty reports, as the
    published script does.
    """

    def __init__(
        self,
        team: Orchestration,
        problem: Problem,
        rollout_id: str,
        *,
        accept_after: int = 4,
        max_iterations: int = 10,
        compat: bool = False,
    ) -> None:
        if accept_after < 1 or max_iterations < 1:
            raise ValueError(
                f"evaluate.accept_after and evaluate.max_iterations must be at least 1, found {accept_after} and "
                f"{max_iterations}"
            )
        self._team = team
        self._accept_after = accept_after
        self._max_iterations = max_iterations
        self._compat = compat
        self._candidates: list[Candidate] = []
        self._first_ask = team.first_ask(rollout_id, problem)
        self._pending: Ask | None = self._first_ask
        self._streak = 0
        self._num_iterations = 0
        self._outcome: Outcome | None = None

    def next_ask(self) -> Ask | None:
        """What must be answered next, by one sample; None once the thread has ended. Asking again changes nothing."""
        return self._pending

    @property
    def num_iterations(self) -> int:
        """Verifier calls so far. With the ask's agent and parent it makes the uid of a repeated call unique."""
        return self._num_iterations

    @property
    def outcome(self) -> Outcome:
        if self._outcome is None:
            raise RuntimeError("the evaluation thread has not ended: answer next_ask() until it is None")
        return self._outcome

    def receive(self, sample: Sample) -> None:
        """Take the parsed sample that answers next_ask() and decide what follows."""
        ask = self._pending
        if ask is None:
            raise RuntimeError(f"the evaluation thread has ended; sample {sample.uid} answers nothing")
        if sample.agent != ask.agent:
            raise ValueError(f"sample {sample.uid} is by {sample.agent}, but {ask.agent} was asked")
        if self._team.role(ask.agent) is Role.VERIFIER:
            self._receive_report(ask, sample)
        else:
            self._receive_solution(sample)

    def _receive_solution(self, sample: Sample) -> None:
        is_whole = sample.finish is Finish.STOP and bool(self._team.shown(sample))
        if not is_whole and self._candidates:
            self._end(self._best(), False, "truncated correction")
            return
        self._candidates.append(Candidate(sample))
        if not is_whole:
            self._end(sample, False, "truncated solution")
            return
        verifiers = self._team.verifiers
        if not verifiers:
            self._end(sample, False, "nobody verifies")
            return
        verifier = verifiers[0] if sample.agent == self._first_ask.agent else verifiers[-1]
        self._pending = self._team.ask_about(verifier, sample, self._first_ask)

    def _receive_report(self, ask: Ask, report: Sample) -> None:
        self._num_iterations += 1
        verdict = report.verdict
        if verdict is None and self._team.settings[report.agent].missing_verdict == "correct":
            verdict = True
        current = self._candidates[-1]
        self._candidates[-1] = Candidate(
            current.sample,
            current.num_correct + (verdict is True),
            current.num_verdicts + (report.finish is Finish.STOP),
        )
        self._streak = self._streak + 1 if verdict else 0
        if self._streak >= self._accept_after:
            self._end(current.sample, True, "accepted")
        elif self._num_iterations >= self._max_iterations:
            self._end(self._best(), False, "max_iterations")
        elif not verdict and (verdict is False or self._compat or self._team.shown(report)):
            corrector = "corrector1" if report.agent == "verifier1" else "corrector2"
            self._pending = self._team.ask_about(corrector, report, ask)
        # else the Verifier is asked again: to confirm, or because there is nothing that a Corrector could read

    def _best(self) -> Sample:
        def votes(candidate: Candidate) -> int:
            return candidate.num_verdicts if self._compat else candidate.num_correct

        return max(self._candidates, key=votes).sample  # max keeps the first of equals

    def _end(self, final: Sample, is_accepted: bool, reason: str) -> None:
        self._pending = None
        self._outcome = Outcome(final, is_accepted, self._num_iterations, tuple(self._candidates), reason)
