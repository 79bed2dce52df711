"""Results and hardware of a run, summary.json: its schema, writer and reader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

from marsrl.trainer.runs.directory import write_json

Z_95 = 1.959963984540054  # the 97.5% quantile of the normal distribution


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (Wilson 1927, JASA 22:209; eq. 2 with z = 1.96 for 95%).

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), p = successes / n. Unlike the normal interval, it stays inside
    [0, 1] and has a width above 0 at p = 0 and p = 1. `successes` may be fractional (partial credit); the interval is then a
    little too wide. n = 0 gives (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    p, z = successes / n, Z_95
    center = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # For p = 0 or 1, rounding can move a bound outside [0, 1] by one unit in the last place.
    return max(0.0, min(p, (center - half) / scale)), min(1.0, max(p, (center + half) / scale))


class Schema(BaseModel):
    """Base class of the results' pydantic models: frozen, no unknown keys, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


Saved = TypeVar("Saved", bound=Schema)


class Estimate(Schema):
    """Measured proportion of n samples with its 95% interval. mean is null if n = 0."""

    mean: float | None = Field(ge=0, le=1)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)
    n: int = Field(ge=0)


UNKNOWN = Estimate(mean=None, low=0.0, high=1.0, n=0)


class Confusion(Schema):
    """Confusion matrix of a Verifier. none: number of outputs without a readable verdict."""

    right_correct: int = Field(0, ge=0)
    right_wrong: int = Field(0, ge=0)
    wrong_correct: int = Field(0, ge=0)
    wrong_wrong: int = Field(0, ge=0)
    none: int = Field(0, ge=0)


class Length(Schema):
    """Completion lengths in tokens: mean, longest, and the share that hit the maximum."""

    mean: float = Field(ge=0)
    longest: int = Field(ge=0)
    cut: float = Field(ge=0, le=1)


class AgentEstimate(Estimate):
    """Accuracy of an agent: on fixed inputs if the team tests the agent separately, else in the evaluation's episodes.

    The fixed inputs of an agent that gives verdicts are right and wrong solutions in equal numbers, and the accuracy is balanced.
    Those of any other agent are wrong solutions to repair, and right ones for `breaks`.

    confusion: verdicts on the fixed inputs. loop_confusion: verdicts in the episodes.
    detection_recall: share of the episodes' wrong solutions that the agent calls wrong.
    detection_precision: share of the solutions called wrong that are wrong.
    breaks: share of right solutions that the agent makes wrong.
    length: lengths of the completions in the episodes.
    missing: share of these completions without a readable answer, verdict, query or route; null if the agent gives none of them.
    """

    confusion: Confusion | None = None
    loop_confusion: Confusion | None = None
    detection_recall: Estimate | None = None
    detection_precision: Estimate | None = None
    breaks: Estimate | None = None
    length: Length | None = None
    missing: float | None = Field(None, ge=0, le=1)


class AtK(Schema):
    """Estimates of pass@k and majority@k, by k; n of each estimate is the number of problems with at least k draws.

    pass_at: probability that at least one of k answers is right (Chen et al., arXiv:2107.03374, eq. 1, unbiased).
    majority_at: probability that the most frequent of k answers is right.
    short_majority_at: the same among the ceil(k / 2) shortest of k answers (short-m@k, Hassid et al., arXiv:2505.17813).
    """

    pass_at: dict[int, Estimate] = Field(default_factory=dict)
    majority_at: dict[int, Estimate] = Field(default_factory=dict)
    short_majority_at: dict[int, Estimate] = Field(default_factory=dict)


class Usage(Schema):
    """Usage of an agent in an evaluation. seconds: engine time of the agent's calls (docs/own_team.md); null: not measured."""

    policy: str
    calls: int = Field(ge=0)
    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    seconds: float | None = Field(None, ge=0)


class ToolUsage(Schema):
    """Usage of a tool in an evaluation. seconds: time of the tool's runs; a call answered from the cache takes none."""

    calls: int = Field(0, ge=0)
    seconds: float = Field(0.0, ge=0)

    def __add__(self, other: ToolUsage) -> ToolUsage:
        return ToolUsage(calls=self.calls + other.calls, seconds=self.seconds + other.seconds)


class JudgeUsage(Usage):
    """Usage of the judge model.

    yes_share: share of yes among judged answers; null if there are none.
    agreement: share of judgements that agree with the task's own judgement; null if the task judges none of the answers.
    missing: number of unjudged answers.
    """

    missing: int = Field(ge=0)
    yes_share: float | None = Field(None, ge=0, le=1)
    agreement: float | None = Field(None, ge=0, le=1)


class Latency(Schema):
    """Quantiles over n episodes of the seconds from first request to end, under the evaluation's load (docs/evaluate.md)."""

    median_s: float = Field(ge=0)
    p95_s: float = Field(ge=0)
    n: int = Field(ge=1)


class Elo(Schema):
    """Rating in Elo with its 95% interval. n: number of games behind the rating."""

    mean: float
    low: float
    high: float
    n: int = Field(ge=1)


