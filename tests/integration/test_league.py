"""A policy plays past versions of itself in evaluations: which version decodes which agent, and what a resumed run does.

Completions come from a script; the local engine holds the adapters that are loaded.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import pytest
from scripted_pool import engines_are, half_right, on_sevens, opened, rows_of, saying, train_here

from marsrl.rollout.adapter import TENSORS, AdapterConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.trainer.evaluate.league import Game
from marsrl.trainer.loop import train
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.runs.answers import Answers
from marsrl.trainer.runs.directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

ADAPTER = AdapterConfig(rank=4, targets=("attention",))
SLOTS = ("main@slot0", "main@slot1")


class Killed(Exception):
    """Raised in place of a kill signal: nothing is saved on exit."""


def league_in(run: RunDirectory) -> dict[str, bytes]:
    return {path.name: (path / TENSORS).read_bytes() for path in sorted(run.league.iterdir())}


def games_in(run: RunDirectory, step: int) -> list[Game]:
    games = Answers.read(run.evaluation(step) / "league.jsonl", Game.model_validate)
    return sorted(games, key=lambda game: (game.opponent, game.role, game.opening, str(game.score)))


def test_past_versions_play_their_seats_and_survive_a_kill(tmp_path: Path) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    words = [
        *on_sevens(tmp_path, model, "agents.verifier.prompt=chain"), "orchestration=solver_verifier",
        "orchestration_options.max_loops=2", "policies.main.optimizer={lr: 0.01}",
        "policies.main.adapter={rank: 4, targets: [attention]}", "league={every: 1, size: 2, games: 4}",
        "rollout.placement=local", "rollout.pipeline=trajectory", "run.steps=4", "run.checkpoint_every=1",
        "run.evaluate=false", "run.eval_every=1",
        "loss.entropy_coef=0.01",  # so that each step trains
    ]  # fmt: skip
    asked = defaultdict[str, set[tuple[str, int]]](set)  # {first part of the uid and the agent: {(adapter, version)}}

    def script(request: DecodeRequest) -> str:
        where, _, agent = request.uid.partition("/")
        agent = "verifier" if "verifier" in agent.rpartition("/")[2] else "solver"
        kind = where if where.startswith("league") else where[:4] if where.startswith("eval") else "training"
        asked[f"{kind}/{agent}"].add((request.adapter, request.adapter_version))
        return half_right(request, random.Random(f"{request.uid} {request.seed}"))

    adapters = {"main": ADAPTER, **dict.fromkeys(SLOTS, ADAPTER)}
    with engines_are(saying(model, script, adapters=adapters)):
        whole = train_here(tmp_path / "whole", words)
        of_whole = dict(asked)
        with pytest.raises(Killed), opened(tmp_path / "killed", words) as run:
            keep = run.checkpoint_if_due

            def not_the_third(step: int) -> None:
                if step == 3:
                    raise Killed
                keep(step)

            run.checkpoint_if_due = not_the_third
            train(run)
        killed = RunDirectory(tmp_path / "killed" / "runs" / "scripted")
        assert [*league_in(killed)] == ["main@0", "main@1", "main@2"]
        resumed = train_here(tmp_path / "killed", [*words, "run.resume=auto"])
        assert [*league_in(whole)] == ["main@0", "main@1", "main@2", "main@4"]
    opponents = {1: [0], 2: [0, 1], 3: [0, 2], 4: [0, 2]}
    for version, expected in opponents.items():
        games = games_in(whole, version)
        assert [(game.version, game.opponent, game.role) for game in games] == [
            (version, opponent, role) for opponent in expected for role in ("solver", "verifier") for _ in range(4)
        ]
        openings = [[game.opening for game in games[i : i + 4]] for i in range(0, len(games), 4)]
        assert all(each == openings[0] for each in openings) and len(set(openings[0])) == 3
        assert games_in(resumed, version) == games
    for name, used in of_whole.items():
        where, agent = name.split("/")
        role = where.partition("-")[2].partition("-")[0]
        if not role or role == agent:
            assert {adapter for adapter, _ in used} == {"main"}, name
        else:
            opponent = int(where.partition("-")[0].removeprefix("league"))
            assert {version for _, version in used} == {opponent} and {a for a, _ in used} <= {*SLOTS}, name
    assert sum(name.startswith("league") for name in of_whole) == 2 * 2 * 3 * 4
    assert league_in(resumed) == league_in(whole)
    rows = rows_of(whole)
    assert all(0 <= row["eval/league/worst"] <= 1 and "eval/league/elo" in row for row in rows)
    same = [key for key in rows[-1] if key.startswith("eval/league/")]
    assert len(same) == 6 and [[r[k] for k in same] for r in rows_of(resumed)] == [[r[k] for k in same] for r in rows]
    found = json.loads((whole.evaluation(4) / "evaluation.json").read_text())["league"]
    assert [*found["scores"]] == ["main@0", "main@2"] and found["zero"] == "main@0" and found["num_failed"] == 0
