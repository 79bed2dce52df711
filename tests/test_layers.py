"""Files import only from their own layer and lower ones: kernels < rollout < trainer < commands < api.

Only files that are named for vLLM or Ray import these libraries.
"""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import marsrl

ROOT = Path(__file__).parent.parent
ORDER = ("kernels", "rollout", "trainer", "commands", "api")
FILES = [p for folder in ORDER for p in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Return every module that a file imports anywhere, including in functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def module_of(path: Path) -> str:
    """Return the name by which a file is imported: marsrl.NAME for files of api/, else marsrl.FOLDER.NAME."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("marsrl", *parts[parts[0] == "api" :])).removesuffix(".__init__")


def test_nothing_imports_upward() -> None:
    api = {module_of(path) for path in FILES if path.is_relative_to(ROOT / "api")}
    names_of_api = {*api, *(f"marsrl.{name}" for name in marsrl.__all__)}
    assert "marsrl" in api and len(api) > 1
    wrong = {}
    for path in FILES:
        layer = path.relative_to(ROOT).parts[0]
        above = tuple(f"marsrl.{each}" for each in ORDER[ORDER.index(layer) + 1 :])
        names = [name for name in imported(path) if name.startswith(above) or (layer != "api" and name in names_of_api)]
        if names:
            wrong[str(path.relative_to(ROOT))] = names
    assert not wrong


# The rooms (folders) of each layer, and the rooms of the same layer that each of them imports. Every room may import `config`.
# Files beside the rooms are not listed: the data contract (types) is below all rooms; files that assemble rooms (team, loop, run)
# are above them.
ROOMS = {
    "rollout": {
        "agents": "",
        "gateway": "agents",
        "orchestrations": "agents gateway",
        "engines": "agents weights",
        "pool": "agents engines",
        "rewards": "agents engines pool",
        "player": "engines gateway tasks",
        "tasks": "agents rewards tools",
        "tools": "",
        "weights": "",
    },
    "trainer": {
        "checks": "data learner models report supervised",
        "config": "",
        "data": "runs",
        "evaluate": "report runs",
        "learner": "data runs",
        "models": "learner",
        "report": "data learner runs",
        "runs": "",
        "supervised": "data learner models report runs",
        "weights": "data learner runs",
    },
    "commands": {
        "check_answers": "",
        "cli": "check_answers curate look models plan sft",
        "curate": "look",
        "look": "",
        "models": "",
        "plan": "",
        "sft": "",
    },
}


@pytest.mark.parametrize("layer", ROOMS)
def test_rooms_import_exactly_the_listed_rooms(layer: str) -> None:
    folders = {p.relative_to(ROOT / layer).parts[0] for p in FILES if p.is_relative_to(ROOT / layer)}
    rooms = {name for name in folders if (ROOT / layer / name).is_dir()}
    imports = {}
    for room in rooms:
        names = {name for path in (ROOT / layer / room).rglob("*.py") for name in imported(path)}
        of_layer = {name.split(".")[2] for name in names if name.startswith(f"marsrl.{layer}.")}
        imports[room] = (of_layer & rooms) - {room, "config"}
    assert imports == {room: set(others.split()) for room, others in ROOMS[layer].items()}
    TopologicalSorter(imports).prepare()  # a CycleError names the rooms


def test_imports_between_files_form_no_cycle() -> None:
    files = {module_of(path): path for path in FILES}
    imports = {}
    for file, path in files.items():
        names = imported(path) & files.keys()
        # `from package import file` needs nothing of the package itself.
        inside = {name.rpartition(".")[0] for name in names}
        imports[file] = {name for name in names if not (name in inside and files[name].name == "__init__.py")} - {file}
    TopologicalSorter(imports).prepare()  # a CycleError names the files


def test_a_room_has_at_most_twenty_files() -> None:
    """Readers cannot take in a longer list at a glance."""
    folders = {path.parent for path in FILES}
    sizes = {str(f.relative_to(ROOT)): sum(path.is_file() for path in f.iterdir()) for f in folders}
    assert {folder: size for folder, size in sizes.items() if size > 20} == {}


@pytest.mark.parametrize("library", ["vllm", "ray"])
def test_only_files_named_for_a_library_import_it(library: str) -> None:
    users = [p for p in FILES if any(n == library or n.startswith(library + ".") for n in imported(p))]
    wrong = [str(p.relative_to(ROOT)) for p in users if library not in p.name and library not in p.parent.name]
    assert users, f"no file imports {library}: the test looks for the wrong name"
    assert not wrong


def test_only_the_learner_imports_megatron() -> None:
    users = [p.relative_to(ROOT) for p in FILES if any(n.split(".")[0] == "megatron" for n in imported(p))]
    assert users
    assert not [str(p) for p in users if p.parts[:2] != ("trainer", "learner")]


def test_mypy_finds_every_folder_under_its_import_name() -> None:
    """Otherwise mypy silently skips every call between two of our modules."""
    for folder in (*ORDER[:-1], "benchmarks", *(path.name for path in (ROOT / "api").glob("*.py"))):
        target = ROOT / ("api" if folder.endswith(".py") else "") / folder
        assert (ROOT / "typed" / "marsrl" / folder).resolve() == target.resolve()


HEAVY = {"torch", "vllm", "ray", "megatron", "transformers"}
EXTRAS = {"httpx", "uvicorn", "starlette", "fastapi", "mcp", "trafilatura", "pypdf", "wandb"}  # setup.py's extras
TRAINER = """
import marsrl.trainer.loop, marsrl.rollout.player.rollout, marsrl.trainer.build, marsrl.commands.models.export
import marsrl.trainer.checks.preflight
import tempfile
from marsrl.trainer.models.init_model import init_model
with tempfile.TemporaryDirectory() as folder:
    init_model("tiny", "bytes", f"{folder}/model")
"""


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        # Reading a config, and starting the viewer. With torch, the viewer would take four times as long to start.
        ("import marsrl.trainer.config.read, marsrl.rollout.config, marsrl.trainer.learner.megatron.layout", HEAVY),
        ("from marsrl.commands.look import server, text, compare", HEAVY),
        ("import marsrl.kernels", {"torch._dynamo", "triton"}),  # libraries that would compile kernels
        # The package must import quickly.
        ("import marsrl; dir(marsrl)", {*HEAVY, "pydantic", "numpy", "omegaconf", "marsrl.runs"}),
        # The training loop before it installs the shim, the export, and the creation of a new model.
        (TRAINER, {"vllm", "ray", "megatron", "transformers.models.qwen3_moe", "transformers.masking_utils", *EXTRAS}),
    ],
    ids=["config", "viewer", "kernels", "api", "trainer"],
)
def test_parts_that_start_quickly_import_no_heavy_library(statement: str, without: set[str]) -> None:
    script = f"{statement}\nimport sys\nprint(' '.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "marsrl" in done.stdout and not set(done.stdout.split()) & without


def test_helper_modules_of_tests_have_unique_names() -> None:
    """pytest imports helpers of all folders by bare name, and would find only the first of two namesakes."""
    names = [path.stem for path in (ROOT / "tests").rglob("*.py") if not path.stem.startswith(("test_", "conftest"))]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []
