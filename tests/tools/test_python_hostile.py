"""Nothing that hostile code tries reaches the machine, and calls beside it are answered."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from hostile_snippets import PRELUDE, SNIPPETS, Snippet

from marsrl.rollout.tools.config import PythonTool
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.tools.python.launcher import WANTED, choose_launcher
from marsrl.rollout.tools.python.seccomp import denied_calls
from marsrl.rollout.tools.python.tool import PythonInterpreter
from marsrl.rollout.types import ToolCall, ToolOutput

SOON_S = 120.0  # far more than anything here takes
CONFIG = PythonTool(
    strict=False,
    memory_mib=256,
    cpu_s=1,
    wall_s=10.0,
    timeout_s=90.0,
    tmp_mib=4,
    concurrency=8,
    warm=8,
    max_output_chars=4000,
)
OTHER_CALLS = {"x86_64": {"clone": 56, "prctl": 157}, "aarch64": {"clone": 220, "prctl": 167}}


@dataclass(frozen=True)
class Host:
    """What hostile code would like to reach."""

    server: socket.socket
    abstract: socket.socket
    folder: Path

    def code(self, snippet: Snippet) -> str:
        code = PRELUDE + snippet.code
        numbers = denied_calls(platform.machine()) | OTHER_CALLS[platform.machine()]
        names = {"PORT": self.server.getsockname()[1], "ABSTRACT": self.abstract.getsockname()[1:].decode()}
        for name, value in {**names, "FOLDER": self.folder, "PID": os.getpid()}.items():
            code = code.replace(name, str(value))
        return re.sub(r"NR_(\w+)", lambda match: str(numbers[match[1]]), code)

    def check_untouched(self) -> None:
        assert (self.folder / "canary").read_text() == "alive" and len(list(self.folder.iterdir())) == 1
        for server in (self.server, self.abstract):
            with pytest.raises(BlockingIOError):
                server.accept()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("open")
    (folder / "canary").write_text("alive")
    for path in (folder, folder / "canary"):
        path.chmod(0o777)
    os.environ["MARSRL_CANARY"] = "CANARY"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0marsrl-test-{os.getpid()}")
        abstract.listen()
        server.setblocking(False)
        abstract.setblocking(False)
        yield Host(server, abstract, folder)
    del os.environ["MARSRL_CANARY"]


def holds(snippet: Snippet, output: str) -> bool:
    return re.search(snippet.says, output) is not None and "DONE" not in output


@pytest.fixture(scope="module")
def missing() -> set[str]:
    words = choose_launcher(CONFIG)[1]
    return {part for part, name in WANTED.items() if name in words}


@pytest.fixture(scope="module")
def outputs(host: Host, missing: set[str]) -> Iterator[Mapping[str, Future[ToolOutput]]]:
    """Outputs of what this machine's sandbox is to hold; all snippets run side by side, every fourth call is an honest one."""
    pool = ToolPool({"python": PythonInterpreter(CONFIG)}, {"python": CONFIG})
    futures: dict[str, Future[ToolOutput]] = {}
    for number, snippet in enumerate(SNIPPETS):
        if not missing & set(snippet.needs.split()):  # others could end the tests
            futures[snippet.name] = pool.submit(call(snippet.name, host.code(snippet)))
        if number % 4 == 0:
            futures[f"honest {number}"] = pool.submit(call(f"honest {number}", f"{number} + 1"))
    yield futures
    pool.close()


def call(id: str, code: str) -> ToolCall:
    return ToolCall(id, "python", json.dumps({"code": code}))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.name)
def test_hostile_code_is_contained(
    snippet: Snippet, outputs: Mapping[str, Future[ToolOutput]], missing: set[str], host: Host
) -> None:
    if lacking := missing & set(snippet.needs.split()):
        pytest.skip(f"the sandbox of this machine lacks {', '.join(WANTED[part] for part in lacking)}")
    output = outputs[snippet.name].result(SOON_S)
    assert not output.is_error and holds(snippet, output.text), output.text
    output.text.encode("utf-8")
    assert len(output.text) < 2 * CONFIG.max_output_chars
    if not missing:
        host.check_untouched()


def test_honest_calls_beside_hostile_ones_have_their_answers(outputs: Mapping[str, Future[ToolOutput]]) -> None:
    honest = {name: future for name, future in outputs.items() if name.startswith("honest")}
    assert len(honest) > 15
    for name, future in honest.items():
        assert future.result(SOON_S) == ToolOutput(str(int(name.split()[1]) + 1))
