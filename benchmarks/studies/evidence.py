"""Run the studies of docs/evidence.md, which test claims of the papers and of marsrl on teams that a CPU trains in minutes.

    python benchmarks/studies/evidence.py                       writes the page from existing results; lists what is missing
    python benchmarks/studies/evidence.py --run [--jobs 2]      trains what is missing, then writes the page

Every arm and seed has a file in results/<device>/evidence/, written when its training ends, so an interrupted command can be
resumed. A result counts as missing if its settings have changed or its commit was not clean; the page names the commits. To
repeat a study, delete its files. --run needs a clean tree and an otherwise idle machine, because it records times. Runs and warm
starts are kept in runs/evidence, in one folder per state of the training code: the study `foreign` evaluates the team that the
arm `whole` has trained, with Solvers from outside the team.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import kuhn
import toll
from arms import FIVE, FOREIGN, FOREIGN_SEEDS, OTHER_KIND, STUDIES, curves, shown
from evidence_page import PAGE, ROOT, Result, Results, page

RESULTS = ROOT / "benchmarks" / "results" / "cpu_xeon_2core" / "evidence"
RUNS = ROOT / "runs" / "evidence"
TRAINS = ("kernels", "rollout", "trainer", "commands", "configs", "csrc", "constraints", "setup.py", "CMakeLists.txt")
WRITTEN = ("benchmarks/results", "docs")  # written by this command; changes in them cannot change a number
GAMES = {"kuhn": kuhn.GAME, "toll": toll.GAME}


@dataclass(frozen=True)
class Job:
    """Training of an arm with a seed. In the study `foreign`, an evaluation with the team that the arm `whole` has trained."""

    study: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.study}-{self.arm.replace(',', '').replace(' ', '_')}-seed{self.seed}"

    @property
    def settings(self) -> list[str]:
        """Settings of the training; for an evaluation, settings of the foreign Solver."""
        if self.study in GAMES:
            game = GAMES[self.study]
            return [*game.settings, *game.arms[self.arm], f"run.seed={self.seed}"]
        if self.study != "foreign":
            study = STUDIES[self.study]
            return [f"preset={study.preset}", f"run.seed={self.seed}", *study.arms[self.arm].settings]
        seed = self.seed if self.arm == "own team" else (self.seed + 1) % FOREIGN_SEEDS
        kind = OTHER_KIND if "another kind" in self.arm else ()
        return [f"preset={STUDIES['marsrl'].preset}", f"run.seed={seed}", *kind]


def every_job(only: Sequence[str]) -> list[Job]:
    """Return all jobs, ordered by seed first, so that an interrupted study has complete seeds.

    An evaluation comes after the training whose team it needs.
    """
    jobs = []
    for seed in range(max(arm.num_seeds for study in STUDIES.values() for arm in study.arms.values())):
        for name, study in STUDIES.items():
            jobs += [Job(name, arm, seed) for arm, arm_settings in study.arms.items() if seed < arm_settings.num_seeds]
        for name, game in GAMES.items():
            jobs += [Job(name, arm, seed) for arm in game.arms if seed < FIVE]
        jobs += [Job("foreign", arm, seed) for arm in FOREIGN if seed < FOREIGN_SEEDS]
    return [job for job in jobs if not only or job.study in only]


def read_results(folder: Path) -> Results:
    """Read existing results, by (study, arm, seed)."""
    results = {}
    for job in every_job(()):
        file = folder / f"{job.name}.json"
        if file.exists():
            results[job.study, job.arm, job.seed] = Result(**json.loads(file.read_text("utf-8")))
    return results


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def changed_files() -> str:
    """Return the files that differ from HEAD, except results and pages."""
    return git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN)).stdout.rstrip()


def state_of_the_code() -> str:
    """Return a name for the state of the training code at HEAD."""
    return hashlib.sha256(git("ls-tree", "HEAD", "--", *TRAINS).stdout.encode()).hexdigest()[:12]


@cache
def is_clean(commit: str) -> bool:
    """Return True if the commit is in the repository and was recorded with a clean tree."""
    return not commit.endswith("+") and git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0


def is_current(job: Job, result: Result | None) -> bool:
    return result is not None and result.settings == job.settings and is_clean(result.commit)


@dataclass
class Runner:
    """Runner of trainings and evaluations, several at a time. more: additional settings of every training."""

    commit: str
    results: Path
    runs: Path
    num_at_once: int
    more: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def all(self, jobs: Sequence[Job]) -> None:
        """Run the warm starts, once each, then the trainings, then the evaluations that need them."""
        self._at_once(partial(self._make, settings) for settings in self._warm_starts(jobs))
        played = [job for job in jobs if job.study in GAMES]
        starts = dict.fromkeys((job.study, job.seed) for job in played)
        self._at_once(partial(self._call, self._game(*start)) for start in starts)
        self._at_once(partial(self.play, job) for job in played)
        trainings = [job for job in jobs if job.study in STUDIES]
        for job in jobs:
            whole_job = Job("marsrl", "whole", job.seed)
            if job.study == "foreign" and whole_job not in trainings and not (self.runs / whole_job.name).exists():
                trainings.append(whole_job)  # the run of the arm `whole` is on another machine, or was deleted
        self._at_once(partial(self.train, job) for job in trainings)
        self._at_once(partial(self.evaluate, job) for job in jobs if job.study == "foreign")

    def _at_once(self, calls: Iterator[Callable[[], object]]) -> None:
        with ThreadPoolExecutor(self.num_at_once) as pool:
            try:
                for future in [pool.submit(call) for call in calls]:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _warm_starts(self, jobs: Sequence[Job]) -> list[list[str]]:
        """Return the settings of the warm-started policies that the jobs need, without duplicates."""
        from marsrl.trainer.config.read import read_config
        from marsrl.trainer.supervised.warm_start import SHAPE, name_of, recipe_of

        starts = {}
        for job in jobs:
            if job.study in GAMES:
                continue
            settings = [*job.settings, *self.more]
            config, _ = read_config(None, settings)
            for policy in config.policies.values():
                starts[name_of(recipe_of(config, policy.shape or SHAPE))] = settings
        return list(starts.values())

    def _make(self, words: Sequence[str]) -> Path:
        """Return the directory of the warm-started policy with these settings; train it if needed."""
        output, _ = self._call([__file__, "--warm-start", *words])
        return Path(output.strip().rpartition("\n")[2])

    def _call(self, words: Sequence[str]) -> tuple[str, dict[str, float]]:
        """Run Python with these arguments; return its standard output, CPU seconds and peak resident bytes.

        Raises:
            RuntimeError: the process failed; the text is marsrl's last error line, or else the last line of output.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, *words], stdout=out, stderr=errors, cwd=ROOT, env=self.environment
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            errors.seek(0)
            output = out.read()
            if process.returncode:
                lines = [*output.splitlines(), *errors.read().splitlines()]
                ours = [line for line in lines if line.startswith("marsrl: ")]
                raise RuntimeError((ours or lines or [f"exit code {process.returncode}"])[-1])
        return output, {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024.0}

    def train(self, job: Job) -> None:
        run = self.runs / job.name
        shutil.rmtree(run, ignore_errors=True)  # a killed training may have left it
        settings = [f"run.dir={self.runs}", f"run.name={job.name}", *job.settings, *self.more]
        start = time.monotonic()
        try:
            _, usage = self._call([str(ROOT / "trainer" / "main.py"), *settings])
            study = STUDIES[job.study]
            self._keep(job, start, shown(study, run) | usage, curves=curves(run) if study.has_curve else {})
        except RuntimeError as error:  # A training that stops is a result too. It is reported, but no mean includes it.
            self._keep(job, start, {}, stopped=str(error))

    def _game(self, study: str, seed: int, *arms: str) -> list[str]:
        """Return the arguments with which a game's script trains these arms; without arms it makes only the initial model."""
        folder = self.runs / study
        return [str(GAMES[study].file), "--folder", str(folder), "--seeds", str(seed), "--arms", *arms]

    def play(self, job: Job) -> None:
        """Train an arm of a game, and store the numbers that the game's script measures."""
        game, start = GAMES[job.study], time.monotonic()
        shutil.rmtree(self.runs / job.study / game.run_name(job.arm, job.seed), ignore_errors=True)
        try:
            output, usage = self._call(self._game(job.study, job.seed, job.arm))
            measured = json.loads(output.strip().rpartition("\n")[2])
            self._keep(job, start, measured["found"] | usage, curves=measured["curves"])
        except RuntimeError as error:
            self._keep(job, start, {}, stopped=str(error))

    def evaluate(self, job: Job) -> None:
        """Evaluate the team with a Solver from outside the team.

        Stores the accuracy of the team, that of the Solver's first answers in the same episodes, and the difference, which is the
        gain from the other agents.
        """
        from marsrl.trainer.report.summary import Evaluation

        start, run = time.monotonic(), self.runs / Job("marsrl", "whole", job.seed).name
        with tempfile.TemporaryDirectory() as folder:
            critics = Path(folder, "critics")
            if job.arm.startswith("untrained"):
                critics = self._make([*Job("marsrl", "whole", job.seed).settings, *self.more])
            else:
                self._call(["-m", "marsrl.commands.cli", "export", str(run), str(critics)])
            settings = [
                "--config",
                str(run / "config.yaml"),
                f"policies.main.model={critics}",
                "policies.main.frozen=true",
            ]
            if job.arm != "own team":
                solver = self._make([*job.settings, *self.more])
                settings += [f"policies.foreign.model={solver}", "policies.foreign.frozen=true"]
                settings += ["policies.foreign.dtype=float32", "agents.solver.policy=foreign"]
            output, _ = self._call(["-m", "marsrl.commands.cli", "evaluate", *settings])
        evaluation = Evaluation.model_validate_json(output)
        assert evaluation.alone is not None and evaluation.alone.mean is not None and evaluation.system.mean is not None
        numbers = {name: row.mean for name, row in evaluation.rows.items() if row.mean is not None}
        alone, system = evaluation.alone.mean, evaluation.system.mean
        self._keep(job, start, {**numbers, "alone": alone, "added": system - alone})

    def _keep(
        self,
        job: Job,
        start: float,
        numbers: dict[str, float],
        stopped: str | None = None,
        curves: Mapping[str, Sequence[float | None]] | None = None,
    ) -> None:
        from marsrl.trainer.machine import LIBRARIES, device_name, library_versions
        from marsrl.trainer.runs.directory import write_atomically

        seconds = round(time.monotonic() - start, 1)
        around = {"device": device_name(), "load": os.getloadavg()[0], "versions": library_versions(LIBRARIES)}
        result = Result(
            job.study, job.arm, job.seed, job.settings, self.commit, stopped, numbers, seconds, around, curves or {}
        )
        write_atomically(self.results / f"{job.name}.json", (json.dumps(dataclasses.asdict(result)) + "\n").encode())
        print(f"{job.name}: {stopped or _line(numbers)}, {seconds:.0f} s", flush=True)


