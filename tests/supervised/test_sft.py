"""`marsrl sft` from the command line to the model that a run starts from."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import run_by
from desk import MODEL
from safetensors.torch import load_file

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.trainer.commands import cli
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics

SENTENCES = ("seven is odd", "eight is even", "nine is odd", "ten is even")
WORDS = (
    "task=math", "data.train=none.jsonl", "policies.main.dtype=float32", "run.evaluate=false", "sft.batch=4",
    "sft.epochs=3", "sft.lr=1e-2", "sft.held_out=0.25", "run.checkpoint_every=2", "run.keep_checkpoints=9",
)  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    os.chdir(tmp_path)
    init_model("tiny", "bytes", tmp_path / "model")
    lines = [{"agent": "solver", "prompt": f"{i}: ", "completion": SENTENCES[i % 4]} for i in range(16)]
    (tmp_path / "demos.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [*WORDS, f"policies.main.model={tmp_path / 'model'}", "data.demonstrations=demos.jsonl"]


def losses(run: Path) -> dict[int, dict[str, float | None]]:
    return {row.step: dict(row.values) for row in read_metrics(run / "metrics.jsonl")}


def cross_entropy(model_dir: Path, lines: list[str]) -> float:
    """Of the completions, the end token included, by transformers."""
    from transformers import AutoModelForCausalLM

    model, renderer = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), ChatRenderer(model_dir)
    total, count = 0.0, 0
    for line in map(json.loads, lines):
        prompt = renderer.encode_trusted(line["prompt"]).tolist()
        completion = [*renderer.encode_trusted(line["completion"]).tolist(), renderer.eos_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        total -= float(logprobs[rows, torch.tensor(completion)].sum())
        count += len(completion)
    return total / count


def test_the_loss_falls_and_the_command_says_where_the_model_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sft", *words, "run.name=learns"]) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policies.main.model=")]
    assert told == "policies.main.model=runs/learns/hf"
    rows = losses(Path("runs/learns"))
    assert list(rows) == list(range(10))  # 12 of 16, 4 a step, 3 epochs
    held_out = {step: row["sft/held_out/loss"] for step, row in rows.items() if "sft/held_out/loss" in row}
    assert list(held_out) == [0, 3, 6, 9]
    first, *_, last = held_out.values()
    assert first is not None and last is not None and last < 0.75 * first
    trained = [row["sft/loss"] for step, row in rows.items() if step]
    assert (trained[-1] or 0) < 0.75 * (trained[0] or 0)


def test_a_learning_rate_of_0_measures_the_model_as_it_is(words: list[str]) -> None:
    """Over one batch of all lines: the loss of the step is that of transformers."""
    one = ["sft.batch=16", "sft.epochs=1", "sft.held_out=0", "sft.lr=0", "run.name=still"]
    assert cli.main(["sft", *words, *one]) == 0
    expected = cross_entropy(Path("model"), Path("demos.jsonl").read_text().splitlines())
    assert losses(Path("runs/still"))[1]["sft/loss"] == pytest.approx(expected, rel=1e-5)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in ("model", "runs/still/hf"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_that_goes_on_equals_an_unbroken_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", *words, "run.name=whole"]) == 0
    shutil.copytree("runs/whole", "runs/killed")
    shutil.rmtree("runs/killed/hf")
    (Path("runs/killed/checkpoints/latest")).write_text("step_4\n")  # in the second epoch
    again = ["run.name=killed", "run.resume=auto"]
    assert cli.main(["sft", *words, *again, "sft.batch=2"]) == 2
    assert "cannot go on with another section sft" in capsys.readouterr().err
    Path("other.jsonl").write_text(Path("demos.jsonl").read_text().replace("seven", "three"))
    assert cli.main(["sft", *words, *again, "data.demonstrations=other.jsonl"]) == 2
    assert "cannot go on with other demonstrations" in capsys.readouterr().err
    assert cli.main(["sft", *words, *again]) == 0
    whole, killed = (load_file(f"runs/{name}/hf/model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert losses(Path("runs/killed")) == losses(Path("runs/whole"))
    assert cli.main(["sft", *words, *again]) == 0  # it is done, and says where the model is
    assert "policies.main.model=runs/killed/hf" in capsys.readouterr().out


@pytest.mark.parametrize("command", run_by("test_a_command_of_the_documents_teaches"))
def test_a_command_of_the_documents_teaches(command: str, words: list[str], tmp_path: Path) -> None:
    given = shlex.split(MODEL.sub(str(tmp_path / "model"), command))
    task = [] if "task=math" in given else ["task=math"]
    assert cli.main([*given[1:], *task, "data.train=none.jsonl", "policies.main.dtype=float32"]) == 0
    (run,) = Path("runs").iterdir()
    assert (run / "hf/model.safetensors").is_file() and run.name.startswith("sft-")


@pytest.mark.slow
def test_two_ranks_that_share_each_matrix_or_the_demonstrations_learn_what_one_does(words: list[str]) -> None:
    words = [*words, "sft.lr=1e-3"]
    assert cli.main(["sft", *words, "run.name=one"]) == 0
    expected = losses(Path("runs/one"))
    for name, layout in (("tensor", ["policies.main.layout.tensor=2"]), ("data", [])):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*launcher, "-m", "marsrl.trainer.commands.cli", "sft", *words, *layout, f"run.name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("policies.main.model=") == 1
        for step, row in losses(Path("runs") / name).items():
            found, wanted = ({k: v for k, v in each.items() if k.startswith("sft/")} for each in (row, expected[step]))
            assert found == pytest.approx(wanted, rel=1e-3), (name, step)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.demonstrations=null"], "data.demonstrations is not set"),
        (["policies.main.model=null"], "policies.main.model is not set"),
        (["policies.main.layout.tensor=2"], "layout"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    words: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sft", *words, *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[0] and not Path("runs").exists()
