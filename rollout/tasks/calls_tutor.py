"""Traces of a mediocre System 2 and System 1 about linked facts and calculations, for the warm start.

As in facts_tutor.py, the worlds differ from lesson to lesson, a fact is said before it is used (`home tarn <answer> tarn
</answer>`), and the tutors slip on purpose in what is a choice. Behind a slip nothing more is written.
"""

from __future__ import annotations

import random

from marsrl.rollout.agents.prompts import prompt_set, tool_response
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.calculations import Calculation
from marsrl.rollout.tasks.config import DualSystemSlips
from marsrl.rollout.tasks.facts_tokenizer import PURPOSE, PYTHON_CALL, SEARCH_CALL
from marsrl.rollout.tasks.facts_tutor import slipped
from marsrl.rollout.tasks.linked_facts import World
from marsrl.rollout.tasks.trace import Trace
from marsrl.rollout.tools.documents import rendered
from marsrl.rollout.types import Message


def call_traces(rng: random.Random, world: World, slips: DualSystemSlips) -> list[Trace]:
    """All that both systems write about one question, in their order; a trace for each turn of System 2."""
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
    """A call in its tag, and whether it can be read: without its last piece it cannot."""
    is_whole = rng.random() >= slips.slip_call
    return f"<tool_call> {call if is_whole else call.rpartition(' ')[0]} </tool_call>", is_whole


def _answer(value: str) -> str:
    return f"<answer> {value} </answer>"


def _went_on(chat: tuple[Message, ...], said: str, response: str) -> tuple[Message, ...]:
    return (*chat, Message("assistant", said), Message("user", tool_response(response)))


def distilling_drill(rng: random.Random, world: World) -> Trace:
    """A document, and one purpose after the other, read without a slip."""
    document = rng.choice(world.documents)
    facts = [(relation, value) for (name, relation), value in world.facts.items() if name == document.title]
    turns = [
        f"{PURPOSE} {relation} read <|assistant|> {relation} {value} <|end|>"
        for relation, value in rng.choices(facts, k=6)
    ]
    completion = " ".join(" <|user|> ".join(turns).split())
    return Trace(Role.DISTILLER, f"<|user|> {rendered([document])[0]} <|user|>", completion, ends=False)
