"""Traces of a mediocre team on chains, for the warm start.

The tutors slip on purpose; RL is to remove the slips. Recipe and constants: docs/cpu_default.md.
"""

from __future__ import annotations

import random

from marsrl.rollout.agents.prompts import prompt_set
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.arithmetic import LETTERS, OPERATIONS, Chain, apply
from marsrl.rollout.tasks.config import ArithmeticOptions, ArithmeticSlips
from marsrl.rollout.tasks.word_tokenizer import Trace
from marsrl.rollout.types import Message

_MOST_TRIES = 1000  # maximum tries for a solution that the Verifier flags


def solver_trace(rng: random.Random, chain: Chain, slip: float, options: ArithmeticOptions) -> Trace:
    return Trace(Role.SOLVER, _prompt(Role.SOLVER, chain), _solution(rng, chain, slip, options))


def team_traces(rng: random.Random, chain: Chain, slips: ArithmeticSlips, options: ArithmeticOptions) -> list[Trace]:
    """Write the traces of Solver, Verifier and Corrector on one chain; the Corrector's input is always a flagged solution.

    The Corrector is missing if the tutors slip so rarely that no solution is flagged in _MOST_TRIES, as in a chain of * with
    slip_multiply 0.
    """
    solution = _solution(rng, chain, slips.slip_solver, options)
    is_hard = rng.random() < slips.hard_claims
    judged = _solution(rng, chain, slips.slip_hard, options) if is_hard else solution
    report = _report(rng, chain, judged, slips, options)
    traces = [
        Trace(Role.SOLVER, _prompt(Role.SOLVER, chain), solution),
        Trace(Role.VERIFIER, _prompt(Role.VERIFIER, chain, judged), report),
    ]
    report = _report(rng, chain, solution, slips, options)
    for _ in range(_MOST_TRIES):
        if report.endswith("wrong"):
            break
        solution = _solution(rng, chain, slips.slip_solver, options)
        report = _report(rng, chain, solution, slips, options)
    if not report.endswith("wrong"):
        return traces
    correction = _correction(rng, chain, solution, slips, options)
    return [*traces, Trace(Role.CORRECTOR, _prompt(Role.CORRECTOR, chain, solution, report), correction)]


def table_drill(rng: random.Random) -> Trace:
    """Write one operation on a digit as a line of a solution: the table that everything else builds on."""
    value, operation = rng.randrange(10), rng.choice(OPERATIONS)
    letter = rng.choice(LETTERS[1:-1])
    return Trace(None, f"= {value} {letter} {operation} =", str(apply(value, operation)), ends=False)


def equality_drill(rng: random.Random) -> Trace:
    """Write the end of a report, which compares two digits; they are equal in half of the drills."""
    said = rng.randrange(10)
    got = said if rng.random() < 0.5 else rng.randrange(10)
    return Trace(None, f"got {got} said {said} Verdict:", "correct" if got == said else "wrong")


def _prompt(role: Role, chain: Chain, solution: str = "", report: str = "") -> tuple[Message, ...]:
    return prompt_set("chain").fill(role, problem=chain.text, solution=solution, report=report)


def _work(rng: random.Random, chain: Chain, slip: float, options: ArithmeticOptions) -> tuple[str, int]:
    """Return the lines of a calculation with slips, and its result."""
    weights = {"+": options.slip_add, "-": options.slip_subtract, "*": options.slip_multiply}
    mean = sum(weights.values()) / 3 or 1.0
    value = chain.start
    words = [LETTERS[0], "=", str(value)]
    for letter, operation in zip(LETTERS[1:], chain.operations, strict=False):
        value = apply(value, operation)
        if rng.random() < slip * weights[operation[0]] / mean:
            value = (value + rng.choice((-1, 1, rng.randint(1, 9)))) % 10
        words += [letter, operation, "=", str(value)]
    return " ".join(words), value


def _solution(rng: random.Random, chain: Chain, slip: float, options: ArithmeticOptions) -> str:
    work, value = _work(rng, chain, slip, options)
    return f"{work} Answer: {value}"


def _report(rng: random.Random, chain: Chain, solution: str, slips: ArithmeticSlips, options: ArithmeticOptions) -> str:
    claim = solution[-1]
    work, value = _work(rng, chain, slips.slip_verifier, options)
    got = claim if rng.random() < slips.anchor else str(value)
    return f"claim {claim} {work} got {got} said {claim} Verdict: {'correct' if got == claim else 'wrong'}"


def _correction(
    rng: random.Random, chain: Chain, solution: str, slips: ArithmeticSlips, options: ArithmeticOptions
) -> str:
    if rng.random() < slips.restate:
        return f"rebut Answer: {solution[-1]}"
    return f"agree {_solution(rng, chain, slips.slip_corrector, options)}"
