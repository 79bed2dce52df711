"""The pool answers every call, whatever a tool or a model does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager

import pytest

from marsrl.rollout.tools.config import ToolLimits
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.types import ToolCall, ToolOutput

SOON_S = 30.0  # far longer than anything here takes


class Scripted:
    def __init__(self, run: Callable[[Mapping[str, object]], object], is_deterministic: bool = True) -> None:
        self._run, self.is_deterministic = run, is_deterministic
        self.seen: list[Mapping[str, object]] = []
        self.num_closed = 0

    def run(self, arguments: Mapping[str, object]) -> str | Sequence[str]:
        self.seen.append(arguments)
        return self._run(arguments)  # type: ignore[return-value]

    def close(self) -> None:
        self.num_closed += 1


def text_of(arguments: Mapping[str, object]) -> str:
    return f"said {arguments['text']}"


@contextmanager
def pool_of(tool: Scripted, **limits: object) -> Iterator[ToolPool]:
    pool = ToolPool({"echo": tool}, {"echo": ToolLimits.model_validate(limits)})
    try:
        yield pool
    finally:
        pool.close()


def call(id: str, text: object = "a", tool: str = "echo") -> ToolCall:
    return ToolCall(id, tool, json.dumps({"text": text}))


def answers(pool: ToolPool, calls: Sequence[ToolCall]) -> dict[str, ToolOutput]:
    """Make the calls at the same time, and return their answers by call id."""
    futures = {each.id: pool.submit(each) for each in calls}
    return {id: future.result(SOON_S) for id, future in futures.items()}


def test_calls_are_answered_by_id_and_taking_resets_the_counts() -> None:
    with pool_of(Scripted(text_of)) as pool:
        said = answers(pool, [call(str(i), i) for i in range(50)])
        assert said == {str(i): ToolOutput(f"said {i}") for i in range(50)}
        counts = pool.take_counts()
        assert set(pool.take_counts().values()) == {0.0}
    assert counts["tools/echo/calls"] == 50 and counts["tools/echo/errors"] == 0
    assert 0 <= counts["tools/echo/seconds"] < SOON_S


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{", "error: the arguments are not JSON"),
        ("[1]", "error: the arguments are a JSON list, expected an object"),
        ("[" * 100_000, "error: the arguments are not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "error: the arguments are not JSON"),
        ('{"text": "' + "a" * (1 << 20) + '"}', "error: the arguments have 1,048,588 characters"),
    ],
    ids=["cut", "list", "brackets", "digits", "long"],
)
def test_arguments_that_are_no_json_object_are_an_error(arguments: str, expected: str) -> None:
    tool = Scripted(text_of)
    with pool_of(tool) as pool:
        output = answers(pool, [ToolCall("1", "echo", arguments)])["1"]
    assert output.is_error and output.text.startswith(expected), output.text[:200]
    assert not tool.seen and len(output.text) < 1000


def test_calls_apart_share_no_cache_and_no_counts() -> None:
    echo = Scripted(text_of)
    with pool_of(echo) as pool:
        answers(pool, [call("1", "a")])
        with pool.apart():
            answers(pool, [call("2", "a"), call("3", "b")])
            assert pool.take_counts()["tools/echo/calls"] == 2
        answers(pool, [call("4", "a")])  # answered from the cache
        counts = pool.take_counts()
    assert sorted(str(seen["text"]) for seen in echo.seen) == ["a", "a", "b"]
    assert (counts["tools/echo/calls"], counts["tools/echo/cached"]) == (2, 1)


def test_unknown_tool_names_are_errors_under_one_metric() -> None:
    with pool_of(Scripted(text_of)) as pool:
        outputs = answers(pool, [call("1", tool="rm -rf"), call("2", tool="x" * 100_000), call("3", tool="\ud800")])
        counts = pool.take_counts()
    assert outputs["1"] == ToolOutput("error: there is no tool 'rm -rf'; expected one of echo", is_error=True)
    assert all(output.is_error and len(output.text.encode()) < 1000 for output in outputs.values())
    assert {key.split("/")[1] for key in counts} == {"echo", "unknown"}
    assert counts["tools/unknown/calls"] == counts["tools/unknown/errors"] == 3


def raises(error: BaseException) -> Callable[[Mapping[str, object]], str]:
    def run(arguments: Mapping[str, object]) -> str:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (raises(ToolError("the query has no words")), "error: the query has no words"),
        (raises(SystemExit(3)), "error: echo failed: SystemExit: 3"),
        (raises(MemoryError()), "error: echo failed: MemoryError: "),
        (lambda arguments: b"bytes", "error: echo failed: TypeError: its output is bytes, expected text"),
        (lambda arguments: ["page", 7], "error: echo failed: TypeError: its output is list, expected text or a list"),
        (raises(ValueError("a" * 50_000_000)), "error: echo failed: ValueError: aaa"),
        pytest.param(raises(ValueError("\ud800")), "error: echo failed: ValueError: ?", id="a lone surrogate"),
    ],
)
def test_a_failing_tool_is_an_error_and_the_next_call_works(
    run: Callable[[Mapping[str, object]], object], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")  # pytest-xdist cannot send a log that has a lone surrogate
    tool = Scripted(lambda arguments: "well" if arguments["text"] == "b" else run(arguments))
    with pool_of(tool, concurrency=1) as pool:
        outputs, counts = answers(pool, [call("1", "a"), call("2", "b")]), pool.take_counts()
    assert outputs["1"].is_error and outputs["1"].text.startswith(expected) and len(outputs["1"].text) < 1000
    assert outputs["2"] == ToolOutput("well")
    assert ("\n[cut: the first 400 of 50,000,025 characters]" in outputs["1"].text) == ("aaa" in expected)
    assert counts["tools/echo/calls"] == 2 and counts["tools/echo/errors"] == 1


def test_a_longer_output_is_cut_at_the_cap_and_says_so() -> None:
    said = {"a": "\ud800" + "x" * 50_000_000, "b": "x" * 1000}  # "b" is exactly as long as allowed
    with pool_of(Scripted(lambda arguments: said[str(arguments["text"])]), max_output_chars=1000) as pool:
        shown = answers(pool, [call("1", "a"), call("2", "b")])
        assert shown["1"].text == "?" + "x" * 999 + "\n[cut: the first 1,000 of 50,000,001 characters]"
        assert shown["2"].text == said["b"] and pool.take_counts()["tools/echo/truncated"] == 1


def test_the_longest_parts_are_cut_at_the_cap_and_none_is_lost() -> None:
    sizes = [50, 10, 5000, 300]
    with pool_of(Scripted(lambda arguments: ["x" * size for size in sizes]), max_output_chars=400) as pool:
        output, counts = answers(pool, [call("1")])["1"], pool.take_counts()
    assert [part.count("x") for part in output.parts] == [50, 10, 170, 170] and counts["tools/echo/truncated"] == 1
    assert output.parts[2].endswith("x\n[cut: the first 170 of 5,000 characters]")
    assert all(part == "x" * size for part, size in zip(output.parts[:2], sizes, strict=False))


def hangs_if_told(gate: threading.Event) -> Scripted:
    """Return a tool that hangs until the gate opens if its text is "hang"."""
    return Scripted(lambda arguments: str(gate.wait(SOON_S)) if arguments["text"] == "hang" else "well", False)


def test_a_hung_call_is_an_error_and_so_are_those_waiting() -> None:
    gate = threading.Event()
    with pool_of(hangs_if_told(gate), concurrency=1, timeout_s=0.05) as pool:
        outputs, counts = answers(pool, [call("slow", "hang"), call("next", "a")]), pool.take_counts()
        gate.set()
    assert outputs["slow"] == ToolOutput("error: echo did not answer within 0.05 s", is_error=True)
    # With concurrency 1, no further calls start while that one hangs, and waiting ones are answered with an error.
    assert outputs["next"] == ToolOutput("error: echo is not available: 1 calls of it hang", is_error=True)
    assert counts["tools/echo/timeouts"] == 1 and counts["tools/echo/errors"] == 2


def test_a_tool_that_gives_up_at_its_limit_counts_as_late() -> None:
    def gives_up(arguments: Mapping[str, object]) -> str:
        threading.Event().wait(0.05)
        raise ToolError("it took too long")

    with pool_of(Scripted(gives_up), concurrency=50, timeout_s=0.05) as pool:
        outputs, counts = answers(pool, [call(str(i), i) for i in range(50)]), pool.take_counts()
    assert set(outputs.values()) == {ToolOutput("error: echo did not answer within 0.05 s", is_error=True)}
    assert counts["tools/echo/timeouts"] == counts["tools/echo/errors"] == 50


def until(pool: ToolPool, text: str, holds: Callable[[ToolOutput], bool]) -> None:
    """Repeat a call with this text until its answer matches."""
    end = time.monotonic() + SOON_S
    while not holds(output := answers(pool, [call("again", text)])["again"]):
        assert time.monotonic() < end, output
        threading.Event().wait(0.001)


def test_a_hung_tool_recovers_and_its_threads_are_bounded() -> None:
    gate, before = threading.Event(), threading.active_count()
    with pool_of(hangs_if_told(gate), concurrency=2, timeout_s=0.05) as pool:
        assert answers(pool, [call("slow", "hang")])["slow"].is_error
        until(pool, "a", lambda output: output == ToolOutput("well"))  # a pause of this process makes calls late
        assert all(output.is_error for output in answers(pool, [call(f"slow{i}", "hang") for i in range(40)]).values())
        until(pool, "hang", lambda output: "calls of it hang" in output.text)
        assert threading.active_count() - before <= 6  # two threads hang, and at most two more exist, each with a timer
        gate.set()  # the tool is up again: hung threads end, and calls are answered as before
        until(pool, "a", lambda output: output == ToolOutput("well"))


def test_the_same_call_while_it_runs_is_one_run() -> None:
    gate = threading.Event()
    tool = Scripted(lambda arguments: f"{gate.wait(SOON_S)}")
    with pool_of(tool) as pool:
        futures = [pool.submit(call(str(i))) for i in range(10)]
        gate.set()
        outputs = [future.result(SOON_S) for future in futures]
        assert set(outputs) == {ToolOutput("True")}
        assert sum(output.seconds > 0 for output in outputs) == 1  # the other nine calls took no time of the tool
        assert len(tool.seen) == 1 and pool.take_counts()["tools/echo/cached"] == 9


@pytest.mark.parametrize(("kind", "runs"), [("answers", 1), ("errors", 2), ("not deterministic", 2), ("no cache", 2)])
def test_a_call_is_cached_however_its_arguments_are_spelled(kind: str, runs: int) -> None:
    run = raises(ToolError("busy")) if kind == "errors" else text_of
    tool = Scripted(run, is_deterministic=kind != "not deterministic")
    with pool_of(tool, cache_mib=0 if kind == "no cache" else 1) as pool:
        spelled = ('{"a": 1, "text": "é"}', '{"text":"\\u00e9","a":1}')
        first, second = (pool.submit(ToolCall("1", "echo", each)).result(SOON_S) for each in spelled)
        counts = pool.take_counts()
    assert first == second and len(tool.seen) == runs
    assert counts["tools/echo/calls"] == 2 and counts["tools/echo/cached"] == 2 - runs


@pytest.mark.parametrize(("size", "texts", "runs"), [(100_000, "abacab", "abcb"), (300_000, "aa", "aa")])
def test_the_outputs_used_last_are_kept(size: int, texts: str, runs: str) -> None:
    """Two outputs of 100,000 characters fit into 1 MiB, and none of 300,000."""
    tool = Scripted(lambda arguments: "x" * size)
    with pool_of(tool, max_output_chars=1_000_000, cache_mib=1) as pool:
        for id, text in enumerate(texts):
            answers(pool, [call(str(id), text)])
    assert "".join(str(each["text"]) for each in tool.seen) == runs


def test_closing_drops_what_hangs_and_closes_each_tool_once() -> None:
    gate, before = threading.Event(), threading.active_count()
    tool = Scripted(lambda arguments: str(gate.wait(SOON_S)))
    pool = ToolPool({"echo": tool}, {"echo": ToolLimits(concurrency=1)})
    futures = [pool.submit(call("1")), pool.submit(call("2", "b"))]
    pool.close()
    pool.close()
    assert tool.num_closed == 1 and not wait(futures, SOON_S).not_done and all(each.cancelled() for each in futures)
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.submit(call("3"))
    gate.set()
    end = time.monotonic() + SOON_S
    while threading.active_count() > before:
        assert time.monotonic() < end, "threads outlive the pool"
