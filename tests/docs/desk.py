"""A folder in which the documents' commands can run: it has the checkout, problem files, and models under the documented
names.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import yaml
from documents import ROOT, config_blocks, other_blocks, python_blocks
from safetensors.torch import load_file, save_file
from small_run import SEED, sevens

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.trainer.models.init_model import init_model

MODEL = re.compile(r"(/path/to|/models)/([\w.-]+)")
ANSWER = "\\boxed{%s}"
RAW = (  # questions and levels; the second question is repeated
    ("What is 7, asked for the 0th time?", "school"),
    ("Think of the calendar: how many days has a week?", "graduate"),
    ("Think of the calendar: how many days has a week!?", "school"),
    ("Asked by a child: how many days has a fortnight?", "graduate"),
)


def write_rows(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Desk:
    """Folder for documented commands. folder: the commands' working directory. cache: where they keep warm starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        for name in ("trainer", "configs", "benchmarks", "examples", "Makefile"):
            (folder / name).symlink_to(ROOT / name)
        for name, count in (("problems", 12), ("questions", 12), ("aime25", 4)):
            sevens(folder, count, name=f"{name}.jsonl")
        for name, count in (("held_out", 1), ("beyondaime", 2)):
            sevens(folder, count, name=f"{name}.jsonl", answer="8")
        (folder / "mine.yaml").write_text((ROOT / "rollout/agents/prompt_sets/math.yaml").read_text())
        page_of = {"team": "own_team", "task": "own_task", "seeker": "waiting", "program": "external"}
        files = {f"my_{name}.py": f"docs/{page}.md:" for name, page in page_of.items()}
        for name, page in {**files, "units.py": "docs/tools.md:", "team.py": "README.md:"}.items():
            blocks = (block.text for block in python_blocks() if block.where.startswith(page))
            (text,) = (block for block in blocks if not block.startswith("import marsrl\n"))
            (folder / name).write_text(text)
        for name, page in page_of.items():
            text = next(block.text for block in config_blocks() if block.where.startswith(f"docs/{page}.md:"))
            (folder / f"own_{name}.yaml").write_text(text)
        write_rows(folder / "raw.jsonl", ({"question": asked, "answer": "7", "level": level} for asked, level in RAW))
        curate = next(block.text for block in config_blocks() if "\ncurate:" in block.text)
        (folder / "curation.yaml").write_text(curate)
        (folder / "mars.yaml").write_text(
            next(b.text for b in config_blocks() if b.text.startswith("preset: mars_") and "\n  eval:" in b.text)
        )
        (capitals,) = (block.text for block in other_blocks() if block.where.startswith("docs/own_task.md:"))
        (folder / "capitals.txt").write_text(f"{capitals}\n")
        (folder / "corpus.jsonl").write_text(json.dumps({"id": "7", "title": "Seven", "text": "It is 7."}))
        (folder / "wiki-18.jsonl").write_text(json.dumps({"id": "0", "contents": '"Seven"\nIt is 7.'}))

    def words(self, command: str, model: Callable[[str], Path], rest: str = "") -> list[str]:
        """Return the command's arguments with real paths, and put real paths into its config file.

        model: function from a model's name to its directory. rest: arguments that replace `...`.
        """
        command = command.replace(" ...", f" {rest}".rstrip())
        command = command.replace("/tmp/", f"{self.folder}/tmp/").replace("HOST:", "127.0.0.1:")
        words = shlex.split(MODEL.sub(lambda match: str(model(match[2])), command))
        for path in [self.folder / word for word in words if word in ("own_task.yaml", "own_seeker.yaml", "mars.yaml")]:
            path.write_text(MODEL.sub(lambda match: str(model(match[2])), path.read_text()))
            self.write_problems(path.read_text())
        return words

    def write_problems(self, config: str) -> None:
        """Write the missing files of a config's data.train and data.eval, each with its `count` of problems, or four."""
        data = yaml.safe_load(config).get("data", {})
        for file in [file for key in ("train", "eval") if isinstance(data.get(key), list) for file in data[key]]:
            path = self.folder / file["path"]
            path.parent.mkdir(exist_ok=True)
            rows = [{"question": f"{path.stem}: what is {i}?", "answer": str(i)} for i in range(file.get("count", 4))]
            if not path.exists():
                write_rows(path, rows)

    def start(self, words: list[str]) -> subprocess.Popen[bytes]:
        """Start the command in this folder, with the tests' environment and its own cache; `console` returns its output."""
        environment = {**os.environ, "MARSRL_CACHE": str(self.cache)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        with open(self.folder / "console", "wb") as console:
            streams = {"stdout": console, "stderr": subprocess.STDOUT}
            return subprocess.Popen(words, cwd=self.folder, env=environment, start_new_session=True, **streams)

    def console(self) -> str:
        """Return the output of the last started command."""
        return (self.folder / "console").read_text("utf-8", errors="replace")

    def until_version_1(self, words: list[str]) -> Path:
        """Start the command, stop it by Ctrl-C once the first step is logged, and return the run's directory."""
        process = self.start([*words, *SEED])
        deadline = time.monotonic() + 1200
        try:
            while not (rows := [each for each in self.folder.glob("runs/*/metrics.jsonl") if each.stat().st_size]):
                assert process.poll() is None and time.monotonic() < deadline, self.console()[-6000:]
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            process.wait(300)
            return rows[0].parent
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def boxing_model(folder: Path, answers: str = "78") -> Path:
    r"""Write a Qwen3-MoE with random layers that completes every chat with \boxed{d}, where d is a random digit of `answers`.

    The head encodes which byte follows which. The embedding is large, so that the random layers hardly change the logits. Short
    completions make tests fast.
    """
    init_model("tiny", "bytes", folder)
    weights = load_file(folder / "model.safetensors")
    encode = lambda text: ChatRenderer(folder).encode_trusted(text).tolist()  # noqa: E731
    after: dict[int, set[int]] = {}  # tokens that may follow a token
    for answer in answers:
        chain = encode("\n" + ANSWER % answer + "<|im_end|>")
        for token, follower in itertools.pairwise(chain):
            after.setdefault(token, set()).add(follower)
    embedding = weights["model.embed_tokens.weight"] * 20  # standard deviation 1
    head = torch.zeros_like(embedding)
    for token, followers in after.items():
        for follower in followers:
            head[follower] += 2 * embedding[token] / embedding[token].norm()  # a logit of about 16
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def published_model(folder: Path, name: str) -> Path:
    """Write the config.json and the weight files' headers of the published model `name`, and a byte tokenizer."""
    from published_model import save_published

    from marsrl.trainer.checks.models import KNOWN

    return save_published(KNOWN.get(name, KNOWN["Qwen3-8B"]), folder)  # for a server's model only the tokenizer is read
