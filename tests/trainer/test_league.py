"""Past versions as opponents: which versions are kept, their adapter slots, scores of games, and ratings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from letters import sampled
from safetensors.torch import save_file

from marsrl.rollout.adapter import CONFIG, TENSORS
from marsrl.rollout.engines.protocol import AdapterUpdate
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import Played
from marsrl.rollout.types import MISSING, Finish, Problem, Reward
from marsrl.trainer.config.sections import LeagueConfig
from marsrl.trainer.evaluate.league import Game, elo_of, result_of, score_of, strengths_of
from marsrl.trainer.evaluate.score import eval_metrics
from marsrl.trainer.report.summary import UNKNOWN, Evaluation
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.weights.league import League


def test_opponents_are_spaced_evenly_from_the_first_version() -> None:
    config = LeagueConfig(every=20, size=4)
    assert [*config.opponents(0)] == [] and [*config.opponents(20)] == [0] and [*config.opponents(21)] == [0, 20]
    assert [*config.opponents(80)] == [0, 20, 40, 60] and [*config.opponents(81)] == [0, 40, 80]
    assert [*LeagueConfig(every=1, size=1).opponents(9)] == [0]
    for size in (1, 2, 3, 8):
        made = set[int]()  # versions kept so far; one that was removed is never needed again
        for version in range(200):
            opponents = {*LeagueConfig(every=3, size=size).opponents(version)}
            assert len(opponents) <= size and opponents - made <= {version - 1}
            made = (made & opponents) | opponents if version else made


class Published:
    """Stand-in for an AdapterSync. published: its directory. loaded: (name, version, first number) of each loaded adapter."""

    def __init__(self, folder: Path) -> None:
        self.published, self.loaded = folder, list[tuple[str, int, float]]()

    def publish(self, version: int) -> None:
        self.published.mkdir(parents=True, exist_ok=True)
        save_file({"a": torch.full((2,), float(version))}, self.published / TENSORS)
        (self.published / CONFIG).write_text("{}")

    def load_past(self, update: AdapterUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        assert (Path(update.path) / TENSORS).is_file() and update.path.endswith(f"main@{update.version}")
        self.loaded.append((update.name, update.version, tensors["a"][0].item()))


def league_of(folder: Path, **settings: Any) -> tuple[League, Published, RunDirectory]:
    run, sync = RunDirectory(folder / "run"), Published(folder / "published")
    (folder / "shared").mkdir(exist_ok=True)
    config = LeagueConfig.model_validate({"every": 2, "size": 2, **settings})
    return League(config, run, sync, folder / "shared"), sync, run  # type: ignore[arg-type]


def play(league: League, sync: Published, versions: Sequence[int]) -> None:
    for version in versions:
        sync.publish(version)
        league.keep("other", version)
        league.keep("main", version)


def kept(run: RunDirectory) -> list[int]:
    return sorted(int(path.name.removeprefix("main@")) for path in run.league.iterdir())


def save(run: RunDirectory, step: int, version: int, suffix: str = "") -> None:
    folder = run.checkpoints / f"step_{step}{suffix}"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"step": step, "versions": {"main": version}}))


@pytest.mark.parametrize("suffix", ["", ".part"])
def test_versions_stay_while_a_checkpoint_needs_them(suffix: str, tmp_path: Path) -> None:
    league, sync, run = league_of(tmp_path)
    play(league, sync, range(4))
    assert kept(run) == [0, 2]
    save(run, 3, 3, suffix)
    play(league, sync, range(4, 10))
    assert kept(run) == [0, 2, 4, 8]  # version 2 is an opponent of versions 3 and 4, and version 4 of version 8
    # A run that resumes from the checkpoint makes the later versions again.
    league.forget_after(3)
    assert kept(run) == [0, 2] and [*league.load(3)] == [0, 2]
    play(league, sync, range(3, 10))
    (run.checkpoints / f"step_3{suffix}" / "meta.json").unlink()
    play(league, sync, range(10, 17))
    assert kept(run) == [0, 8, 16]
    league.forget_after(-1)
    assert kept(run) == []
    league.close()
    assert not any((tmp_path / "shared").iterdir())


def test_a_resumed_run_writes_no_version_twice(tmp_path: Path) -> None:
    league, sync, run = league_of(tmp_path)
    play(league, sync, [0])
    before = (run.league / "main@0" / TENSORS).stat().st_mtime_ns
    (run.league / "main@2.part").mkdir()
    league.forget_after(0)
    play(league, sync, [0])
    assert kept(run) == [0] and (run.league / "main@0" / TENSORS).stat().st_mtime_ns == before


def test_slots_of_past_opponents_are_used_again(tmp_path: Path) -> None:
    league, sync, _ = league_of(tmp_path)
    assert league.load(0) == {}
    play(league, sync, range(3))
    assert league.load(3) == {0: "main@slot0", 2: "main@slot1"} and league.load(3) == league.load(4)
    play(league, sync, range(3, 6))
    assert league.load(5) == {0: "main@slot0", 4: "main@slot1"}
    assert sync.loaded == [("main@slot0", 0, 0.0), ("main@slot1", 2, 2.0), ("main@slot1", 4, 4.0)]
    (copies,) = (tmp_path / "shared").iterdir()
    assert sorted(path.name for path in copies.iterdir()) == ["main@0", "main@4"]
    league.close()


def test_a_damaged_version_is_refused_by_its_file(tmp_path: Path) -> None:
    league, sync, run = league_of(tmp_path)
    play(league, sync, range(3))
    save_file({"a": torch.full((2,), 9.0)}, run.league / "main@2" / TENSORS)
    with pytest.raises(RuntimeError, match=rf"main@2/{TENSORS} has checksum .* or remove .*/league/main@2 to go on"):
        league.load(3)
    league.close()


def games_of(version: int, scores: Mapping[int, Sequence[float | None]], role: str = "first") -> list[Game]:
    """Return games against each opponent; the scores belong to the openings 0, 1, 2, ..."""
    return [
        Game(policy="main", version=version, opponent=opponent, role=role, opening=str(i), score=score)
        for opponent, own in scores.items()
        for i, score in enumerate(own)
    ]


def test_the_elo_of_equals_is_about_0() -> None:
    rng = np.random.default_rng(0)
    games = [
        game
        for version in (2, 3)
        for role in ("first", "second")
        for game in games_of(version, {v: rng.integers(0, 2, 40).tolist() for v in range(version)}, role)
    ]
    found = elo_of(games, 3)
    assert found.low < 0 < found.high and abs(found.mean) < 60 and 30 < found.high - found.low < 200 and found.n == 240
    # The player who moves first always wins, so the rating is 0, with the interval that 10 openings give.
    even = games_of(1, {0: [1.0] * 10}, "first") + games_of(1, {0: [0.0] * 10}, "second")
    rated = elo_of(even, 1)
    assert abs(rated.mean) < 1e-6 and rated.low < -100 and rated.high == pytest.approx(-rated.low)


def test_elo_recovers_known_strengths_across_evaluations() -> None:
    """Version 9 would beat version 0 in 99 of 100 games. They never met, but both met version 4."""
    strength, n = {0: 1.0, 4: 10.0, 9: 100.0}, 2000

    def games(version: int, opponent: int) -> list[Game]:
        num_won = round(n * strength[version] / (strength[version] + strength[opponent]))
        return games_of(version, {opponent: [1.0] * num_won + [0.0] * (n - num_won)})

    found = elo_of([*games(4, 0), *games(9, 4)], 9)
    assert found.mean == pytest.approx(800, abs=3) and found.low < 800 < found.high
    assert elo_of(games(4, 0), 4).mean == pytest.approx(400, abs=2)


def test_the_fit_has_the_strengths_gradient_at_0() -> None:
    rng = np.random.default_rng(1)
    one, other = np.array([1, 2, 2, 3, 3]), np.array([0, 0, 1, 0, 2])
    played = rng.integers(1, 60, (6, 5)).astype(float)
    won = played * rng.uniform(0.02, 0.98, played.shape)
    strengths = strengths_of(won, played, one, other)
    excess = won - played * strengths[:, one] / (strengths[:, one] + strengths[:, other])
    gradient = np.zeros_like(strengths)
    for k in range(5):
        gradient[:, one[k]] += excess[:, k]
        gradient[:, other[k]] -= excess[:, k]
    assert np.abs(gradient).max() < 1e-3 and (strengths[:, 0] == 1).all()


def test_a_cycle_shows_in_the_lowest_score_and_not_in_elo() -> None:
    """Each version beats the one before it, but version 0 beats version 3."""
    earlier = games_of(1, {0: [0.9] * 20}) + games_of(2, {0: [0.5] * 20, 1: [0.9] * 20})
    result = result_of(games_of(3, {0: [0.1] * 20, 1: [0.5] * 20, 2: [0.9] * 20}), earlier)
    assert result is not None and result.zero == "main@0" and abs(result.elo.mean) < 120
    assert result.worst.mean == pytest.approx(0.1) and result.worst.n == 60
    assert {name: each["first"].mean for name, each in result.scores.items()} == pytest.approx(
        {"main@0": 0.1, "main@1": 0.5, "main@2": 0.9}
    )
    metrics = eval_metrics(Evaluation(system=UNKNOWN, league=result))
    assert metrics["eval/league/worst"] == pytest.approx(0.1) and metrics["eval/league/elo"] == result.elo.mean
    assert metrics["eval/league/elo/low"] <= result.elo.mean <= metrics["eval/league/elo/high"]


def test_a_shutout_has_a_finite_rating_and_an_interval() -> None:
    won = elo_of(games_of(1, {0: [1.0] * 16}), 1)
    assert 100 < won.low < won.mean - 100 and 400 < won.mean < 1000 and math.isfinite(won.high)
    assert elo_of(games_of(1, {0: [1.0] * 64}), 1).low > won.low


def test_failed_games_have_no_score_and_are_counted() -> None:
    found = result_of(games_of(1, {0: [1.0, None, 0.0, None]}), [])
    assert found is not None and found.num_failed == 2 and found.worst.mean == 0.5 and found.elo.n == 2
    assert "2 games failed" in found.line
    assert result_of(games_of(1, {0: [None]}), []) is None


def played(*samples: tuple[str, Reward], error: str = "", finish: Finish = Finish.STOP) -> Played:
    own = tuple(
        replace(sampled(f"0/{agent}:{i}", 0.0, agent=agent), reward=reward, finish=finish)
        for i, (agent, reward) in enumerate(samples)
    )
    return Played(Episode("0", "0", Problem("p", "q", "7", "math"), error=error), own, {}, {}, None)


def test_the_agent_that_is_paid_more_wins() -> None:
    def paid(value: float, **parts: float) -> Reward:
        return Reward(value + sum(parts.values()), 0.0, {"program": value, **parts})

    assert score_of(played(("first", paid(2)), ("second", paid(-2))), "first", "second") == 1
    assert score_of(played(("first", paid(2)), ("second", paid(-2))), "second", "first") == 0
    assert score_of(played(("first", paid(1)), ("second", paid(1))), "second", "first") == 0.5
    # In the first game, `first` lost before `second` had a turn. Penalties for form do not decide a game; rewards of turns do.
    assert score_of(played(("first", paid(-2))), "second", "first") == 1
    assert score_of(played(("first", paid(1, format=-3)), ("second", paid(0))), "first", "second") == 1
    bonus = replace(paid(0, turns=0.5), turns=(0.5,))
    assert score_of(played(("first", bonus), ("first", paid(0)), ("second", paid(0.4))), "first", "second") == 1
    # A reward by agent is stored in each of the agent's samples, but counts once.
    assert score_of(played(*[("first", paid(1))] * 3, ("second", paid(2))), "first", "second") == 0
    missing = Reward(MISSING, MISSING)
    assert score_of(played(("first", missing), ("second", paid(1))), "first", "second") is None
    assert score_of(played(("first", paid(1)), error="it raised"), "first", "second") is None
    assert score_of(played(("first", paid(1)), finish=Finish.ERROR), "first", "second") is None