def warm_started(settings: Sequence[str]) -> Path:
    """Return the directory of the first warm-started policy with these settings; make it unless it is cached."""
    from marsrl.trainer.config.read import read_config
    from marsrl.trainer.report.console import RunConsole
    from marsrl.trainer.supervised.warm_start import warm_starts

    config, _ = read_config(None, settings)
    return Path(next(iter(warm_starts(config, RunConsole()).values())))


def _line(numbers: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {numbers[name]:.3f}" for name in ("system", "solver", "alone", "last", "return") if name in numbers
    )


def plan(jobs: Sequence[Job], results: Results) -> str:
    """Return a Markdown table with finished and planned seeds per arm."""
    lines = ["| study | arm | seeds | finished |", "|---|---|---|---|"]
    for study, arm in dict.fromkeys((job.study, job.arm) for job in jobs):
        jobs_of_arm = [job for job in jobs if (job.study, job.arm) == (study, arm)]
        num_current = sum(is_current(job, results.get((job.study, job.arm, job.seed))) for job in jobs_of_arm)
        lines.append(f"| {study} | {arm} | {len(jobs_of_arm)} | {num_current} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="train the arms and seeds without a result")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=[*STUDIES, *GAMES, "foreign"], help="run only these studies"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent trainings (default: 1)")
    parser.add_argument("--warm-start", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm_start:
        print(warm_started(options.warm_start))
        return 0
    jobs = every_job(options.only)
    runs = RUNS / state_of_the_code()
    os.environ["MARSRL_CACHE"] = str(runs / "cache")
    runner = Runner(git("rev-parse", "HEAD").stdout.strip(), RESULTS, runs, options.jobs)
    results = read_results(RESULTS)
    missing = [job for job in jobs if not is_current(job, results.get((job.study, job.arm, job.seed)))]
    print(plan(jobs, results), flush=True)
    if options.run:
        if files := changed_files():
            parser.error(
                f"the tree has uncommitted changes, but results name a commit: commit or undo the changes\n{files}"
            )
        runner.all(missing)
    text = page(PAGE.read_text("utf-8"), read_results(RESULTS))
    PAGE.write_text(text, "utf-8")
    print(f"{PAGE}: written")
    if unsaid := [section.partition("\n")[0] for section in text.split("\n## ")[1:] if "**Seen**" not in section]:
        print("these sections have no paragraph **Seen** about their table: " + "; ".join(unsaid))
    return 0


if __name__ == "__main__":
    sys.exit(main())
