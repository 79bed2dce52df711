"""Two trainer hosts and an engine host in a box: what one host trains, by wire; then the power of rank 0's host goes off.

The rest of what a cluster does and suffers: `make cluster` (all_cases.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from box import SHARED, Box, why_not
from cluster import ALONE, BY_WIRE, fill, lend, same_metrics, train
from commands import run_by

if os.environ.get("MARSRL_BUILD") != "require":  # as .ci/run says it: there a machine without namespaces is an error
    pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no cluster in a box: {why_not()}")


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box(3) as box:
        yield box


def test_a_host_has_its_own_of_all_but_the_shared_folder(box: Box) -> None:
    first, second = box.hosts[:2]
    for host in (first, second):
        host.run("touch /tmp/mine /dev/shm/mine ~/mine /run/mine /mnt/cluster/ours-$(hostname)")
    seen = [host.run("hostname; ls /tmp /dev/shm ~ /run") for host in (first, second)]
    assert seen[0].startswith("host1\n") and seen[1] == seen[0].replace("host1", "host2") and seen[0].count("mine") == 4
    assert {path.name for path in box.shared.iterdir()} == {"ours-host1", "ours-host2"}
    for folder in ("/var/tmp", "/usr", ".", sys.prefix):
        with pytest.raises(RuntimeError, match="Read-only file system"):
            first.run(f"touch {folder}/mine")
    script = "import socket, sys; socket.create_connection((sys.argv[1], 7), 5)"
    with pytest.raises(RuntimeError, match="ConnectionRefusedError"):  # it is there, and nobody listens
        first.run(f"python -c '{script}' host2")
    second.cut_off()
    with pytest.raises(RuntimeError, match="No route to host|timed out"):
        first.run(f"python -c '{script}' host2")
    second.reconnect()
    second.power_off()
    assert box.replace(2).run("hostname; find /tmp /dev/shm /run -name mine") == "host2\n"  # another machine
    first.run("rm /mnt/cluster/*")


DIES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from box import Box
box = Box(1)
box.hosts[0].start("sleep 1000", "/dev/null")
print(box.hosts[0].holder.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_box_whose_process_was_killed() -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(Path(__file__).parent)], capture_output=True, text=True)
    first_process = Path(f"/proc/{int(done.stdout)}")
    end = time.monotonic() + 120
    while first_process.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not first_process.exists()  # and with the first one the kernel has ended all of its PID namespace


@pytest.mark.slow
def test_two_hosts_train_what_one_trains_and_name_the_host_that_is_gone(box: Box, tmp_path: Path) -> None:
    by_hand, join = run_by("test_two_hosts_train_what_one_trains_and_name_the_host_that_is_gone")
    fill(box)
    alone = train(box, f"torchrun --nproc-per-node 8 {ALONE}", "alone", tmp_path, "run.steps=3", ranks=1)
    assert alone.ended(1200) == {"host1": 0}, alone.output("host1")
    lend(box.hosts[2], join, tmp_path)
    words = ("policies.main.layout.tensor=2", "run.steps=100", "run.silence_s=12", *BY_WIRE)
    run = train(box, by_hand, "first", tmp_path, *words, ranks=1)
    run.until(3)
    assert "within" in same_metrics(alone.rows(), run.rows()[:3])
    box.hosts[0].power_off()
    struck = time.monotonic()
    assert run.ended(300, "host2") == {"host2": 1}
    took_s = time.monotonic() - struck
    assert took_s < 200, f"{took_s:.0f} s"
    assert re.fullmatch(
        r"marsrl: rank 1 stops: rank 0 \(host1, process \d+\) or its machine is gone: its store has not answered for "
        rf"run\.silence_s = 12 s; checkpoint {SHARED}/runs/first/checkpoints/step_\d+ \(step \d+\) is whole: go on with "
        r"run\.name=first run\.resume=auto, added to the same command",
        run.said("host2").replace(str(box.shared), str(SHARED)),
    ), run.output("host2")
    run.check()
