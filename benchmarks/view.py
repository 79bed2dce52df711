"""How fast `marsrl view` is on a run of 1 M samples: the index, the filters, the first picture in a browser.

    python benchmarks/view.py [--samples 1000000] [--folder DIR] [--json FILE]

The run is made up: 1,000 samples a step by five agents, texts of some 60 words of which a few are rare (Zipf), 60 metrics a step.

    read        samples a second, into the viewer's memory, without their texts
    a filter    the slowest of some (by agent, reward, flag, words, alone and together), each the median of 5 asked one after
                the other through the server, a page of 50 or what was found when its time was over
    first       in headless Chromium, from the request until the list of samples is painted; where there is a Chromium

Wanted: a filter under 300 ms, the first picture under 1 s. `ratio:` is 300 ms over the slowest filter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fastapi.testclient import TestClient

from marsrl.rollout.types import Finish, Segment
from marsrl.trainer.look.catalog import Catalog
from marsrl.trainer.look.server import make_app, view
from marsrl.trainer.report.metrics import MetricsLog
from marsrl.trainer.report.samples_log import SampleRecord, write_records
from marsrl.trainer.runs.directory import RunDirectory

FILTER_S, FIRST_S = 0.3, 1.0
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
CHROMIUM = Path(__file__).parents[1] / "tests" / "report" / "chromium.sh"


@dataclass(frozen=True)
class Measured:
    """Seconds by filter, the median of REPEATS. first_s, listed_s: until a picture, and the list (None: no Chromium)."""

    samples: int
    read_per_s: float
    file_bytes: int
    filters_s: dict[str, float]
    first_s: float | None
    listed_s: float | None
    load: float


def _samples(step: int, rng: random.Random, words: list[str]) -> Iterator[SampleRecord]:
    """A step's: rollouts of 20, each agent's samples about one of the agent before."""
    for number in range(PER_STEP):
        rollout, place = divmod(number, 20)
        depth, index = divmod(place, 4)
        agent, is_verdict = AGENTS[depth], depth % 2 == 1
        right, name = rng.random() < 0.5, f"{step}.{rollout}"
        reward = round(rng.random(), 2) if rng.random() < 0.01 else rng.choice((0.0, 0.0, 0.5, 1.0, 1.0))
        yield SampleRecord(
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
    words = [f"w{rank}" for rank in ranks]
    with MetricsLog(run, tensorboard=False) as metrics:
        for step in range(1, num_samples // PER_STEP + 1):
            write_records(run, step, _samples(step, rng, words))
            metrics.log(step, {f"reward/{k % 5}/{k}": rng.random() for k in range(60)})
    return run


def measure_filters(run: RunDirectory) -> dict[str, float]:
    client = TestClient(make_app([run.path], "token"), base_url="http://127.0.0.1")
    client.get("/?token=token")
    while (about := client.get("/api/runs").json()[0])["files"] < about["num_files"]:
        pass
    seconds = {}
    for name, asked in FILTERS.items():
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            answer = client.get(f"/api/samples?run=0&{asked}")
            taken.append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text
        seconds[name] = statistics.median(taken)
    return seconds


def measure_browser(run: RunDirectory) -> tuple[float | None, float | None]:
    """Seconds until the first picture, and until the list is there, in a page that has not been opened before."""
    found = subprocess.run([CHROMIUM, "find"], capture_output=True, text=True)
    if found.returncode != 0:
        print(found.stdout.strip())
        return None, None
    from playwright.sync_api import sync_playwright

    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import view; view.serve({str(run.path)!r})"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
            page = browser.new_page()
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(address)
            page.wait_for_selector(".item")
            listed = time.perf_counter() - began
            first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
            browser.close()
        return float(first), listed
    finally:
        server.terminate()
        server.wait()


def serve(path: str) -> None:
    """What the command does, of this checkout."""
    view([Path(path)], 0, lambda address: print(address, flush=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the made-up run (default: %(default)s)")
    parser.add_argument("--folder", help="where the run is made (default: a temporary folder)")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--no-browser", action="store_true", help="leave the first picture out")
    words = parser.parse_args()
    if words.samples < PER_STEP:
        parser.error(f"--samples is {words.samples}, expected at least {PER_STEP}")
    with tempfile.TemporaryDirectory(dir=words.folder) as folder:
        load, run = os.getloadavg()[0], make_run(Path(folder), words.samples)
        began = time.perf_counter()
        Catalog(run.path).refresh(budget_s=None)
        read_s = time.perf_counter() - began
        size = sum(path.stat().st_size for path in run.samples.iterdir())
        filters = measure_filters(run)
        first_s, listed_s = (None, None) if words.no_browser else measure_browser(run)
        found = Measured(words.samples, words.samples / read_s, size, filters, first_s, listed_s, load)
    print(f"{found.samples:,} samples in {found.file_bytes / 1e6:,.0f} MB: {found.read_per_s:,.0f} a second read")
    for name, seconds in found.filters_s.items():
        print(f"{name}: {1000 * seconds:.0f} ms")
    if found.first_s is not None and found.listed_s is not None:
        print(f"first picture after {found.first_s:.2f} s, the list of samples after {found.listed_s:.2f} s")
    slowest = max(found.filters_s.values())
    is_held = slowest < FILTER_S and (found.listed_s is None or found.listed_s < FIRST_S)
    print(f"a filter in {1000 * FILTER_S:.0f} ms, the first list in {FIRST_S:.0f} s: {'held' if is_held else 'MISSED'}")
    print(f"load of the machine before: {found.load:.1f}")
    if words.json:
        Path(words.json).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    print(f"ratio: {FILTER_S / slowest:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
