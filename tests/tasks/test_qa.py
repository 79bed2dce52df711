"""task=qa: answers are judged as SQuAD's script judges them; the built-in facts, and the tutors of teams that search."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letters import bare

from marsrl.rollout.agents.parsers import tagged
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.tasks.config import FactsOptions, QaOptions, TutorConfig
from marsrl.rollout.tasks.data import read_problems, reference, right_answers
from marsrl.rollout.tasks.facts import Calculation, World, write_linked_facts
from marsrl.rollout.tasks.facts.tutor import CALLS_TOKENIZER, FACTS_TOKENIZER, DualTutor, FactsTutor, SearchTutor
from marsrl.rollout.tasks.qa import exact_match, f1
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.tasks.tutor import Trace
from marsrl.rollout.tasks.word_tokenizer import WordTokenizer
from marsrl.rollout.tools.documents import read_corpus, read_papers
from marsrl.rollout.tools.search import CorpusSearch, build_index
from marsrl.rollout.types import Finish, Problem, Reward, ToolCall, ToolOutput

OPTIONS = QaOptions(people=12, places=4, max_hops=2, wording="terse")
AGENTS = {"verifier": Role.ROUTER, "search": Role.SEARCHER, "answer": Role.ANSWERER}


def tutor_of(kind: type[FactsTutor], share: float, **shares: float) -> FactsTutor:
    """Return a tutor that errs in `share` of its choices; `shares` replace it for some kinds of choice."""
    tutor = kind(random.Random(1), TutorConfig(), OPTIONS)
    slips = {name: share for name in dir(kind) if name.startswith("slip_")}
    vars(tutor).update(slips | shares)
    return tutor


@pytest.fixture(scope="module")
def world() -> World:
    return World(OPTIONS)


@pytest.fixture(scope="module")
def calculating() -> World:
    """Return a world of the same facts, whose questions include calculations."""
    return World(OPTIONS.model_copy(update={"calculations": 0.3}))


@pytest.fixture(scope="module")
def tool(world: World) -> Iterator[CorpusSearch]:
    tool = CorpusSearch(build_index(world.documents), top_k=1)
    yield tool
    tool.close()


def renderer_of(tokenizer: WordTokenizer, folder: Path) -> ChatRenderer:
    tokenizer.write(folder)
    return ChatRenderer(folder)


def taught(tutor: FactsTutor, world: World) -> Iterator[tuple[Problem, list[Trace]]]:
    asked = random.Random(1)
    for _ in range(60):
        asked.setstate(tutor.rng.getstate())  # the tutor's first draw is the question
        yield world.draw(asked, held_out=False), list(tutor.question(world))


def words_of(trace: Trace, renderer: ChatRenderer) -> tuple[list[int], list[int]]:
    """Return the token ids of the trace's prompt and of its completion."""
    is_text = isinstance(trace.prompt, str)
    prompt = renderer.encode_trusted(trace.prompt) if is_text else renderer.render(trace.prompt)[0]  # type: ignore[arg-type]
    return prompt.tolist(), renderer.encode_trusted(trace.completion).tolist()


