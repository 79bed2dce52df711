"""A server that speaks MCP, over stdio and over HTTP, as a tool: a real one, which also fails, hangs and ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import mcp_server
import pytest
from held_port import held_port

from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import ToolsConfig
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.types import ToolCall, ToolOutput
from marsrl.trainer.config.origin import ConfigError
from marsrl.trainer.config.read import read_config

SOON_S = 120.0  # far more than anything here takes
STDIO = [sys.executable, mcp_server.__file__]


def config(**settings: object) -> ToolsConfig:
    return ToolsConfig.model_validate({"files": {"kind": "mcp", **settings}})


@contextmanager
def pool_of(**settings: object) -> Iterator[ToolPool]:
    with closing(build_tools(config(**settings), ["files"], ())) as pool:
        yield pool


def ask(pool: ToolPool, name: str, /, **arguments: object) -> ToolOutput:
    call = ToolCall("1", "files", json.dumps({"name": name, "arguments": arguments}))
    return pool.submit(call).result(SOON_S)


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_a_server_s_tools_are_called_by_their_names(way: str) -> None:
    with ExitStack() as servers:
        server: dict[str, object] = {"command": STDIO}
        if way == "http":
            port = servers.enter_context(held_port())
            server = {"url": servers.enter_context(mcp_server.http_server(port))}
        with pool_of(**server) as pool:
            functions = {function.name: function for function in pool.functions("files")}
            assert functions["add"].description.startswith("Adds two numbers.") and functions["add"].server == "files"
            assert functions["add"].parameters["required"] == ["a", "b"]
            assert ask(pool, "add", a=3, b=4) == ToolOutput("7")
            assert ask(pool, "greet") == ToolOutput("hello world")
            assert ask(pool, "picture").text == "a dot\n[image, not shown]"
            for output, said in (
                (ask(pool, "fail"), "no such thing"),
                (ask(pool, "add", a="x", b=1), "valid integer"),
                (ask(pool, "none"), "there is no tool 'none'; there are: add, greet"),
                (pool.submit(ToolCall("1", "files", '{"name": "add", "arguments": 3}')).result(SOON_S), "an object"),
                (pool.submit(ToolCall("1", "files", "{}")).result(SOON_S), "there is no tool 'None'"),
            ):
                assert output.is_error and said in output.text, output
            counts = pool.take_counts()
            assert counts["tools/files/errors"] == 5 and counts["tools/files/restarts"] == 0


def test_a_server_that_ended_is_started_again_by_the_next_call() -> None:
    with pool_of(command=STDIO) as pool:
        assert "onnection closed" in ask(pool, "die").text  # not made again
        assert ask(pool, "greet") == ToolOutput("hello world")
        assert ask(pool, "die").is_error and ask(pool, "add", a=1, b=1).text == "2"
        assert pool.take_counts()["tools/files/restarts"] == 2
        assert pool.take_counts()["tools/files/restarts"] == 0


def test_an_http_server_that_forgot_or_is_gone_costs_calls_and_comes_back() -> None:
    with held_port() as port, mcp_server.http_server(port) as url, pool_of(url=url) as pool:
        assert ask(pool, "die").is_error
        assert ask(pool, "greet").is_error  # nobody is there
        with mcp_server.http_server(port):
            outputs = [ask(pool, "greet") for _ in range(2)]
            assert outputs[-1] == ToolOutput("hello world")


def test_a_server_that_sends_too_much_is_cut_off_and_serves_on() -> None:
    with held_port() as port, mcp_server.http_server(port) as url, pool_of(url=url) as pool:
        flooded = ask(pool, "flood", mib=5)
        assert flooded.is_error and "the answer is larger than 4096 KiB" in flooded.text, flooded.text[:500]
        assert ask(pool, "greet") == ToolOutput("hello world")


def test_of_too_long_an_answer_by_a_command_the_end_is_dropped_and_it_serves_on() -> None:
    with pool_of(command=STDIO, timeout_s=15) as pool:
        assert ask(pool, "flood", mib=5).text == "error: files did not answer within 15 s"
        assert ask(pool, "greet") == ToolOutput("hello world")
        assert pool.take_counts()["tools/files/restarts"] == 0


def test_a_call_that_hangs_is_an_error_and_others_are_answered() -> None:
    with held_port() as port, mcp_server.http_server(port) as url, pool_of(url=url, timeout_s=5) as pool:
        assert ask(pool, "hang").text == "error: files did not answer within 5 s"
        assert pool.take_counts()["tools/files/timeouts"] == 1
        assert ask(pool, "greet") == ToolOutput("hello world")


def test_a_command_gets_the_variables_that_are_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FILES_TOKEN", "secret")
    monkeypatch.setenv("OTHER_TOKEN", "other")
    with pool_of(command=STDIO, environment=["FILES_TOKEN"]) as pool:
        assert ask(pool, "variable", name="FILES_TOKEN").text == "secret"
        assert ask(pool, "variable", name="OTHER_TOKEN").text == "nothing"


def test_the_settings_choose_among_the_server_s_tools() -> None:
    with pool_of(command=STDIO, tools=["greet"]) as pool:
        assert [function.name for function in pool.functions("files")] == ["greet"]
        assert ask(pool, "die").text == "error: there is no tool 'die'; there are: greet"


def test_a_server_that_cannot_serve_is_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    for settings, said in (
        ({"command": [str(tmp_path / "none")]}, "tools.files: the server does not start: .*No such file"),
        ({"command": [sys.executable, str(tmp_path / "ends.py")]}, "tools.files: the server does not start: "),
        ({"url": "http://127.0.0.1:1/mcp"}, "tools.files: the server does not start: "),
        ({"command": STDIO, "tools": ["read"]}, "tools.files: the server has no tool 'read'; it has add, greet, "),
        ({"command": STDIO, "environment": ["NO_SUCH"]}, "tools.files.environment names NO_SUCH, which is not set"),
        ({"url": "http://127.0.0.1:1/mcp", "api_key_env": "NO_SUCH"}, "tools.files.api_key_env names NO_SUCH"),
    ):
        with pytest.raises(ValueError, match=said):
            check_tools(config(**settings), ["files"], ())


def test_two_tools_of_one_name_are_refused() -> None:
    both = {"kind": "mcp", "command": STDIO, "tools": ["greet"]}
    with pytest.raises(ValueError, match="tools.files and tools.disk both have a function greet"):
        check_tools(ToolsConfig.model_validate({"files": both, "disk": both}), ["files", "disk"], ())


def test_settings_that_name_no_server_or_two_are_refused(tmp_path: Path) -> None:
    for words, said in (
        (["tools.files={kind: mcp}"], "either a command or a url"),
        (["tools.files={kind: mcp, command: [x], url: 'http://h/mcp'}"], "either a command or a url"),
        (["tools.files={kind: mcp, command: [x], api_key_env: KEY}"], "api_key_env with a url"),
        (["tools.files={kind: mcp, url: 'http://u:p@h/mcp'}"], "holds a user, password or query"),
        (
            ["tools.files={kind: mcp, comand: [x]}"],
            r"tools.files.comand: unknown key; did you mean tools.files.command\?",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            read_config(None, words)
    (tmp_path / "server.py").write_text("")
    (tmp_path / "run.yaml").write_text("tools: {files: {kind: mcp, command: [python, server.py, --root, here]}}")
    found = read_config(tmp_path / "run.yaml")[0].tools.given["files"]
    assert found.command == ["python", f"{tmp_path}/server.py", "--root", "here"]  # type: ignore[attr-defined]
