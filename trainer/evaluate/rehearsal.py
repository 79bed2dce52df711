"""`marsrl try`: one problem played by a team with made-up answers, through the scheduler, the rewards and the credit of training.

No model: a script answers, right or wrong by a coin, or what a table says. It shows whom a team asks, what they read, and what
their words are worth, before anything is trained.
"""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from rich.text import Text
from rich.tree import Tree

from marsrl.rollout.agents.parsers import VerdictParser
from marsrl.rollout.agents.prompts import PromptSet, prompt_set
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import READS, Role
from marsrl.rollout.config import MOST_TOKENS
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration, find_orchestration
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.data import right_answers
from marsrl.rollout.tasks.protocol import NumberedProblems
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.types import Problem, Sample
from marsrl.trainer.checks.problems import read_data
from marsrl.trainer.config import RunConfig
from marsrl.trainer.data.credit import Credited, credit
from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer

_CALL = '<tool_call>{"tool": "search", "arguments": {"query": "QUESTION"}, "purpose": "QUESTION"}</tool_call>'
_NOT_IN_A_STRING = re.compile(r'["\\\x00-\x1f]')  # of JSON's

Answers = Mapping[str, Sequence[str]]
"""Answers of an agent, call by call; after the last it starts over."""


def read_answers(path: Path, agents: Sequence[str]) -> Answers:
    """A YAML file `agent: [text, ...]`.

    Raises:
        ValueError: it is none, or names an agent that the team does not have.
    """
    try:
        table = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    is_table = isinstance(table, dict) and all(
        isinstance(said, list) and said and all(isinstance(text, str) for text in said) for said in table.values()
    )
    if not is_table:
        raise ValueError(f"{path}: expected a table of agents, `solver: ['first answer', 'second']`, in quotes")
    for name in table:
        if name not in agents:
            raise ValueError(f"{path}: the team has no agent {name!r}; it has {', '.join(agents)}")
    return dict(table)


class Rehearsal(NamedTuple):
    """A problem as it was played. errors: by episode, why one ended where the team's own code failed."""

    problem: Problem
    credited: Credited
    errors: dict[str, str]


def rehearse(config: RunConfig, answers: Answers, *, question: str = "", reference: str = "") -> Rehearsal:
    """This question, or else a problem of the task, played to the end of its rollout instance, with its credit.

    Raises:
        ValueError: the task has no problems of its own.
    """
    with _scripted(config, answers, question, reference, pipeline="trajectory") as (rollout, problem):
        episodes: dict[str, Episode] = {}

        def note(name: str, has_ended: bool) -> None:
            episodes[name] = rollout.stages.state.instances[name.partition(".")[0]].episodes[name]

        rollout.stages.on_episode = note
        groups = rollout.next_batch({"main": 0}).groups
    errors = {name: episode.error for name, episode in episodes.items() if episode.error}
    size, seed = config.rollout.group_size, config.run.seed
    return Rehearsal(problem, credit(groups, config.credit, config.agents, group_size=size, seed=seed), errors)


def reward_rules(config: RunConfig) -> list[str]:
    """The reward rule of each agent, a line an agent."""
    kind = find_orchestration(config.orchestration)
    if config.credit.reward_scheme == "outcome":
        return ["reward of every agent: the outcome of its episode (credit.reward_scheme)"]
    return [f"reward of {spec.name}: {kind.reward_rule(spec)}" for spec in kind.agents]


def first_update_line(config: RunConfig) -> list[str]:
    """First step of a dry run that has samples to train on, with made-up answers of one segment each; [] for step 1.

    Teams that call tools are not asked, a tool may be a paid service, and no program is. With overlap a step waits for groups
    that have ended.
    """
    if config.tools.names or config.rollout.overlap or config.external is not None:
        return []
    num_steps = config.run.steps
    with _scripted(config, {}, "", "", pipeline=config.rollout.pipeline) as (rollout, _):
        step = next((n for n in range(1, num_steps + 1) if rollout.next_batch({"main": 0}).groups), None)
    if step == 1:
        return []
    said = f"comes at step {step} of {num_steps}" if step else f"does not come in run.steps = {num_steps}"
    return [
        f"first update: {said}, if each answer takes one step: samples are trained when all that they are compared with have "
        "ended (rollout.pipeline=trajectory plays episodes to their end in every step)"
    ]