@pytest.mark.parametrize(
    ("tokenizer", "longest"), [(FACTS_TOKENIZER, 128), (CALLS_TOKENIZER, 64)], ids=["facts", "calls"]
)
def test_every_word_that_a_team_reads_or_writes_is_one_token(
    tokenizer: WordTokenizer, longest: int, world: World, calculating: World, tmp_path: Path
) -> None:
    renderer, unknown = renderer_of(tokenizer, tmp_path), len(tokenizer.vocabulary) - 1
    if tokenizer is FACTS_TOKENIZER:
        tutor, asked = tutor_of(SearchTutor, 0.3), world
    else:
        tutor, asked = tutor_of(DualTutor, 0.2), calculating
    drills = [tutor.drill(asked, is_first=is_first) for is_first in (True, False) for _ in range(8)]
    for trace in [*(trace for _, traces in taught(tutor, asked) for trace in traces), *drills]:
        prompt, written = words_of(trace, renderer)
        assert unknown not in prompt and unknown not in written and len(prompt) <= longest
        assert len(written) + trace.ends == len(trace.weights)
        assert not trace.ends or renderer.decode(np.array(written)) == trace.completion


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_search_team_reads_its_tutors_prompts(world: World, tool: CorpusSearch, share: float) -> None:
    """The team plays the tutors' completions, and asks each agent with the tutor's prompt, in the tutor's order."""
    agents = {name: AgentConfig(prompt="facts") for name in AGENTS}
    team = build_orchestration("search_team", agents, "qa", {"max_turns": 4}, RolloutConfig(group_size=1))
    num_whole = 0
    for problem, traces in taught(tutor_of(SearchTutor, share, slip_router=0.0), world):
        episode, left = Episode("0.0", "0", problem), list(traces)
        while left:
            asks, called = episode.enter(team.follow(episode))
            for call in called:
                episode.outputs[call.id] = ToolOutput.of(tool.run(json.loads(call.arguments)))
            for ask in asks:
                trace = left.pop(0)
                assert AGENTS[ask.agent] is trace.role and team.messages(episode, ask) == trace.prompt
                sample = team.parse(bare(f"{ask.id}:0", ask.agent, trace.completion))
                assert ask.agent == "verifier" or sample.answer == trace.completion.split()[-2]
                episode.close(ask, [replace(sample, reward=team.reward(episode, ask, sample, Reward(1.0, 1.0)))])
        num_whole += traces[-1].role is Role.ANSWERER and not episode.enter(team.follow(episode))[0]
        assert share or sample.answer == problem.answer
    assert num_whole == 60 if share == 0.0 else 15 < num_whole < 60


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_both_systems_read_their_tutors_prompts_token_by_token(
    calculating: World, tool: CorpusSearch, share: float, tmp_path: Path
) -> None:
    renderer = renderer_of(CALLS_TOKENIZER, tmp_path)
    agents = {name: AgentConfig(prompt="facts") for name in ("system2", "system1")}
    team = build_orchestration(
        "dual_system", agents, "qa", {}, RolloutConfig(group_size=1), tools=("search", "python"),
        renderers=dict.fromkeys(agents, renderer),
    )  # fmt: skip
    num_right = 0
    for problem, traces in taught(tutor_of(DualTutor, share), calculating):
        episode, left = Episode("0.0", "0", problem), list(traces)
        ((ask,), _) = episode.enter(team.follow(episode))
        ids = renderer.render(team.messages(episode, ask))[0].tolist()
        sample = bare(f"{ask.id}:0", ask.agent, "")
        while left:
            trace = left.pop(0)
            assert trace.role is Role.REASONER and ids == words_of(trace, renderer)[0]
            sample = team.parse(replace(sample, full_text=trace.completion, finish=Finish.STOP))
            ids += [*words_of(trace, renderer)[1], renderer.eos_id]
            if sample.finish is not Finish.WAITING:
                break
            episode.wait(sample)
            _, called = episode.enter(team.follow(episode))
            episode.outputs |= {call.id: ToolOutput.of(answered(call, problem, tool)) for call in called}
            # Unreadable code does not run.
            assert len(called) == (tagged("tool_call", trace.completion) or "").endswith("}")
            for read in episode.enter(team.follow(episode))[0]:
                trace = left.pop(0)
                assert renderer.render(team.messages(episode, read))[0].tolist() == words_of(trace, renderer)[0]
                note = team.parse(bare(f"{read.id}:0", read.agent, trace.completion))
                episode.close(read, [replace(note, reward=team.reward(episode, read, note))])
            going_on = team.continuation(episode, sample)
            assert going_on is not None and not isinstance(going_on, str)
            ids += renderer.next_turn(going_on).tolist()
            sample = replace(sample, turn=sample.turn + 1)
        num_right += sample.answer == problem.answer
        assert not left
    assert num_right == 60 if share == 0.0 else 15 < num_right < 50


def answered(call: ToolCall, problem: Problem, tool: CorpusSearch) -> list[str]:
    arguments = json.loads(call.arguments)
    if call.tool == "search":
        return list(tool.run(arguments))
    calculation = Calculation.of(problem)
    assert calculation is not None
    assert arguments["code"].replace(" ", "") == f"print({calculation.code})".replace(" ", "")
    return [str(calculation.value)]


PARIS = Problem("1", "capital?", reference(["Paris", "City of Paris"]), "qa")


def judged(answer: str, problem: Problem = PARIS, **options: str | int) -> float:
    task = build_task("qa", options, [problem])
    return task.judge(problem, answer).result().value


@pytest.mark.parametrize(
    ("one", "other", "is_same", "by_words"),
    [
        ("The  Beatles!", "beatles", True, 1.0),
        ("well-known", "well known", False, 0.0),  # as in the script: the hyphen is removed without a space
        ("a an the x", "x", True, 1.0),
        ("theatre", "atre", False, 0.0),
        ("Tokyo\n", " tokyo ", True, 1.0),
        ("?", "the", False, 0.0),  # normalisation leaves nothing of either text
        ("", "", True, 1.0),
        ("!", "!", True, 1.0),
        ("", "dog", False, 0.0),
        ("the big red dog", "red dog", False, 0.8),  # F1 of precision 2/3 and recall 1
        ("red red", "red dog", False, 0.5),  # a word counts as often as it occurs
        ("1.5", "15", False, 0.0),  # numbers keep their punctuation, unlike in the script
        ("-5", "5", False, 0.0),
        ("1,500.", "1500.0", True, 1.0),
        ("\u22123", "-3", True, 1.0),
        ("\u20135", "5", False, 0.0),
        ("\u200b1.5", "15", False, 0.0),
        ("\u22123 degrees\u200e", "-3 degrees", True, 1.0),
        ("don\u2019t\u200b", "don't", True, 1.0),
        ("Jose\u0301", "jos\u00e9", True, 1.0),
    ],
)
def test_exact_match_and_f1_are_squad_s(one: str, other: str, is_same: bool, by_words: float) -> None:
    assert exact_match(one, other) == exact_match(other, one) == float(is_same)
    assert f1(one, other) == pytest.approx(by_words) == f1(other, one)


