"""A rank that is killed takes the run down, by name, and nothing but the step is lost. One that falls silent, and a killed
torchrun: test_chaos.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scripted_pool import sevens

from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.manifest import damage

pytestmark = pytest.mark.slow


def alive(session: int) -> list[str]:
    """Commands of the processes that belong to a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended while we looked
            if int(its_session) == session and state != "Z":
                found.append(command)
    return found


def test_the_others_stop_and_the_last_checkpoint_is_whole(tmp_path: Path) -> None:
    """Until then rank 0 comes later than a collective waits to all that it does alone."""
    model = init_model("tiny", "bytes", tmp_path / "model")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("killed_rank_worker.py")), str(model)]
    command += [
        "task=math", f"policies.main.model={model}", "policies.main.dtype=float32", f"data.train={sevens(tmp_path)}",
        "rollout.engine=local", "rollout.prompts_per_step=1", "rollout.group_size=4", "rollout.max_response_tokens=120",
        "run.evaluate=false", f"run.dir={tmp_path}", "run.name=killed", "run.checkpoint_every=1", "run.steps=400",
        "trainer.threads=1",
    ]  # fmt: skip
    run = RunDirectory(tmp_path / "killed")
    broken = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    while (latest := run.latest_checkpoint()) is None or latest.step < 2:
        assert broken.poll() is None, broken.communicate()[0][-6000:]
        time.sleep(0.1)
    (victim,) = (child for child in psutil.Process(broken.pid).children() if child.environ().get("RANK") == "1")
    victim.kill()
    output, _ = broken.communicate(timeout=900)  # gloo alone would wait for half an hour
    assert broken.returncode != 0
    # torchrun's last words
    cause = output[output.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in cause and "SIGKILL" in cause, output[-6000:]
    assert alive(broken.pid) == []
    latest = run.latest_checkpoint()
    assert latest is not None and latest.step >= 2 and damage(latest.path) == [], output[-6000:]
