"""Runs of examples/ as documented, except for the model and the number of steps."""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from desk import Desk, boxing_model
from documented_commands import run_by
from documents import ROOT
from small_run import SEED

from marsrl.commands import cli
from marsrl.commands.rehearsal import Rehearsal, rehearse
from marsrl.commands.sft.demonstrations import read_demonstrations
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import Sample
from marsrl.trainer.config.read import read_config
from marsrl.trainer.main import main
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import read_samples

pytestmark = pytest.mark.slow

# Keys and files of examples/real_team/.
DATA = {"train": "train", "eval": "held_out", "demonstrations": "demonstrations"}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    os.chdir(tmp_path)
    return Desk(tmp_path)


@pytest.mark.parametrize("command", run_by("test_an_example_trains"))
def test_an_example_trains(command: str, desk: Desk) -> None:
    """The model answers 7 or 8 at random; the run ends once its first agent's samples are trained."""
    model = boxing_model(desk.folder / "model")
    first, steps = ("first", 3) if "own_team" in command else ("solver", 1)
    own = [f"policies.main.model={model}", f"run.steps={steps}", "run.evaluate=false", *SEED]
    assert main([*desk.words(command, Path)[2:], *own]) == 0
    (run,) = (desk.folder / "runs").iterdir()
    row = next(row for row in read_metrics(run / "metrics.jsonl") if f"reward/{first}/mean" in row.values)
    assert row.values[f"reward/{first}/missing"] == 0 and 0 <= (row.values[f"reward/{first}/mean"] or 0) <= 1
    assert first in {sample.agent for path in run.glob("samples/*") for sample in read_samples(path)}


@pytest.mark.smoke
@pytest.mark.parametrize("command", run_by("test_an_example_is_tried"))
def test_an_example_is_tried(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(desk.words(command, Path)[1:]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "advantage" in shown and ("checker" in shown) == ("own_team" in command)


@pytest.mark.parametrize("name", ["guess_number", "real_team"])
def test_an_example_for_a_small_model_passes_its_checks(
    name: str, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_by("test_an_example_for_a_small_model_passes_its_checks")
    written, taught, trained, *tried = (desk.words(each, Path) for each in found if f"examples/{name}/" in each)
    (files := desk.folder / "tmp").mkdir()
    subprocess.run([sys.executable, *written[1:]], check=True)
    model = init_model("tiny", "bytes", desk.folder / "model")
    settings = [f"policies.main.model={model}", f"data.demonstrations={files}/guess_number.jsonl"]
    if name == "real_team":
        settings = [settings[0], *(f"data.{key}={files}/real_team/{file}.jsonl" for key, file in DATA.items())]
        train, held_out, _ = (Path(word.partition("=")[2]).read_text().splitlines() for word in settings[1:])
        assert (len(train), len(held_out)) == (400, 200) and not set(train) & set(held_out)
    config, _ = read_config(taught[3], [*taught[4:], *settings])
    assert config.data.demonstrations is not None
    read = read_demonstrations(Path(config.data.demonstrations), config, {"main": ChatRenderer(model)}, {"main": 4096})
    assert len(read.lines) >= 240 and read.notes == ()
    assert main([*trained[2:], *settings, "--dry-run"]) == 0 and "samples a step" in capsys.readouterr().out
    for words in tried:
        assert cli.main([*words[1:], *settings]) == 0 and "call 1 reads" in capsys.readouterr().out


@pytest.mark.smoke
def test_fewer_guesses_are_worth_more() -> None:
    """Play the environment of examples/guess_number/, in which a careful player needs at most four guesses."""
    played = runpy.run_path(str(ROOT / "examples/guess_number/guess_number.py"))
    game = played["GuessNumber"]()
    assert "from 1 to 15" in game.reset(SimpleNamespace(answer="10"))
    assert [game.step(text) for text in ("Range 1-15, middle 8", "12", "none", "Guess 10")] == [
        "Higher", "Lower", "That is no number.", pytest.approx(0.7),
    ]  # fmt: skip
    game.reset(SimpleNamespace(answer="10"))
    assert [game.step("9") for _ in range(4)] == ["Higher"] * 3 + [0.0]
    rng = random.Random(0)
    assert max(len(played["tutored"](rng, False)) for _ in range(200)) == 8


def tried(command: str, desk: Desk, answers: dict[str, list[str]] | None = None) -> Rehearsal:
    """Run `marsrl try` with the settings of the command, then play the recipe with `answers`, or with made-up ones."""
    words = desk.words(command, Path)[2:]
    assert cli.main(["try", *words]) == 0
    played = rehearse(read_config(None, words)[0], answers or {})
    assert played.errors == {}
    return played


def samples_of(played: Rehearsal, agent: str) -> list[Sample]:
    found = [sample for group in played.credited.groups for sample in group.samples if sample.agent == agent]
    return sorted(found, key=lambda sample: (sample.uid.count("/"), sample.uid))


@pytest.mark.smoke
@pytest.mark.parametrize("command", run_by("test_a_critic_is_paid_for_what_comes_of_its_critique"))
def test_a_critic_is_paid_for_what_comes_of_its_critique(command: str, desk: Desk) -> None:
    problem = tried(command, desk).problem
    answers = {"solver": ["Answer: x"], "critic": ["Think!"], "reviser": [f"Answer: {problem.answer}", "Answer: x"]}
    played = tried(command, desk, answers)
    assert [critic.reward.value for critic in samples_of(played, "critic")] == [1.0, 0.0]
    assert all("Think!" in reviser.prompt_text for reviser in samples_of(played, "reviser"))


@pytest.mark.smoke
@pytest.mark.parametrize("command", run_by("test_workers_have_prompts_and_groups_of_their_own"))
def test_workers_have_prompts_and_groups_of_their_own(command: str, desk: Desk) -> None:
    played = tried(command, desk)
    workers, editors = samples_of(played, "worker"), samples_of(played, "editor")
    assert len({worker.prompt_text for worker in workers}) == len({worker.group_id for worker in workers}) == 3
    assert len(workers) == 6 and len(editors) == 2
    for editor in editors:
        own = [worker for worker in workers if worker.uid.partition("/")[0] == editor.uid.partition("/")[0]]
        assert len(own) == 3 and all(worker.shown in editor.prompt_text for worker in own)


@pytest.mark.smoke
@pytest.mark.parametrize("command", run_by("test_a_game_ends_when_it_is_won"))
def test_a_game_ends_when_it_is_won(command: str, desk: Desk) -> None:
    secret = int(tried(command, desk).problem.answer or "")
    lower = next(n for n in range(10) if n != secret)
    # The two games take guesses alternately: the second guess wins one game, and the other game is lost.
    guesses = [f"Answer: {n}" for n in (lower, lower, secret, lower, lower, lower)]
    guessers = samples_of(tried(command, desk, {"guesser": guesses}), "guesser")
    outcomes = {name: [s.outcome for s in guessers if s.uid.startswith(f"000001.{name}/")] for name in (0, 1)}
    assert outcomes == {0: [pytest.approx(0.8)] * 2, 1: [0.0] * 4}
    told = guessers[2].prompt_text
    assert ("Higher." if lower < secret else "Lower.") in told and guessers[0].shown in told


@pytest.mark.smoke
@pytest.mark.parametrize("command", run_by("test_a_reader_reads_what_a_tool_found"))
def test_a_reader_reads_what_a_tool_found(command: str, desk: Desk) -> None:
    readers = samples_of(tried(command, desk), "reader")
    assert len(readers) == 2 and all("Doc 1(Title: " in reader.prompt_text for reader in readers)
