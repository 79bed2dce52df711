"""What a user sees who starts a run with something wrong: one message, exit code 2, nothing started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from marsrl.trainer import cli
from marsrl.trainer.init_model import init_model
from marsrl.trainer.main import main

MAIN = Path(__file__).resolve().parents[2] / "trainer" / "main.py"


def start(*words: str, under_torchrun: bool = False, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if under_torchrun else []
    command = [sys.executable, *launcher, str(MAIN), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The one message of a run that is refused (in this process: a start of Python for each would take minutes)."""

    def refuse(*words: str) -> str:
        assert main(list(words)) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("marsrl: "), lines
        return lines[0]

    return refuse


def test_a_refused_run_exits_with_2_and_without_a_traceback() -> None:
    done = start("run.steps=many")
    assert done.returncode == 2
    assert done.stderr.startswith("marsrl: run.steps: ")
    assert "Traceback" not in done.stderr


def test_an_unknown_key_names_the_nearest_right_one(refusal: Refusal) -> None:
    assert refusal("rollout.group_sise=4") == (
        "marsrl: rollout.group_sise: unknown key; did you mean rollout.group_size? (command line)"
    )


def test_under_torchrun_one_rank_says_it_once() -> None:
    done = start("rollout.group_sise=4", under_torchrun=True)
    assert done.returncode != 0
    assert done.stderr.count("did you mean rollout.group_size?") == 1


def test_an_unknown_agent_names_the_agents(refusal: Refusal) -> None:
    assert "has no such agent; it has solver, verifier1" in refusal("agents.prover.temperature=1")


def test_math_without_a_model_says_how_to_give_one(tmp_path: Path, refusal: Refusal) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    assert "policies.main.model is not set" in refusal("task=math", f"data.train={data}")


def test_math_without_data_says_what_is_missing(refusal: Refusal) -> None:
    assert "set data.train" in refusal("task=math", "policies.main.model=/nowhere")


def test_a_bad_line_of_data_says_file_and_line(tmp_path: Path, refusal: Refusal) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n{"question": \n')
    message = refusal("task=math", f"data.train={data}", "policies.main.model=/nowhere")
    assert f"{data}:2:" in message


def test_a_missing_model_directory_is_named(tmp_path: Path, refusal: Refusal) -> None:
    assert f"{tmp_path}/nothing is not a directory" in refusal(f"policies.main.model={tmp_path}/nothing")


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    message = refusal(f"policies.main.model={tmp_path}")
    assert (
        "GPT2LMHeadModel is not supported; supported: Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
        in message
    )


def test_half_a_model_names_the_missing_files(tmp_path: Path, refusal: Refusal) -> None:
    init_model("tiny", "bytes", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "missing: model-1.safetensors, model-2.safetensors" in refusal(f"policies.main.model={tmp_path}")


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")


def of_another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 96}))


def without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def without_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def with_too_many_tokens(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100].clone()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100, "eos_token_id": 1, "pad_token_id": 1}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut_short, "model.safetensors is no whole safetensors file"),
        (without_a_tensor, "has no tensor model.norm.weight, which config.json asks for"),
        (of_another_width, "config.json gives [96, 64]"),
        (without_a_tokenizer, "tokenizer"),
        (without_a_template, "the tokenizer has no chat template"),
        (with_too_many_tokens, "config.json's vocab_size is 100"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_model_that_could_not_be_loaded_is_refused_before_anything_starts(
    spoil: Callable[[Path], None], says: str, tmp_path: Path, refusal: Refusal
) -> None:
    spoil(init_model("tiny", "bytes", tmp_path / "spoiled"))
    message = refusal("--dry-run", f"policies.main.model={tmp_path}/spoiled")
    assert says in message and "spoiled" in message


def test_a_layout_that_does_not_divide_says_which_numbers(refusal: Refusal) -> None:
    message = refusal("policies.main.layout.tensor=2")
    assert "2" in message and "does not divide the 1 rank(s)" in message


def test_a_run_directory_that_exists_is_never_overwritten(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("kept: true\n")
    message = refusal(f"run.dir={tmp_path}", "run.name=mine")
    assert "exists and is not overwritten" in message and "run.resume=auto" in message
    assert (tmp_path / "mine" / "config.yaml").read_text() == "kept: true\n"


def test_the_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "torchrun trainer/main.py task=math" in capsys.readouterr().out


def test_a_dry_run_prints_the_resolved_config_and_the_arithmetic_and_leaves_nothing(tmp_path: Path) -> None:
    done = start("--dry-run", "rollout.group_size=4", f"run.dir={tmp_path}/runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "group_size: 4" in done.stdout
    assert "8 problems a step x 4 samples = 32 samples of the first agent" in done.stdout
    assert "at most 288 samples a step" in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["doctor", "init", "evaluate", "report"])
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"marsrl {command}" in capsys.readouterr().out.split("example:")[1]


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("doctor", "evaluate", "export", "plan")) and "95% intervals" in shown


def test_the_doctor_says_what_serves_and_why_not_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "linear_policy_loss" in shown
    assert "megatron-core" in shown
    assert any(line.startswith("  - ") and ":" in line for line in shown.splitlines())
