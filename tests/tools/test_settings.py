"""Wrong settings of tools are refused before anything starts; `marsrl tool` calls a tool with a run's settings."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from marsrl.commands.cli import main
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import ToolsConfig
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.types import ToolCall
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.origin import ConfigError
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.init_model import init_model

LIMA = Document("lima", "Lima", "The capital of Peru.")


def tools(**search: object) -> ToolsConfig:
    return ToolsConfig.model_validate({"search": {"kind": "index", **search}})


def test_a_team_with_an_unset_tool_is_told_how_to_set_it(tmp_path: Path) -> None:
    text = "from marsrl.rollout.agents.orchestration import Orchestration\n"
    text += "from marsrl.rollout.agents.roles import AgentSpec\n"
    text += 'class Team(Orchestration):\n    agents, tools = (AgentSpec("solver"),), ("%s",)\n'
    for tool, cure in (("calculator", "tools.calculator.kind "), ("python", r"tools.python=\{\} ")):
        (tmp_path / f"{tool}.py").write_text(text % tool)
        with pytest.raises(ConfigError, match=f"the tool {tool}, which is not configured; set {cure}"):
            read_config(None, [f"orchestration={tmp_path}/{tool}.py:Team"])
    config, _ = read_config(None, [f"orchestration={tmp_path}/python.py:Team", "tools.python={}"])
    assert config.tools.python is not None


def test_a_corpus_is_looked_at_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{')
    for given, expected in (
        ({"corpus": f"{tmp_path}/bad.jsonl"}, "tools.search.corpus: .*bad.jsonl:2: not JSON"),
        ({"corpus": f"{tmp_path}/none.jsonl"}, "tools.search.corpus: .*none.jsonl"),
        ({}, "tools.search.corpus is null, but the task has no documents .*; set it to"),
    ):
        with pytest.raises(ValueError, match=expected):
            check_tools(tools(**given), ["search"], ())
    check_tools(tools(), ["search"], [LIMA])
    check_tools(tools(corpus="none.jsonl"), [], ())  # no agent calls it


def test_a_package_that_a_tool_needs_is_asked_for_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["SERPAPI_API_KEY"] = "key"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("trafilatura", "pypdf") else name)
    given = {"search": {"kind": "serpapi", "read_pages": True}, "scholar": {"kind": "serpapi"}, "visit": {}}
    config = ToolsConfig.model_validate(given)
    for name, key in (("visit", "tools.visit"), ("search", "tools.search.read_pages")):
        with pytest.raises(
            ValueError, match=rf"{key} needs trafilatura and pypdf, which this environment lacks; run pip install"
        ):
            check_tools(config, [name], ())
    check_tools(config, ["scholar"], ())


def test_preflight_refuses_what_check_tools_refuses(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "q{i}", "golden_answers": ["a"]}}\n' for i in range(20)))
    model = init_model("tiny", "bytes", tmp_path / "model")
    words = ["task=qa", f"policies.main.model={model}", "policies.main.dtype=float32", "rollout.engine=local"]
    with pytest.raises(ValueError, match=r"tools.search.corpus is null"):
        preflight(read_config(None, [*words, f"data.train={questions}"])[0], world_size=1)
    assert preflight(read_config(None, words)[0], world_size=1).plan
    with pytest.raises(ValueError, match=r"math has no chat for the role router"):
        preflight(read_config(None, [*words, "agents.verifier.prompt=math"])[0], world_size=1)


def test_tools_need_a_template_and_a_team_that_supports_them(tmp_path: Path) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "q{i}", "answer": "7"}}\n' for i in range(20)))
    (tmp_path / "echo.py").write_text('def echo(text: str) -> str:\n    """Says it again."""\n    return text\n')
    echo_tool = f"tools.echo={{kind: function, function: '{tmp_path}/echo.py:echo'}}"
    calls = ["orchestration=solver", "agents.solver.tools=[echo]", echo_tool]
    words = [
        "task=math", f"data.train={tmp_path}/train.jsonl", *calls, "rollout.engine=local",
        f"policies.main={{model: {model}, dtype: float32}}",
    ]  # fmt: skip

    def assert_refused(message: str, *words: str) -> None:
        with pytest.raises(ValueError, match=message):
            preflight(read_config(None, [*words])[0], world_size=1)

    assert preflight(read_config(None, words)[0], world_size=1).plan
    # The prompt, which describes the tools, does not fit.
    assert_refused("agents.solver.max_input_tokens is 100", *words, "agents.solver.max_input_tokens=100")
    (tmp_path / "echo.py").write_text("def echo(text): return text")
    assert_refused("tools.echo.function is .* has no annotation for text", *words)
    (tmp_path / "echo.py").write_text('def echo(text: str) -> str:\n    "Says it."\n    return text\n')
    (tmp_path / "model/chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert_refused("agents.solver.tools is echo, but with policies.main.model = .* does not show tools", *words)
    assert_refused("agents.solver.tools is echo, .* a warm-started policy calls no tools", *calls)
    qa, echo = ("task=qa", echo_tool), "{tools: [echo]}"
    assert_refused("dual_system defines its own", *qa, "orchestration=dual_system", f"agents.system2={echo}")
    external = ("orchestration=external", "external.function=agent.py:run", f"agents={{solver: {echo}}}")
    assert_refused("external defines its own continuation", *qa, *external)
    compat = "agents.verifier={tools: [echo], parser: compat}"
    assert_refused("would also parse the outputs of agents.", *qa, "orchestration=solver_verifier", compat)


def test_a_scholar_searches_its_file_or_the_task_s_papers(tmp_path: Path) -> None:
    (tmp_path / "papers.jsonl").write_text('{"title": "Maps", "year": 1997}')
    for corpus, title in ((None, "Lima"), (str(tmp_path / "papers.jsonl"), "Maps")):
        scholar = {"kind": "index", "corpus": corpus}
        config = ToolsConfig.model_validate({"search": {"kind": "index"}, "scholar": scholar})
        check_tools(config, ["search", "scholar"], [Document("a", "Maps", "")], [LIMA])
        with closing(build_tools(config, ["search", "scholar"], [Document("a", "Maps", "")], [LIMA])) as pool:
            for tool, found in (("scholar", f"Paper 1(Title: {title}) "), ("search", "Doc 1(Title: Maps)")):
                output = pool.submit(ToolCall(tool, tool, '{"queries": ["lima", "maps"]}')).result(30.0)
                assert output.parts == (output.text,) and output.text.startswith(found)


def tool(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr) of `marsrl tool`."""
    status = main(["tool", *words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    rows = [{"title": "Lima", "text": "The capital\x1b[2J of Peru.\nA city."}, {"title": "Oslo", "text": "x" * 5000}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"tools.search.corpus={tmp_path}/corpus.jsonl"


def test_words_are_text_or_an_object_and_output_is_escaped(capsys: pytest.CaptureFixture[str], corpus: str) -> None:
    status, shown, _ = tool(capsys, "search", "lima=x", corpus)
    assert status == 0 and shown.startswith("Doc 1(Title: Lima) The capital␛[2J of Peru.\nA city.\n# ")
    asked = '{"queries": ["oslo", "lima"]}'
    status, shown, _ = tool(capsys, "search", asked, corpus, "tools.search.max_output_chars=99")
    assert status == 0 and "of 5,019 characters]\nDoc 2(Title: Lima)" in shown and shown.endswith(" 2 parts, cut\n")
    status, shown, _ = tool(capsys, "search", "[1]", corpus)  # JSON that is not an object is read as text
    assert status == 0 and shown.startswith("No documents match.\n# ") and shown.endswith(" s, whole\n")


@pytest.mark.parametrize(
    ("status", "words", "expected"),
    [
        *((1, ["search", argument], "error: ") for argument in ("!!", '{"q": "lima"}', '{"queries": []}')),
        (2, ["bing", "x"], "there is no tool 'bing'; expected one of search, scholar, visit, python"),
        (2, ["search", "x", "task=math"], "tools.search is not set"),
        (2, ["search", "x", "data.train=q.jsonl"], "tools.search.corpus is null, but the task has no documents"),
        (2, ["search", "x", "--config", "none.yaml"], "--config none.yaml: no such file"),
    ],
)
def test_a_tool_error_exits_with_1_and_bad_settings_with_2(
    capsys: pytest.CaptureFixture[str], corpus: str, status: int, words: list[str], expected: str
) -> None:
    found, shown, error = tool(capsys, *words, *([corpus] if status == 1 else []))
    assert found == status and expected in (shown if status == 1 else error) and bool(shown) == (status == 1)
