"""Generated world of linked facts: one document per entity, and questions that follow one or more links.

    document  lotte holt: the home of lotte holt is brill . the friend of lotte holt is suri quill . ...
    question  what is the river of the home of lotte holt ?          (two hops)
    answer    ebb

Papers by these people; their questions need a search by `scholar` first, and then one by `search`:

    paper     sparse lattices for routing (1997, 12 citations): the author of sparse lattices for routing is lotte holt . ...
    question  what is the home of the author of sparse lattices for routing ?
    answer    brill

Terse wording, for tiny policies:

    document  mira: mira home tarn . mira friend odo . ...
    question  mira home river ?

Calculations (task_options.calculations):

    question  what is 7 times 8 ?

No model can have memorised these facts: without searching, a model can only guess. The vocabulary is small and lower case, so
that a whole-word tokenizer covers all words about people and places.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.tasks.arithmetic import is_held_out
from marsrl.rollout.tasks.config import FactsOptions
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.tools.documents import Document, Paper
from marsrl.rollout.types import Problem

_FIRST_NAMES = (
    "mira odo lena tarek ines bruno sela ivo nadia kofi runa pavel zora emil tala hugo vesna arlo suri lev "
    "dana milo yara otto nils petra rami gita sven lotte amos freya juno kai maren noor oleg pia quin rosa"
)
_LAST_NAMES = (
    "holt vane marsh quill thorn pike reed stone vale wren ash birch crane dale elm finch grove heath irons jessop "
    "kell lark moor nash orr penn rook sage tull usher voss ward yates zell brock cole drake esker flint garr"
)
_TOWNS = (
    "tarn ostwick belmar corrin duvale elsmoor farrow gantry hollin istria jarrow kestrel lowen morrow narvik oakley "
    "pellam quarry rendal sorrel tilbury ulster varn wexley xanten yarrow zeeland ambry brill calder dorne eskdale fenwick "
    "garth hexam inver jura kelso lorne melrose"
)
_FIRST, _LAST, _PLACES = _FIRST_NAMES.split(), _LAST_NAMES.split(), _TOWNS.split()
_COUNTRIES = ("norland", "sudmark", "estria", "velden", "karsk")
_RIVERS = ("ebb", "tarnik", "sull", "vira", "moss", "lune", "drau", "isk")
_TRADES = ("baker", "smith", "weaver", "miller", "mason", "sailor", "potter", "tailor")

_OF_PEOPLE = ("home", "friend", "teacher", "trade")
_OF_PLACES = ("country", "river")
_TO_PEOPLE = ("friend", "teacher")
_MOST_DRAWS = 20_000  # maximum draws for a question of one split
_GRAMMAR = ("what", "is", "the", "of", "?", ".")

WORDS = tuple(
    dict.fromkeys([*_GRAMMAR, *_OF_PEOPLE, *_OF_PLACES, *_FIRST, *_LAST, *_PLACES, *_COUNTRIES, *_RIVERS, *_TRADES])
)
"""All words of documents, questions and answers about people and places."""

_MANNERS = (
    "sparse dense nested robust lazy exact partial noisy joint local global hidden stable fast slow soft hard deep wide"
)
_THINGS = "lattices graphs kernels filters tensors proofs grammars markets games queues codes maps trees walks waves sets fields"
_AIMS = "routing sorting parsing planning sensing pricing voting folding mixing scaling tuning pruning sharing packing dating"
_METHODS = "annealing sampling bootstrapping distillation relaxation induction simulation enumeration"
_TO_PAPERS = ("basis", "rival")
_OF_PAPERS = ("year", "citations", "author", "method")


_SIGNS = {"plus": "+", "minus": "-", "times": "*"}
_VALUES = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
_ID = "calculation"

CALCULATION_WORDS = (*_SIGNS, *_SIGNS.values(), *map(str, range(100)))
"""Words of questions, programs and answers about calculations that are not in WORDS."""


@dataclass(frozen=True, slots=True)
class Calculation:
    """Two whole numbers below 100 and an operator (plus, minus, times): a question for a team with Python."""

    left: int
    operator: str
    right: int

    @classmethod
    def draw(cls, rng: random.Random) -> Calculation:
        word = rng.choice(tuple(_SIGNS))
        if word == "plus":
            return cls(rng.randint(1, 49), word, rng.randint(1, 49))
        if word == "minus":
            left = rng.randint(2, 99)
            return cls(left, word, rng.randint(1, left - 1))
        return cls(rng.randint(2, 9), word, rng.randint(2, 9))

    @classmethod
    def of(cls, problem: Problem) -> Calculation | None:
        """Return the calculation that a problem asks for; None for other problems."""
        kind, _, rest = problem.id.partition("/")
        if kind != _ID:
            return None
        left, word, right = rest.split("/")
        return cls(int(left), word, int(right))

    @property
    def code(self) -> str:
        """Return the calculation as a Python expression."""
        return f"{self.left} {_SIGNS[self.operator]} {self.right}"

    @property
    def value(self) -> int:
        return int(_VALUES[self.operator](self.left, self.right))

    def problem(self, is_terse: bool) -> Problem:
        asked = f"{self.left} {self.operator} {self.right} ?"
        question = asked if is_terse else f"what is {asked}"
        return Problem(f"{_ID}/{self.left}/{self.operator}/{self.right}", question, str(self.value), "qa")


class World:
    """Facts by (entity, relation), all drawn from options.world_seed."""

    def __init__(self, options: FactsOptions) -> None:
        rng = random.Random(f"linked facts/{options.world_seed}")
        self._options = options
        self._is_terse = options.wording == "terse"
        names = _FIRST if self._is_terse else [f"{first} {last}" for first in _FIRST for last in _LAST]
        self.people = tuple(rng.sample(names, options.people))
        self.places = tuple(rng.sample(_PLACES, options.places))
        facts: dict[tuple[str, str], str] = {}
        for person in self.people:
            facts[person, "home"] = rng.choice(self.places)
            for relation in _TO_PEOPLE:
                facts[person, relation] = rng.choice([other for other in self.people if other != person])
            facts[person, "trade"] = rng.choice(_TRADES)
        for place in self.places:
            facts[place, "country"], facts[place, "river"] = rng.choice(_COUNTRIES), rng.choice(_RIVERS)
        self.papers = _papers(options, self.people, facts)
        self.facts: Mapping[tuple[str, str], str] = facts
        self.documents = tuple(self._document(name, _OF_PEOPLE) for name in self.people) + tuple(
            self._document(name, _OF_PLACES) for name in self.places
        )

        for held_out in (True, False):
            self.draw(rng, held_out)

    def facts_of(self, entity: str) -> dict[str, str]:
        """Return an entity's facts: {relation: value}."""
        return {relation: value for (name, relation), value in self.facts.items() if name == entity}

    def _document(self, name: str, relations: tuple[str, ...]) -> Document:
        facts = [(relation, self.facts[name, relation]) for relation in relations]
        if self._is_terse:
            text = " ".join(f"{name} {relation} {value} ." for relation, value in facts)
        else:
            text = " ".join(f"the {relation} of {name} is {value} ." for relation, value in facts)
        return Document(name.replace(" ", "_"), name, text)

    def _question(self, name: str, relations: list[str]) -> str:
        if self._is_terse:
            return f"{' '.join([name, *relations])} ?"
        return f"what is {' of '.join(f'the {relation}' for relation in reversed(relations))} of {name} ?"

    def steps(self, problem: Problem) -> list[tuple[str, str, str]]:
        """Return the facts that lead to a question's answer, in order: (entity, relation, value). The last value is the
        answer."""
        _, name, *relations = problem.id.split("/")
        steps: list[tuple[str, str, str]] = []
        for relation in relations:
            entity = steps[-1][2] if steps else name.replace("_", " ")
            steps.append((entity, relation, self.facts[entity, relation]))
        return steps

    def draw(self, rng: random.Random, held_out: bool) -> Problem:
        """Draw a question of the training or the held-out split; ValueError if the world is too small to have one."""
        names = self.people if self._options.about == "facts" else [paper.title for paper in self.papers]
        for _ in range(_MOST_DRAWS):
            if self._options.calculations and rng.random() < self._options.calculations:
                problem = Calculation.draw(rng).problem(self._is_terse)
                if is_held_out(problem.question) == held_out:
                    return problem
                continue
            hops = rng.randint(self._options.min_hops, self._options.max_hops)
            value = name = rng.choice(names)
            relations = _path(rng, hops, self._options.about)
            for relation in relations:
                value = self.facts.get((value, relation), "")  # the oldest paper is not based on another
            question = self._question(name, relations)
            if is_held_out(question) == held_out and value not in ("", name):
                path = "/".join([name.replace(" ", "_"), *relations])
                return Problem(f"{self._options.about}/{path}", question, value, "qa")
        key = "people" if self._options.about == "facts" else "papers"
        raise ValueError(
            f"task_options: none of {_MOST_DRAWS:,} questions about {len(names)} {key} was "
            f"{'held out' if held_out else 'for training'}; raise {key} or max_hops"
        )

    def questions(self, seed: int) -> ProblemSource:
        return lambda n: self.draw(random.Random(f"linked facts/{seed}/{n}"), held_out=False)

    def held_out(self, num_problems: int, seed: int) -> list[Problem]:
        """Return questions that are never trained on; some may repeat, since a world has a limited number of questions."""
        rng = random.Random(f"linked facts/held-out/{seed}")
        return [self.draw(rng, held_out=True) for _ in range(num_problems)]


