"""Demonstrations of a mediocre team on chains. Recipe and constants: docs/cpu_default.md."""

from __future__ import annotations

from collections.abc import Iterator

from marsrl.rollout.agents.prompts import prompt_set
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.arithmetic import LETTERS, OPERATIONS, Chain, apply, draw_chain
from marsrl.rollout.tasks.config import ArithmeticOptions
from marsrl.rollout.tasks.tutor import Trace, Tutor

_MOST_TRIES = 1000  # maximum tries for a solution that the Verifier flags


class ChainTutor(Tutor[ArithmeticOptions]):
    """Teaches Solver, Verifier and Corrector of any team on the arithmetic task to calculate chains."""

    tokenizer, task_options = "arithmetic", ArithmeticOptions
    judged = (Role.SOLVER, Role.VERIFIER)
    slip_first = 0.03  # share of wrong lines in phase 1
    hard_claims = 0.5  # share of the Verifier's inputs with many slips; with less, policies of some seeds learn to copy
    slip_hard = 0.4  # share of wrong lines in inputs with many slips
    restate = 0.4  # share of corrections that keep the Solver's answer, whatever the report says

    def foundation(self, step: int) -> Iterator[Trace]:
        """Write solutions with few slips, and drills.

        Problems have 1-3 operations in the first half of config.short_steps, then from 1 up to options.max_operations; after
        config.short_steps they have as many as the task's problems.
        """
        config, options = self.config, self.options
        if step < config.short_steps:
            longest = 3 if step < config.short_steps // 2 else options.max_operations
            options = options.model_copy(update={"min_operations": 1, "max_operations": longest})
        chains = [draw_chain(self.rng, options, held_out=False) for _ in range(config.solver_batch)]
        for chain in chains:
            yield _trace(Role.SOLVER, self.solution(chain, self.slip_first), problem=chain.text)
        for _ in range(config.equality_drills):
            yield self._equality_drill()
        for _ in range(config.table_drills):
            yield self._table_drill()

    def team_lesson(self) -> Iterator[Trace]:
        """Write demonstrations of all roles on chains, and drills.

        At first the Verifier in training only copies the lines of the solution; its verdicts are no better than chance until it
        computes the lines.
        """
        chains = [draw_chain(self.rng, self.options, held_out=False) for _ in range(self.config.team_batch)]
        for chain in chains:
            yield from self.team(chain)
        for _ in range(self.config.equality_drills):
            yield self._equality_drill()

    def team(self, chain: Chain) -> Iterator[Trace]:
        """Write demonstrations of Solver, Verifier and Corrector on a chain; the Corrector's input is always a flagged solution.

        The Corrector is left out if none of _MOST_TRIES solutions is flagged, as for a chain of * with slip_multiply = 0.
        """
        config, problem = self.config, chain.text
        solution = self.solution(chain, config.slip_solver)
        is_hard = self.rng.random() < self.hard_claims
        judged = self.solution(chain, self.slip_hard) if is_hard else solution
        report = self._report(chain, judged)
        yield _trace(Role.SOLVER, solution, problem=problem)
        yield _trace(Role.VERIFIER, report, problem=problem, solution=judged)
        report = self._report(chain, solution)
        for _ in range(_MOST_TRIES):
            if report.endswith("wrong"):
                break
            solution = self.solution(chain, config.slip_solver)
            report = self._report(chain, solution)
        if report.endswith("wrong"):
            said = self._correction(chain, solution)
            yield _trace(Role.CORRECTOR, said, problem=problem, solution=solution, report=report)

    def _table_drill(self) -> Trace:
        """Write one operation on a digit as a line of a solution, to teach the arithmetic table."""
        value, operation = self.rng.randrange(10), self.rng.choice(OPERATIONS)
        letter = self.rng.choice(LETTERS[1:-1])
        return Trace(None, f"= {value} {letter} {operation} =", str(apply(value, operation)), ends=False)

    def _equality_drill(self) -> Trace:
        """Write the end of a report, where the Verifier compares two digits: in about half of the drills they are equal."""
        stated = self.rng.randrange(10)
        got = stated if self.rng.random() < 0.5 else self.rng.randrange(10)
        return Trace(None, f"got {got} said {stated} Verdict:", "correct" if got == stated else "wrong")

    def _work(self, chain: Chain, slip: float) -> tuple[str, int]:
        """Return the lines of a calculation with slips, and its result."""
        options, rng = self.options, self.rng
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

    def solution(self, chain: Chain, slip: float) -> str:
        """Return a solution. slip: share of its lines that are wrong."""
        work, value = self._work(chain, slip)
        return f"{work} Answer: {value}"

    def _report(self, chain: Chain, solution: str) -> str:
        claim = solution[-1]
        work, value = self._work(chain, self.config.slip_verifier)
        got = claim if self.rng.random() < self.config.anchor else str(value)
        return f"claim {claim} {work} got {got} said {claim} Verdict: {'correct' if got == claim else 'wrong'}"

    def _correction(self, chain: Chain, solution: str) -> str:
        if self.rng.random() < self.restate:
            return f"rebut Answer: {solution[-1]}"
        return f"agree {self.solution(chain, self.config.slip_corrector)}"


def _trace(role: Role, completion: str, **fields: str) -> Trace:
    return Trace(role, prompt_set("chain").fill(role, **fields), completion)
