"""Tokenizers of the built-in questions, and demonstrations of mediocre teams on them.

Every lesson has a new world, so that a policy learns to read search results rather than memorise facts. An agent repeats a fact
before using it (`home tarn <answer> tarn </answer>`). Tutors slip when they choose the fact, never when they copy it, and a
question ends after a slip.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from marsrl.rollout.agents.prompts import NEXT_TURN, NOTHING_READ, NOTHING_SEARCHED, prompt_set, searched, tool_response
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.config import QaOptions
from marsrl.rollout.tasks.facts import CALCULATION_WORDS, WORDS, Calculation, World
from marsrl.rollout.tasks.tutor import Trace, Tutor
from marsrl.rollout.tasks.word_tokenizer import WordTokenizer
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
"""Three parts of a search call: the texts before the query, between query and purpose, and after the purpose."""
PYTHON_CALL = ('{"tool":"python","arguments":{"code":"print', '"}}')
"""Two parts of a Python call: the texts before and after the printed expression."""

PURPOSE = "What is looked for:"
"""Text before a call's purpose in System 1's prompt (prompt_sets/facts.yaml)."""

CALLS_TOKENIZER = _tokenizer(
    *_tags("tool_call", "tool_response", "answer"),
    *(*SEARCH_CALL, *PYTHON_CALL, "read", "error:", *PURPOSE.split(), *NEXT_TURN.split()),
    *(*NOTHING_READ.strip("()").split(), *_TITLE, *WORDS, *CALCULATION_WORDS),
)


class FactsTutor(Tutor[QaOptions]):
    """Base tutor for the built-in questions in their terse wording. It teaches copying from a document, then all roles."""

    task_options = QaOptions
    drills = 4  # number of drills per step of phase 2

    def foundation(self, step: int) -> Iterator[Trace]:
        world = self._another_world()
        for _ in range(self.config.solver_batch):
            yield self.drill(world, is_first=step < self.config.short_steps)

    def team_lesson(self) -> Iterator[Trace]:
        world = self._another_world()
        for _ in range(self.config.team_batch):
            yield from self.question(world)
        world = self._another_world()
        for _ in range(self.drills):
            yield self.drill(world)

    @abstractmethod
    def question(self, world: World) -> Iterator[Trace]:
        """Write a team's demonstrations for one question, in the order of play."""

    @abstractmethod
    def drill(self, world: World, *, is_first: bool = False) -> Trace:
        """Write documents, and correct answers from the last one. is_first: write the shortest kind of drill."""

    def _another_world(self) -> World:
        """Draw another world of the same size, with other facts."""
        return World(self.options.model_copy(update={"world_seed": self.rng.randrange(2**31)}))

    def _slipped(self, world: World, entity: str, relation: str, slip: float) -> str:
        """Return the relation or, with probability `slip`, another one in the same document."""
        if self.rng.random() < slip:
            return self.rng.choice([other for other in world.facts_of(entity) if other != relation])
        return relation


class SearchTutor(FactsTutor):
    """Tutor of the search team; it teaches the answering agent alone first."""

    tokenizer = "facts"
    judged = (Role.ANSWERER, Role.SEARCHER)
    slip_router = 0.15  # share of the Verifier's turns that say yes too early
    slip_searcher = 0.2  # share of later queries that ask for a wrong fact of the document
    slip_answerer = 0.25  # share of answers that give a wrong fact of the document

    def question(self, world: World) -> Iterator[Trace]:
        """Write the team's demonstrations for one question, in the order of play.

        After a premature yes the team continues as after a no, because without the fact there is no right answer to teach the
        Answer agent. A query for a wrong fact is the last trace.
        """
        problem = world.draw(self.rng, held_out=False)
        steps = world.steps(problem)
        documents = {document.title: document for document in world.documents}
        results: list[str] = []

        def reply(role: Role, completion: str) -> Trace:
            report = "\n".join(results) or NOTHING_SEARCHED
            return Trace(role, prompt_set("facts").fill(role, problem=problem.question, found=report), completion)

        def read(number: int, slip: float) -> tuple[str, str]:
            """Return the relation and value of a step or, with probability `slip`, of another fact in the same document."""
            entity, relation, _ = steps[number]
            relation = self._slipped(world, entity, relation, slip)
            return relation, world.facts[entity, relation]

        for number, (entity, _, _) in enumerate(steps):
            yield reply(Role.ROUTER, f"<verify> {'yes' if self.rng.random() < self.slip_router else 'no'} </verify>")
            if number == 0:
                yield reply(Role.SEARCHER, f"<search> {entity} </search>")
            else:
                relation, value = read(number - 1, self.slip_searcher)
                yield reply(Role.SEARCHER, f"{relation} {value} <search> {value} </search>")
                if value != entity:
                    return
            results.append(_found(documents[entity]))
        yield reply(Role.ROUTER, "<verify> yes </verify>")
        relation, value = read(-1, self.slip_answerer)
        yield reply(Role.ANSWERER, f"{relation} {value} <answer> {value} </answer>")

    def drill(self, world: World, *, is_first: bool = False) -> Trace:
        """Write one or two search results (is_first: one), and six questions about the last one, each with its answer."""
        documents = self.rng.sample(world.documents, self.rng.randint(1, 1 if is_first else 2))
        facts = world.facts_of(documents[-1].title)
        report = "\n".join(map(_found, documents))
        turns = [
            f"{relation} ? answer <|assistant|> {relation} {facts[relation]} <answer> {facts[relation]} </answer> <|end|>"
            for relation in self.rng.choices(list(facts), k=6)
        ]
        return Trace(Role.ANSWERER, f"<|user|> {report} <|user|>", " <|user|> ".join(turns), ends=False)


