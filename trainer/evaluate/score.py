"""Results of an evaluation, computed only from draws and fixed answers, saved or new; pass@k and majority@k."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from marsrl.rollout.agents.roles import AgentSpec
from marsrl.rollout.agents.same_answer import answer_key
from marsrl.rollout.config import AgentConfig
from marsrl.trainer.evaluate.draws import Call, Draw, FixedAnswer, Said
from marsrl.trainer.evaluate.intervals import Statistic, estimate_of, mean_of, ratio
from marsrl.trainer.report.cost import judge_usage, latency, usage
from marsrl.trainer.report.summary import AgentEstimate, AtK, Confusion, Estimate, Evaluation, Length, ToolUsage
from marsrl.trainer.report.unread import Ended, unread
from marsrl.trainer.visible import visible

ORDERS = 64  # minimum number of orders of a problem's draws; the first k draws of each order are a sample
_MOST_SHOWN = 200  # characters of an error
_RIGHT = "\x00right"  # all right answers count as one, however they are written


@dataclass(frozen=True, slots=True)
class Scorer:
    """Calculator of an evaluation's results.

    specs: the team's agents, in the order of play.
    judge: name of the policy that judges answers; None: no model judges.
    forms: {agent: description of the answer that the agent's parser expects} (Orchestration.form).
    """

    specs: Sequence[AgentSpec]
    agents: Mapping[str, AgentConfig]
    judge: str | None = None
    forms: Mapping[str, str] = field(default_factory=dict)

    def evaluation(self, draws: Sequence[Draw], fixed: Mapping[str, Sequence[FixedAnswer]]) -> Evaluation:
        """Return the results over all draws, and for each named set."""
        names = dict.fromkeys(draw.of for draw in draws)
        calls = [call for draw in draws for call in draw.calls]
        calls += [answer.call for answers in fixed.values() for answer in answers]
        told = [unread(spec.name, self.forms.get(spec.name, ""), _ended(spec.name, calls)) for spec in self.specs]
        notes = (*_uncounted(draws), *filter(None, told))
        whole = self._of(draws, fixed).model_copy(update={"notes": notes})
        if set(names) <= {""}:
            return whole
        sets = {name: self._of([draw for draw in draws if draw.of == name], {}) for name in names}
        return whole.model_copy(update={"sets": sets})

    def _of(self, draws: Sequence[Draw], fixed: Mapping[str, Sequence[FixedAnswer]]) -> Evaluation:
        agents = {}
        for spec in self.specs:
            calls = [(d.question, call) for d in draws for call in d.calls if call.agent == spec.name]
            if spec.name in fixed:
                agents[spec.name] = (_balanced if spec.gives_verdicts else _repairs)(fixed[spec.name])
            elif calls:
                counted = [(question, call.correct) for question, call in calls if not call.is_redrawn]
                agents[spec.name] = AgentEstimate(**_accuracy(counted).model_dump())
            if spec.name in agents:
                more = {"length": _length(calls)} | (_detection(calls) if spec.gives_verdicts else {})
                ended = _ended(spec.name, [call for _, call in calls]) if self.forms.get(spec.name) else []
                missing = {"missing": sum(not call.is_read for call in ended) / len(ended)} if ended else {}
                agents[spec.name] = agents[spec.name].model_copy(update=more | missing)
        system, alone = _by_problem(draws, lambda d: d.system), _by_problem(draws, lambda d: d.alone)
        used: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        tools: dict[str, ToolUsage] = {}
        judged: Counter[str] = Counter()
        for draw in draws:
            judged.update(draw.judge)
            for call in draw.calls:
                used[call.agent].append((call.input_tokens, call.output_tokens, call.seconds))
            for name, ran in draw.tools.items():
                tools[name] = tools.get(name, ToolUsage()) + ran
        judge = None if self.judge is None else judge_usage(judged, self.judge)
        return Evaluation(
            agents=agents,
            system=_accuracy([(name, answer.correct) for name, answers in system.items() for answer in answers]),
            alone=_accuracy([(name, answer.correct) for name, answers in alone.items() for answer in answers])
            if alone
            else None,
            system_at=at_k(system),
            alone_at=at_k(alone),
            num_problems=len(system),
            num_episodes=len(draws),
            usage=usage(used, self.agents),
            tools=tools,
            judge=judge,
            latency=latency([draw.latency_s for draw in draws if draw.latency_s is not None]),
            team=_means(draws),
        )


def _by_problem(draws: Sequence[Draw], answer_of: Callable[[Draw], Said | None]) -> dict[str, list[Said]]:
    answers: dict[str, list[Said]] = defaultdict(list)
    for draw in draws:
        if (answer := answer_of(draw)) is not None:
            answers[draw.question].append(answer)
    return answers


def _accuracy(correct: Iterable[tuple[str, float | None]]) -> Estimate:
    """Return the mean of the known values in (problem, correct): the share of right answers if the task gives only 0 or 1."""
    sums: dict[str, list[float]] = defaultdict(list)
    for problem, value in correct:
        if value is not None:
            sums[problem].append(value)
    counts = [len(values) for values in sums.values()]
    return estimate_of(len(sums), sum(counts), ratio([math.fsum(values) for values in sums.values()], counts))


def _detection(calls: Sequence[tuple[str, Call]]) -> dict[str, object]:
    """Return loop_confusion, detection_recall and detection_precision of a Verifier.

    detection_recall: share of wrong solutions that are called wrong (arXiv:2511.11373, Figure 5); a missing verdict counts as
    not called wrong. detection_precision: share of the solutions called wrong that are wrong.
    """
    known = [(problem, call) for problem, call in calls if call.is_of_right is not None]
    wrong_solutions = [(problem, float(call.verdict is False)) for problem, call in known if not call.is_of_right]
    called_wrong = [(problem, float(not call.is_of_right)) for problem, call in known if call.verdict is False]
    return {
        "loop_confusion": _confusion(call for _, call in known),
        "detection_recall": _accuracy(wrong_solutions),
        "detection_precision": _accuracy(called_wrong),
    }


def _confusion(calls: Iterable[Call]) -> Confusion:
    """Count the pairs (correctness of the judged solution, verdict). Solutions of unknown correctness are not counted."""
    counts = Counter(
        "none"
        if call.verdict is None
        else f"{'right' if call.is_of_right else 'wrong'}_{'correct' if call.verdict else 'wrong'}"
        for call in calls
        if call.is_of_right is not None
    )
    return Confusion(**counts)


def _balanced(answers: Sequence[FixedAnswer]) -> AgentEstimate:
    """Return the balanced accuracy: the mean of the accuracies on right and wrong solutions. A missing verdict is an error.

    n is the number of right and wrong solutions. There are equally many of both, unless the team's episodes did not provide
    enough.
    """
    problems = {name: i for i, name in enumerate(dict.fromkeys(answer.problem for answer in answers))}

    def accuracy(is_right: bool) -> Statistic:
        hits, all_of = np.zeros(len(problems)), np.zeros(len(problems))
        for answer in answers:
            if answer.call.is_of_right is is_right:
                all_of[problems[answer.problem]] += 1
                hits[problems[answer.problem]] += answer.call.verdict is is_right
        return ratio(hits, all_of)

    right_accuracy, wrong_accuracy = accuracy(True), accuracy(False)
    estimate = estimate_of(
        len(problems), len(answers), lambda weights: (right_accuracy(weights) + wrong_accuracy(weights)) / 2
    )
    return AgentEstimate(**estimate.model_dump(), confusion=_confusion(answer.call for answer in answers))


def _repairs(answers: Sequence[FixedAnswer]) -> AgentEstimate:
    wrong_repairs = [(answer.problem, answer.call.correct) for answer in answers if not answer.call.is_of_right]
    right_repairs = [(answer.problem, answer.call.correct) for answer in answers if answer.call.is_of_right]
    broken = _accuracy((problem, None if correct is None else 1 - correct) for problem, correct in right_repairs)
    return AgentEstimate(**_accuracy(wrong_repairs).model_dump(), breaks=broken)


def _length(calls: Sequence[tuple[str, Call]]) -> Length | None:
    if not calls:
        return None
    tokens = [call.tokens for _, call in calls]
    cut = sum(call.is_cut for _, call in calls) / len(calls)
    return Length(mean=math.fsum(tokens) / len(tokens), longest=max(tokens), cut=cut)


def _ended(agent: str, calls: Iterable[Call]) -> list[Ended]:
    """Return the end of each of the agent's completions, except those saved by a version of marsrl that lacked is_read."""
    return [
        Ended(bool(call.is_read), call.is_cut, call.tokens, call.text or "")
        for call in calls
        if call.agent == agent and call.is_read is not None
    ]


def _means(draws: Sequence[Draw]) -> dict[str, float]:
    """Return the means of the team's metrics over the draws that did not fail; failed ones have none."""
    total: Counter[str] = Counter()
    ended = [draw for draw in draws if not draw.error]
    for draw in ended:
        total.update(draw.team)
    return {name: value / len(ended) for name, value in total.items()}


def _uncounted(draws: Sequence[Draw]) -> list[str]:
    """Return sentences about draws that failed, and about draws whose correctness is unknown."""
    notes, failed = [], [draw for draw in draws if draw.error]
    if failed:
        why = visible(failed[0].error.strip().splitlines()[-1][:_MOST_SHOWN])
        notes.append(f"{len(failed)} of {len(draws)} draws failed and count as wrong; the first: {why}")
    if unknown := sum(draw.system.correct is None for draw in draws):
        notes.append(f"{unknown} of {len(draws)} draws have no known correctness and are left out")
    return notes


def eval_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the eval/... metrics of a step (docs/metrics.md), in which each estimate has a mean, /low and /high.

    Names begin with eval/ for all problems, and with eval/<set>/ for a set of data.eval.
    """
    metrics: dict[str, float] = {}

    def note(name: str, value: Estimate | None) -> None:
        if value is not None and value.mean is not None:
            metrics.update({name: value.mean, f"{name}/low": value.low, f"{name}/high": value.high})

    for prefix, part in {
        "eval": evaluation,
        **{f"eval/{name}": part for name, part in evaluation.sets.items()},
    }.items():
        for name, row in {**part.agents, "alone": part.alone, "system": part.system}.items():
            note(f"{prefix}/{name}", row)
        for name, agent in part.agents.items():
            note(f"{prefix}/{name}/detection_recall", agent.detection_recall)
            note(f"{prefix}/{name}/detection_precision", agent.detection_precision)
            if agent.length is not None:
                metrics[f"{prefix}/{name}/response_length"] = agent.length.mean
            if agent.missing is not None:
                metrics[f"{prefix}/{name}/missing"] = agent.missing
        for name, estimates in (("alone", part.alone_at), ("system", part.system_at)):
            for kind in AtK.model_fields:
                values: dict[int, Estimate] = getattr(estimates, kind)
                note(f"{prefix}/{name}/{kind}_{max(values, default=0)}", values[max(values)] if values else None)
        output_tokens = sum(used.output_tokens for used in part.usage.values())
        metrics[f"{prefix}/tokens"] = output_tokens / max(1, part.num_episodes)
    if evaluation.league is not None:
        elo = evaluation.league.elo
        metrics |= {"eval/league/elo": elo.mean, "eval/league/elo/low": elo.low, "eval/league/elo/high": elo.high}
        note("eval/league/worst", evaluation.league.worst)
    return metrics


def at_k(draws: Mapping[str, Sequence[Said]]) -> AtK:
    """Return pass@k and majority@k for k = 1, 2, 4, ... and the largest number of draws; empty if problems have one draw each.

    Draws without a judgement are ignored. A problem counts for each k up to its number of draws.
    """
    known = [
        [answer for answer in said_answers if answer.correct is not None] for _, said_answers in sorted(draws.items())
    ]
    most = max(map(len, known), default=0)
    if most < 2:
        return AtK()
    ks = sorted({most, *(1 << i for i in range(most.bit_length()))})
    chances = [
        pass_at(len(said_answers), sum((answer.correct or 0) >= 1 for answer in said_answers), ks)
        for said_answers in known
    ]
    votes = [majorities(said_answers, ks) for said_answers in known]
    return AtK(
        pass_at={k: mean_of([chance[k] for chance in chances]) for k in ks},
        majority_at={k: mean_of([vote[k][0] for vote in votes]) for k in ks},
        short_majority_at={k: mean_of([vote[k][1] for vote in votes]) for k in ks},
    )


def pass_at(n: int, c: int, ks: Sequence[int]) -> dict[int, float]:
    """Estimate the probability that at least one of k draws is right, if c of n draws were right.

    1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al., arXiv:2107.03374, eq. 1).
    """
    return {k: 1.0 - math.comb(n - c, k) / math.comb(n, k) if k <= n else math.nan for k in ks}


def majorities(draws: Sequence[Said], ks: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return {k: (majority@k, short-majority@k)}: correctness of the most frequent answer of k draws, or of their shorter half.

    Each value is a mean over seeded orders of the draws. Up to ORDERS draws, each comes first equally often, so majority@1 is the
    share of right draws. Tied answers share the vote. Draws without an answer do not vote; without any vote the majority is
    wrong. NaN if there are fewer than k draws.
    """
    values: dict[int, tuple[float, float]] = {k: (math.nan, math.nan) for k in ks if k > len(draws)}
    if not draws:
        return values
    names = [None if s.answer is None else _RIGHT if (s.correct or 0) >= 1 else answer_key(s.answer) for s in draws]
    kinds = {name: i for i, name in enumerate(dict.fromkeys(name for name in names if name is not None))}
    votes = np.zeros((len(draws), len(kinds)))  # [draws, different answers]
    for i, name in enumerate(names):
        if name is not None:
            votes[i, kinds[name]] = 1
    correct = np.array([s.correct or 0.0 for s in draws])
    worth = (votes.T @ correct) / np.maximum(votes.sum(axis=0), 1)
    tokens = np.array([s.tokens for s in draws])
    num_shifts = min(ORDERS, len(draws))
    num_random = math.ceil(ORDERS / len(draws))  # Each is rotated, so that each of up to ORDERS draws comes first once.
    orders = np.argsort(np.random.default_rng(len(draws)).random((num_random, len(draws))), axis=1)
    order = np.concatenate([np.roll(orders, i * len(draws) // num_shifts, axis=1) for i in range(num_shifts)])
    for k in ks:
        if k <= len(draws):
            orders_of_k = order[:, :k]
            by_length = np.take_along_axis(orders_of_k, np.argsort(tokens[orders_of_k], axis=1, kind="stable"), axis=1)
            values[k] = _elected(votes[orders_of_k], worth), _elected(votes[by_length[:, : (k + 1) // 2]], worth)
    return values


def _elected(votes: npt.NDArray[np.float64], worth: npt.NDArray[np.float64]) -> float:
    """Return the mean correctness of the answers with the most votes.

    votes: [orders, k, answers], 1 where a draw gave the answer. worth: [answers], correctness of each different answer.
    """
    if not len(worth):
        return 0.0
    counts = votes.sum(axis=1)
    wins = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
    return float(np.mean((wins @ worth) / np.maximum(wins.sum(axis=1), 1)))
