"""The dual system's run killed (SIGKILL) while a turn thinks, waits for a tool, is read by System 1, and goes on behind that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from books import check_books
from killed_turns_worker import NUM_CALLS, READS, says

from marsrl.rollout.episode import Episode
from marsrl.rollout.player.stages import RolloutState, StagesState
from marsrl.rollout.state import decode
from marsrl.trainer.look.tokens import tokens_of_sample
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.samples_log import read_samples, sample_files
from marsrl.trainer.report.token_log import token_files
from marsrl.trainer.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "killed_turns_worker.py"
PHASES = ("thinking", "tools", "distilling", "resumed")
LIMIT_S = 900  # only a run that hangs takes so long
TOOL_S = 0.2


class Server(ThreadingHTTPServer):
    """A retrieval server that takes its time, writes down what it is asked, and holds some answers back."""

    daemon_threads = True

    def __init__(self, held: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []
        self.held, self.holds_from = held, 0  # second calls of instances from this number on; 0: none
        self.url = f"http://127.0.0.1:{self.server_port}/retrieve"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        self.server.asked.append(query)
        time.sleep(TOOL_S)
        if self.server.holds_from and int(query[:6]) >= self.server.holds_from and query.endswith(" 1"):
            self.server.held.touch()
            time.sleep(LIMIT_S)
        found = {"document": {"id": "d", "contents": f'"Title"\nof {query}'}, "score": 1.0}
        body = json.dumps({"result": [[found]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(held: Path) -> Iterator[Server]:
    server = Server(held)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()


def books_of(run: RunDirectory) -> tuple[int, StagesState]:
    """(step, books) of the last checkpoint; step 0 where there is none."""
    latest = run.latest_checkpoint()
    if latest is None:
        return 0, StagesState()
    return latest.step, decode(RolloutState, (latest.path / "rollout.msgpack").read_bytes()).stages


def episodes(books: StagesState) -> list[Episode]:
    return [each for instance in books.instances.values() for each in instance.episodes.values()]


def phases(books: StagesState) -> set[str]:
    """In which of their turns' phases samples are."""
    found = {"tools" for episode in episodes(books) if episode.open_calls}
    for opened in books.open.values():
        for each in opened.unfinished:
            if opened.ask.agent == "system1":
                found |= {"distilling"} if len(each.token_ids) else set()
            elif len(each.token_ids) and each.is_sampled[-1]:  # in the middle of its own words
                found.add("resumed" if each.turn else "thinking")
    return found


def queries(books: StagesState, *, has_output: bool) -> set[str]:
    """The queries of the calls in the books."""
    calls = [
        call for each in episodes(books) for name, call in each.calls.items() if (name in each.outputs) == has_output
    ]
    return {query for call in calls for query in json.loads(call.arguments)["queries"]}


def test_a_turn_killed_in_any_phase_repeats_no_call_that_was_kept_and_loses_no_sample(tmp_path: Path) -> None:
    """Instance n + 1 stands in the n-th phase in the checkpoint of step n, of which the run is killed and resumed."""
    init_model("tiny", "bytes", tmp_path / "model", seed=0)
    problems = [{"question": f"what {n} ?", "answer": "7"} for n in range(12)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    run = RunDirectory(tmp_path / "runs" / "killed")
    with served(tmp_path / "held") as server:
        words = [
            "task=qa", f"data.train={tmp_path / 'problems.jsonl'}", f"policies.main.model={tmp_path / 'model'}",
            "policies.main.dtype=float32",
            "orchestration=dual_system", f"tools.search={{kind: http, url: '{server.url}'}}", "tools.search.timeout_s=3000",
            "tools.search.request_timeout_s=3000", "agents.system1.max_input_tokens=4096", "agents.system2.max_input_tokens=4096",
            "credit.normalise=agent", "credit.reward_scheme=outcome", "mpt.scope=off", "rollout.engine=local",
            "rollout.placement=local", "rollout.pipeline=trajectory", "rollout.overlap=1", "rollout.prompts_per_step=1",
            "rollout.group_size=2", "rollout.max_response_tokens=800", "run.evaluate=false", "run.checkpoint_every=1",
            "run.token_log_every=1", "run.token_log_groups=999",
            f"run.dir={run.path.parent}", f"run.name={run.path.name}", f"run.steps={len(PHASES) + 1}",
        ]  # fmt: skip
        for life, phase in enumerate([*PHASES, ""], 1):
            step, books = books_of(run)
            kept, was_open = queries(books, has_output=True), queries(books, has_output=False)
            assert step == life - 1 and (kept or life <= 2) and (was_open or life < 2 or PHASES[life - 2] != "tools")
            server.asked.clear()
            server.held.unlink(missing_ok=True)
            server.holds_from = life + 1 if phase == "tools" else 0
            told = [phase, str(life + 1), str(tmp_path), *words, *(["run.resume=auto"] if step else [])]
            output = end_of(run, told, life, phase)
            asked = Counter(server.asked)
            assert not kept & asked.keys(), f"{phase}: asked again for what the checkpoint has: {kept & asked.keys()}"
            assert was_open <= asked.keys() and set(asked.values()) == {1}, (phase, asked, output)
    check_books(run, 2, leads="system2", has_any_size=frozenset({"system1"}))
    check_samples(run)
    check_tokens(run)


def end_of(run: RunDirectory, words: list[str], life: int, phase: str) -> str:
    """A life up to its SIGKILL in the phase, which the checkpoint of step `life` then has; the last one to its end."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(WORKER), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )  # fmt: skip
    end, status = time.monotonic() + LIMIT_S, None
    while status is None and time.monotonic() < end and (not phase or books_of(run)[0] < life):
        time.sleep(0.1)
        status = process.poll()
    process.kill()
    output = process.communicate()[0][-4000:]  # all who could write to it have ended
    if phase:
        assert status is None, output  # it has not ended by itself
        assert phase in phases(books_of(run)[1]), (phase, phases(books_of(run)[1]), output)
    else:
        assert status == 0, output
    return output


def check_samples(run: RunDirectory) -> None:
    """Each trained turn says what an unbroken one does, and all that System 1 read for it was trained with it."""
    samples = [sample for file in sample_files(run).values() for sample in read_samples(file)]
    reasoned = [sample for sample in samples if sample.agent == "system2"]
    assert len(reasoned) == 2 * (len(PHASES) + 1)
    for sample in reasoned:
        mine = [each for each in samples if each.agent == "system1" and each.uid.startswith(f"{sample.uid}/")]
        assert len(mine) == NUM_CALLS and {each.text for each in mine} == {READS}
        at = [sample.text.index(says(sample.uid, turn)) for turn in range(NUM_CALLS + 1)]
        assert at == sorted(at) and sample.text.count("<tool_call>") == NUM_CALLS == sample.text.count(READS)
        assert sample.correct == float("<answer>7" in sample.text)


def check_tokens(run: RunDirectory) -> None:
    """Every life kept those of all its samples, and the viewer answers with them."""
    samples = {step: list(read_samples(file)) for step, file in sample_files(run).items()}
    assert list(token_files(run)) == list(samples) == list(range(1, len(PHASES) + 2))
    for step, of_step in samples.items():
        answers = [tokens_of_sample(run, step, sample.uid)["kept"] for sample in of_step]
        texts = ["".join(kept["text"]) for kept in answers if kept is not None]
        assert len(texts) == len(of_step) and all(map(str.startswith, texts, (sample.text for sample in of_step)))
