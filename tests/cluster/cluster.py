"""Training in a Box: ranks on its first two hosts, engines on those that lend themselves, files on the shared disk."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from box import SHARED, Box, Host
from books import Loss, check_books
from desk import boxing_model

from marsrl.trainer.report.metrics import MetricsRow, read_metrics
from marsrl.trainer.runs.directory import RunDirectory

GROUP_SIZE = 4
SILENCE_S = 25.0  # of run.silence_s: longer than the cut, and a host's death is told within a minute
START_S, STEP_S = 300.0, 120.0  # on a machine that does other things, too
# Small, in float32, on one thread; a stage has some seconds of decoding, in which a fault can strike.
SETTINGS = (
    "task=math", f"'policies.main={{model: {SHARED}/model, dtype: float32, optimizer: {{lr: 0.001}}}}'",
    f"data.train={SHARED}/problems.jsonl", "rollout.engine=local", "rollout.threads=1", "rollout.prompts_per_step=3",
    f"rollout.group_size={GROUP_SIZE}", "rollout.max_response_tokens=40", "rollout.vllm.max_num_seqs=2",
    "rollout.deadline_s=100", "trainer.threads=1", "run.evaluate=false", "run.checkpoint_every=1",
    f"run.silence_s={SILENCE_S:g}", f"run.dir={SHARED}/runs",
)  # fmt: skip
BY_FILES = (f"sync.directory={SHARED}",)
BY_WIRE = ("sync.backend=nccl", "sync.cpu_twin=true")


def fill(box: Box) -> None:
    """A model and problems on the shared disk: answers are right or wrong by a coin, so that there is something to learn."""
    boxing_model(box.shared / "model")
    problems = [{"question": f"What is 7, asked for the {i}th time?", "answer": "7"} for i in range(60)]
    (box.shared / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in problems))


@dataclass
class Training:
    """A run whose ranks were started on hosts of a box. processes: torchrun of each, by the host's name."""

    box: Box
    directory: RunDirectory
    logs: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def rows(self) -> list[MetricsRow]:
        return read_metrics(self.directory.metrics) if self.directory.metrics.exists() else []

    def step(self) -> int:
        """The last one in metrics.jsonl; its checkpoint is written."""
        rows = self.rows()
        return rows[-1].step if rows else 0

    def output(self, host: str) -> str:
        return (self.logs / f"{self.directory.path.name}-{host}.log").read_text(errors="replace")

    def said(self, host: str) -> str:
        """The last line of ours on that host's console."""
        ours = [line for line in self.output(host).splitlines() if line.startswith("marsrl: ")]
        return ours[-1] if ours else ""

    def until(self, step: int, limit_s: float = START_S) -> None:
        """Until this step is trained.

        Raises:
            Loss: the run ended before, or took longer.
        """
        end = time.monotonic() + limit_s
        while self.step() < step:
            for host, process in self.processes.items():
                if process.poll() is not None:
                    raise Loss(f"{host} ended with {process.poll()} before step {step}:\n{self.output(host)[-4000:]}")
            if time.monotonic() > end:
                raise Loss(f"step {step} was not trained in {limit_s:.0f} s:\n{self.output('host1')[-4000:]}")
            time.sleep(0.05)

    def into_a_stage(self) -> int:
        """Until the engines decode: a step has just ended, and the next begins with a stage of seconds. The step that ended."""
        step = self.step()
        self.until(step + 1, STEP_S)
        time.sleep(0.5)
        return step + 1

    def ended(self, limit_s: float, *, hosts: Sequence[str] = ()) -> dict[str, int]:
        """Exit codes of torchrun on these hosts (none given: on all), which end by themselves within limit_s."""
        end, codes = time.monotonic() + limit_s, {}
        for host in hosts or self.processes:
            try:
                codes[host] = self.processes[host].wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Loss(f"{host} still runs after {limit_s:.0f} s:\n{self.output(host)[-4000:]}") from None
        return codes

    def check(self) -> None:
        """Nothing was lost, nothing trained twice."""
        check_books(self.directory, GROUP_SIZE)


def train(box: Box, name: str, logs: Path, *settings: str, hosts: int, ranks: int) -> Training:
    """Start `ranks` ranks on each of the first hosts, as docs/clusters.md says."""
    run = Training(box, RunDirectory(box.shared / "runs" / name), logs)
    for number, host in enumerate(box.hosts[:hosts]):
        nodes = f"--nnodes {hosts} --node-rank {number} --master-addr {box.hosts[0].name} " if hosts > 1 else ""
        words = " ".join([*SETTINGS, f"run.name={name}", *settings])
        command = f"torchrun {nodes}--nproc-per-node {ranks} trainer/main.py {words}"
        run.processes[host.name] = host.start(command, logs / f"{name}-{host.name}.log")
    return run
