"""Which tests judge which module, and what is known of mistakes that none can notice (equivalent.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from operators import Mutant

_WAITING = "tests/rollout/test_waiting.py"  # of samples whose turns call tools
_AGENTS = ("tests/agents/test_orchestration.py", "tests/agents/test_orchestrations.py")


@dataclass(frozen=True, slots=True)
class Judged:
    """A module of marsrl, the test files that judge it, and, where not all of it is theirs, the functions that are."""

    file: str
    tests: tuple[str, ...]
    only: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return "marsrl." + self.file.removesuffix(".py").replace("/", ".")


MODULES = {
    "credit": Judged("trainer/data/credit.py", ("tests/trainer/test_credit.py", "tests/trainer/test_lemma.py")),
    "picks": Judged("rollout/agents/picks.py", _AGENTS),
    "orchestration": Judged("rollout/agents/orchestration.py", _AGENTS),
    "verifier_corrector": Judged("rollout/orchestrations/verifier_corrector.py", _AGENTS),
    "teams": Judged("rollout/orchestrations/solver_verifier.py", _AGENTS),
    "debate": Judged("rollout/orchestrations/debate.py", _AGENTS),
    "packing": Judged("trainer/data/packing.py", ("tests/trainer/test_packing.py",)),
    "mini_batches": Judged("trainer/data/mini_batches.py", ("tests/trainer/test_mini_batches.py",)),
    "player": Judged(
        "rollout/player/player.py",
        ("tests/rollout/test_player.py", "tests/rollout/test_stages.py", "tests/rollout/test_overlap.py", _WAITING),
    ),
    "stages": Judged(
        "rollout/player/stages.py",
        ("tests/rollout/test_player.py", "tests/rollout/test_stages.py", "tests/rollout/test_overlap.py", _WAITING),
    ),
    "weight_sync": Judged(
        "trainer/weights/comparison.py", ("tests/engines/test_weight_sync.py",), ("_check_receipt", "_what")
    ),
    "checkpoint": Judged("trainer/runs/checkpoint.py", ("tests/trainer/test_checkpoint.py",)),
    "manifest": Judged("trainer/runs/manifest.py", ("tests/trainer/test_manifest.py",)),
    "sampler": Judged("rollout/engines/sampler.py", ("tests/engines/test_sampler.py",)),
}


def equivalents(name: str) -> dict[tuple[str, str, str], str]:
    """{(source line, before, after): why no test can tell the two apart} of one module."""
    listed = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text()).get(name, [])
    return {(each["line"], each["before"], each["after"]): each["why"] for each in listed}


def key(mutant: Mutant) -> tuple[str, str, str]:
    """What equivalent.toml knows a mutant by: it stays the same when lines above it come and go."""
    return mutant.text, mutant.before, mutant.after
