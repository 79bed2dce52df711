"""A rank that is killed or falls silent takes the run down, by name, and nothing but the step is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import RunLock

pytestmark = pytest.mark.slow


def start(folder: Path, *settings: str, kill_at: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("killed_rank_worker.py")), str(folder / "model")]
    command += [
        "task=math", f"policies.main.model={folder / 'model'}", "policies.main.dtype=float32",
        f"data.train={folder / 'train.jsonl'}", "rollout.engine=local", "rollout.prompts_per_step=1",
        "rollout.group_size=4", "rollout.max_response_tokens=120", "run.evaluate=false",
        f"run.dir={folder}", "run.name=killed", "run.checkpoint_every=1", "run.steps=4", "trainer.threads=1", *settings,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"KILL_AT": str(kill_at)} if kill_at is not None else {})
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


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


def test_the_others_stop_and_the_next_start_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    init_model("tiny", "bytes", tmp_path / "model")
    lines = [{"question": f"What is 7, asked for the {i}th time?", "answer": "7"} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    broken = start(tmp_path, kill_at=3)
    output, _ = broken.communicate(timeout=900)
    stopped = time.time()
    latest = tmp_path / "killed" / "checkpoints" / "latest"
    assert broken.returncode != 0
    assert latest.is_file() and latest.read_text().strip() == "step_2", output[-6000:]
    # torchrun's last words
    cause = output[output.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in cause and "SIGKILL" in cause, output[-6000:]
    assert alive(broken.pid) == []
    stopped_s = stopped - latest.stat().st_mtime
    # gloo alone would wait for half an hour
    assert stopped_s < 600, f"{stopped_s:.0f} s from the checkpoint before the step of its death, to the end"
    orphaned = start(tmp_path, "run.resume=auto", "run.steps=400")
    while latest.read_text().strip() == "step_2":
        assert orphaned.poll() is None, orphaned.communicate()[0][-6000:]
        time.sleep(0.1)
    with pytest.raises(ValueError, match="killed is being written by process [0-9]+ on "):
        RunLock(RunDirectory(tmp_path / "killed"))
    os.kill(orphaned.pid, signal.SIGKILL)  # torchrun alone: nobody stops its ranks
    output, _ = orphaned.communicate(timeout=900)  # ends when they have let go of its output
    assert "marsrl: interrupted; checkpoint " in output and "run.name=killed run.resume=auto" in output, output[-6000:]
    assert alive(orphaned.pid) == []
    before = latest.read_text()
    silent = start(tmp_path, "run.resume=auto", "run.steps=400", "run.silence_s=20")
    while latest.read_text() == before:
        assert silent.poll() is None, silent.communicate()[0][-6000:]
        time.sleep(0.1)
    (stopped_rank,) = (child for child in psutil.Process(silent.pid).children() if child.environ().get("RANK") == "1")
    stopped_rank.send_signal(signal.SIGSTOP)
    output, _ = silent.communicate(timeout=900)
    place = re.escape(f"({socket.gethostname()}, process {stopped_rank.pid})")
    why = f"silent for run.silence_s = 20 s: rank 1 {place}; checkpoint .* is whole: go on with run.name=killed run.resume=auto"
    assert re.search(f"marsrl: rank 0 stops: {why}", output), output[-6000:]
    assert re.search(f"marsrl: the run failed: RankLost: {why}", output), output[-6000:]
    # ended by rank 0: torchrun's SIGTERM does not reach it; which of the two torchrun calls the cause is a matter of a second
    ends = output[output.index("killed_rank_worker.py FAILED") :]
    assert re.search(r"rank      : 1 \(local_rank: 1\)\n\s*exitcode  : -9", ends), output[-6000:]
    assert alive(silent.pid) == []
    last = int(latest.read_text().strip().removeprefix("step_"))
    rows = read_metrics(tmp_path / "killed" / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, rows[-1].step + 1)) and rows[-1].step >= last
