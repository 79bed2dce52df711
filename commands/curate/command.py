"""`marsrl curate`: select the problems worth training on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from marsrl.commands.curate.best_of_n import NAME, best_of_n
from marsrl.commands.curate.judged import judged
from marsrl.commands.curate.near_duplicates import near_duplicates
from marsrl.commands.curate.pipeline import Pipeline, StageRecord
from marsrl.commands.curate.rows import Stage, level, read_inputs, readable
from marsrl.commands.look.export import PAGES
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.tasks.data import data_files, shared_answers
from marsrl.rollout.types import Problem
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.agreement import named_policy
from marsrl.trainer.config.curate import CriterionConfig
from marsrl.trainer.config.origin import check_words
from marsrl.trainer.config.read import ConfigError, models_given, read_config
from marsrl.trainer.evaluate.evaluator import Evaluator
from marsrl.trainer.evaluate.identity import policy_identity, team_identity
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.directory import write_atomically
from marsrl.trainer.runs.existing_run import settings_in
from marsrl.trainer.runs.lock import RunLock
from marsrl.trainer.visible import shorten, visible

_MOST_CHARS = 6000  # maximum characters of a text on the page
_SETTING = re.compile(r"[A-Za-z_][\w.<>-]*=")


def split_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split a command line into (inputs, settings). A word is a setting if it begins like `key.sub=` and is not a file."""
    check_words(words)
    settings = [word for word in words if _SETTING.match(word) and not Path(word).exists()]
    return [Path(word) for word in words if word not in settings], settings


def curate(words: Sequence[str], out: Path, config_file: str | None) -> Path:
    """Run the stages that are not on disk yet, and return the report's path.

    Raises:
        ValueError: settings, inputs or a model are invalid, or another process uses `out`.
        CurationStopped: too many questions have no readable answer.
    """
    console = RunConsole()
    inputs, settings = split_words(words)
    if not inputs:
        raise ConfigError("found no inputs; name jsonl or parquet files, or Hugging Face dataset directories")
    config, origin = read_config(config_file, settings, trains=False)
    with origin.places_in_errors():
        check(config)
        lock = RunLock.of_out(out, console.warning)
        try:
            console.message(f"# settings: {origin}")
            if any(config.policies[name].model for name in config.undecided):
                from marsrl.trainer.checks.dtypes import decide_dtypes  # imports torch

                config, dtypes = decide_dtypes(config, settings_in(out / "curate.yaml"))
                for line in dtypes:
                    console.message(line)
            resolved = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
            write_atomically(out / "curate.yaml", f"# settings: {origin}\n{resolved}".encode())
            data = config.data

            pipeline = Pipeline(
                out,
                stages_of(config, inputs, out),
                lambda: read_inputs(inputs, config.task, data.question_key, data.answer_key),
                config.task,
                console,
            )
            records = pipeline.run()
            kept = [(row.problem, row.keys) for row in pipeline.kept(records[-1].name)]
            for warning in shared_answers([problem for problem, _ in kept], "curated.jsonl"):
                console.warning(warning)
            if len(keys := dict.fromkeys(keys for _, keys in kept)) > 1:
                console.warning(
                    f"curated.jsonl has rows with the keys {' and rows with '.join(map(' and '.join, keys))}, but "
                    "data.train reads all rows with the keys of the first; rename keys, or curate each input by itself"
                )
            return _write_report(out, records, resolved)
        finally:
            lock.release()


def _write_report(out: Path, records: Sequence[StageRecord], config: str) -> Path:
    """Write report.html: the rows that each finished stage kept and dropped, with reasons. Hostile text is escaped.

    config: the settings as text.
    """
    environment = Environment(
        loader=FileSystemLoader(os.fspath(Path(__file__).parent)),
        autoescape=True,  # always: by default Jinja does not escape *.j2
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["shorten"] = lambda text: shorten(text, _MOST_CHARS)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=1, ensure_ascii=False)
    page = environment.get_template("curate.html.j2").render(
        name=out.resolve().name,
        style=Markup((PAGES / "style.css").read_text("utf-8")),
        records=records,
        num_rows=records[0].num_rows,
        config=config,
    )
    path = out / "report.html"
    write_atomically(path, page.encode("utf-8"))
    return path


