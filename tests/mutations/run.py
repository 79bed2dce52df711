"""Makes mistakes in our modules, one at a time, and counts those that the tests beside them notice.

    python tests/mutations/run.py                            a sample of every module
    python tests/mutations/run.py --module credit --all --show

Nothing is written to the sources. One process imports the libraries, and from them all that does not depend on the
module; every mutant is a fork of it, into which the changed module is loaded from memory. A mutant is killed when a test
fails, or when the tests take several times as long as without it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from judges import MODULES, Judged, equivalents, key
from operators import Mutant, mutants, sample

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("torch", "pydantic", "pytest", "_hypothesis_pytestplugin", "hypothesis.strategies", "transformers")
_MEMORY_BYTES = 4 << 30  # what the tests may take beyond what is held before them


class Score(NamedTuple):
    """How the mutants of a module fared. Each is in one of the four lists."""

    killed: list[Mutant]
    timed_out: list[Mutant]
    survived: list[Mutant]
    equivalent: list[tuple[Mutant, str]]  # survived, and why no test can tell

    @property
    def share(self) -> float:
        """Killed ones of those that can be."""
        killed = len(self.killed) + len(self.timed_out)
        return killed / max(1, killed + len(self.survived))


class _Loader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class Replaced(importlib.abc.MetaPathFinder):
    """Imports one module from `code`; None: it cannot be imported, nor can what depends on it."""

    def __init__(self, module: str, code: CodeType | None) -> None:
        self._module, self._code = module, code

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if self._code is None or spec is None or spec.origin is None:
            raise ImportError(f"{fullname} is not imported yet")
        spec.loader = loader = _Loader(fullname, spec.origin)
        loader.code = self._code
        return spec


def in_fork(work: Callable[[], Any], limit_s: float, cpu_s: float | None = None) -> tuple[str, Any]:
    """("ended", what `work` returns in a process of its own), ("died", None) or ("timeout", None).

    cpu_s: processor time that it may take, in a session of its own, of which nothing is left afterwards.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            if cpu_s is not None:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 2))
                held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_DATA, (held + _MEMORY_BYTES, held + _MEMORY_BYTES))
            os.write(writing, json.dumps(work()).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    told, deadline = b"", time.monotonic() + limit_s
    status = None
    try:
        while not told.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reading], [], [], left)[0]:
                return "timeout", None
            part = os.read(reading, 1 << 16)
            if not part:
                break
            told += part
        if told:
            return "ended", json.loads(told)
        status = os.waitpid(child, 0)[1]
        return "timeout" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "died", None
    finally:
        with contextlib.suppress(ProcessLookupError):
            if cpu_s is not None:
                os.killpg(child, signal.SIGKILL)  # with all that the tests have started
            else:
                os.kill(child, signal.SIGTERM)  # ends what it has forked itself
        if status is None:
            os.waitpid(child, 0)
        os.close(reading)


def run_tests(judged: Judged, folder: Path, code: CodeType | None = None) -> dict[str, Any]:
    """Run the module's tests in this process: did all pass, how long they took, what was imported."""
    import hypothesis
    import pytest

    if code is not None:
        sys.meta_path.insert(0, Replaced(judged.module, code))
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # that a test fails is enough: no smaller example
    hypothesis.settings.register_profile(
        "mutations", database=None, derandomize=True, deadline=None, phases=phases, max_examples=40
    )
    hypothesis.settings.load_profile("mutations")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.chdir(ROOT)
    start = time.monotonic()
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:faulthandler", f"--basetemp={folder}"]
    options += ["-p", "_hypothesis_pytestplugin", "-m", "not slow and not gpu and not multi_gpu"]
    status = pytest.main([*options, *judged.tests])
    taken, cpu = time.monotonic() - start, time.process_time()
    tests = str(ROOT / "tests")
    imported = [n for n, m in sys.modules.items() if not str(getattr(m, "__file__", None)).startswith(tests)]
    return {"passed": status == 0, "seconds": taken, "cpu_s": cpu, "imported": imported}


def import_all_but(judged: Judged, names: Sequence[str]) -> None:
    """Import what the tests will, but for the module and what depends on it."""
    blocked = Replaced(judged.module, None)
    sys.meta_path.insert(0, blocked)
    if "megatron.core" in names:
        importlib.import_module("marsrl.trainer.learner.megatron.shim").install()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    sys.meta_path.remove(blocked)