@contextlib.contextmanager
def _scripted(
    config: RunConfig, answers: Answers, question: str, reference: str, *, pipeline: Literal["agentic", "trajectory"]
) -> Iterator[tuple[Rollout, Problem]]:
    """The run's rollout with one problem, whose engine is a script."""
    given = Problem("given", question, reference or None, config.task)
    train = [given] if question else read_data(config).train
    task = build_task(config.task, config.task_options, train, train)
    kind = find_orchestration(config.orchestration)
    names = [name for name in config.tools.names if name in (*kind.tools, *kind.optional_tools)]
    check_tools(config.tools, names, task.documents, task.papers)
    with (
        contextlib.closing(task),
        contextlib.closing(build_tools(config.tools, names, task.documents, task.papers)) as tools,
        tempfile.TemporaryDirectory() as folder,
    ):
        write_byte_tokenizer(Path(folder))
        renderer = ChatRenderer(folder)
        problem = given if question else task.problems(config.run.seed).next_problem()
        words = {
            spec.name: _MadeUp(prompt_set(agent.prompt or task.prompts), spec.role, agent.stop)
            for spec, agent in ((spec, config.agents[spec.name]) for spec in kind.agents if spec.name not in answers)
        }
        engine = ScriptedEngine(
            _script(problem, answers, words, config.run.seed),
            encode=lambda text: renderer.completion_ids(text).tolist(),
            decode=renderer.decode,
        )
        bounds = {"max_response_tokens": MOST_TOKENS, "segments": 1, "segment_length": None, "overlap": 0}
        rollout = config.rollout.model_copy(update={"prompts_per_step": 1, "pipeline": pipeline, **bounds})
        own = {"policy": "main", "max_input_tokens": MOST_TOKENS, "max_response_tokens": None, "template_options": {}}
        team = Team(
            {name: agent.model_copy(update=own) for name, agent in config.agents.items()},
            build_orchestration(
                config.orchestration,
                config.agents,
                task.prompts,
                config.orchestration_options,
                rollout,
                tools=config.tools.names,
                renderers=dict.fromkeys(config.agents, renderer),
            ),
            {"main": renderer},
            {"main": EnginePool(LocalReplicas([engine]))},
            WatchedJudge(task.judge),
            max_turns=rollout.max_turns,
            tools=tools,
        )
        again = NumberedProblems(lambda number: problem)
        yield Rollout(rollout, team, again, seed=config.run.seed, trains_whole=config.trains_whole), problem


def drawn(rehearsal: Rehearsal, *, with_prompts: bool = False) -> Tree:
    """The tree of what was said: a branch an episode, below each sample those that were asked about it, and what failed."""
    problem, credited, errors = rehearsal
    reference = "" if problem.answer is None else f"   (answer: {problem.answer})"
    tree = Tree(Text(f"{problem.question}{reference}"))
    samples = {s.uid: s for group in credited.groups for s in group.samples}
    nodes: dict[str, Tree] = {}
    for uid in sorted(samples, key=lambda uid: (uid.count("/"), uid)):
        sample = samples[uid]
        episode = uid.partition("/")[0]
        above = nodes.get(sample.parent_uid or episode)
        if above is None:
            above = nodes[episode] = tree.add(Text(f"episode {episode}"))
        nodes[uid] = above.add(_line(sample, credited.advantages.get(uid)))
        if with_prompts:
            nodes[uid].add(Text(f"it read: {sample.prompt_text}", style="dim"))
    for episode, error in sorted(errors.items()):
        (nodes.get(episode) or tree.add(Text(f"episode {episode}"))).add(
            Text(f"the episode ends: {error}", style="red")
        )
    return tree


def _line(sample: Sample, advantage: float | None) -> Text:
    reward = "none" if sample.reward.is_missing else f"{sample.reward.value:g}"
    trained = "" if advantage is None else f", advantage {advantage:+.2f}"
    note = f" ({sample.reward.note})" if sample.reward.note else ""
    name = sample.uid.rpartition("/")[2]
    return Text.assemble((name, "bold"), f"  {' '.join(sample.text.split())[:200]!r}  reward {reward}{note}{trained}")


@dataclass(frozen=True, slots=True)
class _MadeUp:
    """Made-up answers of an agent: the examples of its prompts.

    Raises:
        ValueError: the prompts are a file without an example.
    """

    prompts: PromptSet
    role: Role
    stops: Sequence[str]

    def __post_init__(self) -> None:
        what = READS.get(self.role)
        parser = self.prompts.parsers[what] if what is not None else None
        if parser is not None and not parser.examples:
            raise ValueError(
                f"{self.prompts.name}: {what} has no example, of which words of a {self.role} could be made up; give the agent "
                "--answers, or `example` beside the regex"
            )

    def words(self, problem: Problem, turn: int, coin: random.Random) -> str:
        """turn: how often its sample has gone on before."""
        if self.role is Role.ADVISER:
            return f"Advice number {coin.randrange(100)}: {problem.question}"
        right = right_answers(problem.answer or "1")[0]
        answer = right if coin.random() < 0.5 else ("0" if right != "0" else "1")
        verdict = coin.choice((0, 1))
        question = _NOT_IN_A_STRING.sub(" ", problem.question)
        if self.role is Role.DISTILLER:
            return f"It says: {answer}."
        if self.role is Role.REASONER and turn == 0:
            return _CALL.replace("QUESTION", question)
        parser = self.prompts.parsers[READS[self.role]]
        if isinstance(parser, VerdictParser):
            said = parser.examples[verdict]
        else:
            said = parser.examples[0].replace("ANSWER", question if self.role is Role.SEARCHER else answer)
        return _after_stops(said, self.stops, turn)


def _script(
    problem: Problem, answers: Answers, words: Mapping[str, _MadeUp], seed: int
) -> Callable[[DecodeRequest], str]:
    calls: Counter[str] = Counter()
    turns: Counter[str] = Counter()  # by uid

    def says(request: DecodeRequest) -> str:
        agent = request.uid.rpartition("/")[2].partition(":")[0].partition("#")[0]
        calls[agent] += 1
        if agent in answers:
            return answers[agent][(calls[agent] - 1) % len(answers[agent])]
        turns[request.uid] += 1
        coin = random.Random(derive_seed(seed, "try", request.uid))
        return words[agent].words(problem, turns[request.uid] - 1, coin)

    return says


def _after_stops(text: str, stops: Sequence[str], number: int) -> str:
    """Text after its `number`-th stop."""
    for _ in range(number):
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        text = text[min(ends) :] if ends else text
    return text
