"""Samples that wait for a tool, another agent or their next turn: what becomes of each, stage by stage or all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from marsrl.rollout.episode import Episode
from marsrl.rollout.schedule.partial_rollouts import Partial
from marsrl.rollout.team import Team
from marsrl.rollout.types import Finish

NOTHING_OPEN = "it waits, and nothing was asked for that is not answered"


@dataclass(frozen=True, slots=True)
class Resumption:
    """A sample that waits no longer. num_added: tokens behind it now; finish: None where it goes on, else how it ends."""

    uid: str
    num_added: int
    finish: Finish | None = None
    error: str = ""


def resume(
    team: Team,
    episode: Episode,
    partial: Callable[[str], Partial],
    most_tokens: Callable[[str], int],
    is_stuck: Callable[[], bool],
) -> list[Resumption]:
    """Put what waiting samples waited for behind them.

    Args:
        partial: a waiting sample's completion so far, by uid.
        most_tokens: of an agent's completion.
        is_stuck: is nothing open in the episode but samples that wait? Then they end as errors.
    """
    said = {uid: team.continuation(episode, sample) for uid, sample in episode.waiting.items()}
    is_over = bool(episode.error) or (all(tokens is None for tokens in said.values()) and is_stuck())
    found = []
    for uid, tokens in said.items():
        if tokens is None and not is_over:
            continue
        agent = episode.waiting.pop(uid).agent
        if tokens is None:
            found.append(Resumption(uid, 0, Finish.ERROR, episode.error or NOTHING_OPEN))
        elif len(partial(uid).token_ids) + len(tokens) >= most_tokens(agent):
            found.append(Resumption(uid, 0, Finish.LENGTH))
        else:
            partial(uid).go_on_with(tokens)
            found.append(Resumption(uid, len(tokens)))
    return found
