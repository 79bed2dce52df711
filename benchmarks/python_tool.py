"""Overhead of a call of the tool `python`, with and without hostile snippets beside it.

    python benchmarks/python_tool.py [--json FILE] [--calls 64] [--rounds 3]

All calls go through a ToolPool with one thread and one started interpreter per call. The overhead is the time from submit to
output, minus the time that the snippet takes by itself.

Prints:

    alone        sequential calls of `1 + 1`, which takes no time
    at once      all calls together, of a snippet that sleeps 0.2 s and prints, so it needs no processor
    neighbours   32 honest calls at once, without and with 8 hostile calls that started earlier. Hostile calls loop forever in
                 several processes, or exhaust memory, output, files, threads or recursion
    refill       milliseconds per interpreter that it takes to replace the used interpreters between two rounds
    load         load average of the machine at the start; other work affects every number

For the calls at once, CPU time and voluntary context switches per call in this process are printed too; they depend less on other
load than latencies do. `ratio:` is 30 ms divided by the median overhead of the calls at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from marsrl.rollout.tools.config import PythonTool
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.tools.python.tool import PythonInterpreter
from marsrl.rollout.types import ToolCall, ToolOutput

WANTED_MS = 30.0
WAIT_S = 0.2
HONEST = 32  # number of honest calls that run together with the hostile ones
WAITING = f"import time\ntime.sleep({WAIT_S})\nprint('well')"
HOSTILE = (
    "while True: pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "held = []\nwhile True:\n    try: held.append(bytearray(1 << 20))\n    except MemoryError: held.clear()",
    "import os\nwhile True: os.write(1, b'')",
    "import os\nwhile True:\n    try: open(f'/tmp/{os.urandom(4).hex()}', 'w').write('x' * 4096)\n    except OSError: pass",
    "import threading\ndef spin():\n    while True: pass\nfor _ in range(3): threading.Thread(target=spin).start()\nspin()",
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef down(): down()\ndown()",
    "import os\nos.fork()\nos.fork()\nwhile True: os.getppid()",
)


def latencies(pool: ToolPool, codes: Sequence[str], own_s: float, is_at_once: bool) -> list[float]:
    """Return the overhead of each call in ms; RuntimeError if outputs differ or have an error."""
    seconds: list[float] = []
    futures: list[Future[ToolOutput]] = []
    for number, code in enumerate(codes):
        begin = time.perf_counter()
        future = pool.submit(ToolCall(str(number), "python", json.dumps({"code": code})))
        future.add_done_callback(lambda _, begin=begin: seconds.append(time.perf_counter() - begin))  # type: ignore[misc]
        futures.append(future)
        if not is_at_once:
            future.result()
    outputs = {future.result() for future in futures}
    if len(outputs) != 1 or next(iter(outputs)).is_error:
        raise RuntimeError(f"calls of one snippet returned {outputs}; expected equal outputs without errors")
    return [1000 * (seconds_of_call - own_s) for seconds_of_call in seconds]


def cost(before: resource.struct_rusage, after: resource.struct_rusage, num_calls: int) -> tuple[float, float]:
    """Return (CPU ms, voluntary context switches) of this process per call."""
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1000 * seconds / num_calls, (after.ru_nvcsw - before.ru_nvcsw) / num_calls


def refill(tool: PythonInterpreter, num_warm: int) -> float:
    """Wait until all interpreters are ready; return the seconds that this took."""
    begin = time.perf_counter()
    while len(tool.ready) < num_warm:
        time.sleep(0.01)
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--calls", type=int, default=64, help="number of concurrent calls")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each set of calls")
    options = parser.parse_args()
    most = max(options.calls, HONEST + len(HOSTILE))
    config = PythonTool(concurrency=most, warm=most, wall_s=5.0)
    load = float(Path("/proc/loadavg").read_text().split()[0])
    tool = PythonInterpreter(config)
    pool = ToolPool({"python": tool}, {"python": config})
    latencies_of: dict[str, list[float]] = {"alone": [], "at once": [], "honest": [], "honest beside hostile": []}
    refilled: list[float] = []
    costs: list[tuple[float, float]] = []
    try:
        refill(tool, most)
        for _ in range(options.rounds):
            latencies_of["alone"] += latencies(pool, ["1 + 1"] * 16, 0.0, is_at_once=False)
            refill(tool, most)
            before = resource.getrusage(resource.RUSAGE_SELF)
            latencies_of["at once"] += latencies(pool, [WAITING] * options.calls, WAIT_S, is_at_once=True)
            costs.append(cost(before, resource.getrusage(resource.RUSAGE_SELF), options.calls))
            refilled.append(1000 * refill(tool, most) / options.calls)
            latencies_of["honest"] += latencies(pool, [WAITING] * HONEST, WAIT_S, is_at_once=True)
            refill(tool, most)
            hostile = [
                pool.submit(ToolCall(f"hostile {number}", "python", json.dumps({"code": code})))
                for number, code in enumerate(HOSTILE)
            ]
            time.sleep(1.0)  # lets the hostile calls start
            latencies_of["honest beside hostile"] += latencies(pool, [WAITING] * HONEST, WAIT_S, is_at_once=True)
            for future in hostile:
                future.result()
            refill(tool, most)
    finally:
        pool.close()
    rows: list[dict[str, Any]] = [
        {"calls": name, "median_ms": statistics.median(values), "p95_ms": sorted(values)[int(0.95 * len(values))]}
        for name, values in latencies_of.items()
    ]
    print(f"{os.cpu_count()} cores, load {load:.1f}; {options.calls} calls at once, {options.rounds} rounds")
    for row in rows:
        print("{calls}: median {median_ms:.1f} ms, p95 {p95_ms:.1f} ms".format(**row))
    cpu_ms, switches = (statistics.median(values) for values in zip(*costs, strict=True))
    print(f"this process: {cpu_ms:.2f} ms of CPU and {switches:.1f} context switches per concurrent call")
    print(f"refill: {statistics.median(refilled):.0f} ms an interpreter")
    if options.json:
        record = {"cores": os.cpu_count(), "load": load, "calls": options.calls, "rounds": options.rounds}
        record |= {"rows": rows, "refill_ms": statistics.median(refilled)}
        record |= {"own_cpu_ms": cpu_ms, "own_switches": switches}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    print(f"ratio: {WANTED_MS / statistics.median(latencies_of['at once']):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
