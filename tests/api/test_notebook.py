"""examples/first_team.ipynb, executed in a Jupyter kernel: its output, and an interrupt."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
# Installed from constraints/games.txt.
nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
run_sync = nbclient.util.run_sync
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_team.ipynb"
LESS = {"evaluate": {"num_problems": 4, "fixed_inputs": 4}}
LESS_ROLLOUT = {"prompts_per_step": 3, "group_size": 4}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Path]]:
    """Execute the notebook, with an inserted cell that makes its settings smaller, and yield (client, notebook, folder)."""
    folder = tmp_path_factory.mktemp("notebook")
    held = nbformat.read(NOTEBOOK, as_version=4)
    index = cell(held, "settings = {")
    smaller = f"settings |= {LESS}\nsettings['rollout'] |= {LESS_ROLLOUT}\nsettings['run']['steps'] = 2"
    held.cells.insert(index + 1, nbformat.v4.new_code_cell(smaller))
    client = nbclient.NotebookClient(
        held, timeout=1200, iopub_timeout=600, resources={"metadata": {"path": str(folder)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARSRL_CACHE", str(folder / "cache"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        with client.setup_kernel():
            for number, each in enumerate(held.cells):
                client.execute_cell(each, number)
            yield client, held, folder


def cell(held: Any, start: str) -> int:
    (index,) = (i for i, each in enumerate(held.cells) if each.source.startswith(start))
    return index


def shown(code_cell: Any) -> str:
    """Return what a cell printed and displayed, as text."""
    parts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in code_cell.outputs]
    return "\n".join(parts)


def test_the_committed_notebook_has_no_output() -> None:
    assert not [each for each in nbformat.read(NOTEBOOK, as_version=4).cells if each.get("outputs")]


def test_the_notebook_trains_its_team(notebook: tuple[Any, Any, Path]) -> None:
    _, held, folder = notebook
    assert "# reward of corrector" in shown(held.cells[cell(held, "played =")])
    trained = held.cells[cell(held, "run = ")]
    assert "orchestration: memory:Checked" in next(folder.glob("runs/*/config.yaml")).read_text()
    bars = re.findall("step 2/2 rollout", shown(trained))
    assert len(bars) == 1, shown(trained)  # the bar is updated in place
    assert [line.split()[0] for line in shown(held.cells[cell(held, "for row")]).splitlines()] == ["1", "2"]
    (report,) = held.cells[cell(held, "run.report")].outputs
    assert report.data["text/html"].startswith("<iframe srcdoc=")
    assert re.search(r"after RL: 0\.\d{3}", shown(held.cells[cell(held, "for name, evaluation")]))
    assert re.search("^--- (solver|verifier|corrector), reward ", shown(held.cells[cell(held, "for sample")]), re.M)


def test_an_interrupted_kernel_saves_the_run_and_stays_usable(notebook: tuple[Any, Any, Path]) -> None:
    """The interrupted run is a second one, in the kernel in which the notebook's own run has ended."""
    client, _, folder = notebook
    client.kc.execute(
        "settings['run'] |= {'steps': 10_000, 'name': 'long'}\nrun = marsrl.train(settings, team=Checked)"
    )
    metrics, end = folder / "runs" / "long" / "metrics.jsonl", time.monotonic() + 1200
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.1)
    run_sync(client.km.interrupt_kernel)()
    reply = run_sync(client.kc.get_shell_msg)(timeout=600)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert re.search(r"interrupted; checkpoint .* is intact", reply["content"]["evalue"])
    again = nbformat.v4.new_code_cell("print(len(marsrl.load_run('runs/long').metrics) >= 1)")
    client.execute_cell(again, 0)
    assert shown(again) == "True\n"
