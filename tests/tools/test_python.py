"""The tool `python` returns what a snippet printed, leaves nothing behind, and keeps hostile code away from the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hostile_snippets import PRELUDE, SNIPPETS, Snippet

from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import PythonTool, ToolsConfig
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.tools.python import launcher as launcher_module
from marsrl.rollout.tools.python import tool as tool_module
from marsrl.rollout.tools.python.launcher import check_sandbox, start_interpreter
from marsrl.rollout.tools.python.seccomp import denied_calls
from marsrl.rollout.tools.python.tool import PythonInterpreter
from marsrl.rollout.types import ToolCall, ToolOutput

SOON_S = 120.0  # far longer than anything here takes
CONFIG = PythonTool(warm=2, max_output_chars=2000, wall_s=30.0, timeout_s=60.0)


@pytest.fixture(scope="module")
def python() -> Iterator[PythonInterpreter]:
    with closing(PythonInterpreter(CONFIG)) as tool:
        yield tool


def run(tool: PythonInterpreter, code: str) -> str:
    return tool.run({"code": textwrap.dedent(code)})


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2"),
        ("print('a')\n'b'", "a\n'b'"),
        ("x = 3", "[no output]"),
        ("print('é ∑ 漢 🙂')", "é ∑ 漢 🙂"),
        ("exit(3)", "[no output]"),
        ("raise SystemExit('enough')", "enough"),
        ("import sys; print('to stderr', file=sys.stderr)", "to stderr"),
        ("import subprocess; subprocess.run(['echo', 'child']).returncode", "child\n0"),
        ("try: input()\nexcept EOFError: print('nobody types')", "nobody types"),
        ("open('/tmp/a', 'w').write('kept')\nopen('/tmp/a').read()", "'kept'"),
        ("print('one\\r\\ntwo')", "one\ntwo"),
        ("__name__", "'__main__'"),
    ],
)
def test_a_snippet_returns_its_output_and_last_value(python: PythonInterpreter, code: str, output: str) -> None:
    assert run(python, code) == output


def test_an_error_is_a_short_traceback_of_the_snippet_alone(python: PythonInterpreter) -> None:
    assert run(python, "def f(x):\n    return 1 / x\nprint('before')\nf(0)") == (
        "before\n"
        "Traceback (most recent call last):\n"
        '  File "<code>", line 4, in <module>\n'
        "    f(0)\n"
        '  File "<code>", line 2, in f\n'
        "    return 1 / x\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero"
    )
    assert run(python, "1 +").endswith("SyntaxError: invalid syntax") and "ast.py" not in run(python, "1 +")
    assert len(run(python, "raise ValueError('x' * 10 ** 6)")) <= CONFIG.max_output_chars
    output = run(python, "print('begin' + 'x' * 4000)\n1 / 0")  # a long output loses its middle
    assert output.startswith("beginxxx") and output.endswith("ZeroDivisionError: division by zero")
    assert "[cut: 4," in output and len(output) == CONFIG.max_output_chars


def test_a_call_leaves_nothing_for_the_next_one(python: PythonInterpreter) -> None:
    run(
        python,
        "import builtins, os; builtins.leak = open('/tmp/x', 'w').write('x'); os.environ['LEAK'] = '1'; leak = 1",
    )
    look = "import os; ('leak' in dir(), hasattr(__builtins__, 'leak'), os.listdir('/tmp'), 'LEAK' in os.environ)"
    seen = run(python, look)
    assert seen == "(False, False, [], False)"


def test_packages_can_be_imported_and_are_loaded_ahead() -> None:
    with tempfile.TemporaryDirectory() as folder:  # the sandbox runs as another user, who cannot open tmp_path
        Path(folder).chmod(0o755)
        (Path(folder) / "own_package.py").write_text("value = 'mine'")
        config = CONFIG.model_copy(update={"packages": folder, "preload": ["own_package"], "warm": 1})
        with closing(PythonInterpreter(config)) as tool:
            assert run(tool, "import sys\n'own_package' in sys.modules") == "True"
            assert run(tool, "import own_package\nown_package.value") == "'mine'"


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def all_gone(processes: set[psutil.Process]) -> bool:
    return not psutil.wait_procs(list(processes), timeout=SOON_S)[1]


def test_a_finished_snippet_leaves_nothing_behind(python: PythonInterpreter) -> None:
    wait_until_ready(python)  # so that no more interpreters start
    others = children()
    interpreter = start_interpreter(CONFIG)
    try:
        interpreter.wait_until_ready(60.0)
        tree = children() - others
        daemon = "import os\nif not os.fork():\n    while True: pass\nos.getpid()"
        ending = interpreter.run(daemon, 30.0, 1 << 16)
        assert ending.output.strip().isdigit() and not ending.has_died and ending.stopped is None
        assert all_gone((children() - others) | tree)
    finally:
        interpreter.kill()


def test_closing_leaves_no_process_and_ends_calls_under_way(python: PythonInterpreter) -> None:
    wait_until_ready(python)  # so that no more interpreters start
    before = children()
    pool = build_tools(ToolsConfig(python=CONFIG), ["python"], ())
    code = "import subprocess, time\ntry: subprocess.Popen(['sleep', '1000'])\nfinally: time.sleep(1000)"
    call = pool.submit(ToolCall("1", "python", json.dumps({"code": code})))
    assert pool.submit(ToolCall("2", "python", '{"code": "1"}')).result(SOON_S).text == "1"
    begun = children() - before
    assert begun
    pool.close()
    assert call.cancelled() and all_gone(begun)


def test_a_killed_trainer_leaves_no_process() -> None:
    script = """
        import threading
        from marsrl.rollout.tools.config import PythonTool
        from marsrl.rollout.tools.python.tool import PythonInterpreter
        tool = PythonInterpreter(PythonTool(warm=2, wall_s=50.0))
        code = "import os, time\\nos.fork()\\nos.fork()\\ntime.sleep(1000)"
        threading.Thread(target=tool.run, args=({"code": code},)).start()
        while len(tool.ready) < 2: pass
        print("ready", flush=True)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        begun = set(psutil.Process(trainer.pid).children(recursive=True))
        os.kill(trainer.pid, signal.SIGKILL)
    assert len(begun) >= 3
    assert all_gone(begun)


