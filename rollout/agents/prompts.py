"""What each role is told, and how its outputs are read: the prompt sets "math", "drmas_math" and "chain"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from marsrl.rollout.agents.parsers import (
    boxed_answer,
    chain_answer,
    chain_verdict,
    compat_is_valid,
    compat_report,
    compat_verdict,
    drmas_is_valid,
    drmas_report,
    drmas_verdict,
    strict_verdict,
    tagged_verdict,
)
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.types import Message

_FIELD = re.compile(r"\{(problem|solution|report)\}")


@dataclass(frozen=True, slots=True)
class Compat:
    """How the code published with a paper reads a Verifier's whole output (agents.<name>.parser: compat).

    report: what the others see of it; verdict: there always is one; is_valid: it is no failure of format.
    """

    report: Callable[[str], str]
    verdict: Callable[[str], bool]
    is_valid: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Templates of every role and the grammar of its answers.

    turns: chat turns whose contents hold {problem}, {solution}, {report}. read_answer / read_verdict take visible
    text and return None where nothing can be read; example holds ANSWER and VERDICT in words that they read, verdicts has the
    two of them, right and wrong.
    """

    name: str
    turns: Mapping[Role, tuple[Message, ...]]
    read_answer: Callable[[str], str | None]
    read_verdict: Callable[[str], bool | None]
    example: str
    verdicts: tuple[str, str] = ("correct", "wrong")
    compat: Compat = Compat(compat_report, compat_verdict, compat_is_valid)

    def fill(self, role: Role, *, problem: str, solution: str = "", report: str = "") -> tuple[Message, ...]:
        """The chat for one call. One pass: a "{report}" that stands in the problem's own text stays as it is."""
        values = {"problem": problem, "solution": solution, "report": report}
        return tuple(
            Message(turn.role, _FIELD.sub(lambda match: values[match[1]], turn.content)) for turn in self.turns[role]
        )


_MATH_VERIFIER = """\
You are a strict grader of mathematical solutions. You are given a problem and a solution that somebody wrote. \
Decide whether the solution is right, and say exactly what is wrong with it if it is not.

How to work
- Go through the solution step by step, in its own order, and check each step yourself. A right final answer does \
not excuse a wrong argument, and you must not take a claim on trust because it sounds familiar.
- You judge; you do not repair. Do not write a solution of your own and do not fill holes for the author.

Two kinds of findings
- Critical error: a step that is false, a slip of calculation, or a contradiction that breaks the chain of \
reasoning. Say why it is false, and do not follow the steps that rest on it; independent parts are still checked.
- Justification gap: a step that may be true but is not shown. Say what is missing, assume the step for the moment, \
and go on checking what follows.

How to end
- A list headed "Findings:", one entry each: a short quotation of the place, its kind (Critical error or \
Justification gap), and the reason. Write "Findings: none" if there is nothing to report.
- Then, as the very last line and with nothing else on it, exactly one of
Verdict: correct
Verdict: wrong
The verdict is wrong if there is a critical error or if the final answer is not the right one."""

_MATH_VERIFIER_USER = """\
Problem:

{problem}

Solution to be graded:

{solution}

Grade the solution as instructed. Finish with the findings list and the verdict line."""

_MATH_CORRECTOR_USER = """\
A grader read your solution above and sent this report:

{report}

Look at every finding. Where you agree, repair your solution. Where you do not, say why the grader is mistaken and \
state your argument again, more clearly. The grader may be wrong: do not change what is right. Then write the whole \
solution once more, complete in itself, with the final answer in \\boxed{}."""

_MATH_DEBATER_USER = """\
Others solved the same problem. Their solutions:

{report}

Compare them with yours, step by step where they differ. Keep what is right, whoever wrote it; the majority may be wrong. \
Then write the whole solution once more, complete in itself, with the final answer in \\boxed{}."""

MATH = PromptSet(
    name="math",
    turns={
        Role.SOLVER: (Message("user", "{problem}"),),
        Role.VERIFIER: (Message("system", _MATH_VERIFIER), Message("user", _MATH_VERIFIER_USER)),
        Role.CORRECTOR: (
            Message("user", "{problem}"),
            Message("assistant", "{solution}"),
            Message("user", _MATH_CORRECTOR_USER),
        ),
        Role.DEBATER: (
            Message("user", "{problem}"),
            Message("assistant", "{solution}"),
            Message("user", _MATH_DEBATER_USER),
        ),
    },
    read_answer=boxed_answer,
    read_verdict=strict_verdict,
    example="\\boxed{ANSWER}\nVerdict: VERDICT",
)

# Dr. MAS's team for math: one message a call, that states the problem, what was said so far, and the agent's part.
_TEAM = """\
You are one of several experts who solve a math problem together.
The problem:

{problem}
"""

_SAID_SOLUTION = """
What the team has said so far

The Solver:

{solution}
"""

_SAID_REPORT = """
The Verifier:

{report}
"""

_SOLVER_PART = """
Your part
You are the Solver. Work the problem out step by step until you have its answer. What the others have said, if anything, may \
help you; check it before you rely on it. Give the final answer in \\boxed{}."""

_VERIFIER_PART = """
Your part
You are the Verifier. Go through the Solver's last solution critically: is each step, each formula and each conclusion right, is \
anything missing, does it hang together? End with your verdict in a tag, exactly one of
<verify>approve</verify> if every step and the final answer are right
<verify>reject</verify> if you have found anything wrong"""

DRMAS_MATH = PromptSet(
    name="drmas_math",
    turns={
        Role.SOLVER: (Message("user", _TEAM + _SOLVER_PART),),
        Role.VERIFIER: (Message("user", _TEAM + _SAID_SOLUTION + _VERIFIER_PART),),
        Role.CORRECTOR: (Message("user", _TEAM + _SAID_SOLUTION + _SAID_REPORT + _SOLVER_PART),),
        Role.DEBATER: MATH.turns[Role.DEBATER],
    },
    read_answer=boxed_answer,
    read_verdict=tagged_verdict,
    example="\\boxed{ANSWER}\n<verify>VERDICT</verify>",
    verdicts=("approve", "reject"),
    compat=Compat(drmas_report, drmas_verdict, drmas_is_valid),
)

# The arithmetic task. Every word is one token of its vocabulary of 64; the chat template adds the control words.
_CHAIN_AGAIN = (
    Message("user", "{problem}"),
    Message("assistant", "{solution}"),
    Message("user", "{report} fix"),
)

CHAIN = PromptSet(
    name="chain",
    turns={
        Role.SOLVER: (Message("user", "{problem}"),),
        Role.VERIFIER: (Message("system", "grade"), Message("user", "{problem} \n {solution}")),
        Role.CORRECTOR: _CHAIN_AGAIN,
        Role.DEBATER: _CHAIN_AGAIN,
    },
    read_answer=chain_answer,
    read_verdict=chain_verdict,
    example="Answer: ANSWER Verdict: VERDICT",
)

_SETS = {prompts.name: prompts for prompts in (MATH, DRMAS_MATH, CHAIN)}


def prompt_set(name: str) -> PromptSet:
    """The prompt set of this name; ValueError names the ones there are."""
    if name not in _SETS:
        raise ValueError(
            f"agents.<name>.prompt: no prompt set is called {name!r}; there are {', '.join(sorted(_SETS))}"
        )
    return _SETS[name]
