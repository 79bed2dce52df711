"""Which policies are warm-started, by which tutor, and what is cached."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from marsrl.rollout.tasks.arithmetic.tutor import ChainTutor
from marsrl.rollout.tasks.facts.tutor import DualTutor, SearchTutor
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.init_model import SHAPES, init_model
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.supervised import warm_start
from marsrl.trainer.supervised.tutors import tutor_of
from marsrl.trainer.supervised.warm_start import READY, RECIPE, cache_directory, name_of, recipe_of, warm_starts


def test_policies_share_a_warm_start_only_with_the_same_shape(tmp_path: Path) -> None:
    os.environ["MARSRL_CACHE"] = str(tmp_path)
    shapes = {"a": "tiny", "b": "cpu_default", "c": "tiny"}
    policies = {name: {"shape": shape} for name, shape in shapes.items()} | {"main": {}, "e": {"model": "/models/e"}}
    config = RunConfig.model_validate({"policies": policies})
    folders = {shape: cache_directory() / name_of(recipe_of(config, shape)) for shape in ("tiny", "cpu_default")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder / "recipe.json").touch()
    found = warm_starts(config, RunConsole(stream=io.StringIO()))
    assert found == {name: str(folders[shape]) for name, shape in {**shapes, "main": "cpu_default"}.items()}


def test_every_shape_that_a_policy_may_have_can_be_made() -> None:
    (choice, _) = get_args(PolicyConfig.model_fields["shape"].annotation)
    assert set(get_args(choice)) <= SHAPES.keys()


def searching(*words: str) -> RunConfig:
    return read_config(None, ["preset=cpu_search_team", *words])[0]


def test_each_team_with_a_tutor_has_its_own_warm_start() -> None:
    dual = read_config(None, ["preset=cpu_dual_system"])[0]
    configs = [read_config(None, [])[0], searching(), dual]
    assert [tutor_of(config) for config in configs] == [ChainTutor, SearchTutor, DualTutor]
    assert recipe_of(searching()) != recipe_of(searching("task_options.people=30"))
    same = {"warm_start": dual.warm_start, "task_options": dual.task_options}
    assert recipe_of(searching().model_copy(update=same | {"orchestration": "dual_system"})) == recipe_of(dual)


@pytest.mark.parametrize(
    "word",
    [
        "task_options.wording=sentences",
        "task_options.calculations=0.1",
        "agents.answer.prompt=qa",
        "data.train=q.jsonl",
    ],
)
def test_a_team_without_a_tutor_needs_models(word: str) -> None:
    config = searching(word)
    assert tutor_of(config) is None
    if word.startswith("agents"):  # the other settings are refused earlier, for other reasons
        with pytest.raises(
            ValueError, match=r"main.model is not set, and this team has no .*, or task=arithmetic, preset="
        ):
            preflight(config, world_size=1)


def found_for(words: list[str]) -> tuple[Path, str]:
    """Return the default run's warm start with these settings, and the console's output about it."""
    said = io.StringIO()
    return Path(warm_starts(read_config(None, words)[0], RunConsole(stream=said))["main"]), said.getvalue()


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ready-made start of the default settings, and an empty cache."""
    folder = tmp_path / "ready"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(recipe_of(read_config(None, [])[0])))
    monkeypatch.setattr(warm_start, "READY", folder)
    monkeypatch.setenv("MARSRL_CACHE", str(tmp_path / "cache"))
    return folder


def test_the_default_run_takes_the_ready_made_start(ready: Path) -> None:
    found, said = found_for([])
    assert found == ready
    assert "ready-made" in said and "warm_start.ready=false" in said and not cache_directory().exists()


@pytest.mark.parametrize("word", ["run.seed=1", "warm_start.lr=0.002", "task_options.max_operations=6"])
@pytest.mark.usefixtures("ready")
def test_other_settings_take_no_ready_made_start(word: str) -> None:
    folder = cache_directory() / name_of(recipe_of(read_config(None, [word])[0]))
    folder.mkdir(parents=True)
    (folder / "recipe.json").touch()
    assert found_for([word])[0] == folder


@pytest.mark.usefixtures("ready")
def test_ready_false_looks_into_the_cache_alone() -> None:
    config = read_config(None, ["warm_start.ready=false"])[0]
    # The recipe, by which the cache is named, does not depend on `ready`.
    assert recipe_of(config) == recipe_of(read_config(None, [])[0])
    folder = cache_directory() / name_of(recipe_of(config))
    folder.mkdir(parents=True)
    (folder / "recipe.json").touch()
    assert found_for(["warm_start.ready=false"])[0] == folder


def test_lessons_change_only_with_the_recipe_s_number() -> None:
    """If you change lessons: increment RECIPE, make the ready-made start again, and update the digests here."""
    digests = []
    for words in ([], ["preset=cpu_search_team"], ["preset=cpu_dual_system"]):
        config = read_config(None, words)[0]
        kind = tutor_of(config)
        assert kind is not None
        options = kind.task_options.model_validate(config.task_options)
        tutor = kind(random.Random("warm start/0"), config.warm_start, options)
        lessons = [*tutor.foundation(0), *tutor.foundation(500), *tutor.team_lesson()]
        digests.append(hashlib.sha256(repr(lessons).encode()).hexdigest()[:16])
    assert (RECIPE, digests) == (3, ["e876a11a8ef2105d", "adc7f4f1274580ca", "325f935d1afd7fdc"])


def test_another_processor_or_torch_has_its_own_cached_start(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(read_config(None, [])[0])
    here = name_of(recipe)
    monkeypatch.setattr(warm_start, "device_name", lambda: "another processor")
    other = name_of(recipe)
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert len({here, other, name_of(recipe)}) == 3


def test_the_ready_made_start_is_what_would_be_made_now(tmp_path: Path) -> None:
    """If this fails after a change of settings, tokenizer or shape, make the start again as docs/cpu_default.md says."""
    recipe = recipe_of(read_config(None, [])[0])
    assert json.loads((READY / "recipe.json").read_bytes()) == recipe
    fresh = init_model("cpu_default", ChainTutor.tokenizer, tmp_path / "model", seed=0)
    names = {path.name for path in fresh.iterdir()}
    assert {path.name for path in READY.iterdir()} == names | {"recipe.json"}
    for name in names - {"model.safetensors"}:
        assert (READY / name).read_bytes() == (fresh / name).read_bytes(), name
    taught, random_ones = (load_file(folder / "model.safetensors") for folder in (READY, fresh))
    assert {k: (v.shape, v.dtype) for k, v in taught.items()} == {k: (v.shape, v.dtype) for k, v in random_ones.items()}
    assert not any(torch.equal(taught[name], random_ones[name]) for name in taught)
    assert sum(path.stat().st_size for path in READY.iterdir()) < 2_500_000
