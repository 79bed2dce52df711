"""One training step of ours, plain Megatron and the reference loop on the same long-tailed batch: tokens/s, peak memory.

    python benchmarks/train_step.py [--json FILE] [--repeats 5]
    python benchmarks/train_step.py --layout tensor=2 expert=2          # ours and Megatron in this layout
    python benchmarks/train_step.py --model qwen3_30b_a3b_slice         # one GPU: full width, 128 experts, 4 layers
    python benchmarks/train_step.py --model slice_tiny                  # the same code path on a CPU
    python benchmarks/train_step.py --model /models/smollm2 --dtype float32    # a model's directory, on a short batch
    python benchmarks/train_step.py --adapter                           # adapters of four agents on one base
    python benchmarks/train_step.py --adapter attention experts         # these targets alone
    python benchmarks/train_step.py --profile                           # also the kernels that ours spends its time in
    python benchmarks/train_step.py --parts [RECOMPUTE ...] --micro-batch 16384   # only ours, split into parts

Ours packs sequences, leaves out groups whose rewards are all equal, and uses the fused head (no full logits). All variants
compute the same update: gradient norms are compared first, and a wrong step prints no number. With --adapter, ours puts all
agents in one micro-batch. It is compared with PEFT in the reference loop, one agent after the other, and with our step that
trains all weights, whose update differs. Each variant has its own processes, with one thread per rank on a CPU. On a CPU
with one rank, all variants are loaded at once and take turns, one step each; otherwise they run one after the other.

tokens/s   all non-padding tokens of the batch / seconds of the step, also for a variant that leaves out sequences.
           Seconds are process time with one rank on a CPU, and wall-clock time with several ranks or on a GPU.
memory     peak during the step beyond the memory held once model and optimizer exist; the maximum over ranks. On a CPU this
           is the process's resident memory, on a GPU torch's allocations.
MFU        FLOPs by formula (step_problem.model_flops) of the sequences that a variant runs / seconds / ranks / peak FLOP/s. The
           peak is the data sheet's bf16 rate of a known GPU; on a CPU, the rate of a large float32 product in the same process.

--parts splits a step of ours on one rank, for each value of policies.<name>.recompute, into forward passes, backward passes with
their recomputation, the optimizer, and the rest (packing and statistics, mostly on the host). Forward passes have a third of the
layers' FLOPs and all FLOPs of the head, because they also compute the head's gradients. On a GPU `idle` is the share of the step
in which no kernel runs: 1 - seconds of all kernels by the profiler / seconds of a step without the profiler.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

CHILD_LIMIT_S = 900
RECOMPUTE = ("none", "full", "full_but_attention")
STEPPED = "stepped"  # line that a child prints after its turn
# Relative tolerances of the gradient norm. In bfloat16 the tolerance is wide, because the routers of two programs choose
# different experts for some tokens.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


def child(job: dict[str, Any]) -> None:
    """Run one variant on this rank; rank 0 prints a line of JSON. job: the JSON that _command passes."""
    import torch
    import torch.distributed as dist
    from memory import PeakMemory
    from part_clock import PartClock
    from step_problem import batch, head_flops, model_flops, problem_of
    from step_variants import OURS, WHOLE, build
    from timing import top_kernels

    from marsrl.rollout.adapter import AdapterConfig
    from marsrl.rollout.model_shape import read_shape
    from marsrl.trainer.torchrun import is_rank_0, world_size

    torch.set_num_threads(1)
    problem, name = problem_of(job["model"], job["dtype"], job["micro_batch"]), job["variant"]
    sequences = batch(problem)
    adapters = [
        AdapterConfig.model_validate({"targets": job["targets"], "start": adapter_dir})
        for adapter_dir in job.get("adapter_dirs", ())
    ]
    variant = build(
        name,
        job["model_dir"],
        problem,
        sequences,
        layout=job["layout"],
        mpt=job.get("mpt"),
        adapters=adapters,
        recompute=job.get("recompute", "none"),
    )
    ranks, is_cuda = world_size(), torch.cuda.is_available()
    clock = time.perf_counter if ranks > 1 or is_cuda else time.process_time
    memory = PeakMemory(is_cuda=is_cuda)
    parts_clock = PartClock(is_cuda=is_cuda) if "recompute" in job else None
    norms, seconds, parts = [], [], []
    for _ in range(job["repeats"] + 1):  # The first step is a warm-up.
        if job["takes_turns"]:
            sys.stdin.readline()
        if parts_clock is not None:
            parts_clock.start()
        start = clock()
        norms.append(variant.step())  # Reading the norm waits for the device, so the step has ended.
        seconds.append(clock() - start)
        if parts_clock is not None:
            parts.append(parts_clock.seconds())
        if job["takes_turns"]:
            print(STEPPED, flush=True)
    measured: list[Any] = [(seconds[1:], memory.extra_bytes())]
    if ranks > 1:
        measured = [None] * ranks
        dist.all_gather_object(measured, (seconds[1:], memory.extra_bytes()))
    if is_rank_0():
        trained = adapters[0] if adapters and name != WHOLE else None
        row: dict[str, Any] = {
            "seconds": [max(step_times) for step_times in zip(*(times for times, _ in measured), strict=True)],
            "norm": norms[0],
            "extra_bytes": max(extra for _, extra in measured),
            "ranks": ranks,
            "tokens": sum(s.num_tokens for s in sequences),
            "flops": model_flops(read_shape(job["model_dir"]), variant.trained, trained),
            "peak_flops": peak_flops(),
        }
        if job["profile"] and name == OURS and ranks == 1:
            row["kernels"] = top_kernels(variant.step, is_cuda=is_cuda)
        if parts:
            row["head_flops"] = head_flops(read_shape(job["model_dir"]), variant.trained)
            row["parts"] = {part: statistics.median(step_parts[part] for step_parts in parts[1:]) for part in parts[0]}
        if parts and is_cuda:
            ((busy_ms, *_), *_) = top_kernels(variant.step, is_cuda=True)
            row["idle"] = 1 - busy_ms / 1e3 / statistics.median(row["seconds"])
        print(json.dumps(row), flush=True)
    variant.close()


def peak_flops() -> float:
    """Return the peak FLOP/s of one rank (see the module's docstring); NaN on a GPU that `marsrl plan` does not know."""
    import roofline
    import torch

    from marsrl.commands.plan.hardware import GPUS

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        return next((gpu.flops for key, gpu in GPUS.items() if key.split("-")[0] in name), math.nan)
    return roofline.measure("cpu", "float32").gemm_flops


def sizes(words: list[str]) -> dict[str, int]:
    """Parse a layout from words such as ["tensor=2", "expert=2"]."""
    return {name: int(size) for name, _, size in (size_text.partition("=") for size_text in words)}


def ranks_of(layout: dict[str, int]) -> int:
    """Return the smallest number of ranks that the layout needs."""
    dense = layout.get("tensor", 1) * layout.get("context", 1)
    expert = layout.get("expert", 1) * layout.get("expert_tensor", 1 if layout.get("expert", 1) > 1 else 0)
    return layout.get("pipeline", 1) * math.lcm(dense, max(expert, 1))


def measure(variant: str, job: dict[str, Any]) -> dict[str, Any]:
    """Measure one variant and return its row of the table, or {"problem": why} if memory does not suffice."""
    completed = subprocess.run(
        _command(variant, job), capture_output=True, text=True, env=_environment(), timeout=CHILD_LIMIT_S
    )
    if "OutOfMemoryError" in completed.stderr:
        return {"problem": "out of memory"}
    if completed.returncode:
        raise RuntimeError(f"{variant} failed:\n{completed.stderr[-8000:]}")
    return _row(completed.stdout)


def measure_in_turns(variants: Sequence[str], job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of all variants, which are loaded together; in a turn, each makes a step while the others wait."""
    with ExitStack() as stack:
        children, stderr_of = dict[str, subprocess.Popen[str]](), dict[str, Any]()
        for variant in variants:
            stderr_of[variant] = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = _command(variant, {**job, "takes_turns": True})
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr_of[variant]}
            children[variant] = subprocess.Popen(command, text=True, env=_environment(), **pipes)
            stack.callback(children[variant].kill)
        for _ in range(job["repeats"] + 1):
            for variant, child in children.items():
                assert child.stdin is not None and child.stdout is not None
                with suppress(BrokenPipeError):
                    child.stdin.write("\n")
                    child.stdin.flush()
                if not any(line.strip() == STEPPED for line in child.stdout):
                    stderr_of[variant].seek(0)
                    raise RuntimeError(f"{variant} failed:\n{stderr_of[variant].read()[-8000:]}")
        rows = {}
        for variant, child in children.items():
            assert child.stdout is not None
            rows[variant] = _row(child.stdout.read())
            child.wait()
        return rows


def _command(variant: str, job: dict[str, Any]) -> list[str]:
    layout = job["layout"] if variant.startswith(("ours", "plain")) else {}
    ranks = ranks_of(layout)
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [
        *command,
        str(Path(__file__).resolve()),
        "--child",
        json.dumps({**job, "variant": variant, "layout": layout}),
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _row(printed: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model", default="bench", help="bench, qwen3_30b_a3b_slice or slice_tiny; or a model's directory"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(TOLERANCE),
        help="dtype to train in (default: that of the benchmark's model, or float32 for a directory)",
    )
    parser.add_argument(
        "--layout",
        nargs="+",
        default=[],
        metavar="SIZE",
        help="sizes of the parallel layout: tensor=2 expert=2 context=2 pipeline=2",
    )
    parser.add_argument(
        "--profile", action="store_true", help="also list the kernels in which our variant spends its time, on one rank"
    )
    parser.add_argument(
        "--parts",
        nargs="*",
        metavar="RECOMPUTE",
        help=f"measure only the parts of our step on one rank, with these values; default: {', '.join(RECOMPUTE)}",
    )
    parser.add_argument(
        "--micro-batch", type=int, metavar="TOKENS", help="tokens of a micro-batch; the batch grows in proportion"
    )
    parser.add_argument("--no-dmmpt", action="store_true", help="leave out the second table: the same with DMMPT")
    parser.add_argument(
        "--adapter",
        nargs="*",
        metavar="TARGET",
        help="train adapters of four agents on these targets; default: attention, then attention and experts",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="VARIANT", help="leave out this variant; repeatable"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from record import surroundings
    from step_problem import PROBLEMS, problem_of
    from step_variants import ADAPTER_VARIANTS, MEGATRON, VARIANTS

    from marsrl.trainer.models.init_model import init_model

    if "ours" in options.skip:
        parser.error("--skip ours: the others are compared with it")
    is_directory = (Path(options.model) / "config.json").is_file()
    if not is_directory and options.model not in PROBLEMS:
        parser.error(f"--model {options.model} is no directory with config.json, and none of {', '.join(PROBLEMS)}")
    problem = problem_of(options.model, options.dtype, options.micro_batch)
    is_cuda = torch.cuda.is_available()
    before = surroundings("cuda" if is_cuda else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = f"{folder}/model"
        if is_directory:
            model_dir = str(Path(options.model).resolve())
        else:
            init_model(problem.shape, "bytes", Path(model_dir), seed=0, dtype=problem.dtype)
        job = {
            "model": options.model,
            "dtype": problem.dtype,
            "micro_batch": options.micro_batch,
            "takes_turns": False,
            "model_dir": model_dir,
            "layout": sizes(options.layout),
            "repeats": options.repeats,
            "profile": options.profile,
        }
        results = {}
        if options.parts is not None:
            results["parts"] = parts_table(options.parts or RECOMPUTE, job, TOLERANCE[problem.dtype])
        for label, extra in {} if options.parts is not None else tables(Path(folder), model_dir, options).items():
            without = {*options.skip, *([MEGATRON] if "mpt" in extra else [])}
            every = VARIANTS if options.adapter is None else ADAPTER_VARIANTS
            chosen = tuple(variant for variant in every if variant not in without)
            in_turns = not is_cuda and ranks_of(job["layout"]) == 1
            results[label] = table(label, chosen, {**job, **extra}, TOLERANCE[problem.dtype], in_turns=in_turns)
    if options.json:
        record = {
            **before,
            "load_after": os.getloadavg()[0],
            "model": options.model,
            "dtype": problem.dtype,
            "layout": sizes(options.layout),
            "micro_batch": problem.micro_batch_tokens,
            "results": results,
        }
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    if options.parts is not None:
        return 0
    ratios = [r["ratio"] for r in results.values() if r["ratio"] is not None]
    print(f"ratio: {min(ratios):.2f}" if ratios else "ratio: none, the reference ran out of memory")
    return 0


def parts_table(modes: Sequence[str], job: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Measure, print and return a row per recompute mode; raise if a mode's update differs from that of the first mode."""
    parts = ("forward", "backward", "optimizer", "rest")
    print(f"parts of a step, s\n  {'recompute':20}{'step':>8}{'MFU':>7}", end="")
    print(*(f"{part:>10}" + f"{'MFU':>7}" * (part.endswith("ward")) for part in parts), "  idle  extra MiB", sep="")
    rows: dict[str, Any] = {}
    for mode in modes:
        row = rows[mode] = measure("ours", {**job, "layout": {}, "recompute": mode})
        if "problem" in row:
            print(f"  {mode:20}{row['problem']}", flush=True)
            continue
        first = next(other["norm"] for other in rows.values() if "norm" in other)
        if not abs(row["norm"] - first) <= tolerance * abs(first):
            raise SystemExit(f"recompute {mode} changes the gradient norm: {row['norm']}; expected {first}")
        seconds = {"step": statistics.median(row["seconds"]), **row["parts"]}
        layers, head = row["flops"] - row["head_flops"], row["head_flops"]
        flops = {"step": layers + head, "forward": layers / 3 + head, "backward": layers * 2 / 3}
        row["mfu"] = {part: flops[part] / seconds[part] / row["peak_flops"] for part in flops}
        print(f"  {mode:20}{seconds['step']:8.3f}{row['mfu']['step']:7.1%}", end="")
        for part in parts:
            print(f"{seconds[part]:10.3f}" + (f"{row['mfu'][part]:7.1%}" if part in row["mfu"] else ""), end="")
        idle = f"{row['idle']:6.1%}" if "idle" in row else "     -"
        print(f"{idle}{row['extra_bytes'] / 2**20:11.0f}", flush=True)
    return rows


def tables(folder: Path, model_dir: str, words: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return {title of a table: additional fields of its jobs}. Writes adapters into `folder`."""
    if words.adapter is None:
        # An entropy threshold of 20 nats is above ln V, so the gate of every positive sample is set.
        return {"DMMPT off": {}} | ({} if words.no_dmmpt else {"DMMPT on": {"mpt": 20.0}})
    from parity_adapters import random_adapter
    from step_problem import NUM_AGENTS

    jobs = {}
    for targets in [words.adapter] if words.adapter else [["attention"], ["attention", "experts"]]:
        label = f"adapters of {' and '.join(targets)}"
        folders = [folder / label.replace(" ", "_") / str(agent) for agent in range(NUM_AGENTS)]
        for agent, out in enumerate(folders):
            random_adapter(Path(model_dir), {"targets": targets}, out, seed=agent)
        jobs[label] = {"targets": targets, "adapter_dirs": [*map(str, folders)]}
    return jobs


def table(
    label: str, variants: tuple[str, ...], job: dict[str, Any], tolerance: float, *, in_turns: bool
) -> dict[str, Any]:
    """Measure, print and return the rows of a table, with the ratio of ours to each other variant (None: out of memory).

    A row is printed only after a check that its update equals that of ours, the first variant.
    """
    from step_variants import WHOLE

    print(f"{label}\n  {'':36}{'ranks':>6}{'tokens/s':>10}{'spread':>9}{'s/step':>9}{'MFU':>7}{'extra MiB':>11}")
    together = measure_in_turns(variants, job) if in_turns else {}
    rows: dict[str, dict[str, Any]] = {}
    speed: dict[str, float] = {}
    for variant in variants:
        row = rows[variant] = together[variant] if in_turns else measure(variant, job)
        if "problem" in row:
            print(f"  {variant:36}{row['problem']}", flush=True)
            continue
        first = rows["ours"]["norm"]
        if variant != WHOLE and not abs(row["norm"] - first) <= tolerance * abs(first):
            raise SystemExit(f"{label}: {variant} computes another update: gradient norm {row['norm']}, ours {first}")
        median = statistics.median(row["seconds"])
        spread = (max(row["seconds"]) - min(row["seconds"])) / median
        speed[variant] = row["tokens"] / median
        row["mfu"] = row["flops"] / median / row["ranks"] / row["peak_flops"]
        print(
            f"  {variant:36}{row['ranks']:>6}{speed[variant]:>10,.0f}{spread:>8.0%} {median:>8.2f}{row['mfu']:>7.1%}"
            f"{row['extra_bytes'] / 2**20:>11.0f}"
        )
        for ms, launches, name in row.get("kernels", ()):
            print(f"  {ms:10.3f} ms {launches:8.1f}x  {name[:100]}")
        sys.stdout.flush()
    ratios = {v: speed["ours"] / speed[v] if v in speed else None for v in rows if v != "ours"}
    memory = {
        v: rows["ours"]["extra_bytes"] / rows[v]["extra_bytes"] if rows[v].get("extra_bytes") else None for v in ratios
    }
    for variant, ratio in ratios.items():
        if ratio is not None and memory[variant] is not None:
            turns = [b / a for a, b in zip(rows["ours"]["seconds"], rows[variant]["seconds"], strict=True)]
            spread = f" (turns {min(turns):.2f} to {max(turns):.2f})" if in_turns else ""
            print(f"  ours over {variant}: {ratio:.2f}x{spread}, memory {memory[variant]:.2f}")
    return {"rows": rows, "ratio": ratios.get("reference"), "ratios": ratios, "memory": memory}


if __name__ == "__main__":
    sys.exit(main())