def judge(name: str, judged: Judged, limit: int | None, seed: int) -> dict[str, Any]:
    """{"fates": of each mutant in order, "num": how many there are} or {"error": why not}."""
    folder = Path(tempfile.mkdtemp(prefix="mutations"))
    try:
        how, first = in_fork(lambda: run_tests(judged, folder), limit_s=1200, cpu_s=300)
        if how != "ended" or not first["passed"]:
            return {"error": f"the tests fail without any mutation: {' '.join(judged.tests)}"}
        import_all_but(judged, first["imported"])
        tree, chosen, num = chosen_mutants(judged, limit, seed)
        plain = compile(tree, str(ROOT / judged.file), "exec", dont_inherit=True)
        how, again = in_fork(lambda: run_tests(judged, folder / "tmp", plain), limit_s=1200, cpu_s=300)
        if how != "ended" or not again["passed"]:
            return {"error": "the tests fail in the process of the mutants, where nothing is mutated"}
        fates = []
        for number, mutant in enumerate(chosen):
            code = mutant.code(tree, str(ROOT / judged.file))
            how, told = in_fork(
                lambda code=code: run_tests(judged, folder / "tmp", code),  # type: ignore[misc]
                limit_s=60 + 10 * first["seconds"],  # of a machine that may be busy
                cpu_s=5 + 2 * first["cpu_s"],
            )
            fates.append(
                "survived" if how == "ended" and told["passed"] else "timeout" if how == "timeout" else "killed"
            )
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            if sys.stderr.isatty():
                print(f"\r{name} {number + 1}/{len(chosen)} ", end="", file=sys.stderr, flush=True)
        return {"fates": fates, "num": num, "seconds": first["seconds"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def chosen_mutants(judged: Judged, limit: int | None, seed: int) -> tuple[ast.Module, list[Mutant], int]:
    """(the syntax tree, the mutants that are tried, how many there are)."""
    source = (ROOT / judged.file).read_text()
    tree = ast.parse(source)
    found = mutants(tree, source, judged.only)
    return tree, found if limit is None else sample(found, limit, seed), len(found)


def score(name: str, judged: Judged, limit: int | None, seed: int) -> tuple[Score, dict[str, Any]]:
    how, told = in_fork(lambda: judge(name, judged, limit, seed), limit_s=1e6)
    if how != "ended" or "error" in told:
        raise SystemExit(f"{name}: {told['error'] if told else how}")
    _, chosen, _ = chosen_mutants(judged, limit, seed)
    known = equivalents(name)
    result = Score([], [], [], [])
    for mutant, fate in zip(chosen, told["fates"], strict=True):
        if fate == "survived" and key(mutant) in known:
            result.equivalent.append((mutant, known[key(mutant)]))
        else:
            {"killed": result.killed, "timeout": result.timed_out, "survived": result.survived}[fate].append(mutant)
    return result, told


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--module", action="append", choices=MODULES, help="may be given several times; default: every one"
    )
    parser.add_argument("--limit", type=int, default=60, help="mutants of a module, spread evenly over it (60)")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--seed", type=int, default=0, help="which ones are taken")
    parser.add_argument("--show", action="store_true", help="name every survivor")
    parser.add_argument("--at-least", type=float, default=0.9, help="exit with 1 where a score is lower (0.9)")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: what was forked ends too
    os.environ.update(OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", HF_HUB_OFFLINE="1")
    sys.dont_write_bytecode = False
    # compiled once, and not among the sources
    sys.pycache_prefix = str(Path(tempfile.gettempdir()) / "marsrl-mutations")
    sys.path[:] = [str(ROOT / "typed"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    for library in _LIBRARIES:
        importlib.import_module(library)
    head = ("mutants", "tried", "killed", "by timeout", "survived", "equivalent", "score", "tests")
    print(f"{'module':16}" + "".join(f"{word:>12}" for word in head))
    worst = 1.0
    for name in options.module or MODULES:
        judged = MODULES[name]
        result, told = score(name, judged, None if options.all else options.limit, options.seed)
        worst = min(worst, result.share)
        counts = (told["num"], len(told["fates"]), *map(len, result))
        figures = "".join(f"{count:12}" for count in counts)
        print(f"{name:16}{figures}{result.share:12.1%}{told['seconds']:10.1f} s", flush=True)
        if options.show:
            for mutant in result.survived:
                print(f"  {judged.file}:{mutant.line}: {mutant.text}\n      {mutant.before}  ->  {mutant.after}")
            for mutant, why in result.equivalent:
                print(f"  {judged.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}\n      equivalent: {why}")
    return int(worst < options.at_least)


if __name__ == "__main__":
    raise SystemExit(main())
