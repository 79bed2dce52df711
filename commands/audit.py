"""Audit of a run: five checks that its files agree on which weights decoded each token, and on how the token was used.

    versions     every token was decoded by a policy version that had been published and verified on every engine
    log-probs    engine and trainer give a sample the same log-probs, if the trainer's version decoded all of it
    tokens       every decoded token of a trained policy belongs to a logged sample, and no sample is missing
    once         no sample was trained twice, and the updates trained as many tokens as the samples record
    staleness    no token is newer than the policy version that was trained on it

The log-probs check takes the mean |log p_trainer - log p_rollout| of each sample, and then the median over samples. The median
may be up to 3 times the rounding noise of the last comparison with the engines (docs/weight_sync.md). Wrong weights exceed this
bound, once training has changed the weights.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from marsrl.trainer.report.console import literal, table_of
from marsrl.trainer.report.fates import LOST, NOT_TRAINED, TRAINED
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.publishes import Publish, read_publishes
from marsrl.trainer.report.samples_log import SampleTrace, read_traces
from marsrl.trainer.runs.directory import RunDirectory, step_files

_MOST_NOISE, _FLOOR = 3.0, 1e-6  # bounds as in trainer/weights/comparison.py
_EXPLAIN = (
    "rollout/dropped_stragglers",
    "rollout/errors",
    "rollout/failed_episodes",
    "rollout/failed_requests",
    "rollout/replayed_sessions",
)


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. passed: None if the run lacks the records for the check. text: the finding."""

    name: str
    passed: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Results of the checks of a run. fates: {(policy, agent): {fate: (number of samples, number of tokens)}}."""

    checks: Sequence[Check]
    fates: Mapping[tuple[str, str], Mapping[str, tuple[int, int]]]

    @property
    def is_clean(self) -> bool:
        return all(check.passed is not False for check in self.checks)


class _Steps:
    """Record of a run's steps, without the samples' texts."""

    def __init__(self, run: RunDirectory, step: int | None) -> None:
        files = step_files(run.samples)
        if step is not None and step not in files:
            raise ValueError(f"{run.samples} has no step {step}; it has {', '.join(map(str, files)) or 'none'}")
        self.rows = {row.step: row.values for row in read_metrics(run.metrics)} if run.metrics.exists() else {}
        files = {number: path for number, path in files.items() if step in (None, number) and number in self.rows}
        self.samples: dict[int, list[SampleTrace]] = {number: read_traces(path) for number, path in files.items()}
        self.is_whole = step is None
        self.publishes = read_publishes(run.publishes)
        self.policies = {publish.policy for publish in self.publishes}
        self._last: dict[tuple[str, bool], tuple[list[int], list[Publish]]] = defaultdict(lambda: ([], []))
        self.first_step: dict[tuple[str, int], int] = {}  # step of the first verified publish of (policy, version)
        for publish in self.publishes:
            for is_compared in {False, publish.noise is not None}:
                steps, of_policy = self._last[publish.policy, is_compared]
                steps.append(publish.step)
                of_policy.append(publish)
            if publish.engines:
                self.first_step.setdefault((publish.policy, publish.version), publish.step)
        if not self.samples:
            raise ValueError(f"{run.path} has no samples of a finished step; audit it after its first step")
        if not self.publishes or any(not sample.fate for rows in self.samples.values() for sample in rows):
            raise ValueError(
                f"{run.path} has no publishes.jsonl or no fates of its samples: an earlier version wrote it"
            )

    def of_trained(self) -> Iterator[tuple[int, SampleTrace]]:
        """Yield (step, sample) for the samples of policies with a publish, which are the trained ones."""
        for step, samples in self.samples.items():
            yield from ((step, sample) for sample in samples if sample.policy in self.policies)

    def last(self, step: int, policy: str, *, is_compared: bool = False) -> Publish | None:
        """Return the policy's last publish before a step, or None. is_compared: skip publishes without a comparison."""
        steps, of_policy = self._last[policy, is_compared]
        place = bisect_left(steps, step)
        return of_policy[place - 1] if place else None


def audit(run: RunDirectory, step: int | None = None) -> Audit:
    """Check the files of a run, or of one step.

    Raises ValueError if the run has no finished step, or an earlier version of marsrl wrote it.
    """
    steps = _Steps(run, step)
    checks = [_versions(steps), _logprobs(steps), _tokens(steps), _once(steps), _staleness(steps)]
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    tokens: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for sample in (sample for samples in steps.samples.values() for sample in samples):
        counts[sample.policy, sample.agent][sample.fate] += 1
        tokens[sample.policy, sample.agent][sample.fate] += sample.num_sampled
    fates = {key: {fate: (number, tokens[key][fate]) for fate, number in of.items()} for key, of in counts.items()}
    return Audit(checks, fates)


def _versions(steps: _Steps) -> Check:
    digests: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for publish in steps.publishes:
        digests[publish.policy, publish.version, publish.shards].add(publish.digest)
    problems = [
        f"version {version} of {policy} was published with {len(found)} different contents"
        for (policy, version, _), found in digests.items()
        if len(found) > 1
    ]
    seen: set[tuple[str, int]] = set()
    for step, sample in steps.of_trained():
        for segment in sample.segments:
            seen.add((sample.policy, segment.version))
            if steps.first_step.get((sample.policy, segment.version), step) >= step:
                problems.append(
                    f"step {step}: {sample.uid} has tokens of version {segment.version} of {sample.policy}, which had not been "
                    "published and verified"
                )
    return _check("versions", problems, f"{len(seen)} versions, all published before and verified on every engine")


