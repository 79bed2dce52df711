"""A user's tools: functions, and MCP servers over stdio and HTTP. Whatever a tool does, only its call can fail."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import mcp_server
import pytest
from held_port import held_port

from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import ToolsConfig
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.types import ToolCall, ToolFunction, ToolOutput
from marsrl.trainer.config.origin import ConfigError
from marsrl.trainer.config.read import read_config

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

SOON_S = 120.0  # far longer than anything here takes
TOOLS = '''
from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from beside import PLACE

@dataclass
class Point:
    x: float
    y: float = 0

def convert(value: Annotated[float, Field(description="a length")], unit: Literal["cm", "m"] = "m") -> str:
    """Converts a length.

    To kilometres.
    """
    return f"{value / {'cm': 100_000, 'm': 1000}[unit]:g} km"

async def later(words: list[str], point: Point) -> dict:
    """Says words later."""
    await asyncio.sleep(0.01)
    return {"words": words, "x": point.x + point.y}

def misbehave(how: str) -> str:
    """Does what it should not."""
    print("noise on stdout")
    if how == "hang":
        time.sleep(600)
    if how == "crash":
        os._exit(7)
    if how == "exit":
        sys.exit(3)
    if how == "memory":
        return "x" * (1 << 40)
    if how == "raise":
        raise KeyError("metre")
    if how == "value":
        return object()
    return f"{how} in {os.getpid()} {PLACE}"
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(TOOLS)
    (path.parent / "beside.py").write_text("PLACE = 'beside'")
    return path


def config_of(**tool: object) -> ToolsConfig:
    return ToolsConfig.model_validate({"own": tool})


@contextmanager
def pool_of(**tool: object) -> Iterator[ToolPool]:
    with closing(build_tools(config_of(**tool), ["own"], ())) as pool:
        yield pool


def ask(pool: ToolPool, **arguments: object) -> ToolOutput:
    return pool.submit(ToolCall("1", "own", json.dumps(arguments))).result(SOON_S)


def of_file(file: Path, function: str) -> dict[str, object]:
    return {"kind": "function", "function": f"{file}:{function}"}


def test_a_schema_follows_the_signature_and_the_docstring(file: Path) -> None:
    with pool_of(**of_file(file, "convert")) as pool:
        value = {"type": "number", "description": "a length"}
        unit = {"type": "string", "enum": ["cm", "m"], "default": "m"}
        schema = {"type": "object", "properties": {"value": value, "unit": unit}, "required": ["value"]}
        (function,) = pool.functions("own")
        assert function == ToolFunction(
            "own", "Converts a length.\n\nTo kilometres.", schema | {"additionalProperties": False}
        )
        assert ask(pool, value=1500) == ToolOutput("1.5 km") == ask(pool, value="1500", unit="m")
    # An async function, and values that are not text.
    with pool_of(**of_file(file, "later")) as pool:
        assert ask(pool, words=["a", "b"], point={"x": 1, "y": 2}).text == '{"words":["a","b"],"x":3.0}'


WRONG: dict[str, list[tuple[dict[str, object], str]]] = {
    "convert": [
        ({}, "wrong arguments: value: Missing required argument"),
        ({"value": "far"}, "wrong arguments: value: Input should be a valid number"),
        ({"value": 1, "unit": "mile"}, "wrong arguments: unit: Input should be 'cm' or 'm'"),
        ({"value": 1, "to": "cm"}, "wrong arguments: to: Unexpected keyword argument"),
        ({"value": "\ud800"}, "wrong arguments: "),
    ],
    "misbehave": [
        ({"how": "crash"}, "own crashed (status 7)"),
        ({"how": "exit"}, "own crashed (status "),
        ({"how": "memory"}, "MemoryError"),
        ({"how": "raise"}, "KeyError: 'metre'"),
        ({"how": "value"}, "PydanticSerializationError: Unable to serialize"),
    ],
}


@pytest.mark.parametrize("function", WRONG)
def test_wrong_arguments_or_a_crash_fail_one_call_in_one_line(file: Path, function: str) -> None:
    with pool_of(**of_file(file, function), concurrency=1) as pool:
        for arguments, said in WRONG[function]:
            output = ask(pool, **arguments)
            assert output.is_error and output.text.startswith(f"error: {said}"), output.text
            assert "\n" not in output.text and len(output.text) < 500
            assert not ask(pool, **{"convert": {"value": 1000}, "misbehave": {"how": "well"}}[function]).is_error
            assert pool.take_counts()["tools/own/errors"] == 1


def test_a_hung_function_is_killed_and_the_next_call_answered(file: Path) -> None:
    with pool_of(**of_file(file, "misbehave"), concurrency=1, timeout_s=3) as pool:
        # The pool's timeout equals the tool's.
        assert ask(pool, how="hang").text == "error: own did not answer within 3 s"
        assert pool.take_counts()["tools/own/timeouts"] == 1
        deadline = time.monotonic() + SOON_S
        while (output := ask(pool, how="well")).is_error and time.monotonic() < deadline:
            time.sleep(0.1)  # until the killed process's thread no longer counts as hung
        assert output.text.startswith("well in ")


def test_calls_run_in_processes_that_end_with_the_run(file: Path) -> None:
    with pool_of(**of_file(file, "misbehave")) as pool:
        said, number, place = ask(pool, how="well").text.rsplit(" ", 2)
        assert int(number) != os.getpid() and place == "beside" and said == "well in"
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(value):\n    'No annotation.'", r"f\(value\) has no annotation for value"),
        ("def f(value: int): ...", "has no docstring"),
        ("def f(*values: int):\n    'Any number.'", r"takes \*values: "),
        ("class Odd: ...\ndef f(value: Odd):\n    'A type that is none.'", "has no JSON schema \\(Unable to generate "),
        ("g = 1", "has no function f"),
        ("class f: ...", "has no function f"),
        ("def f(:", "own.py cannot be imported: SyntaxError: "),
        ("raise SystemExit(4)", "its process ended with status .* before it was ready"),
        (None, "no file "),
    ],
)
def test_an_unusable_function_is_rejected_before_a_run(code: str | None, expected: str, tmp_path: Path) -> None:
    if code is not None:
        (tmp_path / "own.py").write_text(code)
    with pytest.raises(ValueError, match=f"^tools.own.function.*{expected}"):
        check_tools(config_of(**of_file(tmp_path / "own.py", "f")), ["own"], ())


def test_a_function_is_found_from_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tools: {own: {kind: function, function: my_tools.py:convert, timeout_s: 3}}")
    read, _ = read_config(tmp_path / "run.yaml", ["tools.own.cache_mib=1"])
    assert list(read.tools.given) == ["own"]
    own = read.tools.given["own"].model_dump()
    assert (own["function"], own["timeout_s"], own["cache_mib"]) == (f"{tmp_path}/my_tools.py:convert", 3, 1)
    again = type(read).model_validate(read.model_dump(mode="json"))
    assert again == read and again.tools.given == read.tools.given


STDIO = [sys.executable, mcp_server.__file__]


def call(pool: ToolPool, name: str, /, **arguments: object) -> ToolOutput:
    return ask(pool, name=name, arguments=arguments)


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_a_server_s_tools_are_called_by_their_names(way: str) -> None:
    with ExitStack() as servers:
        server: dict[str, object] = {"command": STDIO}
        if way == "http":
            port = servers.enter_context(held_port())
            server = {"url": servers.enter_context(mcp_server.http_server(port))}
        with pool_of(kind="mcp", **server) as pool:
            functions = {function.name: function for function in pool.functions("own")}
            assert functions["add"].description.startswith("Adds two numbers.") and functions["add"].server == "own"
            assert functions["add"].parameters["required"] == ["a", "b"]
            assert call(pool, "add", a=3, b=4) == ToolOutput("7")
            assert call(pool, "greet") == ToolOutput("hello world")
            assert call(pool, "picture").text == "a dot\n[image, not shown]"
            for output, expected in (
                (call(pool, "fail"), "no such thing"),
                (call(pool, "add", a="x", b=1), "valid integer"),
                (call(pool, "none"), "there is no tool 'none'; expected one of add, greet"),
                (pool.submit(ToolCall("1", "own", '{"name": "add", "arguments": 3}')).result(SOON_S), "an object"),
                (pool.submit(ToolCall("1", "own", "{}")).result(SOON_S), "there is no tool 'None'"),
            ):
                assert output.is_error and expected in output.text, output
            counts = pool.take_counts()
            assert counts["tools/own/errors"] == 5 and counts["tools/own/restarts"] == 0


def test_structured_content_is_shown_unless_a_text_says_it() -> None:
    rows, same = json.dumps(mcp_server.ROWS, separators=(",", ":")), dict(reversed(mcp_server.ROWS.items()))
    expected = {
        "beside": f"1 row\n{rows}",
        "same": f"1 row\n{json.dumps(same, indent=2)}",
        "other": f"{json.dumps(mcp_server.ROWS | {'total': 2})}\n{rows}",
        "failed": f"error: bad query\n{rows}",
        "alone": rows,
        "resources": "[resource_link, not read: notes, file:///notes.txt]\nwhat it says\n[resource, not shown: file:///b.bin]\n"
        "[audio, not shown]",
    }
    with pool_of(kind="mcp", command=STDIO) as pool:
        for kind, text in expected.items():
            assert call(pool, "give", kind=kind) == ToolOutput(text, is_error=kind == "failed")
        # A server wraps values that are not objects, and also sends them as text; they are shown once.
        assert call(pool, "cities", names=["Lima", "3", "a b"]) == ToolOutput("Lima\n3\na b")
        assert call(pool, "cities", names=["Lima"]) == ToolOutput("Lima")
        assert call(pool, "cities", names=[]) == ToolOutput('{"result":[]}')
        assert call(pool, "half", number=3) == ToolOutput("1.5")
    with pool_of(kind="mcp", command=STDIO, max_output_chars=20) as pool:
        assert call(pool, "give", kind="beside").text.startswith(f"1 row\n{rows[:14]}\n[cut: the first 20 of ")


def test_a_long_answer_is_dropped_and_an_ended_command_restarts() -> None:
    with pool_of(kind="mcp", command=STDIO, timeout_s=15) as pool:
        assert call(pool, "flood", mib=5).text == "error: own did not answer within 15 s"
        assert call(pool, "greet") == ToolOutput("hello world")
        assert pool.take_counts()["tools/own/restarts"] == 0
        assert "onnection closed" in call(pool, "die").text  # the call is not repeated
        assert call(pool, "greet") == ToolOutput("hello world")
        assert call(pool, "die").is_error and call(pool, "add", a=1, b=1).text == "2"
        assert pool.take_counts()["tools/own/restarts"] == 2
        assert pool.take_counts()["tools/own/restarts"] == 0


def test_a_lost_http_server_costs_calls_and_comes_back() -> None:
    with held_port() as port, mcp_server.http_server(port) as url, pool_of(kind="mcp", url=url) as pool:
        assert call(pool, "die").is_error
        assert call(pool, "greet").is_error  # the server has ended
        with mcp_server.http_server(port):
            outputs = [call(pool, "greet") for _ in range(2)]
            assert outputs[-1] == ToolOutput("hello world")


def test_a_flood_or_hang_of_a_server_costs_only_that_call() -> None:
    with held_port() as port, mcp_server.http_server(port) as url, pool_of(kind="mcp", url=url, timeout_s=5) as pool:
        flooded = call(pool, "flood", mib=5)
        assert flooded.is_error and "the answer is larger than 4096 KiB" in flooded.text, flooded.text[:500]
        assert call(pool, "greet") == ToolOutput("hello world")
        assert call(pool, "hang").text == "error: own did not answer within 5 s"
        assert pool.take_counts()["tools/own/timeouts"] == 1
        assert call(pool, "greet") == ToolOutput("hello world")


def test_a_command_gets_only_the_named_variables_and_tools(monkeypatch: Any) -> None:
    monkeypatch.setenv("FILES_TOKEN", "secret")
    monkeypatch.setenv("OTHER_TOKEN", "other")
    with pool_of(kind="mcp", command=STDIO, environment=["FILES_TOKEN"], tools=["variable"]) as pool:
        assert call(pool, "variable", name="FILES_TOKEN").text == "secret"
        assert call(pool, "variable", name="OTHER_TOKEN").text == "nothing"
        assert [function.name for function in pool.functions("own")] == ["variable"]
        assert call(pool, "die").text == "error: there is no tool 'die'; expected one of variable"


def test_unusable_servers_and_equal_tool_names_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    for settings, expected in (
        ({"command": [str(tmp_path / "none")]}, "tools.own: the server does not start: .*No such file"),
        ({"command": [sys.executable, str(tmp_path / "ends.py")]}, "tools.own: the server does not start: "),
        ({"url": "http://127.0.0.1:1/mcp"}, "tools.own: the server does not start: "),
        (
            {"command": STDIO, "tools": ["read"]},
            "tools.own: the server has no tool 'read'; expected one of add, greet, ",
        ),
        ({"command": STDIO, "environment": ["NO_SUCH"]}, "tools.own.environment names NO_SUCH, which is not set"),
        ({"url": "http://127.0.0.1:1/mcp", "api_key_env": "NO_SUCH"}, "tools.own.api_key_env names NO_SUCH"),
    ):
        with pytest.raises(ValueError, match=expected):
            check_tools(config_of(kind="mcp", **settings), ["own"], ())
    both = {"kind": "mcp", "command": STDIO, "tools": ["greet"]}
    with pytest.raises(ValueError, match="tools.files and tools.disk both have a function greet"):
        check_tools(ToolsConfig.model_validate({"files": both, "disk": both}), ["files", "disk"], ())


def test_settings_that_name_no_server_or_two_are_refused(tmp_path: Path) -> None:
    for words, expected in (
        (["tools.files={kind: mcp}"], "either a command or a url"),
        (["tools.files={kind: mcp, command: [x], url: 'http://h/mcp'}"], "either a command or a url"),
        (["tools.files={kind: mcp, command: [x], api_key_env: KEY}"], "api_key_env a url"),
        (["tools.files={kind: mcp, url: 'http://u:p@h/mcp'}"], "contains a user, password, query or fragment"),
        (["tools.files={kind: mcp, comand: [x]}"], r"tools.files.comand: unknown key; did you mean .*.command\?"),
    ):
        with pytest.raises(ConfigError, match=expected):
            read_config(None, words)
    (tmp_path / "server.py").write_text("")
    (tmp_path / "run.yaml").write_text("tools: {files: {kind: mcp, command: [python, server.py, --root, here]}}")
    found = read_config(tmp_path / "run.yaml")[0].tools.given["files"]
    assert found.command == ["python", f"{tmp_path}/server.py", "--root", "here"]  # type: ignore[attr-defined]