def _found(document: Document) -> str:
    """Format a search for a document's title with its result, as shown to the team."""
    return searched(document.title, "\n".join(rendered([document])))


class DualTutor(FactsTutor):
    """Tutor of System 2 and System 1 for tool calls, calculations and reading results; it teaches System 1 alone first."""

    tokenizer = "calls"
    judged = (Role.DISTILLER, Role.REASONER)
    slip_call = 0.08  # share of System 2's calls with incomplete JSON
    slip_purpose = 0.12  # share of System 2's searches whose purpose names a wrong fact of the document
    slip_guess = 0.5  # share of calculations answered with a random number, without a call
    slip_distiller = 0.15  # share of System 1's notes that give a wrong fact

    def question(self, world: World) -> Iterator[Trace]:
        """Write both systems' demonstrations for one question, in the order of play; each turn of System 2 is a trace."""
        problem = world.draw(self.rng, held_out=False)
        calculation = Calculation.of(problem)
        prompts = prompt_set("facts")
        chat = prompts.fill(Role.REASONER, problem=problem.question)
        if calculation is not None:
            if self.rng.random() < self.slip_guess:
                yield Trace(Role.REASONER, chat, _answer(str(self.rng.randrange(100))))
                return
            call, is_whole = self._called(f"{PYTHON_CALL[0]} ( {calculation.code} ) {PYTHON_CALL[1]}")
            yield Trace(Role.REASONER, chat, call)
            if is_whole:
                value = str(calculation.value)
                yield Trace(Role.REASONER, _went_on(chat, call, value), _answer(value))
            return
        thought = ""
        documents = {document.title: document for document in world.documents}
        for entity, relation, _ in world.steps(problem):
            purpose = self._slipped(world, entity, relation, self.slip_purpose)
            before, between, behind = SEARCH_CALL
            call, is_whole = self._called(f"{before} {entity} {between} {purpose} {behind}")
            yield Trace(Role.REASONER, chat, thought + call)
            if not is_whole:
                return
            (output,) = rendered([documents[entity]])
            read = self._slipped(world, entity, purpose, self.slip_distiller)
            reply = f"{read} {world.facts[entity, read]}"
            prompt = prompts.fill(Role.DISTILLER, problem=problem.question, output=output, purpose=purpose)
            yield Trace(Role.DISTILLER, prompt, reply)
            if read != relation:
                return
            chat, thought = _went_on(chat, thought + call, reply), f"{reply} "
        yield Trace(Role.REASONER, chat, thought + _answer(reply.split()[-1]))

    def drill(self, world: World, *, is_first: bool = False) -> Trace:
        """Write a document, and six purposes, each followed by System 1's note on the document for this purpose."""
        document = self.rng.choice(world.documents)
        facts = world.facts_of(document.title)
        turns = [
            f"{PURPOSE} {relation} read <|assistant|> {relation} {facts[relation]} <|end|>"
            for relation in self.rng.choices(list(facts), k=6)
        ]
        completion = " ".join(" <|user|> ".join(turns).split())
        return Trace(Role.DISTILLER, f"<|user|> {rendered([document])[0]} <|user|>", completion, ends=False)

    def _called(self, call: str) -> tuple[str, bool]:
        """Return (a call in its tag, True if it is complete). With probability slip_call the call lacks its last piece."""
        is_whole = self.rng.random() >= self.slip_call
        return f"<tool_call> {call if is_whole else call.rpartition(' ')[0]} </tool_call>", is_whole


def _answer(value: str) -> str:
    return f"<answer> {value} </answer>"


def _went_on(chat: tuple[Message, ...], reply: str, response: str) -> tuple[Message, ...]:
    return (*chat, Message("assistant", reply), Message("user", tool_response(response)))
