"""Training in a Box: ranks on its first hosts, engines on hosts that join, files on the shared disk."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from books import check_books, last_line
from box import ROOT, SHARED, Box, Host
from desk import boxing_model
from small_run import sevens

from marsrl.trainer.report.metrics import MetricsRow, read_metrics
from marsrl.trainer.runs.directory import RunDirectory

GROUP_SIZE = 4
START_S, STEP_S = 400.0, 200.0  # allows for other load
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{SHARED}/auth_token"}
# A small float32 model on one thread. A stage decodes for seconds, so that a fault can strike during it.
SETTINGS = {
    "task": "math",
    "policies": {"main": {"model": f"{SHARED}/model", "dtype": "float32", "optimizer": {"lr": 0.001}}},
    "data": {"train": f"{SHARED}/problems.jsonl"},
    "rollout": {
        "engine": "local", "threads": 1, "prompts_per_step": 3, "group_size": GROUP_SIZE, "max_response_tokens": 40,
        "local": {"max_num_seqs": 2}, "deadline_s": 200.0, "ray_address": "here",
    },
    "trainer": {"threads": 1},
    "run": {"evaluate": False, "checkpoint_every": 1, "dir": f"{SHARED}/runs"},
}  # fmt: skip
ALONE = "trainer/main.py --config /mnt/cluster/run.yaml rollout.ray_address=null rollout.placement=local"
BY_FILES = (f"sync.directory={SHARED}",)
BY_WIRE = ("sync.backend=nccl", "sync.cpu_twin=true")
# A run whose sessions a program plays, in workers that join host1.
PROGRAM = (
    "orchestration=external", "external={workers: 0, host: host1, port: 8765, key_env: MARSRL_WORKER_KEY}",
    "agents={solver: {}}", "run.steps=1000",
)  # fmt: skip
WORKERS_KEY = {"MARSRL_WORKER_KEY": "between these hosts"}
_PROGRAM = """
import time

def run(problem, client):
    text = client.chat("solver", [problem.question]).text
    time.sleep(0.5)
    return float("7" in text)
"""
# Metrics that may differ although two runs train the same: times, weight transfers, number of engines, rounding errors, and
# experts' loads, because rounding can decide between two nearly equal experts.
_OWN = (
    "timing_s/",
    "latency_s/",
    "perf/",
    "sync/",
    "train_rollout/",
    "rollout/tokens_per_s",
    "rollout/engines/",
    "router/",
)
_SUMS = ("actor/", "mpt/")  # float32 numbers are added in another order; measured differences are at most 2.3e-5
_SUMS_DIFFER = 2e-4


def goes_on(name: str) -> str:
    """Return a pattern for the end of a run's last line, which names the checkpoint and how to resume from it."""
    folder = f"{SHARED}/runs/{name}/checkpoints"
    return rf"checkpoint {folder}/step_\d+ \(step \d+\) is intact: resume by adding run\.name={name} run\.resume=auto"


