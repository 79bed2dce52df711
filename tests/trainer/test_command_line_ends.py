"""Exits of `marsrl` commands whose surroundings refuse them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.tasks.data import read_problems
from marsrl.trainer.commands.cli import main


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}: Address already in use; give another --port" in capsys.readouterr().err


def test_who_reads_enough_of_the_output_gets_no_error() -> None:
    command = f"{sys.executable} -m marsrl.trainer.commands.cli config --markdown | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "# Settings\n", "")


def test_a_name_of_a_model_hub_is_told_how_to_get_the_files() -> None:
    with pytest.raises(ValueError, match=r"nothing is downloaded; to get it: hf download Qwen/Qwen3-0.6B --local-dir"):
        read_shape("Qwen/Qwen3-0.6B")
    with pytest.raises(ValueError, match=r"expected a Hugging Face checkpoint directory$"):
        read_shape("/models/here/not")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no problem: it is empty"),
        ('{"question": "1+1", ', "p.jsonl:1: not JSON: it is cut off at column 20, in the middle of an object"),
        ('{"question": 1+1}', "p.jsonl:1: not JSON: Expecting ',' delimiter at column 15"),
    ],
)
def test_a_file_without_a_problem_says_why(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_problems(tmp_path / "p.jsonl", "math")
