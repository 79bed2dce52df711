"""Explanation of rewards of 0: completions without a readable answer or verdict, and completions that were cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from marsrl.trainer.visible import visible

MOST_UNREAD = 0.2  # largest share of unread or cut completions that needs no explanation
_SHOWN_CHARS = 80  # longest example, characters
_LINE_BREAKS = {9: "␉", 10: "␊"}  # these symbols match those of `visible` for other control characters


class Ended(NamedTuple):
    """End of a completion.

    is_read: the parser found an answer, verdict, query or route.
    is_cut: the completion was cut at the token limit, or has no tokens because the prompt was too long.
    text: the completion's text, or its end.
    """

    is_read: bool
    is_cut: bool
    num_tokens: int
    text: str


def unread(agent: str, form: str, completions: Sequence[Ended]) -> str:
    r"""Return a sentence if more than a fifth of an agent's completions have no readable answer, or were cut; else "".

    Example:

        97 % of solver's completions (97 of 100) have no answer in the form \boxed{...}; 41 % were cut at 128 tokens; one ends
        "She makes $18 every day."

    form: description of the answer that the agent's parser expects (Orchestration.form); "" if it expects none.
    """
    without = [completion for completion in completions if form and not completion.is_read]
    cut = [completion for completion in completions if completion.is_cut and completion.num_tokens]
    unasked = [completion for completion in completions if completion.is_cut and not completion.num_tokens]
    if max(map(len, (without, cut, unasked))) <= MOST_UNREAD * len(completions):
        return ""
    facts = [
        (without, f"have no {form}"),
        (cut, f"were cut at {max((completion.num_tokens for completion in cut), default=0)} tokens"),
        (unasked, f"had a prompt longer than agents.{agent}.max_input_tokens"),
    ]
    clauses, subject = [], f" of {agent}'s completions"
    for affected, problem in facts:
        if affected:
            count = f" ({len(affected)} of {len(completions)})" if subject else ""
            clauses.append(f"{100 * len(affected) / len(completions):.0f} %{subject}{count} {problem}")
            subject = ""
    # Prefer a completion that was not cut: its end shows the form that the agent writes.
    example = min([*without, *cut], key=lambda completion: (completion.is_cut, not completion.text), default=None)
    if example is not None and example.text:
        clauses.append(f'one ends "{visible(example.text.rstrip()[-_SHOWN_CHARS:]).translate(_LINE_BREAKS)}"')
    return "; ".join(clauses)
