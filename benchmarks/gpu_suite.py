"""Everything that one GPU can tell about marsrl, in one command and under 9 minutes.

    python benchmarks/gpu_suite.py [--out DIR] [--wheels DIR] [--quick] [--device cuda|cpu]

Builds the native libraries, runs the GPU tests, every benchmark with the peers that are there, a short MarsRL run with
the local engine, and the profiler. Needs torch >= 2.11, triton >= 3.6, numpy and nvcc, no network and no installation;
--wheels adds packages (megatron-core, config libraries, peers, pytest). What cannot run is listed with the missing
module. Each part is a process of its own with a time limit (on a GPU); report.md and suite.json are written after each.
--device cpu --quick goes the same way with tiny sizes on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from namespace import ROOT, folder_with_marsrl
from native import compiler_of
from wheels import importable

HERE = Path(__file__).resolve().parent
TOTAL_S = 520.0
KILL_AFTER_S = 5.0
TRAINING_MODULES = (
    "pydantic", "omegaconf", "yaml", "rich", "safetensors", "tokenizers", "transformers", "megatron.core", "msgpack",
    "psutil", "zstandard", "tensorboard", "jinja2", "einops",
)  # fmt: skip
CASES = (
    "linear_logprob", "policy_rows", "policy_loss", "attention_varlen", "attention_decode", "grouped_linear",
    "group_advantage", "mpt_gate", "packing",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One process of the suite. modules: must be importable, else the part is skipped and they are named."""

    name: str
    command: list[str]
    limit_s: float
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """status: ok, failed, timeout or skipped; reason: in words unless ok."""

    name: str
    status: str
    seconds: float
    reason: str = ""


def parts(device: str, is_quick: bool, out: Path, work: Path) -> list[Part]:
    """In order of importance: what the time does not suffice for is at the end."""
    python, quick = sys.executable, ["--quick"] if is_quick else []
    gpu = device == "cuda"
    found = [Part("build cpu", [python, str(HERE / "native.py"), "cpu"], 90)]
    if gpu:
        found.append(Part("build cuda", [python, str(HERE / "native.py"), "cuda"], 150))

    def bench(case: str, limit_s: float, *more: str) -> Part:
        words = [str(HERE / "run.py"), case, "--device", device, "--json", str(out / f"{case}.json"), *quick, *more]
        return Part(f"benchmark {case}", [python, *words], limit_s)

    memory = [] if gpu else ["--no-memory"]  # on a CPU it takes a process for each table
    found.append(bench("linear_policy_loss", 170, "--budget", "8", "--rounds", "2" if is_quick else "7", *memory))
    which = ["tests/kernels", "-m", "gpu"] if gpu else ["tests/kernels/test_mpt_gate.py", "-m", "not gpu"]
    found.append(Part("tests", [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which], 100, ("pytest",)))
    found.append(
        Part("training", [python, str(HERE / "gpu_suite.py"), "--training-in", str(work)], 90, TRAINING_MODULES)
    )
    model = "qwen3_30b_a3b_slice" if gpu and not is_quick else "slice_tiny"
    step = [str(HERE / "train_step.py"), "--model", model, "--no-dmmpt", "--json", str(out / "train_step.json")]
    found.append(Part("train step", [python, *step, "--repeats", "1" if is_quick else "3"], 200, TRAINING_MODULES))
    profiler = [str(HERE / "profile_top.py"), "--device", device, "--json", str(out / "profile.json"), *quick]
    found.append(Part("profile", [python, *profiler], 45))
    found += [bench(case, 45, "--budget", "3", *memory) for case in CASES]
    return found


def run_part(part: Part, environment: dict[str, str], out: Path, limit_s: float | None) -> Outcome:
    """Runs it with its output in out/<name>.log; a part that takes too long is ended with all its children.

    limit_s: None where it may take as long as it takes (on a CPU, whose time is not lent).
    """
    missing = missing_modules(part.modules, environment)
    if missing:
        return Outcome(part.name, "skipped", 0.0, f"missing module {', '.join(missing)}")
    if limit_s is not None and limit_s <= 0:
        return Outcome(part.name, "skipped", 0.0, f"the {TOTAL_S:.0f} s of the suite are over")
    log = out / f"{part.name.replace(' ', '_')}.log"
    start = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            part.command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return Outcome(part.name, "timeout", limit_s or 0.0, f"ended after {limit_s:.0f} s, see {log.name}")
    seconds = time.monotonic() - start
    if part.name == "tests" and code == 5:
        return Outcome(part.name, "skipped", seconds, "no test has the marker")
    if code:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:] or ["no output"]
        return Outcome(part.name, "failed", seconds, f"exit code {code}: {last[0][:200]}; see {log.name}")
    return Outcome(part.name, "ok", seconds)