def fill(box: Box) -> None:
    """Write the shared disk's files. The model's answers are right only by chance, so training can improve them."""
    boxing_model(box.shared / "model")
    sevens(box.shared, 60, name="problems.jsonl")
    (box.shared / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    (box.shared / "program.py").write_text(_PROGRAM)
    (box.shared / "auth_token").write_text(secrets.token_hex(32))


def lend(host: Host, command: str, logs: Path) -> subprocess.Popen[bytes]:
    """Run `ray start` in the loop that docs/clusters.md shows; the host offers one core, for one engine."""
    loop = f"while sleep 1; do {command} --num-cpus=1; done"
    return host.start(f"bash -c {shlex.quote(loop)}", logs / f"join-{host.name}.log", **TOKEN)


def play(host: Host, logs: Path) -> subprocess.Popen[bytes]:
    """Start the host's worker, which plays the program's sessions."""
    words = f"--url http://host1:8765 --function {SHARED}/program.py:run --most 4"
    return host.start(f"python rollout/gateway/worker.py {words}", logs / f"worker-{host.name}.log", **WORKERS_KEY)


@dataclass
class Training:
    """A run whose ranks were started on hosts of a box. processes: launchers by host name."""

    directory: RunDirectory
    logs: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def rows(self) -> list[MetricsRow]:
        return read_metrics(self.directory.metrics) if self.directory.metrics.exists() else []

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        rows = self.rows()
        return rows[-1].step if rows else 0

    def output(self, host: str) -> str:
        return (self.logs / f"{self.directory.path.name}-{host}.log").read_text(errors="replace")

    def said(self, host: str) -> str:
        """Return marsrl's last line on that host's console."""
        return last_line(self.output(host))

    def until(self, step: int, limit_s: float = START_S) -> None:
        """Wait until this step is trained."""
        end = time.monotonic() + limit_s
        while self.step() < step:
            for host, process in self.processes.items():
                assert process.poll() is None, f"ended before step {step}:\n{self.output(host)[-4000:]}"
            assert time.monotonic() < end, f"step {step} was not trained:\n{self.output('host1')[-4000:]}"
            time.sleep(0.05)

    def into_a_stage(self) -> int:
        """Wait until the engines decode: a step has just ended, and the next one decodes for seconds. Return the step that
        ended.
        """
        step = self.step() + 1
        self.until(step)
        time.sleep(0.5)
        return step

    def ended(self, limit_s: float, *hosts: str) -> dict[str, int]:
        """Wait for the launchers of these hosts (default: all), and return their exit codes by host."""
        end = time.monotonic() + limit_s
        return {host: self.processes[host].wait(max(0.0, end - time.monotonic())) for host in hosts or self.processes}

    def check(self) -> None:
        """Check that nothing was lost and nothing trained twice."""
        check_books(self.directory, GROUP_SIZE)


def train(box: Box, command: str, name: str, logs: Path, *words: str, ranks: int, **environment: str) -> Training:
    """Start a torchrun command of docs/clusters.md on the first hosts, as many as its --nnodes.

    Each host gets `ranks` ranks, and its number in place of the word N.
    """
    run = Training(RunDirectory(box.shared / "runs" / name), logs)
    given = shlex.split(command)
    num_hosts = int(given[given.index("--nnodes") + 1]) if "--nnodes" in given else 1
    for number, host in enumerate(box.hosts[:num_hosts]):
        filled = [str(number) if word == "N" else word for word in given]
        filled[filled.index("--nproc-per-node") + 1] = str(ranks)
        line = shlex.join([*filled, f"run.name={name}", *words])
        run.processes[host.name] = host.start(line, logs / f"{name}-{host.name}.log", **TOKEN, **environment)
    return run


def submit(box: Box, name: str, logs: Path, *words: str, trainers: int, ranks: int) -> Training:
    """Run docs/slurm.sh as Slurm would, with stand-ins for `srun` and `scontrol` that know the hosts of the box."""
    tools = logs / "slurm"
    tools.mkdir()
    enter = "\n".join(f"{host.name}) enter='{shlex.join(host.enter)}';;" for host in box.hosts)
    for tool, script in (
        ("scontrol", f"echo {' '.join(host.name for host in box.hosts)} | tr ' ' '\\n'"),
        ("srun", _SRUN.format(enter=enter)),
    ):
        (tools / tool).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tools / tool).chmod(0o755)
    environment = {**box.hosts[0].environment, **TOKEN, "TRAINERS": str(trainers), "RANKS": str(ranks)}
    environment |= {"PATH": f"{tools}:{environment['PATH']}", "SLURM_JOB_NODELIST": "host[1-3]"}
    script = ["docs/slurm.sh", "--config", f"{SHARED}/run.yaml", f"run.name={name}", *words]
    with open(logs / f"{name}-host1.log", "wb") as out:
        process = subprocess.Popen(
            script, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    return Training(RunDirectory(box.shared / "runs" / name), logs, {"host1": process})


_SRUN = """while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && nodes=${{1#*=}}; shift; done
number=0
for node in ${{nodes//,/ }}; do
  case $node in
{enter}
  esac
  SLURM_PROCID=$number $enter "$@" &
  number=$((number + 1))
done
trap 'kill $(jobs -p)' TERM
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status"""


def check_same(rows: Sequence[MetricsRow], others: Sequence[MetricsRow]) -> None:
    """Check that counts, rewards, lengths and advantages are bitwise equal, and the learner's sums equal within rounding."""
    for row, other in zip(rows, others, strict=True):
        for key in row.values.keys() | other.values.keys():
            if key.startswith(_OWN) or key.endswith("/seconds"):
                continue
            found, expected = other.values.get(key), row.values.get(key)
            if key.startswith(_SUMS) and expected is not None:
                expected = pytest.approx(expected, rel=_SUMS_DIFFER, abs=0)
            assert found == expected, f"step {row.step}: {key}"
