"""Verification of a weight sync: engines hold what was sent (checksums) and compute the same log-probs as the trainer.

The comparison checks that an engine's log-probs of fixed tokens equal the trainer's up to rounding. Messages and metrics call
these tokens the probe. The trainer scores them twice, plainly and with every intermediate result perturbed by rounding
(learner/other_roundings.py). The difference is the *noise*: the effect of rounding on this model at these weights.
A correct engine's differences must be distributed like the noise:

    median        of |trainer - engine|                                     at most 3 x the noise's median
    share         of tokens beyond twice the noise's 90 % quantile          at most 20 %
    last tokens   of the sequences, beyond the same bound                   at most half of them

The largest difference is reported but not bounded: in any MoE model, a token with nearly tied experts can be off by nats.
Adapters of one base that are published together are compared separately, each on a quarter of the sequences; trainer and
engine score the sequences of all of them at once. See docs/weight_sync.md for measurements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marsrl.rollout.engines.protocol import WeightReceipt
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.types import FloatArray, IntArray
from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack
from marsrl.trainer.learner.learner import Learner, Together
from marsrl.trainer.learner.other_roundings import Precision

_NUM_SEQUENCES, _NUM_OF_EACH = 16, 4  # number of sequences for a single policy, and for each of several adapters
# The probe of this many adapters has as many tokens as the probe of one model.
ADAPTERS_AT_ONCE = _NUM_SEQUENCES // _NUM_OF_EACH
_NUM_TOKENS = 41  # A full block (32 tokens) of vLLM's CPU prefix cache precedes the last token.
_FIRST, _LATER = 3.0, 2.0  # Bounds of the median difference: 3 x the noise's median; later, 2 x the first ratio.
_SHARE = 0.2
_DIVERGED = 100.0  # Nats: median surprisal of the probe's random tokens above which the policy has diverged.
_FLOOR = 1e-6  # Nats: spacing of float32 log-probs between -8 and -16.


@dataclass(frozen=True, slots=True)
class TrainerScores:
    """Trainer's log-probs of tokens 1..N-1 of each sequence, [N-1] float32, nats: plain and perturbed."""

    logprobs: Sequence[FloatArray]
    rounded: Sequence[FloatArray]


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """Difference between the log-probs of the trainer and of the engine that differs most, over num_tokens tokens.

    largest, median: statistics of |difference|, nats.
    noise: median of |difference| that rounding alone causes, nats.
    bound: twice the 90 % quantile of the noise, nats.
    share: share of all tokens that differ by more than `bound`.
    num_last: number of sequences with a last token that differs by more than `bound`.
    """

    num_tokens: int
    largest: float
    median: float
    share: float
    num_last: int
    noise: float
    bound: float

    @property
    def ratio(self) -> float:
        """Median of the differences divided by the noise's median."""
        return self.median / (self.noise + _FLOOR)


def comparison_sequences(vocab_size: int) -> list[IntArray]:
    """Return fixed token sequences, [41] int32 each: long enough to reveal a stale prefix cache."""
    generator = np.random.default_rng(20240229)
    return [generator.integers(0, vocab_size, _NUM_TOKENS).astype(np.int32) for _ in range(_NUM_SEQUENCES)]


def trainer_scores(learner: Learner, engines: Precision) -> TrainerScores:
    """Return the learner's scores of the probe, with noise at the coarser precision of learner and engines. Collective."""
    sequences = comparison_sequences(learner.vocab_size)
    return TrainerScores(sequence_scores(learner, sequences), sequence_scores(learner, sequences, engines))


def sequence_scores(
    learner: Learner, sequences: Sequence[IntArray], rounded_as: Precision | None = None
) -> list[FloatArray]:
    """Return the learner's log-probs [N-1] of tokens 1..N-1 of each sequence, all in one micro-batch. Collective."""
    batch = _packed(sequences, learner.align)
    ends = np.cumsum([len(sequence) - 1 for sequence in sequences])[:-1]
    return np.split(learner.score([batch], rounded_as=rounded_as)[0][batch.trained_rows.cpu()].numpy(), ends)


