"""warm_start: what a school teaches random weights."""

from __future__ import annotations

from pydantic import Field

from marsrl.rollout.config import MOST, Settings
from marsrl.rollout.tasks.config import DualSystemSlips, SearchSlips

_ACCURACY = (
    "accuracy of {} before RL, from and to, outside of which the run warns: good enough to learn from, with room above"
)


class SearchTeamLessons(SearchSlips):
    """What the search team is taught about linked facts."""

    drills: int = Field(4, ge=0, le=MOST, description="documents and questions about them, a step in phase 2")
    accuracy: tuple[float, float] = Field((0.35, 0.65), description=_ACCURACY.format("the whole team"))


class DualSystemLessons(DualSystemSlips):
    """What System 2 and System 1 are taught about linked facts and calculations."""

    drills: int = Field(4, ge=0, le=MOST, description="documents and questions about them, a step in phase 2")
    accuracy: tuple[float, float] = Field((0.35, 0.65), description=_ACCURACY.format("the whole team"))


class WarmStartConfig(Settings):
    """Supervised traces that turn random weights into a mediocre team (trainer/schools).

    The keys of phase 1 are called after the Solver, and those of phase 2 after the Verifier, whichever roles a team's are.
    """

    lr: float = Field(3e-3, gt=0, description="learning rate after its warm-up")
    betas: tuple[float, float] = Field((0.9, 0.98), description="AdamW's")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's")
    router_aux_loss: float = Field(
        0.01,
        ge=0,
        description="coefficient of the MoE load-balancing loss, without which random routers settle on a few experts",
    )
    warmup_steps: int = Field(
        50, ge=0, le=MOST, description="first steps of phase 1, in which the learning rate rises to lr"
    )
    solver_batch: int = Field(
        32, gt=0, le=MOST, description="problems (search team: drills) a step in phase 1 (one role alone)"
    )
    solver_loss: float = Field(0.10, gt=0, description="phase 1 ends when the averaged loss is below it")
    max_solver_steps: int = Field(900, gt=0, le=MOST, description="phase 1 ends after so many steps, whatever the loss")
    team_batch: int = Field(16, gt=0, le=MOST, description="problems a step in phase 2 (all roles)")
    verifier_loss: float = Field(
        0.17, gt=0, description="the learning rate falls from when the averaged loss is below it"
    )
    max_team_steps: int = Field(400, gt=0, le=MOST, description="of phase 2 at the full learning rate")
    decay_steps: int = Field(170, ge=0, le=MOST, description="then, the learning rate falling to a tenth")
    verdict_weight: float = Field(6.0, gt=0, description="loss weight of verdict tokens")
    equality_drills: int = Field(64, ge=0, le=MOST, description="`are these digits equal` drills a step")
    table_drills: int = Field(256, ge=0, le=MOST, description="single operations a step in phase 1")
    short_steps: int = Field(120, ge=0, le=MOST, description="first steps of phase 1, on short problems")
    slip_solver_phase1: float = Field(
        0.03, ge=0, le=1, description="wrong lines of the Solver's tutor in phase 1, as a share"
    )
    slip_solver: float = Field(
        0.10, ge=0, le=1, description="the same in phase 2: fewer slips leave RL less to improve (docs/cpu_default.md)"
    )
    slip_verifier: float = Field(
        0.10, ge=0, le=1, description="wrong lines where the Verifier's tutor works the chain out itself, as a share"
    )
    slip_corrector: float = Field(0.12, ge=0, le=1, description="wrong lines of the Corrector's tutor, as a share")
    anchor: float = Field(0.2, ge=0, le=1, description="share of reports that take the claim as their own result")
    restate: float = Field(0.4, ge=0, le=1, description="share of corrections that rebut whatever the report says")
    hard_claims: float = Field(0.5, ge=0, le=1, description="share of the Verifier's inputs that are full of slips")
    slip_hard: float = Field(0.4, ge=0, le=1, description="slips a line in those")
    accuracy_solver: tuple[float, float] = Field((0.40, 0.65), description=_ACCURACY.format("the Solver"))
    accuracy_verifier: tuple[float, float] = Field((0.57, 0.70), description=_ACCURACY.format("the Verifier"))
    search_team: SearchTeamLessons = SearchTeamLessons()
    dual_system: DualSystemLessons = DualSystemLessons()
