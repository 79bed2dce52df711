"""Verifier-Corrector reasoning system (MarsRL, arXiv:2511.11373).

train      solver -> verifier1 -> corrector1 -> verifier2 -> corrector2
           Each agent samples a group of G on each of at most num_picks outputs of the previous agent; a Corrector
           gets only reports that flag an error. Outputs are picked from all groups of the previous agent, once all
           are complete.
evaluate   solver, then Verifier and Corrector in turn until a stop rule holds (Loop)
collect    as train, with one sample per ask and every eligible output passed on, up to corrector1
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from marsrl.rollout.agents.orchestration import Orchestration, is_right
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.episode import Episode
from marsrl.rollout.types import Ask, Finish, Sample

SCRIPT_DRAWS = 3
"""Number of draws in the published script when the Solver's completions are truncated."""


class VerifierCorrector(Orchestration):
    """Team of five agents with agentic rewards; see the module."""

    name = "verifier_corrector"
    agents = (
        AgentSpec("solver", Role.SOLVER),
        AgentSpec("verifier1", Role.VERIFIER),
        AgentSpec("corrector1", Role.CORRECTOR),
        AgentSpec("verifier2", Role.VERIFIER),
        AgentSpec("corrector2", Role.CORRECTOR),
    )
    is_one_episode = True
    tried_apart = ("verifier1", "corrector1")

    def follow(self, episode: Episode) -> Sequence[Ask]:
        if episode.purpose == "evaluate":
            return self.loop(episode).asks
        collects = episode.purpose == "collect"
        num_samples = 1 if collects else self.group_size
        asks = [episode.ask("solver", num_samples=num_samples)]
        last = list(asks)
        for spec in self.agents[1 : 3 if collects else None]:
            if not last or not all(episode.is_over(ask) for ask in last):
                break
            inputs = self._handed_on(episode, last, spec)
            last = [episode.ask(spec.name, *each, num_samples=num_samples) for each in inputs]
            asks += last
        return asks

    def most_samples(self) -> dict[str, int]:
        first, *later = self.specs
        return {first: self.group_size, **dict.fromkeys(later, self.num_picks * self.group_size)}

    def outcome(self, episode: Episode) -> Sample | None:
        """Return the answer that counts in an evaluation. In training a tree has many final answers (see `outcomes`)."""
        return self.loop(episode).final

    def alone(self, episode: Episode) -> Sample | None:
        """Return the Solver's last draw."""
        return self.loop(episode).solution

    def redrawn(self, episode: Episode) -> Collection[str]:
        """Return the uids of the Solver's draws except the last."""
        asks = [ask for ask in self.loop(episode).asks if ask.agent == "solver"]
        return {sample.uid for ask in asks[:-1] for sample in episode.samples(ask)}

    def outcomes(self, episode: Episode) -> dict[str, float]:
        """Return the mean final correctness over the leaves below each sample, by uid.

        A leaf is a sample without successors. A Solver's or Corrector's leaf counts with its own correctness, and a Verifier's
        leaf with the correctness of the solution that it judged.
        """
        children: dict[str | None, list[tuple[Ask, Sample]]] = {}
        for ask in episode.asks.values():
            children.setdefault(ask.parent_uid, []).extend((ask, sample) for sample in episode.samples(ask))

        def leaves(ask: Ask, sample: Sample) -> list[float]:
            if below := children.get(sample.uid):
                return [value for child in below for value in leaves(*child)]
            judged = episode.sample(ask.inputs[0]) if sample.verdict is not None else sample
            return [judged.reward.correct]

        def mean(values: list[float]) -> float:
            known = [value for value in values if not math.isnan(value)]
            return sum(known) / len(known) if known else math.nan

        return {
            sample.uid: mean(leaves(ask, sample)) for ask in episode.asks.values() for sample in episode.samples(ask)
        }

    def is_eligible(self, sample: Sample, for_agent: str) -> bool:
        """Return True if `for_agent` may read this sample: finished, parsable, rewarded; for a Corrector, a rejecting report.

        With agents.<name>.pick_unparsable, also a sample with text but without answer or verdict.
        """
        if sample.finish is not Finish.STOP or sample.reward.is_missing or math.isnan(sample.reward.correct):
            return False
        may_be_unparsable = self.settings[for_agent].pick_unparsable and sample.shown != ""
        if self.spec(for_agent).role is Role.CORRECTOR:
            return sample.verdict is False or (may_be_unparsable and not self.accepts(sample))
        return sample.answer is not None or may_be_unparsable

    def _handed_on(self, episode: Episode, asks: Sequence[Ask], successor: AgentSpec) -> list[tuple[Sample, ...]]:
        """Return the samples of one agent that are passed to the next agent, sorted by uid."""
        ask_of = {sample.uid: ask for ask in asks for sample in episode.samples(ask)}
        chosen = [s for ask in asks for s in episode.samples(ask) if self.is_eligible(s, successor.name)]
        if episode.purpose == "train":
            # A Verifier learns most from wrong solutions, a Corrector from reports that found a real error.
            prefers_right = successor.role is Role.CORRECTOR
            rule, rng = self.settings[successor.name].pick, episode.rng("pick", asks[0].agent)
            chosen = pick(chosen, self.num_picks, rule, prefers_right, rng)
        if successor.role is not Role.CORRECTOR:
            return [(sample,) for sample in chosen]
        return [(episode.sample(ask_of[report.uid].inputs[0]), report) for report in chosen]

    def loop(self, episode: Episode) -> Loop:
        """Return the state of an evaluation's inference loop."""
        loop = Loop()
        ask: Ask | None = episode.ask("solver")
        while ask is not None:
            loop.asks.append(ask)
            if not episode.is_over(ask):
                return loop
            sample = next(iter(episode.samples(ask)), None)
            if sample is None:
                loop.final = loop.best(self.is_script)
                return loop
            if self.spec(ask.agent).gives_verdicts:
                ask = self._after_report(episode, loop, ask, sample)
            else:
                ask = self._after_solution(episode, loop, sample)
        return loop

    @property
    def is_script(self) -> bool:
        """True if an evaluation follows the published script (Loop)."""
        return self.evaluate.compat == "marsrl"

    def _after_solution(self, episode: Episode, loop: Loop, sample: Sample) -> Ask | None:
        # The published script checks only the finish reason.
        is_whole = sample.finish is Finish.STOP and (self.is_script or sample.shown != "")
        if not is_whole and loop.candidates:
            loop.final = loop.best(self.is_script)
            return None
        if sample.agent == "solver":
            loop.solution = sample
            num_draws = len(loop.asks)
            if not is_whole and self.is_script and num_draws < SCRIPT_DRAWS:
                return episode.ask("solver", turn=num_draws + 1)
        loop.candidates.append(Candidate(sample))
        if not is_whole:
            loop.final = sample
            return None
        return episode.ask("verifier1" if sample.agent == "solver" else "verifier2", sample)

    def _after_report(self, episode: Episode, loop: Loop, ask: Ask, report: Sample) -> Ask | None:
        rules, current = self.evaluate, loop.candidates[-1]
        accepts = self.accepts(report)
        loop.num_iterations += 1
        current.num_calls += 1
        current.num_correct += accepts
        current.num_verdicts += report.finish is Finish.STOP
        loop.streak = loop.streak + 1 if accepts else 0
        if loop.streak >= rules.accept_after:
            loop.final = loop.best(True) if self.is_script else current.sample
            return None
        if loop.num_iterations >= rules.most_verdicts:
            loop.final = loop.best(self.is_script)
            return None
        if not accepts and (report.verdict is False or self.is_script or report.shown):
            corrector = "corrector1" if report.agent == "verifier1" else "corrector2"
            return episode.ask(corrector, current.sample, report)
        # Ask the Verifier again, to confirm its verdict, or because it gave no report for a Corrector.
        return episode.ask(ask.agent, current.sample, turn=current.num_calls + 1)


