"""Orchestrations by name, or by the file and class of a user: `my_team.py:MyTeam`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.config import AgentConfig, EvaluateConfig, RolloutConfig, Settings, problems_of
from marsrl.rollout.orchestrations.debate import Debate
from marsrl.rollout.orchestrations.search_team import SearchTeam
from marsrl.rollout.orchestrations.solver import Solver
from marsrl.rollout.orchestrations.solver_verifier import SolverVerifier
from marsrl.rollout.orchestrations.verifier_corrector import VerifierCorrector

ORCHESTRATIONS: Mapping[str, type[Orchestration]] = {
    kind.name: kind for kind in (VerifierCorrector, Solver, SolverVerifier, Debate, SearchTeam)
}

OptionValues = Mapping[str, int | float | str | bool | None]


def find_orchestration(name: str) -> type[Orchestration]:
    """The class of this name; ValueError names the ones there are, or says what is wrong with the file."""
    if ":" in name:
        return _of_file(name)
    if name not in ORCHESTRATIONS:
        known = ", ".join(sorted(ORCHESTRATIONS))
        raise ValueError(f"orchestration is {name!r}; there are {known}, and your own as FILE.py:CLASS")
    return ORCHESTRATIONS[name]


def agent_names(orchestration: str) -> tuple[str, ...]:
    """Those of the orchestration of this name, in the order of play."""
    return tuple(spec.name for spec in find_orchestration(orchestration).agents)


def read_options(orchestration: str, options: OptionValues) -> Settings:
    """orchestration_options of the orchestration of this name; ValueError names the key that is wrong."""
    kind = find_orchestration(orchestration)
    try:
        return kind.Options.model_validate(dict(options))
    except ValidationError as error:
        known = ", ".join(kind.Options.model_fields) or "none"
        raise ValueError(f"orchestration_options of {kind.name}: {problems_of(error)} (it has {known})") from error


def build_orchestration(
    name: str,
    agents: Mapping[str, AgentConfig],
    default_prompts: str,
    options: OptionValues | None = None,
    rollout: RolloutConfig | None = None,
    evaluate: EvaluateConfig | None = None,
) -> Orchestration:
    """The orchestration of this name with these settings (see Orchestration); ValueError says which is wrong."""
    kind = find_orchestration(name)
    return kind(agents, default_prompts, read_options(name, options or {}), rollout, evaluate)


def _of_file(name: str) -> type[Orchestration]:
    place, _, class_name = name.rpartition(":")
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"orchestration is {name!r}: there is no file {place} (seen from {Path.cwd()})")
    kind = getattr(_module(path.resolve()), class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Orchestration)):
        raise ValueError(f"orchestration is {name!r}: {class_name} is no class of {place} that extends Orchestration")
    names = [spec.name for spec in kind.agents]
    if not names or len(set(names)) < len(names) or not all(each.isidentifier() for each in names):
        raise ValueError(
            f"orchestration is {name!r}: {class_name}.agents names {', '.join(names) or 'none'}; expected at least one "
            "AgentSpec, names of letters, digits and _, none twice"
        )
    if not kind.name:
        kind.name = class_name
    return kind


def _module(path: Path) -> ModuleType:
    """The user's file as a module; read once, so that a class is the same whoever asks for it."""
    name = f"marsrl_own_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"orchestration: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"orchestration: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
