"""Measure the dual system with and without reading pages (MARS, table 6): pages read, and calls of System 1.

    python benchmarks/read_pages.py [--json FILE] [--problems 100]

A world of linked facts is served as a local web site. Each entity has an HTML page, longer than System 1's input limit, with its
facts scattered over the first half. A search like SerpApi's returns the first 160 characters of a page as its snippet. The same
questions are asked with snippets alone and with `tools.search.read_pages`, through the real tools, packing and scheduler.

Both systems are scripts that use only their input. System 1 writes down the fact that is named in the call's purpose, if its bin
(the texts of one call) has the fact. System 2 follows the question from fact to fact, and gives up at a missing fact. So `right`
is the share of questions that the retrieved texts can answer, and says nothing about a model. A token is a byte.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import environ
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, Sampling
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.evaluation import EvaluationPlay, Played
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.tasks.config import QaOptions
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.qa import qa_task
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.tools.build import build_tools
from marsrl.rollout.tools.config import ToolsConfig
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.tools.search import SearchIndex, build_index

PAGE_CHARS = 8000
SNIPPET_CHARS = 160
SYSTEM_1_READS = 6000  # most tokens of System 1's prompt, including instructions
KEY = "READ_PAGES_KEY"
_ASKED = re.compile(r"what is (the [\w ]+) of ([\w ]+) \?")
_WANTED = re.compile(r"fact: (the \w+ of [\w ]+)!")
_FACT = re.compile(r"the (\w+) of ([\w ]+) is (\w[\w ]*) \.")


def article(document: Document, rng: random.Random) -> list[str]:
    """Return the paragraphs of an entity's page, with the entity's facts scattered over the first half."""
    name = document.title
    facts = [f"{fact.strip()} ." for fact in document.text.split(" .") if fact.strip()]
    kinds = ("visitors", "neighbours", "letters", "maps", "songs", "ledgers", "stories", "travellers")
    filler: list[str] = []
    while sum(map(len, filler)) < PAGE_CHARS - len(document.text):
        kind, other_kind = rng.sample(kinds, 2)
        filler.append(
            f"Number {len(filler) + 1}: {kind} tell of {name} what {other_kind} do not, and both were kept for "
            f"{rng.randrange(10, 400)} years before anybody compared them; what came of it fills {rng.randrange(2, 90)} shelves."
        )
    for index, fact in zip(rng.sample(range(len(filler) // 2), len(facts)), facts, strict=True):
        filler[index] = f"By all accounts {fact} {filler[index]}"
    return filler


@contextmanager
def site(documents: Sequence[Document], index: SearchIndex) -> Iterator[str]:
    """Run a server with a page for each document and a search like SerpApi's; yield its address."""
    rng = random.Random(0)
    pages = {document.id: article(document, rng) for document in documents}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            where = urlsplit(self.path)
            if where.path == "/search.json":
                query = parse_qs(where.query)
                hits = index.search(query["q"][0], int(query["num"][0]))
                results = [
                    {
                        "title": d.title,
                        "link": f"{address}/{quote(d.id)}",
                        "snippet": " ".join(pages[d.id])[:SNIPPET_CHARS],
                    }
                    for d, _ in hits
                ]
                body, kind = json.dumps({"organic_results": results}).encode(), "application/json"
            else:
                name = unquote(where.path[1:])
                text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in pages[name])
                menu = "<nav><a href=/>home</a> <a href=/about>about</a></nav>"
                body = f"<html><body>{menu}<article><h1>{escape(name)}</h1>{text}</article></body></html>".encode()
                kind = "text/html; charset=utf-8"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield address
        server.shutdown()
        thread.join()


def system_1(prompt: str) -> str:
    """Return System 1's answer: the fact that is named in the purpose, if the bin has it."""
    fact_name = _WANTED.findall(prompt)[-1]
    match = re.search(rf"{re.escape(fact_name)} is \w[\w ]* \.", prompt)
    return f"It says: {match[0]}" if match else "Nothing here."