def scores_together(group: Together, names: Collection[str], engines: Precision) -> dict[str, TrainerScores]:
    """Return trainer_scores of these policies of the group, which share two passes. Collective."""
    first = next(iter(group.learners.values()))
    sequences = comparison_sequences(first.vocab_size)[:_NUM_OF_EACH]
    places = [place for place, name in enumerate(group.learners) if name in names]
    scores: dict[str, TrainerScores] = {}
    for packed_places in [[place] for place in places] if group.is_apart else [places]:
        agents = np.repeat(packed_places, len(sequences)).tolist()
        batch = _packed(sequences * len(packed_places), first.align, agents)
        plain, rounded = (
            group.score(batch, rounded_as=precision)[batch.trained_rows.cpu()].numpy().reshape(
                len(packed_places), len(sequences), -1
            )
            for precision in (None, engines)
        )  # fmt: skip
        for place, *of_place in zip(packed_places, plain, rounded, strict=True):
            scores[list(group.learners)[place]] = TrainerScores(*map(list, of_place))
    return scores


def _packed(sequences: Sequence[IntArray], align: int, agents: Sequence[int] | None = None) -> PackedBatch:
    """Pack the sequences so that every token after the first is scored. agents: agent of each sequence; None: all 0."""
    every = [
        TrainSequence(
            uid=f"probe/{i}",
            prompt_ids=tokens[:1],
            token_ids=tokens[1:],
            is_sampled=np.ones(len(tokens) - 1, bool),
            rollout_logprobs=None,
            advantage=0.0,
            agent=0 if agents is None else agents[i],
            temperature=1.0,
        )
        for i, tokens in enumerate(sequences)
    ]
    return pack(every, align=align)


class EngineComparison:
    """Comparison of trainer and engines, version after version.

    The first comparison of a process allows a median difference of 3 times the noise. The ratio that it measures depends
    only on kernels and hardware, because trainer and engines have started from the same files or checkpoint. Later comparisons
    allow twice that ratio, but at least 2 and at most 3 times the noise.
    """

    def __init__(self, adapter: str = "") -> None:
        """adapter: name of the adapter to compare, for messages; "": the model's weights."""
        self.whose = f"adapter {adapter}, " if adapter else ""
        self._most = _FIRST  # Largest allowed ratio of the median difference to the noise's median.
        self._is_first = True

    def compare(
        self, trainer: TrainerScores, engines: Sequence[Sequence[FloatArray]], version: int
    ) -> ComparisonReport:
        """Return the report of the engine that differs most.

        Raises RuntimeError if there is nothing to compare, a log-prob is not finite, or an engine differs by more than rounding.
        The message gives the statistic, its value and bound, the engine, and the token that differs most.
        """
        where = f"weight sync: {self.whose}version {version}"
        ours = _finite(trainer.logprobs, f"{where}: the trainer's log-probs of the probe")
        rounded = _finite(trainer.rounded, f"{where}: the trainer's perturbed log-probs of the probe")
        lengths = [len(sequence) for sequence in trainer.logprobs]
        if not len(ours) or not engines:
            raise RuntimeError(
                f"{where}: the probe has nothing to compare: found {len(ours)} tokens and {len(engines)} engines; expected both"
            )
        last = np.cumsum(lengths) - 1
        reports = []
        for engine, scores in enumerate(engines):
            scored = _finite(scores, f"{where}: engine {engine}'s log-probs of the probe")
            if [len(sequence) for sequence in scores] != lengths:
                raise RuntimeError(
                    f"{where}: engine {engine} returned {[len(values) for values in scores]} log-probs of the probe's sequences; "
                    f"expected {lengths}"
                )
            report = measure(np.abs(scored - ours), np.abs(rounded - ours), last)
            if problem := self._problem(report, len(last)):
                at = int(np.abs(scored - ours).argmax())
                sequence = int(np.searchsorted(last, at))
                token = at - int(last[sequence]) + lengths[sequence]
                raise RuntimeError(
                    f"{where}: trainer and engine {engine} disagree on the probe by more than rounding explains: {problem}. "
                    f"The largest difference is {report.largest:.3g} nats at sequence {sequence}, token {token} of "
                    f"{lengths[sequence]}: trainer {ours[at]:.6f}, engine {scored[at]:.6f}. Every tensor's checksum agreed, so "
                    f"{_where_to_look(ours)}"
                )
            reports.append(report)
        farthest = max(reports, key=lambda report: report.ratio)
        if self._is_first:
            self._most = min(_FIRST, _LATER * max(1.0, farthest.ratio))
            self._is_first = False
        return farthest

    def _problem(self, report: ComparisonReport, num_sequences: int) -> str:
        """Return the violated statistic with its value and bound; "" if there is none."""
        if report.ratio > self._most:
            return (
                f"the median of |difference| over {report.num_tokens} tokens is {report.median:.3g} nats, expected at most "
                f"{self._most * (report.noise + _FLOOR):.3g} ({self._most:.3g} x the rounding noise, "
                f"{report.noise:.3g})"
            )
        bound_text = f"{report.bound:.3g} nats (twice the 90 % quantile of the rounding noise)"
        if report.share > _SHARE:
            return (
                f"the share of the {report.num_tokens} tokens that differ by more than {bound_text} is {report.share:.3g}, "
                f"expected at most {_SHARE:g}"
            )
        if report.num_last > num_sequences / 2:
            return (
                f"{report.num_last} of the {num_sequences} last tokens, which an engine may compute through its prefix cache, "
                f"differ by more than {bound_text}, expected at most half"
            )
        return ""