def _path(rng: random.Random, hops: int, about: str) -> list[str]:
    """Draw a chain of relations.

    A chain leads from a person to other people, then perhaps to a home and a fact of that place; or from a paper to other papers,
    then perhaps to the author and a fact of that person.
    """
    links, crossing, beyond, last_links = {
        "facts": (_TO_PEOPLE, "home", _OF_PLACES, _OF_PEOPLE),
        "papers": (_TO_PAPERS, "author", _OF_PEOPLE, _OF_PAPERS),
    }[about]
    if hops >= 2 and rng.random() < 0.5:
        return [*(rng.choice(links) for _ in range(hops - 2)), crossing, rng.choice(beyond)]
    return [*(rng.choice(links) for _ in range(hops - 1)), rng.choice(last_links)]


def _papers(options: FactsOptions, people: Sequence[str], facts: dict[tuple[str, str], str]) -> tuple[Paper, ...]:
    """Build papers by these people, and add their facts to `facts`. Each paper but the oldest is based on an earlier one."""
    rng = random.Random(f"linked papers/{options.world_seed}")
    names = [f"{a} {b} for {c}" for a in _MANNERS.split() for b in _THINGS.split() for c in _AIMS.split()]
    titles = rng.sample(names, options.papers)
    papers = []
    for index, (title, year) in enumerate(
        zip(titles, sorted(rng.choices(range(1980, 2026), k=len(titles))), strict=True)
    ):
        links = {"author": rng.choice(people), "method": rng.choice(_METHODS.split())}
        if index:
            links["basis"] = rng.choice(titles[:index])
        links["rival"] = rng.choice([other for other in titles if other != title])
        abstract = " ".join(f"the {relation} of {title} is {value} ." for relation, value in links.items())
        paper = Paper(
            id=title.replace(" ", "_"), title=title, abstract=abstract, year=year, citations=rng.randrange(1000)
        )
        facts |= {(title, relation): value for relation, value in links.items()}
        facts |= {(title, "year"): str(year), (title, "citations"): str(paper.citations)}
        papers.append(paper)
    return tuple(papers)


def write_linked_facts(folder: str | Path, options: FactsOptions, num_train: int, num_held_out: int, seed: int) -> None:
    """Write corpus.jsonl, papers.jsonl, train.jsonl and held_out.jsonl into a new or existing folder; the files must not
    exist."""
    world, folder = World(options), Path(folder)
    draw = world.questions(seed)
    train = [draw(number) for number in range(num_train)]
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, object]]] = {
        "corpus": [{"id": each.id, "title": each.title, "text": each.text} for each in world.documents],
        "papers": [each.model_dump() for each in world.papers],
        "train": [_row(problem) for problem in train],
        "held_out": [_row(problem) for problem in world.held_out(num_held_out, seed)],
    }
    for name, lines in rows.items():
        with (folder / f"{name}.jsonl").open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def _row(problem: Problem) -> dict[str, object]:
    return {"id": problem.id, "question": problem.question, "golden_answers": [problem.answer]}
