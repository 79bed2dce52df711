"""Failing programs and workers cost only their own sessions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completions_server import Handler, completions_server
from held_port import held_port
from programs import playing, program, rollout_config

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.worker import Worker
from marsrl.rollout.gateway.workers import WORKER, Workers
from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Fate

LONG = {"max_response_tokens": 60}


class Clock:
    """A clock that a test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_failed_or_hung_sessions_have_missing_rewards(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"""
    import pathlib, time

    def run(problem, client):
        client.chat("solver", [problem.question])
        if client.session == "000001.0":
            raise KeyError("no such thing")
        if client.session == "000002.1":
            pathlib.Path({str(tmp_path)!r}, "hangs").touch()
            time.sleep(600)
        return 0.5
    """
    external, clock = {"function": program(tmp_path, text), "timeout_s": 3}, Clock()
    with playing(model, rollout_config(**LONG), external, clock=clock) as played:
        gateway = played.team.gateway
        assert gateway is not None
        played.begin()
        played.until(lambda: (tmp_path / "hangs").exists() and gateway.num_over == 3)
        clock.now = 4.0
        batch = played.rest_of_batch()
    samples = {sample.uid: sample for group in batch.groups for sample in group.samples}
    missing = {uid for uid, sample in samples.items() if math.isnan(sample.reward.value)}
    assert missing == {"000001.0/solver:0", "000002.1/solver:0"} and len(samples) == 4
    assert batch.metrics["rollout/failed_episodes"] == 2
    assert "KeyError: 'no such thing'" in caplog.text and "external.timeout_s = 3 s" in caplog.text


def test_a_hung_worker_is_ended_and_another_plays_its_sessions(model: Path, tmp_path: Path) -> None:
    """A worker is also replaced if it is the only one."""
    text = f"""
    import os, pathlib, signal

    def run(problem, client):
        client.chat("solver", [problem.question])
        mark = pathlib.Path({str(tmp_path)!r}, "hung")
        if not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return 1.0
    """
    external, clock, hung = {"function": program(tmp_path, text)}, Clock(), tmp_path / "hung"
    with playing(model, rollout_config(prompts_per_step=1, **LONG), external, clock=clock) as played:
        played.begin()
        played.until(lambda: hung.exists() and hung.read_text() != "")
        process = Path("/proc", hung.read_text())
        while process.exists():
            clock.now += 1.0
            played.stages.advance(0.05)
        batch = played.rest_of_batch()
    assert batch.metrics["rollout/replayed_sessions"] >= 1 and batch.metrics["rollout/failed_episodes"] == 0


def test_a_worker_without_requests_is_ended_with_its_last_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
    import sys, time

    print("waits for a card", file=sys.stderr, flush=True)
    time.sleep(600)
    """
    config = ExternalConfig(function=program(tmp_path, text))
    clock = Clock()
    gateway = Gateway(config, {}, clock)
    workers = Workers(config, "http://127.0.0.1:1", "key")
    workers.watch(gateway)
    said = ""
    while "waits for a card" not in said:
        time.sleep(0.05)
        said += capfd.readouterr().err
    for clock.now, lost in ((149.0, []), (151.0, ["worker0"])):
        assert gateway.tick() == lost
    workers.end_hanging(["worker0"])
    deadline = time.monotonic() + 120
    while "its last output: waits for a card" not in caplog.text:
        workers.watch(gateway)
        assert time.monotonic() < deadline, caplog.text
    assert "worker worker0 is lost: no request for 30 s" in caplog.text
    workers.close()


def test_a_lost_worker_that_returns_may_replay_its_session(model: Path, tmp_path: Path) -> None:
    """The worker plays the session twice at the same time; the end of its first play does not end the second."""
    text = f"""
    import pathlib, time

    BEGUN = []

    def run(problem, client):
        BEGUN.append(client.session)
        if len(BEGUN) == 1:
            pathlib.Path({str(tmp_path)!r}, "begun").touch()
            while len(BEGUN) < 2:
                time.sleep(0.01)
            return 0.0
        time.sleep(3)
        client.chat("solver", [problem.question])
        return 1.0
    """
    config = rollout_config(prompts_per_step=1, group_size=1, **LONG)
    with playing(model, config, {"function": program(tmp_path, text), "timeout_s": 60}) as played:
        played.begin()
        played.until((tmp_path / "begun").exists)
        gateway = played.team.gateway
        assert gateway is not None
        gateway.lose("worker0", "its network was gone for a while")
        batch = played.rest_of_batch()
    assert batch.metrics["rollout/replayed_sessions"] == 1 and batch.metrics["rollout/failed_episodes"] == 0
    assert [sample.reward.value for group in batch.groups for sample in group.samples] == [1.0]


def test_rejected_requests_name_the_reason_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    text = """
    import json, httpx

    def post(client, path, body, key=None, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body)
        sent = {"authorization": "Bearer " + (key or client.api_key), **headers}
        reply = httpx.post(client.base_url + path, content=data, headers=sent, timeout=600)
        return reply.status_code, reply.json() if reply.is_success else reply.json()["error"]["message"]

    def run(problem, client):
        chat = {"model": "solver", "messages": [{"role": "user", "content": problem.question}]}
        path = "/chat/completions"
        for body, status, said in (
            ({**chat, "model": "nobody"}, 404, "expected one of solver, verifier"),
            ({**chat, "n": 2}, 400, "n=2 is unsupported; use 1"),
            ({**chat, "response_format": {"type": "json_object"}}, 400, "response_format="),
            ({**chat, "stream": "no"}, 400, 'stream is "no"; expected true or false'),
            ({**chat, "stream_options": True}, 400, "stream_options is true; expected an object"),
            ({**chat, "tool_choice": "required"}, 400, "the name of a tool (none given)"),
            ({**chat, "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, 400, "functions"),
            ({**chat, "chat_template_kwargs": {"enable_thinking": False}}, 400, "has no such option"),
            ({**chat, "chat_template_kwargs": {"tools": []}}, 400, "has no such option"),
            ({**chat, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tool_parser"),
            ({**chat, "messages": []}, 400, "messages: expected"),
            ({**chat, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "expected text parts"),
            ({**chat, "messages": [{"role": "user", "content": "a 1 " * 900}]}, 400, "max_input_tokens = 1500"),
            ({**chat, "messages": [{"role": "user", "content": "cut \\ud83d"}]}, 400, "surrogates not allowed"),
            ({**chat, "tools": 5}, 400, "tools is 5; expected a list"),
            ({**chat, "max_tokens": 0}, 400, "max_tokens"),
            (b"{", 400, "not JSON"),
            (b"[" * 100_000, 400, "not JSON"),
            (b"[1]", 400, "the request is [1]; expected a JSON object"),
            (b" " * ((1 << 20) + 1), 413, "external.max_body_mib = 1"),
        ):
            got = post(client, path, body)
            assert got[0] == status and said in got[1], (body, got)
        assert post(client, path, chat, key="wrong")[0] == 401
        status, said = post(client, "/embeddings", {})
        assert status == 404 and said.startswith("POST /v1/embeddings is unsupported; supported: POST /v1/chat"), said
        assert post(client, "/responses", {"model": "solver", "input": "x", "previous_response_id": "r"})[0] == 400
        more = {"n": 1, "top_logprobs": None, "user": "me", "response_format": {"type": "text"}, "temperature": 0.3}
        more |= {"seed": 1, "top_k": 5, "parallel_tool_calls": False, "min_tokens": 0, "tool_choice": "auto"}
        status, first = post(client, path, {**chat, **more})
        assert status == 200
        status, again = post(client, path, {**chat, **more}, **{"x-stainless-retry-count": "1"})
        assert status == 200 and again["id"] == first["id"]
        status, other = post(client, path, {**chat, **more})
        assert status == 200 and other["id"] != first["id"]
        status, said = post(client, path, chat)
        assert status == 429 and "external.max_calls = 2" in said
        return {first["id"]: 3.0, other["id"]: 5.0}
    """
    external = {"function": program(tmp_path, text), "max_calls": 2, "max_body_mib": 1}
    with playing(model, rollout_config(prompts_per_step=1, **LONG), external) as played:
        batch = played.batch()
    (group,) = batch.groups
    assert batch.metrics["rollout/failed_episodes"] == 0
    rewards = {f"000001.{i}/{name}:0": value for i in (0, 1) for name, value in (("solver", 3.0), ("solver#1", 5.0))}
    assert {sample.uid: sample.reward.value for sample in group.samples} == rewards


def test_a_url_with_the_key_needs_no_other_key(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every protocol accepts a URL with the session's key, even if the client sends a placeholder as its own key. A wrong key in
    the URL is rejected, even if the client sends the right one.
    """
    text = """
    import http.client, json, urllib.parse
    import httpx
    from openai import OpenAI

    def raw(client, path, body):  # httpx would normalise the path
        line = http.client.HTTPConnection(urllib.parse.urlsplit(client.base_url).netloc)
        line.request("POST", path, json.dumps(body), {"authorization": "Bearer " + client.api_key})
        reply = line.getresponse()
        return reply.status, json.loads(reply.read())

    def run(problem, client):
        chat = {"model": "solver", "messages": [{"role": "user", "content": problem.question}], "max_tokens": 8}
        llm = OpenAI(base_url=client.keyed_url, api_key="EMPTY")
        llm.chat.completions.create(**chat)
        assert [model.id for model in llm.models.list()] == ["solver", "verifier"]
        httpx.post(client.keyed_url + "/messages", json=chat, headers={"x-api-key": "EMPTY"}).raise_for_status()
        refused = httpx.post(client.keyed_url + "/messages", json={**chat, "model": "nobody"}).json()
        assert refused["type"] == "error" and refused["error"]["type"] == "not_found_error", refused
        unknown = httpx.post(client.keyed_url + "/embeddings", json={}).json()["error"]["message"]
        assert unknown.startswith("POST /v1/embeddings is unsupported") and client.api_key not in unknown
        parts = client.api_key + "%2F", client.api_key[:-1]
        for key in ("wrong", "None", "%2e%2e", "%00", "%F0%9F%90%8C", "%ff", "a" * 4000, *parts):
            status, body = raw(client, f"/s/{key}/v1/chat/completions", chat)
            assert (status, body["error"]["message"]) == (401, "the key belongs to no running session"), (key, body)
        twice = f"/s/{client.api_key}/s/{client.api_key}/v1/messages"
        for path in ("/s//v1/chat/completions", "/s/v1/chat/completions", twice):
            assert raw(client, path, chat)[0] == 404, path
        for path in ("next", "end", "v1/next", "v1/end"):
            assert raw(client, f"/s/{client.api_key}/{path}", {})[0] == 404, path
        return 1.0
    """
    config = rollout_config(prompts_per_step=1, group_size=1, **LONG)
    with playing(model, config, program(tmp_path, text)) as played:
        batch = played.batch()
    assert batch.metrics["rollout/failed_episodes"] == 0, caplog.text
    assert {sample.reward.value for group in batch.groups for sample in group.samples} == {1.0}


class SolverLast(ScriptedEngine):
    """Engine that holds the Solver's last answer back until its session calls the Verifier a second time.

    num_turns: number of the Solver's turns.
    """

    def __init__(self, num_turns: int) -> None:
        super().__init__(lambda request: [5, 6])
        self.num_turns = num_turns
        self.asked = Counter[str]()
        self.kept: list[DecodeResult] = []

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        self.asked.update(request.uid for request in requests)
        super().submit(requests, version=version)

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        found, self.kept = [*self.kept, *super().collect(timeout_s)], []
        for each in found:
            is_last = "/solver:" in each.uid and self.asked[each.uid] == self.num_turns
            if is_last and not self.asked[each.uid.replace("solver", "verifier#1")]:
                self.kept.append(each)
        return [each for each in found if each.uid not in {kept.uid for kept in self.kept}]


@pytest.mark.parametrize("num_turns", [1, 3])
def test_what_a_program_never_read_is_not_trained(model: Path, tmp_path: Path, num_turns: int) -> None:
    """Answers that the program read earlier in the same sample are trained."""
    text = f"""
    import http.client, json, urllib.parse

    def run(problem, client):
        host = urllib.parse.urlsplit(client.base_url).netloc
        line = http.client.HTTPConnection(host)
        messages = [{{"role": "user", "content": problem.question}}]
        for _ in range({num_turns} - 1):
            messages += [client.chat("solver", messages).message, {{"role": "user", "content": "fix"}}]
        body = json.dumps({{"model": "solver", "messages": messages, "stream": True}})
        line.request("POST", "/v1/chat/completions", body, {{"authorization": "Bearer " + client.api_key}})
        line.sock.close()
        line.close()
        client.chat("verifier", [problem.question])  # once this is answered, the gateway knows that the connection is closed
        client.chat("verifier", [problem.question, "again"])
        return 1.0
    """
    config, engine = rollout_config(prompts_per_step=1), SolverLast(num_turns)
    with playing(model, config, program(tmp_path, text), engine=engine) as played:
        samples = played.samples()
    assert len(samples) == 6
    for uid, sample in samples.items():
        # The two connections race, so the unread call may have either number.
        fates, last = [turn.fate for turn in sample.turns], sample.turns[-1].call
        if "verifier" in uid:
            assert sample.reward.value == 1.0 and fates == [Fate.READ] and sample.is_sampled.all()
            continue
        assert fates == [Fate.READ] * (num_turns - 1) + [Fate.UNREAD]
        if num_turns == 1:
            assert sample.reward.is_missing and not sample.is_sampled.any()
            assert sample.reward.note == f"the program has not read its answer; call {last} (unread) of 3"
            continue
        *read, unread = ([turn.start, turn.end] for turn in sample.turns)
        assert sample.reward.value == 1.0 and sample.reward.note == f"calls 1, 2, {last} (unread) of 5"
        sampled = np.flatnonzero(sample.is_sampled).tolist()
        assert sampled == [i for start, end in read for i in range(start, end)] and len(sampled) == 6
        assert sample.length == read[-1][1] < unread[0] and unread[1] == len(sample.token_ids)


def test_a_call_lost_by_its_engine_leaves_earlier_answers(model: Path, tmp_path: Path) -> None:
    text = """
    def run(problem, client):
        said = client.chat("solver", [problem.question])
        try:
            client.chat("solver", [problem.question, said.message, "fix"])
        except ConnectionError:
            return 1.0
    """
    asked = Counter[str]()

    def fails(request: DecodeRequest) -> str | None:
        asked[request.uid] += 1
        return "out of memory" if asked[request.uid] == 2 else None

    engine = ScriptedEngine(lambda request: [5, 6], fail=fails)
    with playing(model, rollout_config(prompts_per_step=1), program(tmp_path, text), engine=engine) as played:
        samples = list(played.samples().values())
    assert [sample.reward.note for sample in samples] == ["calls 1, 2 (unread) of 2"] * 2
    assert [(sample.reward.value, int(sample.is_sampled.sum())) for sample in samples] == [(1.0, 3)] * 2


TWO_CALLS = """
import pathlib, time

def run(problem, client):
    first = client.chat("solver", [problem.question])
    go = pathlib.Path({folder!r}, "go")
    if client.session.endswith(".1") and not go.exists():
        client.chat("solver", ["not asked a second time"])
        while not go.exists():
            time.sleep(0.01)
    client.chat("verifier", [problem.question])
    return {{"solver": len(first.text), "verifier": 1.0}}
"""


def test_a_resume_replays_open_sessions_only(model: Path, tmp_path: Path) -> None:
    external, config = program(tmp_path, TWO_CALLS.format(folder=str(tmp_path))), rollout_config(**LONG)
    with playing(model, config, external) as played:
        played.begin()
        played.until(lambda: sum(len(i.held) for i in played.stages.state.instances.values()) >= 4)
        kept = encode(played.stages.snapshot())
    (tmp_path / "go").touch()
    with playing(model, config, external) as played:
        played.stages.restore(decode(RolloutState, kept))
        open_ones = {name for i in played.stages.state.instances.values() for name in i.episodes}
        resumed = played.batch()
    with playing(model, config, external) as played:
        unbroken = played.batch()
    assert open_ones == {"000001.1", "000002.1"}
    counted = {name: resumed.metrics[f"rollout/{name}"] for name in ("episodes", "unfinished", "replayed_sessions")}
    # Two sessions had ended before the resume.
    assert counted == {"episodes": 4, "unfinished": 0, "replayed_sessions": 2}
    tokens = [{s.uid: s.token_ids.tolist() for g in batch.groups for s in g.samples} for batch in (resumed, unbroken)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 8
    assert unbroken.metrics["rollout/tokens"] == sum(s.num_sampled for group in unbroken.groups for s in group.samples)


def test_a_client_gets_blanks_until_the_engine_answers(model: Path, tmp_path: Path) -> None:
    text = f"""
    import http.client, json, pathlib, urllib.parse

    def run(problem, client):
        for streams, blank in ((False, b" "), (True, b": waiting")):
            go = pathlib.Path({str(tmp_path)!r}, "go")
            go.unlink(missing_ok=True)
            line = http.client.HTTPConnection(urllib.parse.urlsplit(client.base_url).netloc)
            messages = [{{"role": "user", "content": problem.question}}]
            headers = {{"authorization": "Bearer " + client.api_key}}
            body = json.dumps({{"model": "solver", "messages": messages, "stream": streams}})
            line.request("POST", "/v1/chat/completions", body, headers)
            reply = line.getresponse()
            assert reply.read(len(blank)) == blank
            go.touch()
            rest = reply.read().decode()
            assert json.loads(rest)["choices"] if not streams else rest.endswith("data: [DONE]\\n\\n"), rest
        return 1.0
    """

    def script(request: DecodeRequest) -> list[int]:
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return [5, 6]

    config = rollout_config(prompts_per_step=1, group_size=1)
    with playing(model, config, program(tmp_path, text), engine=ScriptedEngine(script)) as played:
        assert {sample.reward.value for sample in played.samples().values()} == {1.0}


def test_a_worker_from_elsewhere_joins_with_its_key(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = program(tmp_path, "def run(problem, client):\n    client.chat('solver', ['hello'])\n    return 1.0\n")
    with held_port() as port:
        external = {"workers": 0, "port": port, "key_env": "KEY"}
        command = [sys.executable, str(WORKER), "--url", f"http://127.0.0.1:{port}", "--function", function]
        with playing(model, rollout_config(**LONG), external, key="secret") as played:
            line = f"MARSRL_WORKER_KEY=(the key in KEY) python {WORKER} --url http://127.0.0.1:{port} --function"
            assert line in capsys.readouterr().err
            other = {**os.environ, "MARSRL_WORKER_KEY": "other"}
            wrong = subprocess.run(command, env=other, capture_output=True, text=True)
            assert wrong.returncode == 1 and "expected the workers' key" in wrong.stderr
            with subprocess.Popen(command, env={**os.environ, "MARSRL_WORKER_KEY": "secret"}) as worker:
                samples = played.samples()
                worker.terminate()
    assert {sample.reward.value for sample in samples.values()} == {1.0} and worker.returncode == 0


def test_a_command_that_hangs_is_killed_with_its_session(model: Path, tmp_path: Path) -> None:
    book, clock = tmp_path / "pid", Clock()
    script = f"import os, time; open({str(book)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    external = {"command": [sys.executable, "-c", script], "timeout_s": 3}
    with playing(model, rollout_config(prompts_per_step=1, group_size=1), external, clock=clock) as played:
        played.begin()
        played.until(lambda: book.exists() and book.read_text() != "")
        clock.now = 4.0
        batch = played.rest_of_batch()
        while Path(f"/proc/{book.read_text()}/cmdline").exists():
            time.sleep(0.1)
    assert batch.metrics["rollout/failed_episodes"] == 1 and not batch.groups


def test_on_end_runs_at_once_if_the_session_is_over() -> None:
    begun, is_over, ended = threading.Event(), threading.Event(), threading.Event()

    def play(problem: object, client: object, on_end: Callable[[Callable[[], None]], None]) -> None:
        begun.set()
        assert is_over.wait(60)
        on_end(ended.set)

    def gateway(handler: Handler, body: dict[str, Any], before: int) -> None:
        session = {"session": "1", "api_key": "k", "problem": {}, "agents": []}
        news = {"sessions": [session] if before == 0 else [], "over": ["k"] if before == 1 else []}
        assert before != 1 or begun.wait(60)
        if before == 2:
            is_over.set()
        handler.send(200, json.dumps(news).encode())

    with completions_server(gateway) as server:
        worker = Worker(server.base_url.removesuffix("/v1"), "key", "worker", 1, play)
        end = time.monotonic() + 60
        worker.run(lambda: not ended.is_set() and time.monotonic() < end)
    assert ended.is_set()


def test_a_command_and_what_it_started_end_with_a_killed_worker(model: Path, tmp_path: Path) -> None:
    """Another worker starts the program again, and finds no process of the first one alive."""
    script = f"""
import contextlib, os, pathlib, subprocess, sys, time

def lives(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc", pid, "cmdline").read_bytes() != b""  # of a zombie
    return False

sys.stdin.read()
book = pathlib.Path({str(tmp_path / "pids")!r})
if not book.exists():
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    book.write_text(f"{{os.getpid()}} {{child.pid}}")
    os.kill(os.getppid(), 9)
    time.sleep(600)
while any(map(lives, book.read_text().split())):
    time.sleep(0.1)
print(1.0)
"""
    external = {"command": [sys.executable, "-c", script], "timeout_s": 120}
    with playing(model, rollout_config(prompts_per_step=1, group_size=1), external) as played:
        batch = played.batch()
    assert batch.metrics["rollout/replayed_sessions"] == 1 and batch.metrics["rollout/failed_episodes"] == 0
