"""The warm start's phases end on the loss of the role that is to be learned, whatever the others' are."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import PolicyConfig, RunConfig, WarmStartConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.scatter import BatchShard, Update
from marsrl.trainer.models.init_model import SHAPES
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.schools.schools import SCHOOLS, ArithmeticSchool, school_of
from marsrl.trainer.schools.warm_start import WRITERS, recipe_of, teach, warm_starts
from marsrl.trainer.supervised.imitation import DemonstrationTokens

SOLVER, VERIFIER, CORRECTOR, *_, DRILL = range(len(WRITERS))
SETTINGS = WarmStartConfig(
    lr=1.0, warmup_steps=0, solver_batch=2, team_batch=2, equality_drills=3, table_drills=4, short_steps=5,
    max_solver_steps=60, max_team_steps=50, decay_steps=9, solver_loss=0.1, verifier_loss=0.2,
)  # fmt: skip


@dataclass
class StubLearner:
    """Its mean loss a token is `loss(step, role)`, and drills cost 100; it keeps what it was asked to train on."""

    loss: Callable[[int, int], float]
    lrs: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def train_step(self, updates: list[Update], *, lr: float) -> Any:
        (update,), tokens = updates, [0] * len(WRITERS)
        for batch in update.micro_batches:
            for agent in batch.of_tokens(batch.agent_of)[batch.mask].tolist():
                tokens[agent] += 1
        assert update.normaliser == sum(tokens) - tokens[DRILL]
        means = [self.loss(len(self.lrs), role) for role in range(DRILL)] + [100.0]
        self.lrs.append(lr)
        self.tokens.append(tokens)
        return SimpleNamespace(agent_sums={"weighted_nll": [m * n for m, n in zip(means, tokens, strict=True)]})


@pytest.fixture
def taught(tmp_path: Path) -> Callable[..., tuple[StubLearner, str]]:
    ARITHMETIC_TOKENIZER.write(tmp_path)

    def run(loss: Callable[[int, int], float]) -> tuple[StubLearner, str]:
        learner, out = StubLearner(loss), io.StringIO()
        school = ArithmeticSchool(RunConfig(warm_start=SETTINGS), random.Random(0))
        tokens = DemonstrationTokens(ChatRenderer(tmp_path))
        teach(learner, school, tokens, BatchShard(0, 1, 4096, 1), RunConsole(stream=out))  # type: ignore[arg-type]
        return learner, " ".join(out.getvalue().split())

    return run


FALLING = [1.0 - 0.1 * (n + 1) for n in range(9)]  # to a tenth
VERIFIER_LEARNS = 60


def first(is_so: Callable[[int], bool]) -> int:
    return next(n for n in range(1000) if is_so(n))


def test_a_phase_ends_when_its_role_has_learned_and_not_when_others_have(taught: Callable[..., Any]) -> None:
    def loss(step: int, role: int) -> float:
        if role == VERIFIER:
            return 0.05 if step >= VERIFIER_LEARNS else 0.5
        return 0.01 if step >= 4 else 1.0

    learner, said = taught(loss)
    solver_alone = [tokens[VERIFIER] == 0 for tokens in learner.tokens]
    num_solver = solver_alone.index(False)
    assert all(solver_alone[:num_solver]) and not any(solver_alone[num_solver:])
    assert all(tokens[CORRECTOR] and tokens[DRILL] for tokens in learner.tokens[num_solver:])
    assert num_solver == 4 + first(lambda n: 0.01 + 0.99 * 0.95**n < 0.1)
    full = first(lambda n: 0.05 + 0.45 * 0.95**n < 0.2) + VERIFIER_LEARNS - num_solver
    assert learner.lrs == pytest.approx([1.0] * (num_solver + full) + FALLING)
    assert "warning" not in said


def test_roles_that_do_not_learn_are_told_and_end_at_their_limits(taught: Callable[..., Any]) -> None:
    learner, said = taught(lambda step, role: 0.5)
    assert len(learner.lrs) == 60 + 50 + 9
    assert "the Solver's loss is 0.500 after 60 steps" in said and "the Verifier's loss is 0.500 after 50 steps" in said


def test_policies_of_one_shape_share_a_warm_start_and_another_shape_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(config: object, out: Path, console: object, shape: str) -> None:
        made.append(shape)
        out.mkdir(parents=True)
        (out / "shape").write_text(shape)

    monkeypatch.setattr("marsrl.trainer.schools.warm_start._make", make)
    os.environ["MARSRL_CACHE"] = str(tmp_path)
    shapes = {"a": "tiny", "b": None, "c": "cpu_default", "d": "tiny"}
    policies = {name: {"shape": shape} for name, shape in shapes.items()} | {"e": {"model": "/models/e"}}
    config = RunConfig.model_validate({"policies": policies, "agents": {"solver": {"policy": "a"}, **others("b")}})
    found = warm_starts(config, RunConsole(stream=io.StringIO()))
    assert {name: (each.model_dir / "shape").read_text() for name, each in found.items()} == {
        "a": "tiny", "b": "cpu_default", "c": "cpu_default", "d": "tiny"
    }  # fmt: skip
    assert made == ["tiny", "cpu_default"] and not any(each.is_cached for each in found.values())
    assert all(each.is_cached for each in warm_starts(config, RunConsole(stream=io.StringIO())).values())
    alone = RunConfig.model_validate({})
    assert recipe_of(alone) == recipe_of(config)  # what was cached before there were shapes still counts


def others(policy: str) -> dict[str, dict[str, str]]:
    return {name: {"policy": policy} for name in ("verifier1", "corrector1", "verifier2", "corrector2")}


def test_every_shape_that_a_policy_may_have_can_be_made() -> None:
    (choice, _) = get_args(PolicyConfig.model_fields["shape"].annotation)
    assert set(get_args(choice)) <= SHAPES.keys()
    with pytest.raises(ValueError, match=r"policies.a.shape is tiny, the size of a warm-started policy, .*/models/a"):
        RunConfig.model_validate({"policies": {"main": {}, "a": {"shape": "tiny", "model": "/models/a"}}})


def searching(*words: str) -> RunConfig:
    return read_config(None, ["preset=cpu_search_team", *words])[0]


def test_a_team_is_taught_by_its_own_school_and_depends_on_that_school_s_settings_alone() -> None:
    dual = read_config(None, ["preset=cpu_dual_system"])[0]
    assert [school_of(config) for config in (RunConfig.model_validate({}), searching(), dual)] == list(SCHOOLS)
    for words in (
        "task_options.wording=sentences",
        "task_options.calculations=0.1",
        "agents.answer.prompt=qa",
        "data.train=q.jsonl",
    ):
        assert school_of(searching(words)) is None
        with pytest.raises(ValueError, match=r"set policies.main.model, or task=arithmetic, or preset=cpu_search_team"):
            recipe_of(searching(words))
    with pytest.raises(
        ValueError, match=r"policies.main.model is not set, and nobody teaches this team .*, or task=arithm"
    ):
        preflight(searching("agents.answer.prompt=qa"), world_size=1)
    chains, facts = read_config(None, [])[0], searching()
    slips = "warm_start.search_team.slip_router=0.5"
    assert recipe_of(dual) == recipe_of(read_config(None, ["preset=cpu_dual_system", slips])[0])
    assert recipe_of(searching(slips)) != recipe_of(facts) != recipe_of(searching("task_options.people=30"))
    assert recipe_of(read_config(None, [slips])[0]) == recipe_of(chains)