def wait_until_ready(tool: PythonInterpreter) -> None:
    end = time.monotonic() + SOON_S
    while len(tool.ready) < CONFIG.warm:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_failed_sandbox_is_a_call_error_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ("sh", "-c", "echo no namespaces here; exit 1", "sh")
    monkeypatch.setattr(launcher_module, "_bwrap", lambda config, is_root: broken)
    monkeypatch.setattr(tool_module, "check_sandbox", lambda config: None)
    with closing(PythonInterpreter(CONFIG)) as tool:
        for _ in range(2):
            with pytest.raises(ToolError, match="python is not available: .*no namespaces here"):
                run(tool, "1")
    assert len([record for record in caplog.records if "cannot be started" in record.message]) == 1
    with pytest.raises(ToolError, match="closed"):
        run(tool, "1")


# Output on Ubuntu 24.04 with kernel.apparmor_restrict_unprivileged_userns=1, for a user who is not root.
UBUNTU_SAYS = "bwrap: setting up uid map: Permission denied"


@pytest.mark.parametrize(
    ("setting", "value", "cure"),
    [
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "AppArmor"),
        ("kernel.unprivileged_userns_clone", "0", "sysctl -w"),
        ("user.max_user_namespaces", "0", "sysctl -w"),
    ],
)
def test_a_kernel_that_forbids_namespaces_is_named_with_a_fix(
    setting: str, value: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho '{UBUNTU_SAYS}' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    os.environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    monkeypatch.setattr(launcher_module, "_is_root", lambda: False)
    monkeypatch.setattr(launcher_module, "_KERNEL_SETTINGS", tmp_path)
    file = tmp_path / setting.replace(".", "/")
    file.parent.mkdir()
    file.write_text(f"{value}\n")
    with pytest.raises(
        ValueError, match=f"cannot create a complete sandbox here .{UBUNTU_SAYS}.*{setting} is {value} .*{cure}"
    ):
        check_tools(ToolsConfig(python=CONFIG), ["python"], ())
    check_tools(ToolsConfig(python=CONFIG), ["search"], ())  # no agent calls it
    file.write_text("2\n")
    with pytest.raises(ValueError, match="cannot create a complete sandbox here") as error:
        PythonInterpreter(CONFIG)
    assert "sysctl" not in str(error.value)  # no kernel setting is the cause here


def test_a_sandbox_that_misses_a_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = launcher_module._shown(CONFIG)
    monkeypatch.setattr(launcher_module, "_shown", lambda config: [*shown, "/etc"])
    with pytest.raises(ValueError, match="cannot create a complete sandbox here .*the host's files"):
        check_sandbox(CONFIG)


@pytest.mark.parametrize(
    ("machine", "header"), [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")]
)
def test_system_call_numbers_match_the_kernels_headers(machine: str, header: str) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip(f"no {path} on this {platform.machine()} machine")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
    wrong = {name: number for name, number in denied_calls(machine).items() if defined.get(name) != str(number)}
    assert not wrong


LIMITS = {"memory_mib": 256, "tmp_mib": 4, "cpu_s": 1, "wall_s": 10.0, "timeout_s": 90.0, "max_output_chars": 4000}
TIGHT = PythonTool.model_validate({"concurrency": 8, "warm": 8, **LIMITS})
OTHER_CALLS = {"x86_64": {"clone": 56, "prctl": 157}, "aarch64": {"clone": 220, "prctl": 167}}


@dataclass(frozen=True)
class Host:
    """Targets on the host that hostile code tries to reach."""

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


@pytest.fixture(scope="module")
def outputs(host: Host) -> Iterator[Mapping[str, Future[ToolOutput]]]:
    """Run all snippets at the same time and yield their outputs. After every fourth snippet, an honest call follows."""
    pool = ToolPool({"python": PythonInterpreter(TIGHT)}, {"python": TIGHT})
    futures: dict[str, Future[ToolOutput]] = {}
    for number, snippet in enumerate(SNIPPETS):
        futures[snippet.name] = pool.submit(call(snippet.name, host.code(snippet)))
        if number % 4 == 0:
            futures[f"honest {number}"] = pool.submit(call(f"honest {number}", f"{number} + 1"))
    yield futures
    pool.close()


def call(id: str, code: str) -> ToolCall:
    return ToolCall(id, "python", json.dumps({"code": code}))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.name)
def test_hostile_code_is_contained(snippet: Snippet, outputs: Mapping[str, Future[ToolOutput]], host: Host) -> None:
    output = outputs[snippet.name].result(SOON_S)
    assert not output.is_error and re.search(snippet.says, output.text) and "DONE" not in output.text, output.text
    output.text.encode("utf-8")
    assert len(output.text) < 2 * TIGHT.max_output_chars
    host.check_untouched()


def test_honest_calls_beside_hostile_ones_have_their_answers(outputs: Mapping[str, Future[ToolOutput]]) -> None:
    honest = {name: future for name, future in outputs.items() if name.startswith("honest")}
    assert len(honest) > 15
    for name, future in honest.items():
        assert future.result(SOON_S) == ToolOutput(str(int(name.split()[1]) + 1))
