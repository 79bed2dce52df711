"""How good the team is on held-out problems: each agent on fixed inputs, and the whole loop.

probe     held-out problems solved by the policy before RL: 80 right and 80 wrong solutions for the Verifier, and
          what it flagged of them for the Corrector; the inputs stay the same ever after
system    Solver, then Verifier and Corrector in turn until a stop rule holds (inference.EvaluationThread)

In a team without Verifier there is no probe, and the system is its Solver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marsrl.rollout.agents.inference import EvaluationThread
from marsrl.rollout.config import EvaluateConfig
from marsrl.rollout.engines.protocol import Progress, Sampling
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.team import Team, derive_seed
from marsrl.rollout.types import Ask, Sample
from marsrl.trainer.report.summary import Confusion, CorrectorEstimate, Estimate, Evaluation, VerifierEstimate, estimate

EVALUATION_SET, PROBE_SET = 0, 1
"""Seeds of the two held-out draws: the same problems whatever run.seed is, and not the same in both."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed inputs, made before RL. judge_right / judge_wrong: Verifier asks about right and wrong solutions;
    repair: Corrector asks about wrong solutions that were flagged; keep: about right ones that were flagged."""

    judge_right: tuple[Ask, ...] = ()
    judge_wrong: tuple[Ask, ...] = ()
    repair: tuple[Ask, ...] = ()
    keep: tuple[Ask, ...] = ()


@dataclass(slots=True)
class Evaluator:
    """Evaluates a team. Problems and probe do not depend on `seed`, the draws on nothing else: before and after compare.

    max_tokens: of one completion.
    """

    team: Team
    config: EvaluateConfig
    task: Task
    max_tokens: int
    seed: int
    probe: Probe = field(default_factory=Probe)
    num_decoded: int = 0  # tokens so far, for progress bars

    def make_probe(self, versions: Mapping[str, int], progress: Progress | None = None) -> Probe:
        """Inputs from the team as it is now. Fewer than wanted where it has not solved (or missed) enough problems."""
        team = self.team.orchestration
        if not team.verifiers:
            return self.probe
        problems = self.task.held_out(3 * self.config.probe_size, PROBE_SET)
        roots = [team.first_ask(f"probe{i:05d}", problem) for i, problem in enumerate(problems)]
        solutions = self._answer(roots, versions, "probe", progress)
        judges = [
            team.ask_about("verifier1", solution, ask)
            for ask, solution in zip(roots, solutions, strict=True)
            if solution.answer is not None
        ]
        reports = self._answer(judges, versions, "probe", progress)
        flagged = [
            team.ask_about("corrector1", report, ask)
            for ask, report in zip(judges, reports, strict=True)
            if report.verdict is False
        ]
        half, size = self.config.probe_size // 2, self.config.probe_size
        self.probe = Probe(
            judge_right=tuple(_about(judges, right=True)[:half]),
            judge_wrong=tuple(_about(judges, right=False)[:half]),
            repair=tuple(_about(flagged, right=False)[:size]),
            keep=tuple(_about(flagged, right=True)[:size]),
        )
        return self.probe

    def evaluate(self, versions: Mapping[str, int], progress: Progress | None = None) -> Evaluation:
        """Every number of the before / after table."""
        self.num_decoded = 0
        solver, system, loop = self._system(versions, progress)
        if not self.team.orchestration.verifiers:
            return Evaluation(solver=solver, system=system)
        return Evaluation(
            solver=solver,
            verifier=self._verifier(versions, loop, progress),
            corrector=self._corrector(versions, progress),
            system=system,
        )

    def _answer(
        self, asks: Sequence[Ask], versions: Mapping[str, int], name: str, progress: Progress | None
    ) -> list[Sample]:
        """`name` is part of the seeds: asking the same thing under another name draws anew."""
        samples = self.team.answer(
            asks,
            versions,
            max_tokens=self.max_tokens,
            seed=derive_seed(self.seed, "evaluate", name),
            sampling=Sampling(self.config.temperature, self.config.top_p, self.config.top_k),
            progress=None if progress is None else lambda tokens: progress(self.num_decoded + tokens),
        )
        self.num_decoded += sum(len(sample.token_ids) for sample in samples)
        return samples

    def _system(self, versions: Mapping[str, int], progress: Progress | None) -> tuple[Estimate, Estimate, Confusion]:
        """Solver's accuracy, the whole loop's, and the Verifier's verdicts inside the loop."""
        threads = [
            EvaluationThread(
                self.team.orchestration,
                problem,
                f"eval{i:05d}.{draw}",
                accept_after=self.config.accept_after,
                max_iterations=self.config.max_iterations,
            )
            for i, problem in enumerate(self.task.held_out(self.config.num_problems, EVALUATION_SET))
            for draw in range(self.config.repeat)
        ]
        solved: list[Sample] = []
        verdicts: list[tuple[float, bool | None]] = []
        call = 0
        while asks := [(thread, ask) for thread in threads if (ask := thread.next_ask()) is not None]:
            # a Verifier may be asked the same thing twice: the call's number makes the draws differ
            answers = self._answer([ask for _, ask in asks], versions, f"call {call}", progress)
            for (thread, ask), sample in zip(asks, answers, strict=True):
                if ask.solution is None:
                    solved.append(sample)
                elif ask.report is None:
                    verdicts.append((ask.solution.reward.correct, sample.verdict))
                thread.receive(sample)
            call += 1
        return _accuracy(solved), _accuracy([t.outcome.final for t in threads]), _confusion(verdicts)

    def _verifier(self, versions: Mapping[str, int], loop: Confusion, progress: Progress | None) -> VerifierEstimate:
        """Balanced accuracy: the mean of the two classes' accuracies, no verdict counting as an error.

        The probe has equally many of both classes unless the team could not provide them; n is their sum.
        """
        asks = [*self.probe.judge_right, *self.probe.judge_wrong]
        answers = self._answer(asks, versions, "verifier", progress)
        confusion = _confusion(
            [(a.solution.reward.correct, s.verdict) for a, s in zip(asks, answers, strict=True) if a.solution]
        )
        right, wrong = len(self.probe.judge_right), len(self.probe.judge_wrong)
        n = right + wrong
        if not right or not wrong:
            return VerifierEstimate(**estimate(0, 0).model_dump(), confusion=confusion, loop_confusion=loop)
        balanced = (confusion.right_correct / right + confusion.wrong_wrong / wrong) / 2
        return VerifierEstimate(**estimate(balanced * n, n).model_dump(), confusion=confusion, loop_confusion=loop)

    def _corrector(self, versions: Mapping[str, int], progress: Progress | None) -> CorrectorEstimate:
        repaired = self._answer(self.probe.repair, versions, "repair", progress)
        kept = _accuracy(self._answer(self.probe.keep, versions, "keep", progress))
        broken = estimate(kept.n - (kept.mean or 0.0) * kept.n, kept.n)
        return CorrectorEstimate(**_accuracy(repaired).model_dump(), breaks=broken)


def _about(asks: Sequence[Ask], *, right: bool) -> list[Ask]:
    """The asks about solutions that are right (or wrong); those whose judge failed are neither."""
    known = [ask for ask in asks if ask.solution is not None and not math.isnan(ask.solution.reward.correct)]
    return [ask for ask in known if ask.solution is not None and (ask.solution.reward.correct >= 1) == right]


def _accuracy(samples: Sequence[Sample]) -> Estimate:
    """Share of correct samples; a sample whose judge failed is not counted."""
    known = [sample.reward.correct for sample in samples if not math.isnan(sample.reward.correct)]
    return estimate(sum(value >= 1 for value in known), len(known))


def _confusion(verdicts: Sequence[tuple[float, bool | None]]) -> Confusion:
    """Counts of (actual correctness of the judged solution, verdict); a solution whose judge failed is not counted."""
    counts = {"right_correct": 0, "right_wrong": 0, "wrong_correct": 0, "wrong_wrong": 0, "none": 0}
    for correct, verdict in verdicts:
        if math.isnan(correct):
            continue
        if verdict is None:
            counts["none"] += 1
        else:
            counts[f"{'right' if correct >= 1 else 'wrong'}_{'correct' if verdict else 'wrong'}"] += 1
    return Confusion(**counts)