def check(config: RunConfig) -> None:
    """Raise ValueError for a stage that cannot run. The checks are cheap, and come before the first stage starts."""
    section = config.curate
    if section.near_duplicates is not None:
        near_duplicates(section.near_duplicates)
    for name, judge in section.judges.items():
        policy = named_policy(config, f"curate.{name}.policy", judge.policy)
        model = models_given(config.model_copy(update={"policies": {judge.policy: policy}}))[judge.policy]
        ChatRenderer(model)
        longest = judge.max_input_tokens + judge.max_response_tokens
        if policy.openai is None and (positions := read_shape(model).max_positions) < longest:
            raise ConfigError(
                f"curate.{name}.max_input_tokens + curate.{name}.max_response_tokens is {longest:,}, but "
                f"policies.{judge.policy}.model supports {positions:,} positions (max_position_embeddings, or a shorter "
                "sliding_window); lower one of the two settings"
            )
    if section.best_of_n is not None:
        models_given(config.without_curators())


def stages_of(config: RunConfig, inputs: Sequence[Path], out: Path) -> list[Stage]:
    """Return the config's stages in order; their engines start on first use."""
    section, data, seed = config.curate, config.data, config.run.seed
    origin = {
        "inputs": [{"path": str(path), "sha256": _digest(path)} for path in inputs],
        "question_key": data.question_key,
        "answer_key": data.answer_key,
        "task": config.task,
    }
    stages = [readable(section.max_question_chars, origin, data.on_placeholder)]
    if section.level is not None:
        stages.append(level(section.level))

    def ask(name: str, judge: CriterionConfig | None) -> None:
        if judge is not None:
            policy = policy_identity(config.policies[judge.policy])
            answers = out / "stages" / name / "answers.jsonl"
            stages.append(judged(name, judge, policy, seed, partial(_open_judge, config, judge), answers))

    ask("academic", section.academic)
    if section.near_duplicates is not None:
        stages.append(near_duplicates(section.near_duplicates))
    ask("clarity", section.clarity)
    ask("graduate", section.graduate)
    if section.best_of_n is not None:
        alone = config.without_curators()
        answers = out / "stages" / NAME / "answers.jsonl"
        stages.append(best_of_n(section.best_of_n, team_identity(alone), partial(_open_evaluator, alone), answers))
    return stages


@contextmanager
def _open_judge(config: RunConfig, judge: CriterionConfig) -> Iterator[tuple[ChatRenderer, EnginePool]]:
    from marsrl.rollout.engines.refusals import this_host
    from marsrl.trainer.build import open_pool  # imports torch, which only stages with a model need

    name, policy = judge.policy, config.policies[judge.policy]
    alone = config.model_copy(update={"policies": {name: policy}})
    model = models_given(alone)[name]
    longest = judge.max_input_tokens + judge.max_response_tokens
    host, deadline_s = this_host(config.rollout.ray_address, trains=False), config.rollout.deadline_s
    with open_pool(alone, name, model, max_model_len=longest, host=host, deadline_s=deadline_s) as pool:
        yield ChatRenderer(model), pool


@contextmanager
def _open_evaluator(config: RunConfig, problems: Sequence[Problem]) -> Iterator[Evaluator]:
    from marsrl.trainer.build import make_evaluator, open_team
    from marsrl.trainer.checks.preflight import preflight

    checked = preflight(config, world_size=1, trains=False, given=problems)
    with open_team(checked, models_given(checked.config)) as team:
        yield make_evaluator(checked, team)


def _digest(path: Path) -> str:
    """Return the SHA-256 of an input's files, in order."""
    digest = hashlib.sha256()
    for file in data_files(path):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
