"""A team that writes letters: each character is a token, and a script replaces the model. Needs no tokenizer and no torch."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.protocol import AdapterUpdate, DecodeRequest, WeightReceipt, WeightUpdate
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.orchestrations.registry import agent_names, build_orchestration
from marsrl.rollout.player.completion import Completion, State
from marsrl.rollout.player.refill import Counting
from marsrl.rollout.player.stages import RolloutState, Stages, StepBatch
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.rewards.judge import Judge, known
from marsrl.rollout.tasks.data import in_epochs
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.types import Finish, Group, Message, Problem, Reward, Sample, Segment, ToolCall, ToolOutput

AGENTS = ("solver", "verifier1", "corrector1", "verifier2", "corrector2")
END = 1
PROMPT_ENDS = 255


class LetterRenderer:
    stop_ids = (END,)

    def render(self, messages: Sequence[Message], tools: object = ()) -> tuple[np.ndarray, str]:
        text = "\n".join(message.content for message in messages)
        return np.asarray([*(2 + ord(c) % 250 for c in text), PROMPT_ENDS], np.int32), text

    def decode(self, token_ids: np.ndarray) -> str:
        return "".join(chr(t) for t in token_ids.tolist() if t != END)


class WeighedEngine(ScriptedEngine):
    """Engine whose weights are the name of the file that it received; their checksum is a sum over the name."""

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        super().update_weights(update)
        return WeightReceipt(update.version, ({"name": sum(update.path.encode())},))

    def update_adapter(self, update: AdapterUpdate) -> WeightReceipt:
        super().update_adapter(update)
        return WeightReceipt(update.version, ({"name": sum(update.path.encode())},))


def completion(uid: str) -> list[int]:
    """Return the tokens that the sample with this uid always gets: lengths with a long tail, random answers and verdicts."""
    rng = random.Random(uid)
    is_verifier = uid.rpartition("/")[2].startswith("verifier")
    said = f"Verdict: {rng.choice(['correct', 'wrong'])}" if is_verifier else f"\\boxed{{{rng.choice('78')}}}"
    thought = "." * min(60, int(rng.lognormvariate(2.0, 0.8)))
    return [*(ord(c) for c in f"{thought}\n{said}"), END]


def script(request: DecodeRequest) -> list[int]:
    """Return the rest of the sample's completion, after the tokens that the request already has."""
    known = request.token_ids.tolist()[::-1].index(PROMPT_ENDS)
    return completion(request.uid)[known:]


def judge(problem: Problem, answer: str) -> Future[Reward]:
    return known(Reward(float(answer == problem.answer), float(answer == problem.answer)))


YES, NO = (
    f"extracted_final_answer: it\nreasoning: so it is\ncorrect: {word}\nconfidence: 80%" for word in ("yes", "no")
)


def answer_in(prompt: str) -> str:
    """Return the answer in the prompt of a model judge."""
    return prompt.rpartition("BEGIN ANSWER ")[2].partition("\n")[2].partition("\nEND ANSWER ")[0]


def make_team(
    agents: Mapping[str, AgentConfig],
    orchestration: Orchestration,
    pool: EnginePool,
    renderer: Any = None,
    *,
    judge: Judge = judge,
    **more: Any,
) -> Team:
    """Build a team of these agents on one policy."""
    renderers = {"main": renderer or LetterRenderer()}
    return Team(agents, orchestration, renderers, {"main": pool}, WatchedJudge(judge), **more)


def letter_team(
    config: RolloutConfig,
    *,
    script: Callable[[DecodeRequest], list[int]] = script,
    tokens_per_step: int | None = 9,
    judge: Judge = judge,
    orchestration: str = "verifier_corrector",
    pool: EnginePool | None = None,
) -> tuple[Team, list[ScriptedEngine]]:
    """Return the team, and its engines unless another pool is passed."""
    agents = {name: AgentConfig() for name in agent_names(orchestration)}
    engines: list[ScriptedEngine] = [
        WeighedEngine(script, tokens_per_step=tokens_per_step) for _ in range(config.engines)
    ]
    pool = pool or EnginePool(LocalReplicas(engines), slots=12, deadline_s=config.deadline_s)
    team = build_orchestration(orchestration, agents, "math", None, config)
    return make_team(agents, team, pool, judge=judge), engines


def letter_problems(count: int, seed: int = 0) -> ProblemSource:
    return in_epochs([Problem(f"p{i}", f"question {i}", "7", "math") for i in range(count)], seed)


def letter_config(**options: object) -> RolloutConfig:
    base = {"prompts_per_step": 2, "group_size": 3, "max_response_tokens": 48, "overlap": 1}
    return RolloutConfig.model_validate(base | options)


def set_team(stages: Stages, team: Team) -> None:
    """Make the stages continue with another team."""
    stages.team = stages.player.team = team


def completions(stages: Stages, *states: State) -> list[Completion]:
    """Return the unfinished asks' completions in one of these states."""
    return [each for ask in stages.state.open.values() for each in ask.completions if each.state in states]


def next_batch(stages: Stages, versions: Mapping[str, int] | None = None) -> StepBatch:
    """Collect results until the next batch is complete, and return it. versions: current policy versions; None: unchanged."""
    if versions is not None:
        stages.resume(versions)
    stages.want()
    end = time.monotonic() + 300  # judges and tools may have threads
    while time.monotonic() < end:
        if (batch := stages.take()) is not None:
            return batch
        stages.advance(0.0)
    raise AssertionError("no batch")


