"""The evidence page: every arm is accepted, a result is stored with its commit, and the page shows the stored results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import arms
import evidence
import evidence_page
import games
import pytest
from evidence import Job, Runner
from evidence_page import Claim, Result
from made_up_run import make_summary
from typer.main import get_command

from marsrl.commands.cli import app
from marsrl.trainer.config.read import read_config
from marsrl.trainer.report.summary import Estimate, Evaluation, save_summary

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


@pytest.mark.parametrize("name", arms.STUDIES)
def test_every_arm_is_accepted_and_differs_from_the_others(name: str) -> None:
    study = arms.STUDIES[name]
    configs = {arm: read_config(None, Job(name, arm, 0).settings)[0] for arm in study.arms}
    for arm, config in configs.items():
        assert [other for other in configs if configs[other] == config] == [arm]
        assert {*study.agents, *study.evaluated} <= set(config.agents)
        # Set explicitly, because a preset could change the default.
        assert {policy.dtype for policy in config.policies.values()} == {"float32"}


@pytest.mark.parametrize("name", evidence.GAMES)
def test_every_arm_of_a_game_is_accepted(name: str, tmp_path: Path) -> None:
    game = evidence.GAMES[name]
    trainings = []
    for arm in game.arms:
        paths = [f"task={game.file}:{game.task}", f"external.environment={game.file}:{game.environment}"]
        settings = [*games.SETTINGS, *game.settings, *game.arms[arm], *paths, f"policies.main.model={tmp_path}"]
        config, _ = read_config(None, settings)
        assert config.policies["main"].dtype == "float32"
        trainings.append((config, game.programs.get(arm)))
    assert [trainings.count(training) for training in trainings] == [1] * len(game.arms)


def test_claims_and_arms_that_are_run_correspond() -> None:
    claimed = {(claim.study, arm) for claim in evidence_page.CLAIMS.values() for group in claim.groups for arm in group}
    assert claimed == {(job.study, job.arm) for job in evidence.every_job(())}
    assert len({job.name for job in evidence.every_job(())}) == len(evidence.every_job(()))


def result(arm: str, seed: int, system: float | None) -> tuple[tuple[str, str, int], Result]:
    found = {} if system is None else {"system": system}
    settings = Job("marsrl", arm, seed).settings
    stopped = "RuntimeError: it stopped" if system is None else None
    return ("marsrl", arm, seed), Result("marsrl", arm, seed, settings, "0" * 40, stopped, found, 60.0, {})


CLAIM = Claim("marsrl", (("whole", "gate off", "gate always"),), {"system": "team"})


def test_a_table_tells_arms_apart_seed_by_seed() -> None:
    results = dict(result("whole", seed, 0.5 + 0.1 * seed) for seed in range(3))
    results |= dict(result("gate off", seed, 0.4 + 0.1 * seed + 0.001 * (seed - 1)) for seed in range(3))
    *_, whole, off, always = evidence_page.table(CLAIM, results).splitlines()
    assert whole == "| whole | 3 | .600 ± .248 | – |"
    assert off == "| gate off | 3 | .500 ± .251 | **-.100 ± .002** |"
    assert always == "| gate always | not run | | |"
    results |= dict(result("gate off", seed, value) for seed, value in enumerate((0.9, 0.3, 0.6, None)))
    off = evidence_page.table(CLAIM, results).splitlines()[-2]
    assert "(1 stopped)" in off and off.count("±") == 2 and "**" not in off


def test_accuracies_are_compared_at_equal_tokens() -> None:
    claim = Claim("refill", (("as it is", "refill"),), {"at_tokens": "team"})
    curves = {
        ("as it is", 0): {"system": [0.5, 0.7, 0.8], "tokens": [0.0, 50.0, 100.0]},
        ("refill", 0): {"system": [0.5, 0.6, 0.9], "tokens": [0.0, 80.0, 160.0]},
        ("as it is", 1): {"system": [0.5, 0.8], "tokens": [0.0, 100.0]},  # with this seed the other arm has not run
    }
    results = {
        ("refill", arm, seed): Result("refill", arm, seed, [], "0" * 40, None, {}, 60.0, {}, curve)
        for (arm, seed), curve in curves.items()
    }
    assert evidence_page.values(claim, "as it is", "at_tokens", results) == pytest.approx({0: 0.8})
    assert evidence_page.values(claim, "refill", "at_tokens", results) == pytest.approx({0: 0.6 + 0.3 * 20 / 80})


def test_a_curve_has_each_accuracy_and_what_it_cost(tmp_path: Path) -> None:
    rows = [{"rollout/tokens": 10.0, "timing_s/total": 2.0} for _ in range(6)]
    for row in rows[1::2]:  # run.eval_every=2
        row |= {"timing_s/total": 5.0, "timing_s/evaluate": 3.0, "eval/system": 0.7}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **r}) + "\n" for i, r in enumerate(rows, 1)))
    summary = make_summary()
    save_summary(tmp_path / "summary.json", summary)
    assert summary.before is not None and summary.after is not None
    assert arms.curves(tmp_path) == {
        # Step 6 is evaluated after training.
        "system": [summary.before.system.mean, 0.7, 0.7, summary.after.system.mean],
        "tokens": [0, 20, 40, 60],
        "step_seconds": [0, 4, 8, 12],
    }


def test_a_table_compares_several_columns() -> None:
    claim = replace(
        CLAIM, groups=(("whole", "gate off"),), columns={"system": "team", "solver": "Solver"}, num_compared=2
    )
    results = {}
    for seed in range(3):
        for arm, accuracies in (("whole", {"solver": 0.2}), ("gate off", {"solver": 0.3 + 0.001 * (seed - 1)})):
            key, each = result(arm, seed, 0.5)
            results[key] = replace(each, found=each.found | accuracies)
    heading, _, _, off = evidence_page.table(claim, results).splitlines()
    assert heading == "|  | seeds | team | Solver | difference, team | difference, Solver |"
    assert off == "| gate off | 3 | .500 ± 0 | .300 ± .002 | +0 ± 0 | **+.100 ± .002** |"


def test_a_clean_result_is_kept_until_its_settings_change() -> None:
    job, (_, stored) = Job("marsrl", "gate off", 0), result("gate off", 0, 0.5)
    head = evidence.git("rev-parse", "HEAD").stdout.strip()
    assert evidence.is_current(job, replace(stored, commit=head))
    assert not evidence.is_current(job, replace(stored, commit=f"{head}+"))
    assert not evidence.is_current(job, replace(stored, commit="0" * 40))
    assert not evidence.is_current(job, replace(stored, commit=head, settings=["preset=cpu_default"]))
    assert not evidence.is_current(job, None)


def test_evaluating_a_foreign_solver_uses_valid_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []
    half = Estimate(mean=0.5, low=0, high=1, n=2)
    said = Evaluation(system=half, alone=half).model_dump_json(indent=1)
    monkeypatch.setattr(Runner, "_call", lambda self, words: asked.append(words) or (said, {}))
    Runner("c", tmp_path, tmp_path, 1).evaluate(Job("foreign", "own team", 0))
    command: Any = get_command(app)
    assert command.commands["evaluate"].make_context("evaluate", asked[-1][3:]).params["config"]
    assert json.loads((tmp_path / "foreign-own_team-seed0.json").read_text())["found"]["added"] == 0


def test_the_page_is_made_of_the_results_that_are_there() -> None:
    results = evidence.read_results(evidence.RESULTS)
    text = evidence_page.PAGE.read_text("utf-8")
    assert evidence_page.page(text, results) == text, "run `python benchmarks/studies/evidence.py`"
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == [*evidence_page.CLAIMS]
    key, masking = ("marsrl", "gate off", 0), "Masking tokens that are mastered"
    changed = {**results, key: replace(results[key], found={"system": 0.123})}
    section = evidence_page.page(text, changed).partition(f"## {masking}")[2].partition("## ")[0]
    assert evidence_page.table(evidence_page.CLAIMS[masking], changed) in section
    assert "**Seen**" not in section  # the text was written about other numbers, so the page omits it