def system_2(text: str) -> str:
    """Return System 2's turn: a search for the next fact of the question, or an answer."""
    chain, entity = _ASKED.findall(text)[0]
    # The first match is in the prompt's instructions.
    responses = "".join(re.findall(r"<tool_response>(.*?)</tool_response>", text, re.DOTALL)[1:])
    facts = {(relation, name): value for relation, name, value in _FACT.findall(responses)}
    for relation in reversed(re.findall(r"the (\w+)", chain)):
        if (relation, entity) not in facts:
            purpose = f"fact: the {relation} of {entity}!"
            if purpose in text:
                return "<answer>unknown</answer>"
            call = {"tool": "search", "arguments": {"query": entity}, "purpose": purpose}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        entity = facts[relation, entity]
    return f"<answer>{entity}</answer>"


def play(task: Task, address: str, num_problems: int, *, read_pages: bool) -> dict[str, Any]:
    """Play the questions with or without pages. Return means over episodes; most_at_once and pages_read are over all episodes."""
    environ[KEY] = "none"
    limits = {"timeout_s": 300.0, "max_output_chars": 1_000_000}
    search = {"kind": "serpapi", "base_url": address, "api_key_env": KEY, "read_pages": read_pages, **limits}
    pages = {"allow_hosts": ["127.0.0.1"], "timeout_s": 300.0}
    config = ToolsConfig.model_validate({"search": search, "pages": pages})
    agents = {"system2": AgentConfig(), "system1": AgentConfig(max_input_tokens=SYSTEM_1_READS)}
    played: list[Played] = []
    with tempfile.TemporaryDirectory() as folder, closing(build_tools(config, ["search"], ())) as tools:
        write_byte_tokenizer(Path(folder))
        renderer = ChatRenderer(folder)

        def says(request: DecodeRequest) -> str:
            text = renderer.decode(request.token_ids)
            return system_1(text) if "/system1" in request.uid else system_2(text)

        engine = ScriptedEngine(
            says, encode=lambda text: renderer.completion_ids(text).tolist(), decode=renderer.decode
        )
        orchestration = build_orchestration(
            "dual_system",
            agents,
            "qa",
            {},
            RolloutConfig(),
            tools=["search"],
            renderers=dict.fromkeys(agents, renderer),
        )
        pool = EnginePool(LocalReplicas([engine]), slots=64, deadline_s=600)
        team = Team(
            orchestration.settings,
            orchestration,
            {"main": renderer},
            {"main": pool},
            WatchedJudge(task.judge),
            tools=tools,
        )
        problems = task.held_out(num_problems, 0)
        episodes = [Episode(f"e.{i}", f"e.{i}", problem, purpose="evaluate") for i, problem in enumerate(problems)]
        playing = EvaluationPlay(team, {"main": 0}, 1 << 20, Sampling(), on_end=played.append)
        playing.add(episodes, 0)
        playing.finish()
        counts = tools.take_counts()
    metrics_of = [orchestration.metrics(result.episode) for result in played]
    mean = lambda name: statistics.fmean(metrics[name] for metrics in metrics_of)  # noqa: E731
    samples = [sample for result in played for sample in result.samples]
    return {
        "right": statistics.fmean(s.reward.correct for s in samples if s.agent == "system2"),
        "searches": mean("calls/search"),
        "results": mean("pages"),
        "bins": mean("distillates"),
        "at_once": mean("distillates_at_once"),
        "most_at_once": max(int(metrics["distillates_at_once"]) for metrics in metrics_of),
        "system_1_tokens": sum(len(s.prompt_ids) for s in samples if s.agent == "system1") / len(metrics_of),
        "pages_read": int(counts.get("tools/pages/read", 0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--problems", type=int, default=100)
    options = parser.parse_args()
    task = qa_task([], [], QaOptions(people=40, places=24, min_hops=1, max_hops=3))
    arms: dict[str, dict[str, Any]] = {}
    with closing(build_index(task.documents)) as index, site(task.documents, index) as address:
        for name, read_pages in (("snippets only", False), ("read_pages", True)):
            arms[name] = play(task, address, options.problems, read_pages=read_pages)
    print(
        "| | right | searches | results shown | bins = System 1's calls | parallel calls, mean of episodes (most) | tokens that "
        "System 1 reads | pages fetched |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, arm in arms.items():
        print(
            "| {name} | {right:.2f} | {searches:.2f} | {results:.1f} | {bins:.1f} | {at_once:.1f} ({most_at_once}) | "
            "{system_1_tokens:,.0f} | {pages_read} |".format(name=name, **arm)
        )
    if options.json:
        Path(options.json).write_text(json.dumps(arms, indent=1) + "\n")


if __name__ == "__main__":
    main()
