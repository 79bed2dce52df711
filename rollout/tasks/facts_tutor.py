"""Traces of a mediocre search team about linked facts, for the warm start.

The worlds differ from lesson to lesson, so that what can be learned is to read what was found, and not the facts. An agent that
reads a fact says it before it uses it (`home tarn <answer> tarn </answer>`): the first word is the choice, the second a copy. The
tutors slip on purpose, in the choice; RL is to remove the slips.
"""

from __future__ import annotations

import random

from marsrl.rollout.agents.prompts import NOTHING_SEARCHED, prompt_set, searched
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.config import FactsOptions, SearchSlips
from marsrl.rollout.tasks.linked_facts import World
from marsrl.rollout.tasks.trace import Trace
from marsrl.rollout.tools.documents import Document, rendered


def another_world(rng: random.Random, options: FactsOptions) -> World:
    """As large as the one of these options, with facts of its own."""
    return World(options.model_copy(update={"world_seed": rng.randrange(2**31)}))


def search_traces(rng: random.Random, world: World, slips: SearchSlips) -> list[Trace]:
    """All that a team writes about one question, in its order.

    A yes that comes too early is not followed: the team goes on as after a no, since what an Answer agent should say that
    has not found the answer cannot be taught. A query for the wrong fact is the last thing that is written.
    """
    problem = world.draw(rng, held_out=False)
    steps = world.steps(problem)
    documents = {document.title: document for document in world.documents}
    traces: list[Trace] = []
    found: list[str] = []

    def write(role: Role, completion: str) -> None:
        report = "\n".join(found) or NOTHING_SEARCHED
        traces.append(Trace(role, prompt_set("facts").fill(role, problem=problem.question, found=report), completion))

    def read(number: int, slip: float) -> tuple[str, str]:
        """The relation of a step and its value, or another one of the same document."""
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
        found.append(_found(documents[entity]))
    write(Role.ROUTER, "<verify> yes </verify>")
    relation, value = read(-1, slips.slip_answerer)
    write(Role.ANSWERER, f"{relation} {value} <answer> {value} </answer>")
    return traces


def slipped(rng: random.Random, world: World, entity: str, relation: str, slip: float) -> str:
    """The relation, or with this probability another one of the same document."""
    if rng.random() < slip:
        return rng.choice([other for name, other in world.facts if name == entity and other != relation])
    return relation


def reading_drill(rng: random.Random, world: World, num_documents: int, num_questions: int = 6) -> Trace:
    """Documents that were found one after the other, and questions about facts of the last, answered without a slip."""
    documents = rng.sample(world.documents, num_documents)
    facts = [(relation, value) for (name, relation), value in world.facts.items() if name == documents[-1].title]
    report = "\n".join(map(_found, documents))
    turns = []
    for relation, value in rng.choices(facts, k=num_questions):
        turns.append(f"{relation} ? answer <|assistant|> {relation} {value} <answer> {value} </answer> <|end|>")
    return Trace(Role.ANSWERER, f"<|user|> {report} <|user|>", " <|user|> ".join(turns), ends=False)


def _found(document: Document) -> str:
    """A search for a document's title and its result, as the team reads it."""
    return searched(document.title, "\n".join(rendered([document])))
