"""Evaluation of a policy against past versions of itself: its games, scores and rating (docs/evaluate.md).

In each game the policy's current adapter plays one of two agents, and a past version plays the other, from a slot of the same
engines (weights/league.py). Against every opponent, the current adapter plays both roles on the same openings, which are the
held-out problems. Games are saved in league.jsonl of the evaluation's folder as they end, so a killed evaluation resumes with the
remaining games.

The rating is fitted to the games of all evaluations of the run. Evaluations are linked by opponents that several versions have
met, and by versions that were evaluated before they became opponents. On Elo's scale a difference of 400 is odds of 10 to 1
(Bradley and Terry 1952, Biometrika 39:324; fitted as in Hunter 2004, Annals of Statistics 32:384, equation 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

import numpy as np
from pydantic import Field

from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import OnProgress, Played
from marsrl.rollout.types import PENALTIES, Finish
from marsrl.trainer.config.sections import LeagueConfig
from marsrl.trainer.evaluate.draws import digest, episode_key
from marsrl.trainer.evaluate.evaluator import Evaluator
from marsrl.trainer.evaluate.intervals import Array, bootstrap, estimate_of, ratio
from marsrl.trainer.report.summary import Elo, Estimate, LeagueResult, Schema, wilson_interval
from marsrl.trainer.runs.answers import Answers, key_of

GAMES = "league.jsonl"
_MOST_ROUNDS, _CLOSE = 2000, 1e-6  # most iterations of the fit; change of log strengths that ends the fit


class Game(Schema):
    """A game of a policy's version `version`, as agent `role`, against the policy's version `opponent`.

    opening: a digest of the problem. score: 1 won, 0.5 drawn, 0 lost; null if an engine, the judge or the game failed.
    """

    policy: str
    version: int
    opponent: int
    role: str
    opening: str
    score: float | None = Field(ge=0, le=1)


def evaluate_league(
    evaluator: Evaluator,
    config: LeagueConfig,
    versions: Mapping[str, int],
    slots: Mapping[int, str],
    folder: Path,
    progress: OnProgress | None = None,
) -> LeagueResult | None:
    """Play the current version against each opponent in both roles, and rate the current version; None if all games failed.

    slots: {opponent's version: name of its adapter slot in the engines}.
    folder: folder of this evaluation; the folders beside it belong to earlier evaluations.
    """
    version = versions[config.policy]
    roles = [name for name, agent in evaluator.team.agents.items() if agent.policy == config.policy]
    problems = [problem for held_out in evaluator.held_out() for problem in held_out.problems]
    identity = key_of(identity=evaluator.identity, versions=versions)
    keys: dict[str, str] = {}  # {episode id: key}
    parts = []
    with closing(Answers(folder / GAMES, Game.model_validate)) as kept:
        for opponent, slot in sorted(slots.items()):
            for role, other in (roles, roles[::-1]):
                names = {f"league{opponent}-{role}-{i:05d}": problems[i % len(problems)] for i in range(config.games)}
                episodes = [Episode(n, n, problem, evaluator.seed, "evaluate") for n, problem in names.items()]
                keys |= {each.id: episode_key(identity, each) for each in episodes}
                due = [each for each in episodes if keys[each.id] not in kept]
                parts.append((due, {other: (slot, opponent)}))
        of_part = {each.id: cast for due, cast in parts for each in due}

        def ended(played: Played) -> None:
            episode = played.episode
            ((other, (_, opponent)),) = of_part[episode.id].items()
            role = next(name for name in roles if name != other)
            game = Game(
                policy=config.policy,
                version=version,
                opponent=opponent,
                role=role,
                opening=digest(episode.problem),
                score=score_of(played, role, other),
            )
            kept.add(keys[episode.id], game.model_dump(mode="json"), is_whole=game.score is not None)

        if of_part:
            evaluator.play(parts, "league", versions, progress, ended)
        now = [kept[key] for key in keys.values()]
    if (model := evaluator.team.judge.model) is not None:
        model.take_counts("evaluate")  # Otherwise the next evaluation's draws would include these counts.
    past = [path for path in folder.parent.glob(f"step_*/{GAMES}") if path.parent != folder]
    earlier = [game for path in sorted(past) for game in Answers.read(path, Game.model_validate)]
    return result_of(now, [game for game in earlier if game.policy == config.policy])


def score_of(played: Played, role: str, other: str) -> float | None:
    """Return 1 if the agent `role` got a higher reward than `other` in the game, 0.5 if equal, 0 if lower; None on failure.

    Penalties for the form of a completion do not count. An agent without a turn has reward 0.
    """
    paid: list[float] = []
    for agent in (role, other):
        own = [s for s in played.samples if s.agent == agent]
        if played.episode.error or any(s.finish is Finish.ERROR for s in own):
            return None
        known = [s.reward for s in own if not s.reward.is_missing]
        if own and not known:
            return None
        # An agent's reward for the game is in each of its samples; a turn's reward is in one sample only.
        apart = ("turns", *PENALTIES)
        whole = [r.value - sum(part for name, part in r.parts.items() if name in apart) for r in known]
        paid.append((fmean(whole) if whole else 0.0) + sum(sum(r.turns) for r in known))
    return 0.5 * (1 + (paid[0] > paid[1]) - (paid[0] < paid[1]))


def result_of(games: Sequence[Game], earlier: Sequence[Game]) -> LeagueResult | None:
    """Return scores and rating of the version that played `games`; None if all games failed.

    earlier: games of other evaluations.
    """
    scored = [game for game in games if game.score is not None]
    if not scored:
        return None
    policy = scored[0].policy
    by_opponent = {
        opponent: [game for game in scored if game.opponent == opponent]
        for opponent in sorted({game.opponent for game in scored})
    }
    openings = {name: place for place, name in enumerate(dict.fromkeys(game.opening for game in scored))}
    won, played = np.zeros((2, len(openings), len(by_opponent)))
    for column, own in enumerate(by_opponent.values()):
        for game in own:
            won[openings[game.opening], column] += game.score or 0.0
            played[openings[game.opening], column] += 1

    def lowest(weights: Array) -> Array:
        above, below = weights @ won, weights @ played
        lowest: Array = np.divide(above, below, out=np.ones_like(above), where=below > 0).min(axis=1)
        return lowest

    def share(part: Sequence[Game]) -> Estimate:
        scores: dict[str, list[float]] = {}
        for game in part:
            scores.setdefault(game.opening, []).append(game.score or 0.0)
        counts = [len(each) for each in scores.values()]
        return estimate_of(len(scores), len(part), ratio([math.fsum(each) for each in scores.values()], counts))

    roles = dict.fromkeys(game.role for game in scored)
    of_run = [*scored, *(game for game in earlier if game.score is not None)]
    return LeagueResult(
        elo=elo_of(of_run, scored[0].version),
        zero=f"{policy}@{min(game.opponent for game in of_run)}",
        worst=estimate_of(len(openings), len(scored), lowest),
        scores={
            f"{policy}@{opponent}": {role: share([game for game in own if game.role == role]) for role in roles}
            for opponent, own in by_opponent.items()
        },
        num_failed=len(games) - len(scored),
    )


def elo_of(games: Sequence[Game], version: int) -> Elo:
    """Return the rating of `version` above the oldest version in these games, with its interval by bootstrap over openings.

    One drawn game is added for every pair of versions that played, so that ratings stay finite. If all resamples are equal, the
    interval is derived from Wilson's interval of the version's share of wins.
    """
    openings = {name: place for place, name in enumerate(dict.fromkeys(game.opening for game in games))}
    players = {n: i for i, n in enumerate(sorted({n for game in games for n in (game.version, game.opponent)}))}
    pairs = {pair: i for i, pair in enumerate(dict.fromkeys((game.version, game.opponent) for game in games))}
    won, played = np.zeros((2, len(openings), len(pairs)))
    for game in games:
        place = openings[game.opening], pairs[game.version, game.opponent]
        won[place] += game.score or 0.0
        played[place] += 1
    one, other = (np.array([players[pair[side]] for pair in pairs]) for side in (0, 1))

    def rating(weights: Array) -> Array:
        strengths = strengths_of(weights @ won + 0.5, weights @ played + 1.0, one, other)
        found: Array = 400 * np.log10(strengths[:, players[version]] / strengths[:, 0])
        return found

    mean = float(rating(np.ones((1, len(openings))))[0])
    low, high = bootstrap(len(openings), rating)
    if high - low < 1e-6:
        scores = [game.score or 0.0 for game in games if game.version == version]
        half = 0.5 / (len(scores) + 1)
        n = len({game.opening for game in games if game.version == version})
        bounds = (fmean(scores), *wilson_interval(fmean(scores) * n, n))
        centre, below, above = (400 * math.log10(p / (1 - p)) for p in np.clip(bounds, half, 1 - half))
        low, high = mean + below - centre, mean + above - centre
    num_games = sum(game.version == version for game in games)
    return Elo(mean=mean, low=min(low, mean), high=max(high, mean), n=num_games)


def strengths_of(won: Array, played: Array, one: Array, other: Array) -> Array:
    """Fit Bradley-Terry strengths, [B, players]; the first player's is 1. P(i beats j) = s_i / (s_i + s_j).

    one, other: [pairs], the two players of each pair.
    played: [B, pairs], number of games of the pair. won: [B, pairs], number of games that `one` won. All are above 0.
    """
    of_one, of_other = (np.eye(1 + max(one.max(), other.max()))[side] for side in (one, other))  # [pairs, players]
    wins = won @ of_one + (played - won) @ of_other
    strengths = np.ones_like(wins)
    for _ in range(_MOST_ROUNDS):
        rate = played / (strengths[:, one] + strengths[:, other])
        new = wins / (rate @ (of_one + of_other))
        new /= new[:, :1]
        change = np.abs(np.log(new / strengths)).max()
        strengths = new
        if change < _CLOSE:
            break
    return strengths
