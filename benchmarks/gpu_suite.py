"""Everything that one GPU can tell about marsrl, in one command and under 10 minutes.

    python benchmarks/gpu_suite.py [--out DIR] [--wheels DIR] [--quick] [--device cuda|cpu] [--commit NAME]

Is each op right, which GPU tests fail, how fast is the fused loss, do two steps of training run, do two processes share a
buffer by CUDA IPC, how fast are attention and grouped GEMM: these have their time however long each of them takes. Then the
other benchmarks, each of which is started only where its whole limit is left. Needs torch >= 2.11, triton >= 3.6, numpy and
g++, no network and no installation; --wheels adds packages (collect_wheels.py makes them). What cannot run is listed with the
missing module. Each part is a process of its own with a time limit (on a GPU), and a part that fails is recorded and the rest
goes on. On a GPU other processes fill Triton's cache until the first timed part. After each part --out holds report.md and
results.tar.gz, which has everything. --device cpu --quick goes the same way with tiny sizes on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_state import gpu_state
from namespace import ROOT, folder_with_marsrl
from suite_report import file_name, report
from wheels import importable

HERE = Path(__file__).resolve().parent
TOTAL_S = 560.0
KILL_AFTER_S = 5.0  # beyond its limit that a part may take to end
LAST_PROMISED = "grouped linear"  # the parts up to this one all have their time, however long each of them takes
UNTIMED = ("surroundings", "build", "smoke", "tests")  # beside these Triton's cache is filled
LOG_BYTES = 200_000  # of each log, its end: all of them together stay far below a megabyte once packed
TRAINING_MODULES = (
    "pydantic", "omegaconf", "yaml", "rich", "safetensors", "tokenizers", "transformers", "megatron.core", "msgpack",
    "psutil", "zstandard", "tensorboard", "jinja2", "einops",
)  # fmt: skip
HEADLINE = "T=16,384, H=2,048, V=151,936"  # all rows active, and half of them masked
OTHER_HEADS = ("T=1,024", "T=4,096", "T=65,536", "V=75,968", "V=37,984")
CASES = (
    "linear_logprob", "swiglu", "rms_norm", "attention_decode", "policy_loss", "group_advantage", "mpt_gate", "packing",
)  # fmt: skip
NEED_MORE_THAN_TORCH = ("tests/engines/test_checksum_and_layout.py", "tests/plan/test_memory.py")


@dataclass(frozen=True)
class Part:
    """One process of the suite. modules: must be importable, else the part is skipped and they are named."""

    name: str
    command: list[str]
    limit_s: float
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """status: ok, failed, timeout or skipped; reason: in words unless ok. compiled: kernels that Triton's cache lacked; None:
    not known, for others filled it meanwhile."""

    name: str
    status: str
    seconds: float
    reason: str = ""
    compiled: int | None = None


def parts(device: str, is_quick: bool, folder: Path, work: Path) -> list[Part]:
    """In order of importance: what the time does not suffice for is at the end. folder: for results, work: for the rest."""
    quick = ["--quick"] if is_quick else []
    gpu = device == "cuda"

    def script(name: str, limit_s: float, file: str, *more: str, modules: tuple[str, ...] = ()) -> Part:
        return Part(name, [sys.executable, str(HERE / file), *more], limit_s, modules)

    def bench(name: str, case: str, limit_s: float, *more: str) -> Part:
        memory = [] if gpu else ["--no-memory"]  # on a CPU it takes a process for each table
        words = ["--device", device, "--json", str(folder / f"{name.replace(' ', '_')}.json"), *quick, *memory, *more]
        words += ["--budget", "0.1"] if is_quick else []  # the last one counts
        return script(name, limit_s, "run.py", case, *words)

    def one_by_one(
        name: str, limit_s: float, each_s: float, file: str, *more: str, modules: tuple[str, ...] = ()
    ) -> Part:
        journal = ["--journal", str(folder / f"{name.replace(' ', '_')}.jsonl")]
        child = [sys.executable, str(HERE / file), *journal, *more]
        each_s = each_s if gpu else 20 * each_s  # a GPU that hangs is known; a CPU may be busy with something else
        return script(
            name, limit_s, "one_by_one.py", "--limit", f"{each_s:.0f}", *journal, "--", *child, modules=modules
        )

    def to(name: str, *more: str) -> list[str]:
        return ["--json", str(folder / f"{name}.json"), *more]

    rounds = ["--rounds", "2" if is_quick else "7"]
    headline = [] if is_quick else ["--shape", HEADLINE]
    tests = ["tests/kernels", "-m", "gpu"] if gpu else ["tests/kernels/test_mpt_gate.py", "-m", "not gpu"]
    tiny = [] if gpu and not is_quick else ["--tiny"]
    model = "slice_tiny" if tiny else "qwen3_30b_a3b_slice"
    engine = ["--engine", "local"] if is_quick else []
    step = ["--model", model, "--no-dmmpt", "--repeats", "1" if is_quick else "3"]
    shared_buffer = ["tests/engines/test_shared_buffer.py", "--noconftest", "-m", "gpu" if gpu else "not gpu"]
    return [
        script("surroundings", 20, "record.py", "--device", device, *to("surroundings")),
        script("build", 30, "native.py"),
        one_by_one("smoke", 75, 40, "smoke.py", "--device", device),
        one_by_one("tests", 100, 30, "gpu_tests.py", *tests, modules=("pytest",)),
        bench("headline", "linear_policy_loss", 95, "--budget", "8", *rounds, *headline),
        script("first steps", 90, "first_steps.py", "--folder", str(work / "first"), *tiny, *engine, *to("first_steps"),
               modules=TRAINING_MODULES),
        one_by_one("two processes", 25, 20, "gpu_tests.py", *shared_buffer, modules=("pytest",)),
        bench("attention varlen", "attention_varlen", 35, "--budget", "2"),
        bench("grouped linear", "grouped_linear", 35, "--budget", "2"),
        bench("head gemms", "head_gemms", 45, "--budget", "2"),
        bench("policy rows", "policy_rows", 45, "--budget", "2"),
        script("profile", 40, "profile_top.py", "--device", device, *quick, *to("profile")),
        script("dz rows", 45, "dz_rows.py", "--device", device, *quick, *to("dz_rows")),
        script("train step", 120, "train_step.py", *step, *to("train_step"), modules=TRAINING_MODULES),
        script("step parts", 60, "step_parts.py", "--model", model, "--steps", "1", *to("step_parts"), modules=TRAINING_MODULES),
        *(bench(case.replace("_", " "), case, 45, "--budget", "2") for case in CASES),
        *(bench(f"head {text}", "linear_policy_loss", 60, "--budget", "4", "--shape", text)
          for text in OTHER_HEADS if not is_quick),
        *([one_by_one("other tests", 60, 30, "gpu_tests.py", *NEED_MORE_THAN_TORCH, "-m", "gpu",
                      modules=("pytest", *TRAINING_MODULES))] if gpu else []),
    ]  # fmt: skip


def run_part(part: Part, environment: dict[str, str], folder: Path, left_s: float | None) -> Outcome:
    """Runs it with its output in folder/<name>.log; a part that takes too long is ended with all its children.

    left_s: of the suite's time; a part with a longer limit is not started. None: as long as it takes (on a CPU, whose time is
    not lent).
    """
    limit_s = None if left_s is None else part.limit_s
    missing = missing_modules(part.modules, environment)
    if missing:
        return Outcome(part.name, "skipped", 0.0, f"missing module {', '.join(missing)}")
    if left_s is not None and left_s < part.limit_s + KILL_AFTER_S:
        return Outcome(part.name, "skipped", 0.0, f"needs up to {part.limit_s:.0f} s, {max(left_s, 0):.0f} s are left")
    log = folder / f"{file_name(part.name)}.log"
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
            return Outcome(part.name, "timeout", limit_s or 0.0, f"ended after {limit_s:.0f} s, see {log.name}")
        finally:
            _kill_group(process)
    seconds = time.monotonic() - start
    if code:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:] or ["no output"]
        return Outcome(part.name, "failed", seconds, f"exit code {code}: {last[0][:200]}; see {log.name}")
    return Outcome(part.name, "ok", seconds)


class CacheFiller:
    """fill_cache.py beside the parts that are not timed, and the number of kernels in Triton's cache."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._cache, self._start = Path(environment["TRITON_CACHE_DIR"]), time.monotonic()
        self.is_running = True
        with (folder / "fill_cache.log").open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "fill_cache.py"), "--device", "cuda", "--shape", HEADLINE],
                stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def end(self) -> Outcome:
        """Before something is timed; ends what still runs."""
        code, seconds = self._process.poll(), time.monotonic() - self._start
        _kill_group(self._process)
        self.is_running = False
        name, told = "fill cache", f"{self.num_kernels()} kernels"
        if code is None:
            return Outcome(name, "timeout", seconds, f"{told}; ended before the first timed part, see fill_cache.log")
        return Outcome(name, "failed" if code else "ok", seconds, f"{told}; see fill_cache.log")

    def num_kernels(self) -> int:
        return sum(1 for _ in self._cache.rglob("*.cubin"))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """What a part has started and left behind would take the GPU from the next one."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


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


def pack(folder: Path, out: Path, suite: dict[str, Any]) -> None:
    """out/report.md and out/results.tar.gz: the report, suite.json, and each part's tables, journal and end of its log."""
    (folder / "suite.json").write_text(json.dumps(suite, indent=1) + "\n")
    text = report(folder, suite)
    (folder / "report.md").write_text(text)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        packed = Path(temporary) / "results.tar.gz"
        with tarfile.open(packed, "w:gz") as archive:
            for file in sorted(folder.iterdir()):
                if file.suffix == ".log" and file.stat().st_size > LOG_BYTES:
                    end = file.read_bytes()[-LOG_BYTES:]
                    file.write_bytes(b"...\n" + end)
                archive.add(file, f"results/{file.name}")
        os.replace(packed, out / "results.tar.gz")  # whole at any time: the machine may be taken away
    (out / "report.md").write_text(text)


