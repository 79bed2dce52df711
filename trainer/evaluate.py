"""How good the team is on held-out problems: each agent on fixed inputs, and the whole loop.

    probe     held-out problems solved by the policy before RL: 80 right and 80 wrong solutions for the Verifier, and
              what it flagged of them for the Corrector; the inputs stay the same ever after
    system    Solver, then Verifier and Corrector in turn until a stop rule holds (orchestration.EvaluationThread)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marsrl.rollout.agents.orchestration import EvaluationThread, StopRule
from marsrl.rollout.config import EvaluateConfig
from marsrl.rollout.engines.protocol import Progress, Sampling
from marsrl.rollout.team import Team, derive_seed
from marsrl.rollout.types import Ask, Problem, Sample
from marsrl.trainer.summary import Confusion, CorrectorEstimate, Estimate, Evaluation, VerifierEstimate, estimate


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
    """Evaluates a team. The draws derive from `seed` and the problems alone, so before and after are comparable.

    max_tokens: of one completion.
    """

    team: Team
    config: EvaluateConfig
    problems: Sequence[Problem]
    max_tokens: int
    seed: int
    probe: Probe = field(default_factory=Probe)

    def make_probe(self, problems: Sequence[Problem], versions: Mapping[str, int], progress: Progress | None = None) -> Probe:
        """Inputs from the team as it is now. Fewer than wanted where it has not solved (or missed) enough problems."""
        orchestration = self.team.orchestration
        roots = [orchestration.root(f"probe{i:05d}", problem) for i, problem in enumerate(problems)]
        solutions = self._answer(roots, versions, progress)
        judges = [
            orchestration.ask_verifier(ask, sample)
            for ask, sample in zip(roots, solutions, strict=True)
            if sample is not None and sample.answer is not None
        ]
        reports = self._answer(judges, versions, progress)
        right = [a for a in judges if a.solution is not None and a.solution.reward.correct >= 1]
        wrong = [a for a in judges if a.solution is not None and a.solution.reward.correct < 1]
        flagged = [
            orchestration.ask_corrector(ask, report)
            for ask, report in zip(judges, reports, strict=True)
            if report is not None and report.verdict is False
        ]
        half, size = self.config.probe_size // 2, self.config.probe_size
        self.probe = Probe(
            judge_right=tuple(right[:half]),
            judge_wrong=tuple(wrong[:half]),
            repair=tuple([a for a in flagged if a.solution is not None and a.solution.reward.correct < 1][:size]),
            keep=tuple([a for a in flagged if a.solution is not None and a.solution.reward.correct >= 1][:size]),
        )
        return self.probe

    def evaluate(self, versions: Mapping[str, int], progress: Progress | None = None) -> Evaluation:
        """Every number of the before / after table."""
        solver, system, loop = self._system(versions, progress)
        return Evaluation(
            solver=solver,
            verifier=self._verifier(versions, loop, progress),
            corrector=self._corrector(versions, progress),
            system=system,
        )

    def _answer(
        self, asks: Sequence[Ask], versions: Mapping[str, int], progress: Progress | None
    ) -> list[Sample | None]:
        sampling = Sampling(self.config.temperature, self.config.top_p, self.config.top_k)
        seed = derive_seed(self.seed, "evaluate")
        return self.team.answer(
            asks, versions, max_tokens=self.max_tokens, seed=seed, sampling=sampling, progress=progress
        )

    def _system(
        self, versions: Mapping[str, int], progress: Progress | None
    ) -> tuple[Estimate, Estimate, Confusion]:
        rule = StopRule(self.config.accept_after, self.config.max_iterations)
        threads = [
            EvaluationThread(self.team.orchestration, f"eval{i:05d}.{draw}", problem, rule)
            for i, problem in enumerate(self.problems)
            for draw in range(self.config.repeat)
        ]
        first: dict[str, Sample | None] = {}
        verdicts: list[tuple[float, bool | None]] = []
        while asks := [(thread, ask) for thread in threads if (ask := thread.next_ask()) is not None]:
            answers = self._answer([ask for _, ask in asks], versions, progress)
            for (thread, ask), sample in zip(asks, answers, strict=True):
                first.setdefault(ask.rollout_id, sample)
                if sample is not None and ask.solution is not None and ask.report is None:
                    verdicts.append((ask.solution.reward.correct, sample.verdict))
                thread.receive(sample)
        finals = [thread.final for thread in threads]
        return _accuracy(list(first.values())), _accuracy(finals), _confusion(verdicts)

    def _verifier(
        self, versions: Mapping[str, int], loop: Confusion, progress: Progress | None
    ) -> VerifierEstimate:
        """Balanced accuracy: the mean of the two classes' accuracies, no verdict counting as an error.

        The probe has equally many of both classes unless the team could not provide them; n is their sum.
        """
        asks = [*self.probe.judge_right, *self.probe.judge_wrong]
        answers = self._answer(asks, versions, progress)
        confusion = _confusion(
            [(a.solution.reward.correct, s.verdict if s else None) for a, s in zip(asks, answers, strict=True) if a.solution]
        )
        right, wrong = len(self.probe.judge_right), len(self.probe.judge_wrong)
        n = right + wrong
        if not right or not wrong:
            return VerifierEstimate(**estimate(0, 0).model_dump(), confusion=confusion, loop_confusion=loop)
        balanced = (confusion.right_correct / right + confusion.wrong_wrong / wrong) / 2
        return VerifierEstimate(**estimate(balanced * n, n).model_dump(), confusion=confusion, loop_confusion=loop)

    def _corrector(self, versions: Mapping[str, int], progress: Progress | None) -> CorrectorEstimate:
        repaired = self._answer(self.probe.repair, versions, progress)
        kept = _accuracy(self._answer(self.probe.keep, versions, progress))
        broken = estimate(kept.n - (kept.mean or 0.0) * kept.n, kept.n)
        return CorrectorEstimate(**_accuracy(repaired).model_dump(), breaks=broken)


def _accuracy(samples: Sequence[Sample | None]) -> Estimate:
    """Share of correct samples. No sample (a prompt too long) is wrong; a sample whose judge failed is not counted."""
    known = [s.reward.correct if s is not None else 0.0 for s in samples]
    known = [value for value in known if value == value]
    return estimate(sum(value >= 1 for value in known), len(known))


def _confusion(verdicts: Sequence[tuple[float, bool | None]]) -> Confusion:
    """Counts of (actual correctness of the judged solution, verdict); a solution whose judge failed is not counted."""
    counts = {"right_correct": 0, "right_wrong": 0, "wrong_correct": 0, "wrong_wrong": 0, "none": 0}
    for correct, verdict in verdicts:
        if correct != correct:
            continue
        if verdict is None:
            counts["none"] += 1
        else:
            counts[f"{'right' if correct >= 1 else 'wrong'}_{'correct' if verdict else 'wrong'}"] += 1
    return Confusion(**counts)