def test_the_right_answer_that_fits_best_counts() -> None:
    assert judged("the city of paris") == judged("PARIS.") == 1.0
    assert judged("Paris, France") == judged("") == 0.0
    assert judged("Paris, France", reward="f1") == pytest.approx(2 / 3)


def test_hostile_answers_are_judged_in_linear_time_or_wrong() -> None:
    assert judged("paris " * 10_000_000) == 0.0  # longer than max_answer_chars, so it is not read
    assert judged("\ud800\x00 paris") == 0.0
    assert judged("the " * 100_000 + "paris", max_answer_chars=1_000_000) == 1.0


@pytest.mark.parametrize("answers", [["x"], ["x", "y"], ["[x"], ['["a"]'], ["[1]", "é\n"], ["[" * 10_000]])
def test_a_reference_gives_its_answers_back(answers: list[str]) -> None:
    assert right_answers(reference(answers)) == answers
    # A user wrote these: each is one answer, because it is not a JSON list of texts.
    for written in ("[", "[1]", "[]", "[" * 100_000, "plain"):
        assert right_answers(written) == [written]


def follow(world: World, question: str) -> str:
    """Look the answer up hop by hop, only in documents and papers, and return it."""
    texts = {each.title: each.text for each in (*world.documents, *(paper.document for paper in world.papers))}
    words = question.removeprefix("what is ").removesuffix(" ?")
    path, _, value = words.rpartition(" of ")
    relations = [each.removeprefix("the ") for each in reversed(path.split(" of "))]
    if words == question.removesuffix(" ?"):  # in terse wording
        value, *relations = words.split()
    for relation in relations:
        found = re.findall(
            rf"the {relation} of {value} is ([a-z ]+) \.|\b{value} {relation} ([a-z]+) \.|{relation.title()}: (\d+)\.",
            texts[value],
        )
        [value] = ["".join(each) for each in found]
    return value


@pytest.mark.parametrize(
    ("options", "relations"),
    [
        ({"max_hops": 3}, {"home", "friend", "teacher", "trade", "country", "river"}),
        (
            {"about": "papers", "max_hops": 3, "papers": 80},
            {"year", "citations", "author", "method", "basis", "rival", "home", "trade"},
        ),
        ({"people": 40, "places": 40, "wording": "terse"}, {"home", "friend", "river"}),
    ],
)
def test_answers_follow_from_documents_and_splits_are_disjoint(options: dict[str, Any], relations: set[str]) -> None:
    task, world = build_task("qa", options), World(FactsOptions(**options))
    assert task.documents == world.documents and len(task.papers) == len(world.papers)
    seen = set[str]()
    train, held_out = list(map(task.problems(0), range(300))), task.held_out(60, 0)
    for problem in (*train, *held_out):
        steps = world.steps(problem)
        assert follow(world, problem.question) == problem.answer == steps[-1][2]
        assert [value for *_, value in steps[:-1]] == [entity for entity, *_ in steps[1:]]
        seen |= {relation for _, relation, _ in steps}
    assert seen >= relations and not {p.question for p in train} & {p.question for p in held_out}


def test_seeds_determine_the_world_and_its_questions() -> None:
    world, again, other = (World(FactsOptions(max_hops=3, world_seed=seed)) for seed in (0, 0, 1))
    assert again.documents == world.documents != other.documents
    drawn = list(map(world.questions(5), range(10)))
    assert list(map(again.questions(5), range(5, 10))) == drawn[5:] != drawn[:5]


def test_files_of_facts_are_read_as_they_were_made(tmp_path: Path) -> None:
    write_linked_facts(tmp_path / "facts", FactsOptions(people=20), num_train=50, num_held_out=10, seed=3)
    world = World(FactsOptions(people=20))
    assert tuple(read_corpus(tmp_path / "facts" / "corpus.jsonl")) == world.documents
    assert tuple(read_papers(tmp_path / "facts" / "papers.jsonl")) == tuple(paper.document for paper in world.papers)
    train = read_problems(tmp_path / "facts" / "train.jsonl", "qa").problems
    held_out = read_problems(tmp_path / "facts" / "held_out.jsonl", "qa").problems
    assert len(train) == 50 and len(held_out) == 10
    assert not {p.question for p in train} & {p.question for p in held_out}
    assert all(follow(world, p.question) == p.answer for p in (*train, *held_out))
    with pytest.raises(FileExistsError):
        write_linked_facts(tmp_path / "facts", FactsOptions(people=20), 1, 1, 0)