class Play:
    """Stages with their engines, which the test drives as a trainer does, without a thread. options: options of letter_team."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        state: RolloutState | None = None,
        version: int = 0,
        problems: int = 60,
        counting: Counting | None = None,
        **options: Any,
    ) -> None:
        team, self.engines = letter_team(config, **options)
        self.pool = team.pools["main"]
        self.stages = Stages(config, team, letter_problems(problems), seed=0, counting=counting)
        if state is not None:
            self.stages.restore(state)
        self.metrics: Counter[str] = Counter()
        self.publish(version)

    def publish(self, version: int) -> None:
        self.version = version
        self.pool.update_weights(WeightUpdate(f"version_{version}", version))
        self.stages.resume({"main": version})

    def train(self, steps: int, rounds_while_training: int = 3) -> list[tuple[Group, ...]]:
        """Take this many batches, publish new weights after each, and return the groups of each batch."""
        trained = []
        for _ in range(steps):
            batch = next_batch(self.stages)
            trained.append(batch.groups)
            for _ in range(rounds_while_training):
                self.stages.advance(0.0)
            self.stages.rest()
            self.publish(self.version + 1)
            self.metrics.update(batch.metrics)
        return trained


class Looker:
    """Stands in for a tool pool; the function `answer` answers the calls. called: number of calls by call id."""

    def __init__(self, answer: Callable[[ToolCall], ToolOutput]) -> None:
        self.answer, self.called, self.threads = answer, Counter[str](), ThreadPoolExecutor(4)

    def submit(self, call: ToolCall) -> Future[ToolOutput]:
        self.called[call.id] += 1
        return self.threads.submit(self.answer, call)

    def take_counts(self) -> Mapping[str, float]:
        return {}


def submissions(pool: EnginePool) -> list[tuple[list[str], bool]]:
    """Record submissions from now on: their uids, and True if all are sent at once."""
    sent: list[tuple[list[str], bool]] = []
    submit = pool.submit

    def noted(requests: Sequence[DecodeRequest], *, version: int, at_once: bool = False) -> None:
        sent.append(([request.uid for request in requests], at_once))
        submit(requests, version=version, at_once=at_once)

    pool.submit = noted  # type: ignore[method-assign]
    return sent


def groups_of_a_while(stages: Stages, versions: Mapping[str, int], rng: random.Random) -> Sequence[Group]:
    """Play a stage or, with overlap, a random number of engine steps; return the groups of the batch that is complete, if any."""
    if stages.in_step:
        return next_batch(stages, versions).groups
    stages.resume(versions)
    stages.want()
    for _ in range(rng.randrange(1, 12)):
        stages.advance(60.0)  # if only tools are running, this waits for one
    batch = stages.take()
    return batch.groups if batch is not None else ()


def assert_of_the_script(groups: Sequence[Group], size: int | None = 3) -> None:
    """Check that groups are whole and of this size (None: any), and that each sample occurs once, with the text of `completion`
    over all of its segments.
    """
    uids = Counter(sample.uid for group in groups for sample in group.samples)
    assert max(uids.values()) == 1 and len({group.group_id for group in groups}) == len(groups)
    for group in groups:
        assert size is None or len(group.samples) == size
        assert [sample.uid for sample in group.samples] == sorted(sample.uid for sample in group.samples)
        for sample in group.samples:
            assert sample.group_id == group.group_id
            assert sample.token_ids.tolist() == completion(sample.uid)[: len(sample.token_ids)]
            ends = [segment.end for segment in sample.segments]
            assert [segment.start for segment in sample.segments] == [0, *ends[:-1]]
            assert ends[-1] == len(sample.token_ids) == len(sample.rollout_logprobs)
            versions = [segment.version for segment in sample.segments]
            assert versions == sorted(versions)


def bare(uid: str, agent: str = "solver", text: str = "t", **changes: Any) -> Sample:
    """Return a completion without tokens that ended by itself."""
    none = np.zeros(0, np.int32)
    made = Sample(
        uid, "r", "p", agent, "g", None, none, none, none.astype(bool), none.astype(np.float32), (Segment(0, 0, 0),),
        Finish.STOP, full_text=text,
    )  # fmt: skip
    return replace(made, **changes)


def sampled(uid: str, reward: float, *, agent: str = "solver", tokens: int = 3, **changes: Any) -> Sample:
    """Return a completion of this many tokens on a prompt of two, in the instance and group of its uid (0/solver:1)."""
    group = uid.rpartition(":")[0]
    made = bare(uid, agent, rollout_id=group.split("/")[0], group_id=group, reward=Reward(reward, reward))
    of_tokens = {
        "prompt_ids": np.array([1, 2], np.int32),
        "token_ids": np.arange(tokens, dtype=np.int32),
        "is_sampled": np.ones(tokens, bool),
        "rollout_logprobs": np.zeros(tokens, np.float32),
        "segments": (Segment(0, tokens, 0),),
    }
    return replace(made, **{**of_tokens, **changes})


def group_of(name: str, rewards: Sequence[float], agent: str = "solver", **changes: Any) -> Group:
    samples = (sampled(f"{name}:{i}", reward, agent=agent, **changes) for i, reward in enumerate(rewards))
    return Group(name, name.split("/")[0], agent, tuple(samples))