def missing_modules(names: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    """Those that a child process with this environment cannot find."""
    if not names:
        return []
    lines = [
        "import importlib.util, sys",
        "def lacks(name):",
        "    try: return importlib.util.find_spec(name) is None",
        "    except ModuleNotFoundError: return True",
        "print(' '.join(name for name in sys.argv[1:] if lacks(name)))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *names], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.split()


def train(work: Path) -> int:
    """A short run from random weights: arithmetic, the local engine in the trainer's process, through torchrun."""
    from marsrl.trainer.models.init_model import init_model

    init_model("cpu_default", "arithmetic", work / "model", seed=0, dtype="float32")
    settings = [
        f"policies.main.model={work / 'model'}", "rollout.engine=local", "rollout.placement=local", "run.steps=3",
        "run.evaluate=false", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_response_tokens=24",
        f"run.dir={work / 'runs'}", "run.name=suite",
    ]  # fmt: skip
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        str(ROOT / "trainer" / "main.py"),
    ]
    done = subprocess.run([*launcher, *settings])
    metrics = work / "runs" / "suite" / "metrics.jsonl"
    print(metrics.read_text() if metrics.exists() else f"{metrics} was not written", flush=True)
    return done.returncode


def report(out: Path, outcomes: list[Outcome], device: str) -> None:
    """report.md for people, suite.json for programs."""
    lines = [f"# marsrl on {device}", "", "| part | status | s | |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.status} | {each.seconds:.0f} | {each.reason} |" for each in outcomes]
    tables = []
    for file in sorted(out.glob("*.json")):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and "surroundings" in content:
            tables += content["tables"]
            where = content["surroundings"]
            lines[0] = f"# marsrl on {where['device']}, commit {where['commit']}"
    for table in tables:
        lines += ["", *_markdown(table)]
    profiled = out / "profile.json"
    if profiled.exists():
        for entry in json.loads(profiled.read_text()):
            lines += [
                "",
                f"## Top kernels of linear_policy_loss: {entry['shape']}",
                "",
                "| ms | share | launches | kernel |",
            ]
            lines += ["|---|---|---|---|"]
            lines += [
                f"| {k['milliseconds']:.3f} | {k['share']:.1%} | {k['launches']:.1f} | `{k['name'][:90]}` |"
                for k in entry["kernels"]
            ]
    if (out / "train_step.json").exists():
        lines += ["", *_train_step(json.loads((out / "train_step.json").read_text()))]
    (out / "report.md").write_text("\n".join(lines) + "\n")
    record = {"parts": [dataclasses.asdict(each) for each in outcomes], "tables": tables}
    (out / "suite.json").write_text(json.dumps(record, indent=1) + "\n")


def _train_step(record: dict[str, Any]) -> list[str]:
    lines = [
        f"## A training step of {record['model']}",
        "",
        "| | ranks | tokens/s | s | MFU | extra MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in record["results"]["DMMPT off"]["rows"].items():
        if "problem" in row:
            lines.append(f"| {name} | {row['problem']} | | | | |")
            continue
        median = sorted(row["seconds"])[len(row["seconds"]) // 2]
        lines.append(
            f"| {name} | {row['ranks']} | {row['tokens'] / median:,.0f} | {median:.3f} | {row['mfu']:.1%} "
            f"| {row['extra_bytes'] / 2**20:,.0f} |"
        )
    return lines


def _markdown(table: dict[str, Any]) -> list[str]:
    sizes = ", ".join(f"{name} {value}" for name, value in table["shape"].items() if value and name != "device")
    lines = [f"## {table['case']}: {sizes}", ""]
    lines += [
        f"GEMM {table['gemm_flops'] / 1e12:.1f} TFLOP/s, copy {table['copy_bytes'] / 1e9:.0f} GB/s, measured here."
    ]
    if table["failure"]:
        return [*lines, "", f"Wrong, so nothing was measured: {table['failure']}"]
    lines += [
        "",
        "| | ms | spread | x ours | roofline | extra MiB | largest error | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table["rows"]:
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:,.0f}"
        error = f"{max(row['errors'].values()):.1e}" if row["errors"] else "-"
        lines.append(
            f"| {row['name']} | {row['median_s'] * 1e3:.3f} | {row['spread']:.0%} | {row['over_ours']:.2f} "
            f"| {row['floor_share']:.0%} | {extra} | {error}{'' if row['is_right'] else ' !'} | {row['does']} |"
        )
    return lines + [f"\n{name}: skipped, {reason}" for name, reason in table["skipped"].items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_suite"), help="folder for report, JSON and logs")
    parser.add_argument("--wheels", type=Path, help="folder of wheels or of unpacked wheels to import from")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose name holds one of these words")
    parser.add_argument("--training-in", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.training_in:
        return train(words.training_in)
    out: Path = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="marsrl-suite-") as temporary:
        work = Path(temporary)
        try:
            found = importable(words.wheels.resolve(), work) if words.wheels else []
        except ValueError as error:
            parser.error(str(error))
        paths = [str(folder_with_marsrl(work / "namespace")), *map(str, found)]
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited]), "HF_HUB_OFFLINE": "1"}
        if words.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        print(f"nvcc: {compiler_of('cuda')}; cmake: {shutil.which('cmake')}; results in {out}", flush=True)
        chosen = parts(words.device, words.quick, out, work)
        if words.only:
            chosen = [part for part in chosen if any(word in part.name for word in words.only)]
        start, outcomes = time.monotonic(), []
        for part in chosen:
            left = min(part.limit_s, TOTAL_S - (time.monotonic() - start)) if words.device == "cuda" else None
            outcome = run_part(part, environment, out, left)
            outcomes.append(outcome)
            print(f"{outcome.status:8} {outcome.seconds:6.1f} s  {outcome.name}  {outcome.reason}", flush=True)
            report(out, outcomes, words.device)
    print(f"{(out / 'report.md')}: {time.monotonic() - start:.0f} s")
    return 1 if any(outcome.status in ("failed", "timeout") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