def _where_to_look(trainer: FloatArray) -> str:
    """Return a hint at a likely cause other than the transfer. trainer: log-probs of the probe, [tokens] nats."""
    if (median := float(np.median(trainer))) < -_DIVERGED:
        return (
            f"the transfer is not the cause: the trainer's own log-probs have a median of {median:.4g} nats, so the policy has "
            "diverged; lower policies.<name>.optimizer.lr and resume from an earlier checkpoint"
        )
    return "check for stale prefix caches, different computations (rope, norms, routing), and the engine's dtype"


def measure(difference: FloatArray, noise: FloatArray, last: IntArray) -> ComparisonReport:
    """Compute the comparison's report from absolute differences and noise, both [tokens] nats.

    last: indices of the sequences' last tokens.
    """
    bound = 2 * (float(np.quantile(noise, 0.9)) + _FLOOR)
    is_beyond = difference > bound
    return ComparisonReport(
        num_tokens=len(difference),
        largest=float(difference.max()),
        median=float(np.median(difference)),
        share=float(is_beyond.mean()),
        num_last=int(is_beyond[last].sum()),
        noise=float(np.median(noise)),
        bound=bound,
    )


def _finite(logprobs: Sequence[FloatArray], whose: str) -> FloatArray:
    """Return all log-probs concatenated, [tokens] float64; RuntimeError if one is not finite."""
    for sequence, values in enumerate(logprobs):
        if not np.isfinite(values).all():
            bad = np.flatnonzero(~np.isfinite(values))
            raise RuntimeError(
                f"{whose} are not finite: {len(bad)} of {len(values)} in sequence {sequence}, first {values[bad[0]]} at token "
                f"{bad[0] + 1}; check the weights of this version (0: the initial weights; later: a loss that "
                "diverged, the learning rate) and overflow in the dtype"
            )
    return np.concatenate([np.zeros(0), *logprobs]).astype(np.float64)


