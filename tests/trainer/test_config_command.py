"""`marsrl config`, `init --from-run` and `--help`; errors for unusable arguments and a taken port."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from marsrl.commands.cli import main
from marsrl.trainer.config.explain import help_line, page_of
from marsrl.trainer.config.keys import all_keys
from marsrl.trainer.config.read import read_config

ROOT = Path(__file__).parents[2]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_printed_settings_can_be_read_back_as_a_config_file(tmp_path: Path, capsys) -> None:
    (tmp_path / "my.yaml").write_text("run:\n  seed: 7\nagents:\n  solver:\n    stop: ['</s>']\n")
    words = ["--config", str(tmp_path / "my.yaml"), "run.steps=3"]
    text = shown(capsys, "config", *words)
    (tmp_path / "again.yaml").write_text(text)
    assert read_config(tmp_path / "again.yaml")[0] == read_config(tmp_path / "my.yaml", ["run.steps=3"])[0]
    with_places = shown(capsys, "config", "--origin", *words)
    assert yaml.safe_load(with_places) == yaml.safe_load(text)
    lines = {line.strip() for line in with_places.splitlines()}
    assert {"steps: 3  # command line", f"seed: 7  # {tmp_path}/my.yaml:2", "wandb: null  # default"} <= lines


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (
            "run.steps",
            [
                "run.steps: integer > 0, default 32",
                "training steps, each of trainer.updates_per_step",
                "here: 3 (command line)",
            ],
        ),
        ("loss.kl", ["none or k1 or k2 or k3", "here: none (default)", "more: docs/credit.md"]),
        ("policies.main.layout.tensor", ["integer > 0", "here: 1 (default)", "docs/parallelism.md"]),
        ("orchestration", ["here: verifier_corrector", "more: docs/own_team.md"]),
        ("policies.main", ["section", "dtype: float32", "layout: {...}"]),
        ("agents", ["mapping of name to section", "solver:"]),
        ("task_options.min_ops", ["here: 2 (command line)"]),
        ("tools.search.top_k", ["integer > 0 and <= 100", "here: none, because tools.search is not set"]),
        ("agents.<name>.top_p", ["default 1", "here: none, because agents.<name> is not set"]),
    ],
)
def test_a_key_is_explained(key: str, parts: list[str], capsys) -> None:
    text = shown(capsys, "config", "--explain", key, "run.steps=3", "task_options.min_ops=2")
    assert all(part in text for part in parts), text


def test_the_settings_page_explains_each_key_once(capsys) -> None:
    page = shown(capsys, "config", "--markdown")
    pages = {page_of(name) for name in all_keys()} | set(re.findall(r"docs/\w+\.md", page))
    assert not [each for each in pages if not (ROOT / each).is_file()]
    assert all(key.meaning.strip() for key in all_keys().values())
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and row[1] and row[3] for row in rows)
    names = [row[0] for row in rows]
    for line in page.splitlines():
        names += line.split(": ", 1)[1].split(", ") if line.startswith("As in ") else []
    names = sorted(name.strip("`.") for name in names)
    assert names == sorted(key.name for key in all_keys().values() if key.kind != "section")


def test_an_error_of_a_setting_ends_with_what_to_read(capsys) -> None:
    for words in (["rollout.segmnts=3"], ["--explain", "rollout.segmnts"]):
        assert main(["config", *words]) == 2
        error = capsys.readouterr().err
        assert "rollout.segmnts: unknown key; did you mean rollout.segments?" in error
        assert "docs/" not in error  # there is no such key to explain
    assert main(["config", "loss.kl=k3"]) == 2
    assert capsys.readouterr().err.endswith("(more: docs/credit.md, marsrl config --explain loss.kl)\n")
    assert help_line("something else happened") == "" and help_line("") == ""
    assert help_line("agents.solver.top_p is 3").endswith("--explain agents.solver.top_p)")


@pytest.mark.parametrize(
    "words",
    [
        ["run.steps=3", "agents.solver.temperature=0.9", "run.name=x"],
        ["preset=cpu_solver_verifier", "policies.solver.optimizer.lr=0.001"],
        ["orchestration=debate", "orchestration_options.rounds=3"],
        ["--config", "qwen3_8b", "task=math", "policies.main.model=/models/x", "data.train=p.jsonl"],
        ["task=qa", "preset=none", "policies.main.model=/models/x", "rollout.group_size=5"],
    ],
)
def test_a_run_s_settings_become_a_file_that_gives_them_again(words: list[str], tmp_path: Path, capsys) -> None:
    path, settings = (words[1], words[2:]) if words[0] == "--config" else (None, words)
    config, origin = read_config(path, settings)
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"# settings: {origin}\n{yaml.safe_dump(config.model_dump(mode='json'))}")
    out = tmp_path / "mine.yaml"
    assert shown(capsys, "init", "--from-run", str(run), str(out)) == f"{out}\n"
    again = read_config(out)[0]
    assert again.run.name is None
    assert again.model_copy(update={"run": config.run}) == config
    written = yaml.safe_load(out.read_text())
    assert len(str(written)) < 700, written  # only the differences
    assert main(["init", "--from-run", str(run), str(out)]) == 2 and "exists" in capsys.readouterr().err
    assert main(["init", "--from-run", str(tmp_path), str(out)]) == 2 and "no config.yaml" in capsys.readouterr().err


def test_help_lists_all_commands_each_with_an_example(capsys) -> None:
    listed = re.findall(r"^│ ([a-z][a-z-]+)  ", shown(capsys, "--help"), re.MULTILINE)
    assert {"try", "plan", "config", "evaluate", "serve-retrieval", "init", "export", "doctor"} < set(listed)
    for name in listed:
        assert f"\n marsrl {name}" in shown(capsys, name, "-h").split("example:")[1]


def test_unusable_arguments_exit_with_status_2(capsys) -> None:
    for words, said in ((["plan"], "--gpus"), (["nope"], "nope"), (["init", "--dtype", "x", "y"], "--dtype"), ([], "")):
        assert main(words) == 2 and said in capsys.readouterr().err


def test_control_characters_in_errors_and_logs_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "\x1b[2J"]) == 2 and logging.lastResort is not None
    logging.lastResort.handle(logging.makeLogRecord({"msg": "a program said \x1b[5m"}))
    said = "marsrl report: ␛[2J is not a run directory: it has no config.yaml\na program said ␛[5m\n"
    assert capsys.readouterr().err == said


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}: Address already in use; set another --port" in capsys.readouterr().err


def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    command = f"{sys.executable} -m marsrl.commands.cli config --markdown | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "# Settings\n", "")


COMMANDS = (
    *(["try"], ["sft"], ["plan", "--gpus", "8"], ["config"], ["evaluate"], ["curate", "raw.jsonl", "--out", "x"]),
    *(["check-answers", "p.jsonl"], ["tool", "search", "x"], ["doctor"]),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_setting_written_as_an_option_is_told_without_dashes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (["--rollout.group_size=4"], ["--rollout.group_size", "4"], ["-rollout.group_size=4"], ["--task=qa"]):
        assert main([*words, *given]) == 2
        setting = "=".join(given).lstrip("-") if len(given) > 1 else given[0].lstrip("-")
        assert capsys.readouterr().err == (
            f"marsrl {words[0]}: command line: {given[0]!r} begins with dashes; write {setting}\n"
        )
    assert main([*words, "rollout.group_size", "=", "4"]) == 2
    assert "spaces around the = of 'rollout.group_size'" in capsys.readouterr().err


def test_a_mistyped_key_is_told_before_torch_is_imported() -> None:
    lines = [
        f"assert main({[*words, 'rollout.group_sze=4']}) == 2 and 'torch' not in sys.modules" for words in COMMANDS
    ]
    program = "\n".join(["import sys", "from marsrl.commands.cli import main", *lines])
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.returncode == 0 and told.stderr.count("did you mean rollout.group_size?") == len(COMMANDS), told.stderr