def pick(
    candidates: Sequence[Sample], num_picks: int, rule: str, prefers_right: bool, rng: random.Random
) -> list[Sample]:
    """Pick at most num_picks different samples, sorted by uid, independent of the candidates' order.

    A sample is right if reward.correct >= 1. Right or wrong samples are preferred (prefers_right). rule:

        adaptive    preferred samples first, then the rest
        balanced    a sample of each kind in turn, beginning with the preferred kind
        paired      equal numbers of both kinds, or no sample
        random      samples of any kind

    Samples of the same kind are drawn by rng.
    """
    pool = sorted(candidates, key=lambda sample: sample.uid)
    rng.shuffle(pool)
    preferred = [sample for sample in pool if is_right(sample) == prefers_right]
    rest = [sample for sample in pool if is_right(sample) != prefers_right]
    if rule == "adaptive":
        chosen = (preferred + rest)[:num_picks]
    elif rule == "balanced":
        pairs = min(len(preferred), len(rest))
        alternating = [sample for pair in zip(preferred, rest, strict=False) for sample in pair]
        chosen = (alternating + preferred[pairs:] + rest[pairs:])[:num_picks]
    elif rule == "paired":
        each = min(len(preferred), len(rest), num_picks // 2)
        chosen = preferred[:each] + rest[:each]
    else:
        chosen = pool[:num_picks]
    return sorted(chosen, key=lambda sample: sample.uid)


@dataclass(slots=True)
class Candidate:
    """A solution shown to the Verifier, and its verdicts."""

    sample: Sample
    num_correct: int = 0
    num_verdicts: int = 0
    num_calls: int = 0


@dataclass(slots=True)
class Loop:
    """Inference loop for one problem: Solver, then Verifier and Corrector in turn.

    A candidate is accepted after evaluate.accept_after consecutive "correct" verdicts. Otherwise the loop ends after
    evaluate.max_iterations Verifier calls or at a truncated correction, and the candidate most often judged correct counts
    (the earliest of equals).

    evaluate.compat=marsrl follows the published script (github.com/liushulinle/MarsRL, vc_reasoning_system.py and
    extract_solution.py, e68a831): a truncated solution is drawn again, up to three draws; empty reports are passed on; and
    however the loop ends, the candidate with the most completed Verifier calls counts (the earliest of equals), accepted or not.
    asks: asks so far, in order. solution: the Solver's last draw. final: the answer that counts, None while the loop runs.
    num_iterations: number of Verifier calls.
    """

    asks: list[Ask] = field(default_factory=list)
    solution: Sample | None = None
    candidates: list[Candidate] = field(default_factory=list)
    final: Sample | None = None
    num_iterations: int = 0
    streak: int = 0

    def best(self, by_calls: bool) -> Sample | None:
        def votes(candidate: Candidate) -> int:
            return candidate.num_verdicts if by_calls else candidate.num_correct

        return max(self.candidates, key=votes).sample if self.candidates else None  # max keeps the first of equals
