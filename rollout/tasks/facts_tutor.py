"""Tokenizers of the built-in questions, and traces of mediocre teams on them, for the warm start.

Every lesson has another world, so that a policy learns to read search results instead of facts. An agent repeats a fact before
it uses it (`home tarn <answer> tarn </answer>`): the first word is a choice, the second a copy. The tutors slip on
purpose in the choice; RL is to remove the slips. A trace ends after a slip.
"""

from __future__ import annotations

import random

from marsrl.rollout.agents.prompts import NEXT_TURN, NOTHING_READ, NOTHING_SEARCHED, prompt_set, searched, tool_response
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.config import DualSystemSlips, FactsOptions, SearchSlips
from marsrl.rollout.tasks.linked_facts import CALCULATION_WORDS, WORDS, Calculation, World
from marsrl.rollout.tasks.word_tokenizer import Trace, WordTokenizer
from marsrl.rollout.tools.documents import Document, rendered
from marsrl.rollout.types import Message

_TITLE = ("Doc", *"123()", "Title:")


def _tags(*names: str) -> tuple[str, ...]:
    return tuple(f"<{slash}{tag}>" for tag in names for slash in ("", "/"))


def _tokenizer(*words: str) -> WordTokenizer:
    return WordTokenizer(words, gaps=r"\s+", apart="</?[a-z_]+>|[()]")


FACTS_TOKENIZER = _tokenizer(
    *_tags("verify", "search", "answer", "information"),
    *("yes", "no", "verify", "search", "answer", *NOTHING_SEARCHED.split(), *_TITLE, *WORDS),
)

SEARCH_CALL = ('{"tool":"search","arguments":{"query":"', '"},"purpose":"', '"}')
"""Texts before a query, before its purpose, and after it."""
PYTHON_CALL = ('{"tool":"python","arguments":{"code":"print', '"}}')
"""Texts before and after the printed expression."""

PURPOSE = "What is looked for:"
"""Text before a call's purpose in System 1's prompt (prompt_sets/facts.yaml)."""

CALLS_TOKENIZER = _tokenizer(
    *_tags("tool_call", "tool_response", "answer"),
    *(*SEARCH_CALL, *PYTHON_CALL, "read", "error:", *PURPOSE.split(), *NEXT_TURN.split()),
    *(*NOTHING_READ.strip("()").split(), *_TITLE, *WORDS, *CALCULATION_WORDS),
)


def another_world(rng: random.Random, options: FactsOptions) -> World:
    """Draw another world of the same size, with other facts."""
    return World(options.model_copy(update={"world_seed": rng.randrange(2**31)}))


def search_traces(rng: random.Random, world: World, slips: SearchSlips) -> list[Trace]:
    """Write all traces of a team on one question, in order.

    A premature yes is ignored, and the team continues as after a no: without the fact there is no right answer to teach an
    Answer agent. A query for the wrong fact ends the traces.
    """
    problem = world.draw(rng, held_out=False)
    steps = world.steps(problem)
    documents = {document.title: document for document in world.documents}
    traces: list[Trace] = []
    results: list[str] = []

    def write(role: Role, completion: str) -> None:
        report = "\n".join(results) or NOTHING_SEARCHED
        traces.append(Trace(role, prompt_set("facts").fill(role, problem=problem.question, found=report), completion))

    def read(number: int, slip: float) -> tuple[str, str]:
        """Return the relation and value of a step or, by a slip, of another fact in the same document."""
        entity, relation, _ = steps[number]
        relation = slipped(rng, world, entity, relation, slip)
        return relation, world.facts[entity, relation]

    for number, (entity, _, _) in enumerate(steps):
        write(Role.ROUTER, f"<verify> {'yes' if rng.random() < slips.slip_router else 'no'} </verify>")
        if number == 0:
            write(Role.SEARCHER, f"<search> {entity} </search>")
        else:
            relation, value = read(number - 1, slips.slip_searcher)
            write(Role.SEARCHER, f"{relation} {value} <search> {value} </search>")
            if value != entity:
                return traces
        results.append(_found(documents[entity]))
    write(Role.ROUTER, "<verify> yes </verify>")
    relation, value = read(-1, slips.slip_answerer)
    write(Role.ANSWERER, f"{relation} {value} <answer> {value} </answer>")
    return traces


