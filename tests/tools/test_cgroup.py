"""A call's processes are bounded together where a cgroup can be made, and where none can the warning says why."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from marsrl.rollout.tools.config import PythonTool
from marsrl.rollout.tools.python import cgroup as cgroup_module
from marsrl.rollout.tools.python.cgroup import find_cgroups
from marsrl.rollout.tools.python.tool import PythonInterpreter

CONFIG = PythonTool(strict=False, warm=1, memory_mib=128, tmp_mib=16, processes=4, wall_s=30.0, timeout_s=60.0)
CONTROLLED = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max")


class Kernel:
    """What a kernel does with folders of cgroups, below a folder of ours: a stand-in, where this machine's cannot be written."""

    def __init__(self, root: Path) -> None:
        self.root, self.giving, self.refusing = root, set[Path](), set[Path]()
        self.limits: list[dict[str, str]] = []  # of those that were removed

    def mkdir(self, path: Path) -> None:
        if path.parent in self.refusing:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        Path(path).mkdir()
        for name in ("cgroup.procs", *(CONTROLLED if path.parent in self.giving else ())):
            (path / name).touch()

    def rmdir(self, path: Path) -> None:
        self.limits.append({name: (path / name).read_text() for name in CONTROLLED if (path / name).exists()})
        shutil.rmtree(path)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The trainer is in /session/trainer."""
    made = Kernel(tmp_path)
    (tmp_path / "session" / "trainer").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "session", tmp_path / "session" / "trainer"):
        (folder / "cgroup.controllers").write_text("memory pids")
        (folder / "cgroup.subtree_control").touch()
    (tmp_path / "own").write_text("1:name=systemd:/old\n0::/session/trainer\n")
    monkeypatch.setattr(cgroup_module, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroup_module, "_OWN", tmp_path / "own")
    folders = SimpleNamespace(**{**vars(os), "mkdir": made.mkdir, "rmdir": made.rmdir})  # of that file alone
    monkeypatch.setattr(cgroup_module, "os", folders)
    return made


def test_an_interpreter_has_a_cgroup_of_its_own_with_the_call_s_limits(kernel: Kernel) -> None:
    session = kernel.root / "session"
    kernel.giving = {session}  # the trainer's own has processes, and gives no controllers
    cgroups, reason = find_cgroups(CONFIG)
    assert cgroups is not None and not reason and cgroups.parent == session
    whole = {"memory.max": str(144 << 20), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "8"}
    assert kernel.limits[-1] == whole
    one, other = cgroups.make(), cgroups.make()
    assert {one.path, other.path} == set(session.glob("marsrl-*"))
    done = subprocess.run([*one.entering, "echo", "$HOME", "a b"], capture_output=True, text=True)
    # 0: the process that writes
    assert done.stdout == "$HOME a b\n" and (one.path / "cgroup.procs").read_text() == "0\n"
    one.end()
    other.end()
    assert not list(session.glob("marsrl-*"))


def test_where_none_can_be_made_the_warning_says_why_and_what_holds_instead(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    session = kernel.root / "session"
    kernel.refusing = {session}
    with caplog.at_level(logging.WARNING):
        PythonInterpreter(CONFIG).close()
    said = caplog.text
    assert re.search(
        r"no cgroup bounds a call as a whole \(.*trainer.*memory.max.*; .*session: .*Permission denied", said
    )
    assert "a call may take 4 times 128 MiB" in said
    assert not list(kernel.root.rglob("marsrl-*"))


def test_what_a_killed_trainer_left_is_removed_and_a_living_one_s_is_not(kernel: Kernel) -> None:
    session = kernel.root / "session"
    kernel.giving = {session}
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, used = (session / f"marsrl-python-{pid}-3" for pid in (dead.pid, os.getppid()))
    for path in (left, used):
        kernel.mkdir(path)
    assert find_cgroups(CONFIG)[0] is not None
    assert used.exists() and not left.exists()


def test_the_processes_of_a_call_together_have_one_memory() -> None:
    cgroups, reason = find_cgroups(CONFIG)
    if cgroups is None:
        pytest.skip(f"this machine has no cgroup for it: {reason}")
    tool = PythonInterpreter(CONFIG)
    try:
        code = "import os, time\nfor _ in range(2):\n    if not os.fork(): break\nheld = b'x' * (70 << 20)\ntime.sleep(20)\n1"
        assert "memory ran out" in tool.run({"code": code})
        assert tool.run({"code": json.dumps(1)}) == "1"
    finally:
        tool.close()
