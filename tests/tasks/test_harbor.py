"""Tasks in folders of Harbor's format. A script stands in for Docker's client; a container is a folder that acts as its root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marsrl.rollout.tasks.data import read_problems

DOCKER = """
import os, pathlib, re, shutil, subprocess, sys
root, words = pathlib.Path(os.environ["FAKE_DOCKER"]), sys.argv[1:]
with open(root / "log", "a") as log:
    print(*words, file=log)
inside = lambda text: re.sub(r"/(tests|logs|app)\\b", lambda found: f"{root}/box/{found[1]}", text)
match words:
    case ["version"] if os.environ.get("FAKE_DOWN"):
        sys.exit(1)
    case ["cp", source, target]:
        shutil.copytree(source, inside(target.partition(":")[2]))
    case ["exec", *rest]:
        rest = [word for word in rest if not word.startswith(("-e", "marsrl-harbor-")) and word not in ("-u", "root")]
        if rest[0] == "bash":
            rest = ["bash", "-c", (root / "box/tests/test.sh").read_text()]
        sys.exit(subprocess.run([inside(word) for word in rest]).returncode)
"""
TEST = """
[ "$(cat /app/answer)" = 4 ] && reward=1 || reward=0.25
echo $reward > /logs/verifier/reward.txt
exit 3
"""
AGENT = """
import json, os, sys, time
problem = json.load(sys.stdin)
assert problem["answer"] is None and os.environ["HARBOR_CONTAINER"].startswith("marsrl-harbor-")
os.makedirs(os.environ["FAKE_DOCKER"] + "/box/app", exist_ok=True)
os.makedirs(os.environ["FAKE_DOCKER"] + "/box/tests", exist_ok=True)
open(os.environ["FAKE_DOCKER"] + "/box/app/answer", "w").write(sys.argv[1])
print("[1.0]")
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


def folder_of(folder: Path, name: str = "sum", toml: str = "", test: str = TEST) -> Path:
    task = folder / name
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "environment/Dockerfile").write_text("FROM debian")
    (task / "instruction.md").write_text("<!-- a canary GUID -->\n# harbor-canary\nWrite 2 + 2 into /app/answer.\n")
    (task / "tests/test.sh").write_text(test)
    (task / "task.toml").write_text(toml)
    return task


def test_a_folder_of_tasks_is_read_as_problems(tmp_path: Path) -> None:
    folder_of(tmp_path, "b")
    folder_of(tmp_path, "a", 'schema_version = "1.1"\n[environment]\ncpus = 1\n')
    (tmp_path / "notes").mkdir()
    found = read_problems(tmp_path, "math").problems
    assert [(problem.id, problem.question, problem.answer) for problem in found] == [
        (name, "Write 2 + 2 into /app/answer.", f"{tmp_path}/{name}") for name in "ab"
    ]


@pytest.mark.parametrize(
    ("toml", "gone", "expected"),
    [
        ("[", "", "sum: task.toml is invalid"),
        ("", "tests/test.sh", "sum: it has no tests/test.sh"),
        ("", "instruction.md", "sum: it has no instruction.md"),
        ("", "environment/Dockerfile", "neither environment/Dockerfile nor environment.docker_image"),
        ("[environment]\ngpus = 1", "", "environment.gpus is 1, which is unsupported"),
        ('[environment]\nnetwork_mode = "allowlist"', "", "environment.network_mode is 'allowlist'"),
        ('[verifier.env]\nKEY = "${KEY:-none}"', "", "default of the variable KEY"),
        ('[[steps]]\nname = "one"', "", "it has several steps"),
        ('[verifier]\nenvironment_mode = "separate"', "", "needs a container of its own"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused(tmp_path: Path, toml: str, gone: str, expected: str) -> None:
    task = folder_of(tmp_path, toml=toml)
    if gone:
        (task / gone).unlink()
    with pytest.raises(ValueError, match=expected):
        read_problems(tmp_path, "math")


def played(folder: Path, task: Path, *agent: str, **more: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the command on this task; return the finished process and the calls of Docker."""
    (binaries := folder / "bin").mkdir()
    (binaries / "docker").write_text(f"#!{sys.executable}\n{DOCKER}")
    (binaries / "docker").chmod(0o755)
    (folder / "agent.py").write_text(AGENT)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "FAKE_DOCKER": str(folder), **more}
    words = [sys.executable, "-m", "marsrl.rollout.tasks.harbor", sys.executable, folder / "agent.py", *agent]
    problem = json.dumps({"id": task.name, "question": "?", "answer": str(task), "purpose": "train"})
    done = subprocess.run(words, input=problem, env=environment, capture_output=True, text=True, start_new_session=True)
    return done, (folder / "log").read_text()


@pytest.mark.parametrize(("answer", "reward"), [("4", 1.0), ("5", 0.25)])
def test_the_verifier_judges_what_the_program_left(tmp_path: Path, answer: str, reward: float) -> None:
    environment = "[environment]\ncpus = 2\nmemory_mb = 64\ngpus = 0\nworkdir = '/app'\nenv = {A = 'b'}\n"
    task = folder_of(tmp_path / "tasks", toml=f"{environment}[agent]\ntimeout_sec = 30\n")
    done, calls = played(tmp_path, task, answer, "0", "0")
    assert done.returncode == 0 and float(done.stdout.splitlines()[-1]) == reward, done.stderr
    assert (
        "build -q -t marsrl-harbor-" in calls
        and "--cpus=2 --memory=64m --workdir=/app -eA=b --entrypoint sleep" in calls
    )
    assert calls.splitlines()[-1].startswith("rm -f marsrl-harbor-")


def test_a_program_that_takes_too_long_is_ended_and_judged(tmp_path: Path) -> None:
    task = folder_of(tmp_path / "tasks", toml='[environment]\ndocker_image = "debian:12"\n[agent]\ntimeout_sec = 3\n')
    done, calls = played(tmp_path, task, "4", "600", "0")
    assert done.returncode == 0 and done.stdout == "1.0\n" and "build" not in calls, done.stderr


@pytest.mark.parametrize(
    ("test", "code", "down", "expected"),
    [
        ("true", "0", "", "neither /logs/verifier/reward.json nor"),
        ("echo nan > /logs/verifier/reward.txt", "0", "", "expected a reward"),
        (
            "echo 1 > /logs/verifier/reward.txt; echo '{}' > /logs/verifier/reward.json",
            "0",
            "",
            "reward.json; expected a",
        ),
        (TEST, "7", "", "ended with code 7"),
        (TEST, "0", "1", "need Docker, which does not run here"),
    ],
)
def test_without_a_reward_the_session_fails(tmp_path: Path, test: str, code: str, down: str, expected: str) -> None:
    done, calls = played(tmp_path, folder_of(tmp_path / "tasks", test=test), "4", "0", code, FAKE_DOWN=down)
    assert done.returncode == 1 and expected in done.stderr and done.stdout == "", (done.stdout, done.stderr)
    assert bool(down) or calls.splitlines()[-1].startswith("rm -f ")