def tell(outcome: Outcome) -> None:
    print(f"{outcome.status:8} {outcome.seconds:6.1f} s  {outcome.name}  {outcome.reason}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_suite"), help="folder for report.md and results.tar.gz")
    parser.add_argument("--wheels", type=Path, help="folder of wheels or of unpacked wheels to import from")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose name holds one of these words")
    parser.add_argument("--commit", help="of these files, where they were copied without their history")
    words = parser.parse_args()
    out: Path = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="marsrl-suite-") as temporary:
        work = Path(temporary)
        folder = work / "results"
        folder.mkdir()
        try:
            found = importable(words.wheels.resolve(), work) if words.wheels else []
        except ValueError as error:
            parser.error(str(error))
        paths = [str(folder_with_marsrl(work / "namespace")), *map(str, found)]
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited]), "HF_HUB_OFFLINE": "1"}
        environment |= {"PYTHONUNBUFFERED": "1"}
        environment.setdefault("TRITON_CACHE_DIR", str(work / "triton"))
        if words.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        print(f"cmake: {shutil.which('cmake')}; results in {out}", flush=True)
        chosen = parts(words.device, words.quick, folder, work)
        if words.only:
            chosen = [part for part in chosen if any(word in part.name for word in words.only)]
        outcomes: list[Outcome] = []
        filler = CacheFiller(environment, folder) if words.device == "cuda" else None
        suite: dict[str, Any] = {"device": words.device, "commit": words.commit, "before": gpu_state(), "after": ""}
        for part in chosen:
            if filler and filler.is_running and part.name not in UNTIMED:
                outcomes.append(filler.end())
                tell(outcomes[-1])
            left = TOTAL_S - (time.monotonic() - start) if words.device == "cuda" else None
            before = filler.num_kernels() if filler else 0
            outcome = run_part(part, environment, folder, left)
            if filler and not filler.is_running:
                outcome = dataclasses.replace(outcome, compiled=filler.num_kernels() - before)
            outcomes.append(outcome)
            tell(outcome)
            suite |= {"parts": [dataclasses.asdict(each) for each in outcomes], "after": gpu_state()}
            pack(folder, out, suite)
        if filler and filler.is_running:
            filler.end()
    print(f"{out / 'report.md'}: {time.monotonic() - start:.0f} s")
    return 1 if any(outcome.status in ("failed", "timeout") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
