"""`marsrl evaluate`: a team on held-out problems, without a trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from marsrl.trainer.build import open_team
from marsrl.trainer.evaluate.evaluator import Evaluator
from marsrl.trainer.preflight import preflight
from marsrl.trainer.read_config import ConfigError, read_config
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.directory import write_json


def evaluate_alone(config_file: str | None, settings: Sequence[str], json_file: str | None) -> None:
    """Print the evaluation as JSON, and write it to json_file. The probe is made by the team itself.

    Raises:
        ValueError: the settings, the data or the model cannot be used.
    """
    config, origin = read_config(config_file, settings)
    with origin.places_in_errors():
        checked = preflight(config, world_size=1, trains=False)
        config = checked.config
        models = {name: policy.model for name, policy in config.policies.items() if policy.model is not None}
        missing = [name for name in config.policies if name not in models]
        if missing:
            raise ConfigError(f"policies.{missing[0]}.model is not set: give the Hugging Face directory to evaluate")
    console = RunConsole()
    console.message(f"# settings: {origin}")
    for warning in checked.warnings:
        console.warning(warning)
    with open_team(checked, models) as team:
        evaluator = Evaluator(
            team, config.evaluate, checked.task, max_tokens=config.rollout.max_response_tokens, seed=config.run.seed
        )
        versions = dict.fromkeys(config.policies, 0)
        with console.progress("evaluation", unit="tokens") as bar:
            evaluator.make_probe(versions, bar.update)
            result = evaluator.evaluate(versions, bar.update).model_dump(mode="json")
    print(json.dumps(result, indent=1))
    if json_file is not None:
        write_json(Path(json_file), result)
