"""A forked process is, to those who start it, what Python would be; and it is forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from forked import descendants

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SERVER = Path(__file__).with_name("server.py")
SAYS = """
import os, sys, time
print(os.getppid(), os.getpid(), "base64" in sys.modules, os.getcwd(), os.environ.get("SAID"), sys.argv[1:], flush=True)
print(sys.stdin.read(), file=sys.stderr)
if "waits" in sys.argv:
    open("waiting", "w").close()
    time.sleep(600)
sys.exit(7)
"""


@contextmanager
def serving(folder: Path, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """One that has imported base64 alone; args[-3] is its folder."""
    process = subprocess.Popen([sys.executable, str(SERVER), str(folder), kind, "base64"], env=ENVIRONMENT)
    while not (folder / "python").exists():
        assert process.poll() is None
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    with serving(tmp_path_factory.mktemp("forks"), "trainer") as process:
        yield process


@pytest.fixture
def python(server: subprocess.Popen[bytes]) -> str:
    return f"{server.args[-3]}/python"  # type: ignore[index]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "main.py").write_text(SAYS)
    return tmp_path / "trainer" / "main.py"


def start(python: str, program: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-W", "ignore", str(program), *words], cwd=program.parent, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT | environment,
    )  # fmt: skip


def test_it_has_the_words_the_files_and_the_status(server: subprocess.Popen[bytes], python: str, program: Path) -> None:
    process = start(python, program, "a b", "", SAID="so")
    out, err = process.communicate("asked")
    assert process.returncode == 7 and err == "asked\n"
    assert out.split(maxsplit=2)[0] == str(server.pid)
    assert out.split(maxsplit=2)[2] == f"True {program.parent} so ['a b', '']\n"


def test_commands_lie_beside_it(server: subprocess.Popen[bytes], python: str, program: Path) -> None:
    """torchrun, whose rank is forked too: it has imported base64 (as torch does) from the server."""
    torchrun = Path(python).with_name("torchrun")
    words = [torchrun, "--nproc-per-node", "1", program, "a b"]
    done = subprocess.run(
        words, cwd=program.parent, text=True, capture_output=True, input="", env=ENVIRONMENT, timeout=600
    )
    assert done.stdout.split(maxsplit=1)[0] == str(server.pid), done.stderr
    assert "exitcode  : 7" in done.stderr


ASKED = "os.getppid(), sys.executable, 'base64' in sys.modules, 'torch' in sys.modules, os.environ.get('PYTHON_EXEC')"


def test_tests_are_forked_and_start_processes_of_their_own(tmp_path: Path) -> None:
    """With sys.executable, which imports everything itself; with torchrun and its ranks."""
    test = tmp_path / "test_it.py"
    with serving(tmp_path, "torch") as server:
        expected = server.pid, sys.executable, True, False, None
        test.write_text(f"import os, sys\ndef test_it(): assert ({ASKED}) == {expected}\n")
        words = [tmp_path / "python", "-m", "pytest", "-q", "--rootdir", tmp_path, test]
        done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, env=ENVIRONMENT, timeout=600)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_benchmark_is_forked_where_its_marsrl_is_another(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "own.py").write_text("SAYS = 'mine'")
    program = tmp_path / "benchmarks" / "any.py"
    program.write_text(f"import os, sys, own\nprint(*({ASKED}), own.SAYS, sys.path[0])\n")
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    with serving(tmp_path, "torch") as server:
        for words in ([program], ["-c", program.read_text(), "a b"]):
            done = subprocess.run([tmp_path / "python", *words], text=True, capture_output=True, env=environment)
            folder = program.parent if words[0] == program else ""
            assert done.stdout == f"{server.pid} {tmp_path}/python True False None mine {folder}\n", done.stderr


def test_what_is_read_at_the_start_takes_a_process_of_its_own(python: str, program: Path) -> None:
    process = start(python, program, OMP_NUM_THREADS="3")
    out, _ = process.communicate("")
    assert process.returncode == 7 and out.startswith(f"{os.getpid()} {process.pid} ")
    done = subprocess.run([python, "-c", "import os; print(os.getppid())"], capture_output=True, text=True)
    assert done.stdout == f"{os.getpid()}\n"  # the server knows no such program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(python: str, program: Path, number: signal.Signals) -> None:
    process = start(python, program, "waits")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    forked = psutil.Process(int(process.stdout.readline().split()[1]))
    while not (program.parent / "waiting").exists() or forked not in descendants():
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == -number
    process.stdout.read()  # it has let go of it
    forked.wait(60)


def test_none_outlives_its_server(python: str, program: Path, server: subprocess.Popen[bytes]) -> None:
    process = start(python, program, "waits")
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.close()
    forked = psutil.Process(int(process.stdout.readline().split()[1]))
    server.kill()
    forked.wait(60)
    assert process.wait(60) == 1 and "has ended" in process.stderr.read()