def slipped(rng: random.Random, world: World, entity: str, relation: str, slip: float) -> str:
    """Return the relation or, with probability `slip`, another one in the same document."""
    if rng.random() < slip:
        return rng.choice([other for name, other in world.facts if name == entity and other != relation])
    return relation


def reading_drill(rng: random.Random, world: World, num_documents: int, num_questions: int = 6) -> Trace:
    """Write documents found in turn, and questions about facts in the last one, answered without slips."""
    documents = rng.sample(world.documents, num_documents)
    facts = [(relation, value) for (name, relation), value in world.facts.items() if name == documents[-1].title]
    report = "\n".join(map(_found, documents))
    turns = []
    for relation, value in rng.choices(facts, k=num_questions):
        turns.append(f"{relation} ? answer <|assistant|> {relation} {value} <answer> {value} </answer> <|end|>")
    return Trace(Role.ANSWERER, f"<|user|> {report} <|user|>", " <|user|> ".join(turns), ends=False)


def _found(document: Document) -> str:
    """Format a search for a document's title with its result, as shown to the team."""
    return searched(document.title, "\n".join(rendered([document])))


def call_traces(rng: random.Random, world: World, slips: DualSystemSlips) -> list[Trace]:
    """Write all traces of both systems on one question, in order; one for each turn of System 2."""
    problem = world.draw(rng, held_out=False)
    calculation = Calculation.of(problem)
    prompts = prompt_set("facts")
    chat = prompts.fill(Role.REASONER, problem=problem.question)
    if calculation is not None:
        if rng.random() < slips.slip_guess:
            return [Trace(Role.REASONER, chat, _answer(str(rng.randrange(100))))]
        call, is_whole = _called(rng, slips, f"{PYTHON_CALL[0]} ( {calculation.code} ) {PYTHON_CALL[1]}")
        traces = [Trace(Role.REASONER, chat, call)]
        if is_whole:
            value = str(calculation.value)
            traces.append(Trace(Role.REASONER, _went_on(chat, call, value), _answer(value)))
        return traces
    traces, thought = [], ""
    documents = {document.title: document for document in world.documents}
    for entity, relation, _ in world.steps(problem):
        purpose = slipped(rng, world, entity, relation, slips.slip_purpose)
        before, between, behind = SEARCH_CALL
        call, is_whole = _called(rng, slips, f"{before} {entity} {between} {purpose} {behind}")
        traces.append(Trace(Role.REASONER, chat, thought + call))
        if not is_whole:
            return traces
        (found,) = rendered([documents[entity]])
        read = slipped(rng, world, entity, purpose, slips.slip_distiller)
        said = f"{read} {world.facts[entity, read]}"
        prompt = prompts.fill(Role.DISTILLER, problem=problem.question, output=found, purpose=purpose)
        traces.append(Trace(Role.DISTILLER, prompt, said))
        if read != relation:
            return traces
        chat, thought = _went_on(chat, thought + call, said), f"{said} "
    traces.append(Trace(Role.REASONER, chat, thought + _answer(said.split()[-1])))
    return traces


def _called(rng: random.Random, slips: DualSystemSlips, call: str) -> tuple[str, bool]:
    """Return (a call in its tag, True if it is complete); by a slip it lacks its last piece."""
    is_whole = rng.random() >= slips.slip_call
    return f"<tool_call> {call if is_whole else call.rpartition(' ')[0]} </tool_call>", is_whole


def _answer(value: str) -> str:
    return f"<answer> {value} </answer>"


def _went_on(chat: tuple[Message, ...], said: str, response: str) -> tuple[Message, ...]:
    return (*chat, Message("assistant", said), Message("user", tool_response(response)))


def distilling_drill(rng: random.Random, world: World) -> Trace:
    """Write a document that is read for several purposes in turn without slips."""
    document = rng.choice(world.documents)
    facts = [(relation, value) for (name, relation), value in world.facts.items() if name == document.title]
    turns = [
        f"{PURPOSE} {relation} read <|assistant|> {relation} {value} <|end|>"
        for relation, value in rng.choices(facts, k=6)
    ]
    completion = " ".join(" <|user|> ".join(turns).split())
    return Trace(Role.DISTILLER, f"<|user|> {rendered([document])[0]} <|user|>", completion, ends=False)