class LeagueResult(Schema):
    """Games of the policy against past versions of itself (docs/evaluate.md).

    elo: Bradley-Terry rating minus the rating of the oldest version, `zero`, from the games of all evaluations so far.
    worst: the lowest score against an opponent.
    scores: {opponent ("main@40"): {role of the current policy: score}}; a draw is half a win.
    num_failed: number of games without a score.
    """

    elo: Elo
    zero: str
    worst: Estimate
    scores: dict[str, dict[str, Estimate]]
    num_failed: int = Field(0, ge=0)

    @property
    def line(self) -> str:
        """Result as one line of text."""
        elo, worst, failed = self.elo, self.worst, f"; {self.num_failed} games failed" if self.num_failed else ""
        return (
            f"league: Elo {elo.mean:+.0f} ({elo.low:+.0f} to {elo.high:+.0f}, {elo.n} games) above {self.zero}; lowest score "
            f"{worst.mean:.3f} ({worst.low:.3f}-{worst.high:.3f}), of {len(self.scores)} opponent(s){failed}"
        )


class Evaluation(Schema):
    """Evaluation of each agent that answered, in the order of play, and of the whole team.

    Intervals are by bootstrap over problems (trainer/evaluate/intervals.py).

    system: accuracy of the team's answers, avg@k: the mean over k draws of every problem.
    alone: the same for the first agent's own answers in these episodes (Orchestration.alone); null if that agent does not solve.
    system_at, alone_at: pass@k and majority@k of these answers, if problems have several draws.
    sets: evaluation of each set of data.eval, if that is a list; the other fields are for all sets together.
    usage, tools: usage by agent, and by tool name, in the same episodes.
    judge: usage of the model judge there; null without one. latency: latency of these episodes; null if not measured.
    team: means of the orchestration's own metrics in the same episodes.
    league: games against past versions; null without a league, and for the first version.
    notes: sentences about draws that failed or have no known correctness, and about each agent with more than a fifth of its
        completions cut or unreadable (trainer/report/unread.py).
    """

    agents: dict[str, AgentEstimate] = Field(default_factory=dict)
    system: Estimate
    alone: Estimate | None = None
    system_at: AtK = AtK()
    alone_at: AtK = AtK()
    sets: dict[str, Evaluation] = Field(default_factory=dict)
    num_problems: int = Field(0, ge=0)
    num_episodes: int = Field(0, ge=0)
    usage: dict[str, Usage] = Field(default_factory=dict)
    tools: dict[str, ToolUsage] = Field(default_factory=dict)
    judge: JudgeUsage | None = None
    latency: Latency | None = None
    team: dict[str, float] = Field(default_factory=dict)
    league: LeagueResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, Estimate]:
        """Estimates by name, in the order of tables: sets, agents, the first agent alone, the system."""
        sets = {
            f"{name}/{row}": value
            for name, evaluation in self.sets.items()
            for row, value in evaluation.rows.items()
            if row in ("alone", "system")
        }
        alone = {} if self.alone is None else {"alone": self.alone}
        return {**sets, **self.agents, **alone, "system": self.system}


def compared(before: Evaluation | None, after: Evaluation | None) -> list[tuple[str, Estimate | None, Estimate | None]]:
    """Return (name, before, after) for each row of the table; None if that evaluation lacks the row."""
    rows = [{} if evaluation is None else evaluation.rows for evaluation in (before, after)]
    names = dict.fromkeys([*rows[0], *rows[1]]) or dict.fromkeys(("system",))
    last = ("alone", "system")
    return [(name, rows[0].get(name), rows[1].get(name)) for name in sorted(names, key=lambda name: name in last)]


def of_other_inputs(before: Estimate | None, after: Estimate | None) -> bool:
    """Return True if the two estimates have different inputs. A Corrector's, for example, depend on other agents."""
    return before is not None and after is not None and bool(before.n and after.n) and before.n != after.n


class EngineRecord(Schema):
    """Class, library, device and dtype of the engines, and the sampler that chooses tokens."""

    engine_class: str = Field(alias="class")
    library: str
    version: str
    kind: str
    device: str
    dtype: str
    sampler: str = ""


class Summary(Schema):
    """Contents of summary.json. before / after are null without an evaluation."""

    name: str
    task: str
    model: str = Field(description="HF directory of each policy, or `warm start`")
    device: str = Field(description="hardware of the trainer")
    steps: int = Field(ge=0)
    seeds: dict[str, int]
    before: Evaluation | None = None
    after: Evaluation | None = None
    engine: EngineRecord
    tokens_per_engine: tuple[int, ...]
    verified_syncs: int = Field(ge=0)
    timings: dict[str, float] = Field(default_factory=dict, description="seconds by phase")
    versions: dict[str, str] = Field(default_factory=dict, description="torch, vllm, ray, megatron-core, ...")
    commit: str | None = Field(None, description="git revision of marsrl; null outside a checkout")


def save_summary(path: Path, summary: Summary) -> None:
    """Write summary.json atomically."""
    write_json(path, summary.model_dump(mode="json", by_alias=True))


def load_summary(path: Path) -> Summary:
    """Read summary.json; errors as in `read_saved`."""
    return read_saved(path, Summary, "a run summary")


def read_saved(path: Path, kind: type[Saved], what: str) -> Saved:
    """Read a JSON file that has the schema `kind`.

    what: description of such a file, for errors.

    Raises ValueError with the file, `what`, and the invalid key.
    """
    try:
        # pydantic's parser would reject lone surrogates of undecodable file names.
        return kind.model_validate(json.loads(path.read_bytes()))
    except ValueError as error:  # pydantic's ValidationError is a ValueError.
        raise ValueError(f"{path} is not {what} of this version of marsrl: {error}") from error
