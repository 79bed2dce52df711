"""Measure how long `marsrl view` takes to read a run of a million samples, and to filter it.

    python benchmarks/view.py [--samples 1000000] [--folder DIR] [--json FILE]

The run is synthetic: 1,000 samples a step by five agents, 60 metrics a step, and texts of about 60 words, a few of them rare
(Zipf).

Prints:

    read        samples/s read into the viewer's memory, without their texts
    a filter    seconds of the slowest of several filters (agent, reward, flag, words; alone and combined). Each is the median of
                5 requests to the server for a page of 50, or for the matches found when the search's time limit ends.

The target is 300 ms per filter; `ratio:` is 300 ms divided by the slowest filter's time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fastapi.testclient import TestClient

from marsrl.commands.look.catalog import Catalog
from marsrl.commands.look.server import make_app
from marsrl.rollout.types import Finish, Segment
from marsrl.trainer.report.metrics import MetricsLog
from marsrl.trainer.report.parquet import write_rows
from marsrl.trainer.report.samples_log import SampleRecord
from marsrl.trainer.runs.directory import RunDirectory

FILTER_S = 0.3
PER_STEP, REPEATS = 1000, 5
AGENTS = ("solver", "verifier1", "corrector1", "verifier2", "corrector2")
FILTERS = {
    "everything": "",
    "an agent": "agent=verifier1",
    "wrong verdicts of an agent": "agent=verifier2&flag=wrong+verdict",
    "a flag that few have": "flag=error",
    "a flag, an agent and a reward": "flag=truncated&agent=solver&low=0.4&high=0.6",
    "a reward that few have": "low=0.95&high=0.99",
    "old steps": "last=3&agent=corrector1",
    "a frequent word": "words=w0",
    "a rare word": "words=w19990",
    "a frequent word and a rare flag": "words=w0+w1&flag=error",
    "two words and an agent": "words=w3+w50&agent=corrector2&high=0",
    "a problem": "problem=p17",
}


def _samples(step: int, rng: random.Random, words: list[str]) -> Iterator[SampleRecord]:
    """Yield the samples of a step, in rollouts of 20; each agent's samples are about a sample of the previous agent."""
    for number in range(PER_STEP):
        rollout, position = divmod(number, 20)
        depth, index = divmod(position, 4)
        agent, is_verdict = AGENTS[depth], depth % 2 == 1
        right, name = rng.random() < 0.5, f"{step}.{rollout}"
        reward = round(rng.random(), 2) if rng.random() < 0.01 else rng.choice((0.0, 0.0, 0.5, 1.0, 1.0))
        yield SampleRecord(
            step=step,
            line=number + 1,
            uid=f"{name}/{agent}:{index}",
            parent_uid=f"{name}/{AGENTS[depth - 1]}:0" if depth else None,
            group_id=f"{name}/{agent}",
            rollout_id=name,
            problem_id=f"p{rng.randrange(20000)}",
            agent=agent,
            prompt="" if index else " ".join(rng.choices(words, k=20)),
            text=" ".join(rng.choices(words, k=60)),
            answer=None if is_verdict else str(number % 97),
            verdict=right if is_verdict else None,
            reward=reward,
            correct=reward,
            parts={"verdict": float(right)} if is_verdict else {"answer": reward},
            note="",
            advantage=reward - 0.5,
            num_prompt_tokens=40,
            num_tokens=rng.randrange(20, 4000),
            finish=Finish.ERROR if rng.random() < 1e-5 else Finish.LENGTH if rng.random() < 0.05 else Finish.STOP,
            segments=(Segment(0, 10, max(0, step - 2)), Segment(10, 20, max(0, step - 1))),
        )


def make_run(folder: Path, num_samples: int) -> RunDirectory:
    run = RunDirectory.create(folder, "made-up", "test")
    run.write_config({"run": {"name": "made-up"}})
    rng = random.Random(0)
    ranks = random.Random(1).choices(range(20_000), weights=[1 / (k + 1) for k in range(20_000)], k=500_000)
    vocabulary = [f"w{rank}" for rank in ranks]
    with MetricsLog(run) as metrics:
        for step in range(1, num_samples // PER_STEP + 1):
            write_rows(run.samples / f"step_{step}.parquet", SampleRecord, _samples(step, rng, vocabulary))
            metrics.log(step, {f"reward/{k % 5}/{k}": rng.random() for k in range(60)})
    return run


def measure_filters(run: RunDirectory) -> dict[str, float]:
    """Return the seconds of each filter: the median of REPEATS requests."""
    client = TestClient(make_app([run.path], "token"), base_url="http://127.0.0.1")
    client.get("/?token=token")
    while (about := client.get("/api/runs").json()[0])["files"] < about["num_files"]:
        pass
    seconds = {}
    for name, query in FILTERS.items():
        times_s = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            answer = client.get(f"/api/samples?run=0&{query}")
            times_s.append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text
        seconds[name] = statistics.median(times_s)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--samples", type=int, default=1_000_000, help="number of samples of the synthetic run (default: %(default)s)"
    )
    parser.add_argument("--folder", help="folder for the synthetic run (default: a temporary one)")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    if options.samples < PER_STEP:
        parser.error(f"--samples is {options.samples}, expected at least {PER_STEP}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        load, run = os.getloadavg()[0], make_run(Path(folder), options.samples)
        began = time.perf_counter()
        Catalog(run.path).refresh(budget_s=None)
        read_s = time.perf_counter() - began
        size = sum(path.stat().st_size for path in run.samples.iterdir())
        filters = measure_filters(run)
    print(f"{options.samples:,} samples in {size / 1e6:,.0f} MB: {options.samples / read_s:,.0f} a second read")
    for name, seconds in filters.items():
        print(f"{name}: {1000 * seconds:.0f} ms")
    slowest = max(filters.values())
    print(f"a filter in {1000 * FILTER_S:.0f} ms: {'met' if slowest < FILTER_S else 'MISSED'}")
    print(f"load of the machine before: {load:.1f}")
    if options.json:
        result = {
            "samples": options.samples,
            "read_per_s": options.samples / read_s,
            "file_bytes": size,
            "filters_s": filters,
        }
        Path(options.json).write_text(json.dumps(result | {"load": load}, indent=1) + "\n", encoding="utf-8")
    print(f"ratio: {FILTER_S / slowest:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
