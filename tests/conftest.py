"""Fixtures of all tests, the assignment of tests to processes, and a team with a scripted engine (real rules, real tokenizer)."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from letters import AGENTS, make_team
from xdist.scheduler import LoadScopeScheduling

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig, EvaluateConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.imports import imports_for_good
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER, arithmetic_task
from marsrl.rollout.tasks.config import ArithmeticOptions
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.team import Team

if TYPE_CHECKING:
    from rank_pair import RankPair

# With the checkout on sys.path, its folders kernels and trainer would shadow other packages (Hugging Face has `kernels`).
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _ROOT]

if settings.get_current_profile_name() == "default":
    settings.load_profile("ci")  # hypothesis: the same examples on every machine, and no time limit for an example
# Folders and files whose tests share ranks, engines or runs, or mostly wait. All tests of an entry run in one process. Any other
# file is an entry by itself and starts after these. Long entries come first, so that all processes end at about the same time.
TOGETHER = {
    # first, because torch.compile is disabled in a process once it has trained with our replacement for parts of Megatron
    "compiled": ("tests/kernels/test_traced_ops.py",),
    "ranks": ("tests/megatron", "tests/plan", "tests/supervised", "tests/trainer/test_stop.py"),
    "engines": ("tests/engines",),
    "runs": ("tests/integration",),
    "default run": ("tests/integration/test_default_run.py", "tests/integration/test_chaos.py"),
    "miniatures": ("tests/integration/test_miniatures.py", "tests/integration/test_teacher.py"),
    "docs": ("tests/docs",),
    "cluster": ("tests/cluster",),
    "pages": ("tests/look", "tests/report"),
    "benchmarks": ("tests/benchmarks",),
    "programs": ("tests/external",),
    "tools": ("tests/tools/test_users_tools.py",),
    "wheel": ("tests/test_wheel.py",),
    "install": ("tests/install",),
    "notebook": ("tests/api/test_notebook.py",),
}


@functools.cache
def together(file: str) -> str:
    """Return the name of the file's group in TOGETHER, or the file itself. Tests with the same result run in one process."""
    paths = {path: name for name, paths in TOGETHER.items() for path in paths if Path(file).is_relative_to(path)}
    return paths[max(paths, key=len)] if paths else file


class InGroups(LoadScopeScheduling):
    """pytest-xdist's scheduler `loadscope`, with the groups of `together` as scopes.

    xdist's own `loadgroup` does not work with pytest 9.2: it sets a private attribute of test items, which no longer determines
    their ids.
    """

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InGroups:
    return InGroups(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all test files under imports_for_good, as a run imports its libraries."""
    with imports_for_good():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(TOGETHER)}
    # The sort is stable: tests of one file stay in order.
    items.sort(key=lambda item: order.get(together(str(item.path.relative_to(_ROOT))), len(order)))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore environment variables, working directory, PyTorch's number of threads and SIGTERM's handler after a test."""
    torch, before, folder = sys.modules.get("torch"), dict(os.environ), os.getcwd()
    num_threads, on_sigterm = torch.get_num_threads() if torch else 0, signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, on_sigterm)
    if torch and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
    os.chdir(folder)


def scripted_team(
    folder: Path,
    *,
    script: Callable[[DecodeRequest, ChatRenderer, random.Random], str],
    evaluate: EvaluateConfig,
    fail: Callable[[DecodeRequest], str | None] = lambda request: None,
) -> tuple[Team, ScriptedEngine, Task]:
    """Return a team of five agents on one scripted engine, the engine, and the task.

    A completion depends only on its request's uid.
    """
    folder.mkdir(exist_ok=True)
    ARITHMETIC_TOKENIZER.write(folder)
    renderer = ChatRenderer(folder)
    engine = ScriptedEngine(
        lambda request: script(request, renderer, random.Random(request.uid)),
        encode=lambda text: renderer.encode_trusted(text).tolist(),
        fail=fail,
    )
    agents = {name: AgentConfig(max_input_tokens=512) for name in AGENTS}
    task = arithmetic_task(ArithmeticOptions())
    orchestration = build_orchestration("verifier_corrector", agents, task.prompts, evaluate=evaluate)
    pool = EnginePool(LocalReplicas([engine]))
    return make_team(agents, orchestration, pool, renderer, judge=task.judge), engine, task


@pytest.fixture(name="scripted_team", scope="session")
def scripted_team_fixture() -> Any:
    """The function scripted_team, as a fixture: scripted_team(folder, script=..., evaluate=...)."""
    return scripted_team


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """Renderer of chats with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ChatRenderer(folder)


@pytest.fixture(scope="session")
def two_ranks() -> RankPair:
    """Two gloo ranks, shared by all tests that need them (see rank_pair). They start with the first job."""
    from rank_pair import RankPair

    return RankPair("preloaded")
