"""`marsrl evaluate` of teams that train nothing: agents behind a server, and agents that use another checkpoint, as in MarsRL's
Table 3.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from completions_server import Handler, completions_server
from desk import Desk, boxing_model
from documented_commands import run_by
from letters import AGENTS
from scripted_pool import BRIEFLY
from small_run import sevens

from marsrl.commands import cli

pytestmark = pytest.mark.slow
HERE = "rollout={engine: local, placement: local, max_response_tokens: 40}"


def evaluated(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Return (the printed result, stderr)."""
    status, said = cli.main(["evaluate", *words]), capsys.readouterr()
    assert status == 0, said.err
    return json.loads(said.out), said.err


def test_evaluation_of_a_served_solver_with_critics_resumes(tmp_path: Path, capsys: Any) -> None:
    os.chdir(tmp_path)
    model = boxing_model(tmp_path / "model")
    sevens(tmp_path, 4, name="p.jsonl")

    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        handler.complete(f"\\boxed{{{7 + body['seed'] % 2}}}")

    with completions_server(reply) as server:
        words = [
            "task=math", "agents.solver.policy=served", *(f"agents.{a}.policy=critics" for a in AGENTS[1:]),
            "policies.served={frozen: true, engine: openai}",
            f"policies.served.openai={{base_url: '{server.base_url}', model: m, api: chat}}",
            f"policies.critics={{frozen: true, model: {model}, dtype: float32}}", "data.eval=p.jsonl",
            "evaluate={accept_after: 1, max_iterations: 1, fixed_inputs: 2, repeat: 2}", HERE, *BRIEFLY, "--out", "kept",
        ]  # fmt: skip
        first, _ = evaluated(words, capsys)
        num_asked = len(server.bodies)
        assert first["alone"]["n"] == first["system"]["n"] == first["latency"]["n"] == 8
        # In the single round the critics give no verdict, so the Solver's answers count.
        assert first["alone"]["mean"] == first["system"]["mean"]
        policies = {agent: used["policy"] for agent, used in first["usage"].items()}
        assert policies == {"solver": "served", "verifier1": "critics"}
        used = first["usage"]["solver"]
        # The server reports 11 input and 3 output tokens for each call.
        assert (used["input_tokens"], used["output_tokens"]) == (11 * used["calls"], 3 * used["calls"])
        lines = Path("kept/draws.jsonl").read_bytes().splitlines(keepends=True)
        Path("kept/draws.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:30])  # as after kill -9
        again, errors = evaluated(words, capsys)
        # Usage and latency contain seconds.
        assert {**again, "usage": 0, "latency": 0} == {**first, "usage": 0, "latency": 0}
        assert again == json.loads(Path("kept/evaluation.json").read_text())
        assert "5 of 8 draws are kept" in errors and len(server.bodies) == num_asked + 3


def test_ctrl_c_keeps_what_ended_and_names_what_resumes(tmp_path: Path, capsys: Any) -> None:
    os.chdir(tmp_path)
    model = boxing_model(tmp_path / "model")
    sevens(tmp_path, 8, name="p.jsonl")
    number, goes_on = itertools.count(), threading.Event()

    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        if (index := next(number)) == 7:  # the last of the eight draws
            (file,) = Path("evaluations").glob("*/draws.jsonl")
            while file.read_bytes().count(b"\n") < 5:
                time.sleep(0.01)
            time.sleep(0.2)  # wait until the fifth draw is written and counted
            os.kill(os.getpid(), signal.SIGINT)
        if index >= 5:
            goes_on.wait()
        handler.complete("It is 7.")

    with completions_server(reply) as server:
        words = [
            "task=math", "orchestration=solver", f"policies.main={{frozen: true, engine: openai, model: {model}}}",
            f"policies.main.openai={{base_url: '{server.base_url}', model: m}}", "data.eval=p.jsonl", HERE,
        ]  # fmt: skip
        assert cli.main(["evaluate", *words]) == 130
        goes_on.set()
        printed = capsys.readouterr()
        *_, last = printed.err.splitlines()
        (folder,) = Path("evaluations").iterdir()
        done, _, again = last.partition("; resume with: marsrl ")
        first = (folder / "draws.jsonl").read_bytes()
        assert done == f"interrupted: 5 of 8 draws have ended and are kept in {folder}" and first.count(b"\n") == 5
        assert "math_default, interrupted" in printed.err and "n 5)" in printed.err and printed.out == ""
        num_asked = len(server.bodies)
        result, errors = evaluated(shlex.split(again)[1:], capsys)
        assert len(server.bodies) == num_asked + 3 and result["num_episodes"] == 8
        assert (folder / "draws.jsonl").read_bytes().startswith(first) and f"{folder}: 5 of 8 draws are kept" in errors
        form = "the form \\boxed{...} or #### ... or Answer: ..."
        zeros = f'100 % of solver\'s completions (8 of 8) have no answer in {form}; one ends "It is 7."'
        assert result["notes"] == [zeros] and f"warning: {zeros}" in errors.splitlines()
        evaluated(words, capsys)
        assert len(list(Path("evaluations").iterdir())) == 2  # the same command without --out starts a new evaluation


GAME = """
class Game:
    def reset(self, problem):
        return problem.question

    def step(self, text):
        return 0.25
"""


def test_a_changed_environment_is_evaluated_anew(tmp_path: Path, capsys: Any) -> None:
    os.chdir(tmp_path)
    model = boxing_model(tmp_path / "model")
    sevens(tmp_path, 4, name="p.jsonl")
    words = [
        "task=math", "orchestration=external", "external.environment=game.py:Game", "agents={solver: {}}",
        f"policies={{main: {{frozen: true, model: {model}, dtype: float32}}}}", "data.eval=p.jsonl", "evaluate.repeat=2",
        HERE, "--out", "kept",
    ]  # fmt: skip
    Path("game.py").write_text(GAME)
    found, _ = evaluated(words, capsys)
    assert found["system"]["n"] == found["latency"]["n"] == 8 and found["system"]["mean"] == 0.25
    assert found["usage"].keys() == {"solver"}
    Path("game.py").write_text(GAME.replace("0.25", "0.75"))
    assert evaluated(words, capsys)[0]["system"]["mean"] == 0.75


def test_evaluations_are_kept_and_compared(tmp_path: Path, capsys: Any) -> None:
    os.chdir(tmp_path)
    desk, models = Desk(tmp_path), {}
    few = "evaluate={accept_after: 1, max_iterations: 1, fixed_inputs: 2}"
    settings = [few, "policies.main.dtype=float32", HERE, *BRIEFLY]

    def model(name: str) -> Path:
        models[name] = models.get(name) or boxing_model(tmp_path / "models" / name)
        return models[name]

    commands = [desk.words(each, model)[1:] for each in run_by("test_evaluations_are_kept_and_compared")]
    for words in (words for words in commands if words[0] == "evaluate"):
        result, said = evaluated([*words[1:], *settings], capsys)
        kept = f"{words[words.index('--out') + 1]}/evaluation.json"
        assert said.rstrip().endswith(f"kept in {kept}") and result == json.loads(Path(kept).read_text()), said
        if "evaluate.repeat=2" in words:
            num_episodes = {name: each["num_episodes"] for name, each in result["sets"].items()}
            assert num_episodes == {"aime25": 8, "beyondaime": 8}
        else:
            assert {agent: used["policy"] for agent, used in result["usage"].items()}["solver"] == "other"
    for name, kept in (("one", "base"), ("two", "trained")):
        shutil.copytree(f"evaluations/{kept}", f"runs/{name}")
    for words in (words for words in commands if words[0] == "compare"):
        assert cli.main(words) == 0, capsys.readouterr().err
        shown = capsys.readouterr().out
        assert "minus the first run" in shown and "solver (other)" in shown and "p95 s" in shown
        assert '"num_problems":4,' in Path("compare.html").read_text()  # aime25 has four
        Path("compare.html").unlink()
