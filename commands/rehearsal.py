"""`marsrl try`: a team plays one problem with made-up answers, through the scheduler, rewards and credit of training.

No model is needed: a script gives right or wrong answers at random, or answers from a file. The output shows the team's calls,
prompts and rewards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.parsers import all_tagged
from marsrl.rollout.agents.prompts import PromptSet, prompt_set
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import READS, AgentSpec, Role
from marsrl.rollout.config import MOST_TOKENS, AgentConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.episode import Episode
from marsrl.rollout.gateway.chats import Ask, Said
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.vllm_reader import agents_of
from marsrl.rollout.orchestrations.registry import build_orchestration, find_orchestration
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import Stages
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.data import right_answers
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.text import in_one_line
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.types import Group, IntArray, Problem, ToolFunction
from marsrl.trainer.checks.problems import read_data
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.origin import ConfigOrigin
from marsrl.trainer.data.credit import Credited, credit
from marsrl.trainer.report.console import literal
from marsrl.trainer.report.group_metrics import poor_merges

Answers = Mapping[str, Sequence[str]]
"""Answers of each agent, in the order of its calls. After the last answer the first one is used again."""


def read_answers(path: Path, agents: Sequence[str]) -> Answers:
    """Read a YAML file `agent: [text, ...]`. Raises ValueError if it is invalid or names an agent that is not in the team."""
    try:
        table = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {in_one_line(error)}") from error
    is_table = isinstance(table, dict) and all(
        isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts) for texts in table.values()
    )
    if not is_table:
        raise ValueError(
            f"{path}: expected a list of quoted answers for each agent, `solver: ['first answer', 'second']`"
        )
    check_agents(str(path), table, agents)
    return dict(table)


def check_agents(where: str, answers: Answers, agents: Sequence[str]) -> None:
    """Raise ValueError if answers belong to an agent that is not in the team. where: start of the error message."""
    for name in answers:
        if name not in agents:
            raise ValueError(f"{where}: the team has no agent {name!r}; expected one of {', '.join(agents)}")


class Turn(NamedTuple):
    """One call of an agent by a program.

    number: number of the call in its session, from 1.
    num_new: number of prompt tokens; if the call continues a sample, only those after the sample's earlier tokens.
    text: the answer.
    """

    number: int
    num_new: int
    text: str


class Rehearsal(NamedTuple):
    """Record of one problem that the team played.

    errors: why episodes failed (an error in the team's own code or the program), by episode.
    turns: the program's calls in each sample, by uid; {} if no program plays.
    num_episodes: number of episodes played for the problem.
    warnings: sentences about prompts that do not state the expected form of answers, and about calls that do not
        merge into one sample.
    """

    problem: Problem
    credited: Credited
    errors: dict[str, str]
    turns: Mapping[str, Sequence[Turn]]
    num_episodes: int
    warnings: Sequence[str] = ()


def rehearse(config: RunConfig, answers: Answers, *, question: str = "", reference: str = "") -> Rehearsal:
    """Play this question, or a problem of the task, until its rollout instance ends and its credit is assigned.

    Raises ValueError if the task has no problems.
    """
    with _scripted(config, answers, question, reference, pipeline="trajectory") as (rollout, problem):
        episodes: dict[str, Episode] = {}

        def note(name: str, has_ended: bool) -> None:
            episodes[name] = rollout.stages.state.instances[name.partition(".")[0]].episodes[name]

        rollout.stages.on_episode = note
        groups = rollout.next_batch({"main": 0}).groups
        turns = _turns(groups, rollout.stages.team.renderers["main"]) if config.external is not None else {}
    read: dict[str, list[str]] = {}
    for sample in (sample for group in groups for sample in group.samples):
        read.setdefault(sample.agent, []).append(sample.prompt_text)
    warnings = [*rollout.stages.team.orchestration.unasked([problem], read), *poor_merges(groups)]
    errors = {name: episode.error for name, episode in episodes.items() if episode.error}
    credited = credit(groups, config.credit, config.agents, group_size=config.rollout.group_size, seed=config.run.seed)
    return Rehearsal(problem, credited, errors, turns, len(episodes), warnings)


def rehearse_shown(
    config: RunConfig,
    origin: ConfigOrigin,
    answers: Answers,
    console: Console,
    *,
    question: str = "",
    reference: str = "",
    with_prompts: bool = False,
) -> Rehearsal:
    """Rehearse, and print settings, reward rules, the tree of samples, warnings, and the first update's step if it is not 1.

    console: prints the tree.

    Raises ConfigError if the task has no problems, or settings are wrong.
    """
    logging.disable(logging.ERROR)  # the printed tree shows failures
    try:
        with origin.places_in_errors():
            rehearsal = rehearse(config, answers, question=question, reference=reference)
            late = [] if rehearsal.errors else first_update_line(config, answers, question, reference)
    finally:
        logging.disable(logging.NOTSET)
    print(f"# settings: {origin}", *(f"# {line}" for line in reward_rules(config)), sep="\n", flush=True)
    console.print(drawn(rehearsal, with_prompts=with_prompts))
    for line in [*(f"warning: {warning}" for warning in rehearsal.warnings), *late]:
        print(line)
    return rehearsal


def _turns(groups: Sequence[Group], renderer: ChatRenderer) -> dict[str, list[Turn]]:
    """Return the turns of each sample."""
    turns: dict[str, list[Turn]] = {}
    for sample in (sample for group in groups for sample in group.samples):
        begins = [-len(sample.prompt_ids), *(turn.end for turn in sample.turns)]  # the first turn reads the prompt
        turns[sample.uid] = [
            Turn(turn.call, turn.start - begin, renderer.decode(sample.token_ids[turn.start : turn.end]))
            for turn, begin in zip(sample.turns, begins, strict=False)
        ]
    return turns


def reward_rules(config: RunConfig) -> list[str]:
    """Return the reward rule of each agent, one line each."""
    kind = find_orchestration(config.orchestration)
    if config.credit.reward_scheme == "outcome":
        return ["reward of every agent: the outcome of its episode (credit.reward_scheme)"]
    return [f"reward of {spec.name}: {kind.reward_rule(spec)}" for spec in _specs(config)]


def _specs(config: RunConfig) -> Sequence[AgentSpec]:
    """Return the agents' specs. A program's agents are assumed to answer the problem."""
    return find_orchestration(config.orchestration).agents or [AgentSpec(name) for name in config.agents]


def first_update_line(config: RunConfig, answers: Answers, question: str, reference: str) -> list[str]:
    """Return a line that names the first step with samples to train on, if each answer takes one step; [] if that is step 1.

    Returns [] without playing for programs, for teams with tools (which may be paid services), and with rollout.overlap,
    where each step waits for finished groups.
    """
    if config.tools.given or config.rollout.overlap or config.external is not None:
        return []
    num_steps = config.run.steps
    with _scripted(config, answers, question, reference, pipeline=config.rollout.pipeline) as (rollout, _):
        step = next((n for n in range(1, num_steps + 1) if rollout.next_batch({"main": 0}).groups), None)
    if step == 1:
        return []
    when = f"at step {step} of {num_steps}" if step else f"not within run.steps = {num_steps}"
    return [
        f"first update: {when}, if each answer takes one step: a sample is trained once all samples of its group have ended "
        "(rollout.pipeline=trajectory plays whole episodes in every step)"
    ]


@contextlib.contextmanager
def _scripted(
    config: RunConfig,
    answers: Answers,
    question: str,
    reference: str,
    *,
    pipeline: Literal["agentic", "trajectory"],
) -> Iterator[tuple[Rollout, Problem]]:
    """Open the run's rollout with one problem and a script as its engine."""
    asked_problem = Problem("given", question, reference or None, config.task)
    train = [asked_problem] if question and config.task != "qa" else read_data(config).train  # qa needs documents
    task = build_task(config.task, config.task_options, train, train)
    kind = find_orchestration(config.orchestration)
    called = {name for agent in config.agents.values() for name in agent.tools}
    names = [name for name in config.tools.given if name in (*kind.tools, *kind.optional_tools, *called)]
    functions = check_tools(config.tools, names, task.documents, task.papers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(task))
        tools = build_tools(config.tools, names, task.documents, task.papers)
        stack.callback(tools.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_byte_tokenizer(Path(folder))
        renderer = ChatRenderer(folder)
        problem = asked_problem if question else task.problems(config.run.seed)(0)
        words = {
            spec.name: _MadeUp(
                prompt_set(agent.prompt or task.prompts),
                spec.role,
                agent.stop,
                functions[agent.tools[0]][0] if agent.tools else None,
            )
            for spec, agent in ((spec, config.agents[spec.name]) for spec in _specs(config) if spec.name not in answers)
        }
        engine = ScriptedEngine(
            _script(problem, answers, words, config.run.seed, is_whole=config.external is not None),
            encode=lambda text: renderer.completion_ids(text).tolist(),
            decode=renderer.decode,
        )
        bounds = {"max_response_tokens": MOST_TOKENS, "segments": 1, "segment_length": None, "overlap": 0}
        rollout = config.rollout.model_copy(update={"prompts_per_step": 1, "pipeline": pipeline, **bounds})
        updates = {
            "policy": "main",
            "max_input_tokens": MOST_TOKENS,
            "max_response_tokens": None,
            "template_options": {},
        }
        agents = {name: agent.model_copy(update=updates) for name, agent in config.agents.items()}
        external = config.external
        by_turn = config.credit.turns == "returns"
        gateway = None if external is None else stack.enter_context(_gateway(external, agents, renderer, by_turn))
        team = Team(
            agents,
            build_orchestration(
                config.orchestration,
                config.agents,
                task.prompts,
                config.orchestration_options,
                rollout,
                tools=config.tools.given,
                renderers=dict.fromkeys(config.agents, renderer),
            ),
            {"main": renderer},
            {"main": EnginePool(LocalReplicas([engine]))},
            WatchedJudge(task.judge),
            max_turns=rollout.max_turns,
            tools=tools,
            gateway=gateway,
        )
        seed, trains_whole = config.run.seed, config.trains_whole
        yield Rollout(Stages(rollout, team, lambda number: problem, seed=seed, trains_whole=trains_whole)), problem


def _gateway(
    external: ExternalConfig, agents: Mapping[str, AgentConfig], renderer: ChatRenderer, by_turn: bool
) -> contextlib.AbstractContextManager[Gateway]:
    """Open the program's gateway with one worker. Sessions are played one by one, so seeded answers are reproducible."""
    from marsrl.rollout.gateway.server import open_gateway  # imported here: most teams need no HTTP server
    from marsrl.rollout.gateway.workers import check_external

    if external.workers:
        external = external.model_copy(update={"workers": 1, "concurrency": 1, "host": "127.0.0.1", "port": 0})
    key = check_external(external)
    known = agents_of(agents, {"main": renderer}, MOST_TOKENS)
    reading = {name: replace(agent, reader=_CallReader()) for name, agent in known.items()}
    return open_gateway(external, reading, key, sums_turns=by_turn)


class _CallReader:
    """Parser of tool calls in the form that most chat templates use; malformed calls stay text."""

    reads_calls = True
    closing = "</tool_call>"

    def opening(self, name: str) -> str:
        return ""  # made-up answers are whole turns

    def __call__(self, text: str, token_ids: IntArray, ask: Ask) -> Said:
        calls = []
        for written in all_tagged("tool_call", text) if ask.tools and ask.calls_tools else []:
            try:
                call = json.loads(written)
                function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            except (ValueError, TypeError, KeyError):
                return Said(text)
            calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
        return Said(text.partition("<tool_call>")[0].strip() if calls else text, None, calls)


def drawn(rehearsal: Rehearsal, *, with_prompts: bool = False) -> Tree:
    """Draw the tree of samples: a branch per episode, with each sample's successors below it, and failures."""
    problem, credited, errors, turns, *_ = rehearsal
    reference = "" if problem.answer is None else f"   (answer: {problem.answer})"
    tree = Tree(literal(f"{problem.question}{reference}"))
    samples = {s.uid: s for group in credited.groups for s in group.samples}
    nodes: dict[str, Tree] = {}
    begun = {uid: of_sample[0].number for uid, of_sample in turns.items()}
    for uid in sorted(samples, key=lambda uid: (uid.count("/"), uid.partition("/")[0], begun.get(uid, 0), uid)):
        sample = samples[uid]
        episode = uid.partition("/")[0]
        above = nodes.get(sample.parent_uid or episode)
        if above is None:
            above = nodes[episode] = tree.add(Text(f"episode {episode}"))
        num_calls = len(turns.get(uid, ()))
        says = f"{num_calls} call{'s' * (num_calls != 1)}" if uid in turns else _short(sample.text)
        reward = "none" if sample.reward.is_missing else f"{sample.reward.value:g}"
        note = f" ({sample.reward.note})" if sample.reward.note not in ("", errors.get(episode)) else ""
        advantages = credited.turns.get(uid) or [credited.advantages[uid]] if uid in credited.advantages else []
        trained = f", advantage {' '.join(f'{advantage:+.2f}' for advantage in advantages)}" if advantages else ""
        earns = literal(f"  {says}  reward {reward}{note}{trained}")
        nodes[uid] = above.add(Text.assemble((uid.rpartition("/")[2], "bold"), earns))
        if with_prompts:
            nodes[uid].add(literal(f"prompt: {sample.prompt_text}", "dim"))
        if sample.rewritten:
            nodes[uid].add(literal(f"does not continue an earlier sample: {sample.rewritten}", "dim"))
        for turn in turns.get(uid, ()):
            verb = "reads" if turn.number == begun[uid] else "continues with"
            nodes[uid].add(Text(f"call {turn.number} {verb} {turn.num_new} bytes: {_short(turn.text)}"))
    if not samples and not errors:
        tree.add(Text("no agent was called"))
    first: dict[str, str] = {}  # the first episode with each error
    for episode, error in sorted(errors.items()):
        branch = nodes.get(episode) or tree.add(Text(f"episode {episode}"))
        seen = first.setdefault(error, episode)
        message = error.rstrip() if seen == episode else f"same error as episode {seen}"
        branch.add(literal(f"the episode failed: {message}", "red"))
    return tree


def _short(text: str) -> str:
    return repr(" ".join(text.split())[:200])


@dataclass(frozen=True, slots=True)
class _MadeUp:
    """Made-up answers of an agent, taken from the examples of its prompts.

    Raises ValueError if the prompts are a file without an example.
    """

    prompts: PromptSet
    role: Role
    stops: Sequence[str]
    function: ToolFunction | None = None  # tool that the made-up answer of the first turn calls

    def __post_init__(self) -> None:
        part = READS.get(self.role)
        parser = self.prompts.parsers[part] if part is not None else None
        if parser is not None and not parser.examples:
            raise ValueError(
                f"{self.prompts.name}: {part} has no example to make up answers of a {self.role} from; pass answers with "
                "--answers, or add `example` beside the regex"
            )

    def words(self, problem: Problem, turn: int, coin: random.Random) -> str:
        """Return the text of an answer. turn: number of earlier continuations of the sample."""
        if self.function is not None and turn == 0:
            call = {"name": self.function.name, "arguments": _example(self.function.parameters, problem.question)}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        if self.role is Role.ADVISER:
            return f"Advice number {coin.randrange(100)}: {problem.question}"
        right = right_answers(problem.answer or "1")[0]
        answer = right if coin.random() < 0.5 else ("0" if right != "0" else "1")
        verdict = coin.choice((0, 1))
        if self.role is Role.DISTILLER:
            return f"It says: {answer}."
        if self.role is Role.REASONER and turn == 0:
            call = {"tool": "search", "arguments": {"query": problem.question}, "purpose": problem.question}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        parser = self.prompts.parsers[READS[self.role]]
        if len(parser.examples) == 2:  # one example of yes and one of no
            text = parser.examples[verdict]
        else:
            text = parser.examples[0].replace("ANSWER", problem.question if self.role is Role.SEARCHER else answer)
        for _ in range(turn):  # a continued sample goes on after the stop text
            ends = [text.index(stop) + len(stop) for stop in self.stops if stop in text]
            text = text[min(ends) :] if ends else text
        return text


def _example(schema: Mapping[str, Any], text: str) -> object:
    """Return a value that roughly fits a JSON schema. text: value of every string."""
    if fixed := [schema[key] for key in ("default", "const") if key in schema]:
        return fixed[0]
    if choices := schema.get("enum") or schema.get("examples"):
        return choices[0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], text)
    if schema.get("type") == "object":
        parts = {name: schema.get("properties", {}).get(name, {}) for name in schema.get("required", ())}
        return {name: _example(part, text) for name, part in parts.items()}
    if schema.get("type") == "array":
        return [_example(schema.get("items", {}), text)]
    return {"integer": 1, "number": 1.5, "boolean": True, "null": None}.get(schema.get("type", ""), text)


def _script(
    problem: Problem, answers: Answers, words: Mapping[str, _MadeUp], seed: int, *, is_whole: bool
) -> Callable[[DecodeRequest], str]:
    """Return the function that answers requests. is_whole: each turn of a sample is a complete answer."""
    calls: Counter[str] = Counter()
    turns: Counter[str] = Counter()  # turns so far, by uid

    def says(request: DecodeRequest) -> str:
        agent = request.uid.rpartition("/")[2].partition(":")[0].partition("#")[0]
        calls[agent] += 1
        if agent in answers:
            return answers[agent][(calls[agent] - 1) % len(answers[agent])]
        turns[request.uid] += 1
        turn = turns[request.uid] - 1
        coin = random.Random(derive_seed(seed, "try", request.uid, *([turn] if is_whole and turn else [])))
        return words[agent].words(problem, 0 if is_whole else turn, coin)

    return says