def _logprobs(steps: _Steps) -> Check:
    problems, medians = [], []
    gaps: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for step, sample in steps.of_trained():
        present = steps.last(step, sample.policy)
        is_present = present is not None and {segment.version for segment in sample.segments} == {present.version}
        if sample.gap is not None and sample.update == 1 and is_present:
            gaps[step, sample.policy, sample.agent].append(sample.gap)
    for (step, policy, agent), values in gaps.items():
        compared = steps.last(step, policy, is_compared=True)
        if compared is None or compared.noise is None:
            continue
        median, bound = statistics.median(values), _MOST_NOISE * (compared.noise + _FLOOR)
        medians.append(median / bound)
        if median > bound:
            problems.append(
                f"step {step}: log-probs of {agent} ({policy}) are off by {median:.3g} nats in the median of "
                f"{len(values)} samples, "
                f"expected at most {bound:.3g}: other weights than the trainer's decoded them"
            )
    if not medians:
        return Check(
            "log-probs", None, "nothing to compare: no sample was decoded by the trained version after a comparison"
        )
    return _check(
        "log-probs",
        problems,
        f"differences are at most {max(medians):.2f} times the bound, in {len(medians)} pairs of step and agent",
    )


def _tokens(steps: _Steps) -> Check:
    problems = []
    for step, samples in steps.samples.items():
        expected = steps.rows[step].get("rollout/samples")
        if expected is not None and len(samples) != expected:
            problems.append(f"step {step} has {len(samples)} samples, and its metrics counted {expected:.0f}")
        lost = [sample for sample in samples if sample.fate == LOST]
        if lost:
            problems.append(f"step {step}: {len(lost)} samples with a gradient are in no update, first {lost[0].uid}")
    sampled = Counter[str]()
    for _, sample in steps.of_trained():
        sampled[sample.policy] += sample.num_sampled
    if not steps.is_whole or len(steps.samples) != len(steps.rows):
        text = f"{sampled.total():,} tokens in {len(steps.samples)} steps, all with their fate"
        return _check("tokens", problems, text)
    last = steps.rows[max(steps.rows)]
    reasons = {name: sum(values.get(name) or 0 for values in steps.rows.values()) for name in _EXPLAIN}
    named = ", ".join(f"{name} {value:.0f}" for name, value in reasons.items() if value)
    in_progress = dropped = 0
    for policy in sorted(steps.policies):
        decoded = round(sum(values.get(f"policy_cost/{policy}/output_tokens") or 0 for values in steps.rows.values()))
        carried = round(last.get(f"rollout/carried_tokens/{policy}") or 0)
        left = decoded - sampled[policy] - carried
        if left < 0 or (left and not named):
            problems.append(
                f"{decoded:,} tokens of {policy} were decoded; its samples have {sampled[policy]:,}, those in progress "
                f"{carried:,}; nothing explains the difference"
            )
        in_progress, dropped = in_progress + carried, dropped + left
    rest = f"; {in_progress:,} more of samples in progress" if in_progress else ""
    rest += f"; {dropped:,} more of samples or attempts that were dropped ({named})" if dropped else ""
    return _check("tokens", problems, f"{sampled.total():,} decoded tokens, all with their fate{rest}")


def _once(steps: _Steps) -> Check:
    problems: list[str] = []
    trained_in: dict[str, int] = {}
    sums: dict[tuple[int, str, str], int] = Counter()
    for step, sample in steps.of_trained():
        if sample.num_trained:
            if sample.uid in trained_in:
                problems.append(f"{sample.uid} was trained in step {trained_in[sample.uid]} and in step {step}")
            trained_in[sample.uid] = step
            sums[step, sample.policy, sample.agent] += sample.num_trained
    several = len(steps.policies) > 1
    for step, values in steps.rows.items():
        if step not in steps.samples:
            continue
        for policy, agent in {(sample.policy, sample.agent) for sample in steps.samples[step]}:
            counted = values.get(f"{policy}/actor/{agent}/tokens" if several else f"actor/{agent}/tokens") or 0
            if counted != sums[step, policy, agent]:
                problems.append(
                    f"step {step}: the updates of {policy} had {counted:.0f} tokens of {agent}, and its samples have "
                    f"{sums[step, policy, agent]}"
                )
    return _check("once", problems, f"{len(trained_in):,} samples, {sum(sums.values()):,} tokens, each in one update")


def _staleness(steps: _Steps) -> Check:
    problems, largest = [], 0
    for step, sample in steps.of_trained():
        present = steps.last(step, sample.policy)
        if present is None:
            continue
        for segment in sample.segments:
            age = present.version - segment.version
            largest = max(largest, age)
            if age < 0:
                problems.append(
                    f"step {step}: {sample.uid} has tokens of version {segment.version}, newer than the trained one"
                )
    return _check(
        "staleness", problems, f"tokens are at most {largest} versions older than the version that trained on them"
    )


def _check(name: str, problems: Sequence[str], text: str) -> Check:
    if not problems:
        return Check(name, True, text)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Check(name, False, problems[0] + more)


def table(audit: Audit) -> Table:
    """Return a table of each agent's samples and sampled tokens by fate, with a mark for agents without a trained sample."""
    shown = table_of("", "agent", "policy", "fate", "samples", "tokens")
    for (policy, agent), of in sorted(audit.fates.items()):
        rests = TRAINED not in of and NOT_TRAINED not in of
        for fate, (number, tokens) in sorted(of.items(), key=lambda item: -item[1][0]):
            name = literal(f"{agent} (nothing trained)" if rests else agent)
            shown.add_row(name, literal(policy), fate, f"{number:,}", f"{tokens:,}")
    return shown
