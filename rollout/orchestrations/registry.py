"""Orchestrations by name, or by a user's file and class: `my_team.py:MyTeam`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import AgentSpec
from marsrl.rollout.config import AgentConfig, EvaluateConfig, OptionValues, RolloutConfig, Settings, read_settings
from marsrl.rollout.orchestrations.debate import Debate
from marsrl.rollout.orchestrations.dual_system import DualSystem
from marsrl.rollout.orchestrations.external import External
from marsrl.rollout.orchestrations.search_team import SearchTeam
from marsrl.rollout.orchestrations.solver import Solver
from marsrl.rollout.orchestrations.solver_verifier import SolverVerifier
from marsrl.rollout.orchestrations.verifier_corrector import VerifierCorrector
from marsrl.rollout.own_classes import is_own, own_class

ORCHESTRATIONS: Mapping[str, type[Orchestration]] = {
    kind.name: kind for kind in (VerifierCorrector, Solver, SolverVerifier, Debate, SearchTeam, DualSystem, External)
}

_OF_LOOP = frozenset({VerifierCorrector.name})
_READERS: Mapping[str, Mapping[str, Collection[str]]] = {
    "rollout": {"picks": _OF_LOOP},
    "evaluate": dict.fromkeys(("accept_after", "max_iterations", "compat", "fixed_inputs"), _OF_LOOP),
    "agents": {
        "pick": _OF_LOOP,
        "pick_unparsable": _OF_LOOP,
        "missing_verdict": {VerifierCorrector.name, SolverVerifier.name, SearchTeam.name},
        "long_prompts": ORCHESTRATIONS.keys() - {External.name},
    },
}
"""Settings that not every built-in team reads, by section and key (of each agent), with the teams that read them."""


def ignored_by(orchestration: str, section: str) -> set[str]:
    """Return the keys of a section that the orchestration ignores; a team of a user's file may read any."""
    keys = _READERS.get(section, {}) if orchestration in ORCHESTRATIONS else {}
    return {key for key, readers in keys.items() if orchestration not in readers}


def find_orchestration(name: str) -> type[Orchestration]:
    """Return the class of this name; ValueError lists the known names, or explains the error in the file."""
    if is_own(name):
        return _of_file(name)
    if name not in ORCHESTRATIONS:
        known = ", ".join(sorted(ORCHESTRATIONS))
        raise ValueError(f"orchestration is {name!r}; expected one of {known}, or your own as FILE.py:CLASS")
    return ORCHESTRATIONS[name]


def agent_names(orchestration: str) -> tuple[str, ...]:
    """Return the agents of the named orchestration, in the order of play; () if the settings name its agents."""
    return tuple(spec.name for spec in find_orchestration(orchestration).agents)


def read_options(orchestration: str, options: OptionValues) -> Settings:
    """Read orchestration_options of the named orchestration; ValueError names the wrong key."""
    kind = find_orchestration(orchestration)
    return read_settings(kind.Options, options, where=f"orchestration_options of {kind.name}: ")


def build_orchestration(
    name: str,
    agents: Mapping[str, AgentConfig],
    default_prompts: str,
    options: OptionValues | None = None,
    rollout: RolloutConfig | None = None,
    evaluate: EvaluateConfig | None = None,
    tools: Collection[str] = (),
    renderers: Mapping[str, ChatRenderer] | None = None,
) -> Orchestration:
    """Build the named orchestration with these settings (see Orchestration); ValueError names the wrong one."""
    kind = find_orchestration(name)
    return kind(agents, default_prompts, read_options(name, options or {}), rollout, evaluate, tools, renderers)


def _of_file(name: str) -> type[Orchestration]:
    kind = own_class("orchestration", name, Orchestration)
    agents = kind.agents if isinstance(kind.agents, tuple | list) else ()
    names = [spec.name for spec in agents if isinstance(spec, AgentSpec)]
    if not names or len(set(names)) < len(agents) or not all(each.isidentifier() for each in names):
        raise ValueError(
            f"orchestration is {name!r}: {kind.__name__}.agents names {', '.join(names) or 'none'}; expected at least one "
            "AgentSpec, with distinct names of letters, digits and _"
        )
    if not issubclass(kind.Options, Settings):
        raise ValueError(
            f"orchestration is {name!r}: {kind.__name__}.Options does not extend Orchestration.Options; make it a subclass"
        )
    if not kind.name:
        kind.name = kind.__name__
    return kind
