"""Tasks in Harbor's folder format, played by an external program and judged by their verifiers (docs/external.md).

    external: {command: [python, -m, marsrl.rollout.tasks.harbor, python, my_agent.py]}

For each session, `main` starts a container of the task's image, runs the program on the host with its name in HARBOR_CONTAINER,
runs the task's verifier in the container, and prints the reward. Format: https://www.harborframework.com/docs/tasks (schema 1.x).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from marsrl.rollout.types import Problem

_REWARDS = "/logs/verifier/reward"
# Text that marks leaked benchmarks; not part of the instruction.
_CANARY = re.compile(r"\A(?:\s*(?:<!--|#)[^\n]*canary[^\n]*\n)+", re.IGNORECASE)
_TIMEOUT_S, _BUILD_S = 600.0, 600.0  # Harbor's defaults
_SUPPORTED = {
    "docker_image",
    "build_timeout_sec",
    "cpus",
    "memory_mb",
    "allow_internet",
    "network_mode",
    "workdir",
    "env",
}
_SUPPORTED |= {"storage_mb"}  # accepted but not applied, because Docker's usual storage cannot limit a single container
_SPARE_S = 300  # a container ends by itself this many seconds after its timeouts, in case its session was killed
_MOST_SHOWN = 2000


def harbor_problems(folder: Path, task: str) -> list[Problem]:
    """Return the problems of a folder of tasks, in order of their names; [] if it holds none.

    A problem's id is the name of its task's folder, and its answer the folder's path. ValueError: a task cannot be played.
    """
    folders = sorted(path.parent for path in folder.glob("*/task.toml"))
    return [Problem(path.name, _instruction(path), str(path.absolute()), task) for path in folders]


def _instruction(folder: Path) -> str:
    for why in _why_not(folder):
        raise ValueError(f"{folder}: {why}; remove the task, or run it with Harbor's own command")
    text = _CANARY.sub("", (folder / "instruction.md").read_text("utf-8")).strip()
    if not text:
        raise ValueError(f"{folder}/instruction.md is empty; expected the instruction for the agent")
    return text


def _why_not(folder: Path) -> Iterator[str]:
    """Yield the reasons why a task cannot be played."""
    try:
        settings = _settings(folder)
    except ValueError as error:
        yield f"task.toml is invalid: {error}"
        return
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    if settings.get("steps") or (folder / "steps").exists():
        yield "it has several steps; expected one"
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            yield f"it has no {name}"
    if list((folder / "environment").glob("docker-compose.y*ml")):
        yield "its environment has several containers (docker-compose.yaml); expected a Dockerfile or environment.docker_image"
    elif "docker_image" not in environment and not (folder / "environment/Dockerfile").is_file():
        yield "it has neither environment/Dockerfile nor environment.docker_image"
    for name, value in environment.items():
        if value and name not in _SUPPORTED:
            yield f"environment.{name} is {value!r}, which is unsupported"
    if (mode := environment.get("network_mode", "public")) not in ("public", "no-network"):
        yield f"environment.network_mode is {mode!r}; expected public or no-network"
    for name, value in {**environment.get("env", {}), **verifier.get("env", {})}.items():
        if ":-" in str(value):
            yield f"the default of the variable {name} (:-) is unsupported; write the value itself"
    if verifier.get("environment_mode", "shared") != "shared" or "environment" in verifier:
        yield "its verifier needs a container of its own; expected verifier.environment_mode = shared"


def _settings(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "task.toml").read_text("utf-8"))


def _docker(*words: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *words], capture_output=True, text=True, errors="replace", timeout=timeout_s)


def _checked(*words: str, timeout_s: float | None = None) -> str:
    if (done := _docker(*words, timeout_s=timeout_s)).returncode:
        raise RuntimeError(f"docker {words[0]} fails: {done.stderr.strip()[-_MOST_SHOWN:]}")
    return done.stdout


def _image(folder: Path, environment: dict[str, Any]) -> str:
    if "docker_image" in environment:
        return str(environment["docker_image"])
    name = f"marsrl-harbor-{hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()}"
    _checked(
        "build", "-q", "-t", name, f"{folder}/environment", timeout_s=environment.get("build_timeout_sec", _BUILD_S)
    )
    return name


def _play(words: Sequence[str], problem: dict[str, Any], container: str, timeout_s: float) -> None:
    """Run the program; RuntimeError if it fails. After timeout_s the program is ended, and its work so far is judged."""
    # The answer is withheld, since it is the path to the solution and the tests.
    given = json.dumps({**problem, "answer": None})
    environment = {**os.environ, "HARBOR_CONTAINER": container}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment, text=True)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(given, timeout=timeout_s)
    code = process.poll()
    os.killpg(0, signal.SIGTERM)  # processes of the program must not change its work while it is judged
    process.kill()
    process.wait()
    if code:
        raise RuntimeError(f"{words[0]} ended with code {code}")


def _reward(container: str) -> float:
    """Return the reward that the verifier wrote; RuntimeError if it is not a finite number."""
    for name in (f"{_REWARDS}.json", f"{_REWARDS}.txt"):
        if (read := _docker("exec", container, "cat", name)).returncode == 0:
            with suppress(ValueError, KeyError, TypeError):
                reward = float(json.loads(read.stdout)["reward"] if name.endswith("json") else read.stdout)
                if math.isfinite(reward):
                    return reward
            raise RuntimeError(f"the verifier wrote {read.stdout[:200]!r} into {name}; expected a reward")
    raise RuntimeError(f"the verifier wrote neither {_REWARDS}.json nor {_REWARDS}.txt; correct tests/test.sh")


def main(words: Sequence[str]) -> int:
    """Play the task of the problem on standard input with the program `words` (its command line), and print the reward."""
    if _docker_is_missing():
        print("tasks in Harbor's folders need Docker, which does not run here; start it", file=sys.stderr)
        return 1
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # marsrl's worker has already done this; it kills the group when the session ends
    signal.signal(signal.SIGTERM, lambda *_: None)  # unlike SIG_IGN, not inherited by the program
    problem = json.load(sys.stdin)
    folder = Path(problem["answer"])
    settings = _settings(folder)
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    agent_s = float(settings.get("agent", {}).get("timeout_sec", _TIMEOUT_S))
    verifier_s = float(verifier.get("timeout_sec", _TIMEOUT_S))
    container = f"marsrl-harbor-{secrets.token_hex(8)}"
    limits = [f"--cpus={environment['cpus']}"] if "cpus" in environment else []
    limits += [f"--memory={environment['memory_mb']}m"] if "memory_mb" in environment else []
    limits += [f"--workdir={environment['workdir']}"] if environment.get("workdir") else []
    if environment.get("allow_internet") is False or environment.get("network_mode") == "no-network":
        limits.append("--network=none")
    limits += _variables(environment)
    seconds = str(int(agent_s + verifier_s) + _SPARE_S)
    image = _image(folder, environment)
    _checked("run", "-d", "--rm", "--name", container, *limits, "--entrypoint", "sleep", image, seconds)
    try:
        _play(words, problem, container, agent_s)
        _checked("exec", "-u", "root", container, "sh", "-c", "rm -rf /tests /logs/verifier; mkdir -p /logs/verifier")
        _checked("cp", f"{folder}/tests", f"{container}:/tests")
        given = [f"-e{name}={os.path.expandvars(value)}" for name, value in verifier.get("env", {}).items()]
        # The verifier's reward counts, not its exit code.
        _docker("exec", *given, container, "bash", "/tests/test.sh", timeout_s=verifier_s)
        print(_reward(container))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{folder.name}: {error}", file=sys.stderr)
        return 1
    finally:
        _docker("rm", "-f", container)
    return 0


def _variables(section: dict[str, Any]) -> list[str]:
    return [f"-e{name}={os.path.expandvars(str(value))}" for name, value in section.get("env", {}).items()]


def _docker_is_missing() -> bool:
    try:
        return _docker("version").returncode != 0
    except FileNotFoundError:
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
