"""A forked process is, to those who start it, what Python would be; and it is forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """One that has imported base64 alone; args[-3] is its folder."""
    folder = tmp_path_factory.mktemp("forks")
    process = subprocess.Popen([sys.executable, str(SERVER), str(folder), "trainer", "base64"], env=ENVIRONMENT)
    while not (folder / "python").exists():
        assert process.poll() is None
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


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


def test_tests_are_forked_and_start_processes_of_their_own(
    server: subprocess.Popen[bytes], python: str, tmp_path: Path
) -> None:
    """torchrun, Ray: what a test starts with sys.executable imports everything itself."""
    said = {"parent": server.pid, "executable": sys.executable, "base64": True, "PYTHON_EXEC": None}
    asked = "os.getppid(), sys.executable, 'base64' in sys.modules, os.environ.get('PYTHON_EXEC')"
    (tmp_path / "test_it.py").write_text(f"import os, sys\ndef test_it(): assert ({asked}) == {tuple(said.values())}\n")
    words = [python, "-m", "pytest", "-q", "--rootdir", tmp_path, tmp_path / "test_it.py"]
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, env=ENVIRONMENT, timeout=600)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


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
