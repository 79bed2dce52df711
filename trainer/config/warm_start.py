"""warm_start: lessons that turn random weights into a team."""

from __future__ import annotations

from pydantic import Field

from marsrl.rollout.config import Settings
from marsrl.rollout.tasks.config import DualSystemSlips, SearchSlips
from marsrl.trainer.config.sections import Count, Share, ZeroOrMore

_ACCURACY = (
    "accuracy of {} before RL, from and to, outside of which the run warns: good enough to learn from, with room above"
)


class SearchTeamLessons(SearchSlips):
    """Lessons of the search team about linked facts."""

    drills: ZeroOrMore = Field(4, description="documents and questions about them, a step in phase 2")
    accuracy: tuple[float, float] = Field((0.35, 0.65), description=_ACCURACY.format("the whole team"))


class DualSystemLessons(DualSystemSlips):
    """Lessons of System 2 and System 1 about linked facts and calculations."""

    drills: ZeroOrMore = Field(4, description="documents and questions about them, a step in phase 2")
    accuracy: tuple[float, float] = Field((0.35, 0.65), description=_ACCURACY.format("the whole team"))


class WarmStartConfig(Settings):
    """Supervised traces that turn random weights into a mediocre team (trainer/schools).

    The keys of phase 1 are called after the Solver, and those of phase 2 after the Verifier, whichever roles a team's are.
    """

    lr: float = Field(3e-3, gt=0, description="learning rate after its warm-up")
    betas: tuple[float, float] = Field((0.9, 0.98), description="AdamW's")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's")
    router_aux_loss: float = Field(0.01, ge=0)
    """coefficient of the MoE load-balancing loss, without which random routers settle on a few experts"""
    warmup_steps: ZeroOrMore = Field(50, description="first steps of phase 1, in which the learning rate rises to lr")
    solver_batch: Count = Field(32, description="problems (search team: drills) a step in phase 1 (one role alone)")
    solver_loss: float = Field(0.10, gt=0, description="phase 1 ends when the averaged loss is below it")
    max_solver_steps: Count = Field(900, description="phase 1 ends after so many steps, whatever the loss")
    team_batch: Count = Field(16, description="problems a step in phase 2 (all roles)")
    verifier_loss: float = Field(0.17, gt=0)
    """the learning rate falls from when the averaged loss is below it"""
    max_team_steps: Count = Field(400, description="of phase 2 at the full learning rate")
    decay_steps: ZeroOrMore = Field(170, description="then, the learning rate falling to a tenth")
    verdict_weight: float = Field(6.0, gt=0, description="loss weight of verdict tokens")
    equality_drills: ZeroOrMore = Field(64, description="`are these digits equal` drills a step")
    table_drills: ZeroOrMore = Field(256, description="single operations a step in phase 1")
    short_steps: ZeroOrMore = Field(120, description="first steps of phase 1, on short problems")
    slip_solver_phase1: Share = Field(0.03, description="wrong lines of the Solver's tutor in phase 1, as a share")
    slip_solver: Share = 0.10
    """the same in phase 2: fewer slips leave RL less to improve (docs/cpu_default.md)"""
    slip_verifier: Share = 0.10
    """wrong lines where the Verifier's tutor works the chain out itself, as a share"""
    slip_corrector: Share = Field(0.12, description="wrong lines of the Corrector's tutor, as a share")
    anchor: Share = Field(0.2, description="share of reports that take the claim as their own result")
    restate: Share = Field(0.4, description="share of corrections that rebut whatever the report says")
    hard_claims: Share = Field(0.5, description="share of the Verifier's inputs that are full of slips")
    slip_hard: Share = Field(0.4, description="slips a line in those")
    accuracy_solver: tuple[float, float] = Field((0.40, 0.65), description=_ACCURACY.format("the Solver"))
    accuracy_verifier: tuple[float, float] = Field((0.57, 0.70), description=_ACCURACY.format("the Verifier"))
    search_team: SearchTeamLessons = SearchTeamLessons()
    dual_system: DualSystemLessons = DualSystemLessons()