class CheckedEngines:
    """Pool of engines whose weights and log-probs are verified.

    adapter: name of the adapter to verify; "": the model's weights.
    shards_of_each: for each worker of an engine, the shard of the model that it holds; the same for all engines.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        vocab_size: int,
        settings: Mapping[str, float] | None = None,
        adapter: str = "",
    ) -> None:
        """Score the comparison's sequences once, so that a prefix cache that survives the first update is detected.

        settings: ModelShape.settings() of the trainer's model, compared with what the engines report; None: not compared.

        Raises ValueError if an engine computes with other settings (a router's top-k, a norm's eps, ...).
        """
        infos = pool.infos()
        for engine, info in enumerate(infos if settings else ()):
            for name, values in info.settings.items():
                ours = (settings or {}).get(name, math.nan)
                if wrong := [value for value in values if not math.isclose(value, ours, rel_tol=1e-6)]:
                    raise ValueError(
                        f"weight sync: engine {engine} ({info.engine_class}) computes with {name} {wrong[0]:g}, the trainer with "
                        f"{ours:g}"
                        "; config.json is read differently, or an engine option overrides it: check the engine's options"
                    )
        self.pool, self.adapter, self.shards_of_each = pool, adapter, infos[0].shards
        self._comparison = EngineComparison(adapter)
        self._sequences = comparison_sequences(vocab_size)
        pool.score(self._sequences, adapter)

    def check(self, expected: Sequence[Mapping[str, int]], receipts: Mapping[int, WeightReceipt], version: int) -> None:
        """Raise RuntimeError, with the tensors' names, if an engine's weights differ from those sent.

        expected: {fused tensor: checksum} for each shard of an engine. receipts: {engine number: receipt}.
        """
        for engine, receipt in receipts.items():
            if receipt.version != version:
                raise RuntimeError(
                    f"weight sync: engine {engine} reports version {receipt.version} after version {version} was sent"
                )
            wrong: list[str] = []
            for shard, (sent, held) in enumerate(zip(expected, receipt.checksums, strict=True)):
                where_shard = f"shard {shard} of {len(expected)}: " if len(expected) > 1 else ""
                names = [name for name in {**sent, **held} if held.get(name) != sent.get(name)]
                wrong += [f"{where_shard}{name} ({_difference(sent.get(name), held.get(name))})" for name in names]
            if wrong:
                raise RuntimeError(
                    f"weight sync: {self._comparison.whose}version {version}: engine {engine} does not hold what was "
                    f"sent: {len(wrong)} of {sum(map(len, expected))} tensors differ, first {'; '.join(wrong[:3])}"
                )

    @staticmethod
    def compare(asked: Sequence[Compared]) -> list[ComparisonReport]:
        """Compare log-probs of engines and trainer, for several adapters or for the model's weights.

        The engines are called once.

        Raises RuntimeError if they differ by more than rounding.
        """
        first = asked[0]
        num = len(first.scores.logprobs)
        names = [each.engines.adapter for each in asked] + [""] * any(each.is_bare for each in asked)
        sequences = first.engines._sequences[:num] * len(names)
        of_engines = first.engines.pool.score(sequences, np.repeat(names, num).tolist() if len(names) > 1 else names[0])
        reports = []
        for each in asked:
            for name in ("", each.engines.adapter) if each.is_bare else (each.engines.adapter,):
                place = num * names.index(name)
                own = [of_engine[place : place + num] for of_engine in of_engines]
                report = each.engines._comparison.compare(each.scores, own, each.version)
            reports.append(report)
        return reports


@dataclass(frozen=True, slots=True)
class Compared:
    """Adapter, or weights, to compare. is_bare: an adapter without effect, so the bare weights must give the same log-probs."""

    engines: CheckedEngines
    scores: TrainerScores
    version: int
    is_bare: bool


def _difference(sent: int | None, held: int | None) -> str:
    """Describe how two checksums of a tensor differ."""
    if held is None:
        return "not in the engine"
    return "not sent" if sent is None else f"checksum {held:#x}, expected {sent:#x}"
