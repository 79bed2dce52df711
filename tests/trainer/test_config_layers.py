"""Presets, files and arguments: which value wins, how saved configs are loaded, and how errors locate keys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from marsrl.rollout.tools.config import HttpSearch, IndexSearch, SerpApiScholar, SerpApiSearch
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.checks.refusals import ignored_settings
from marsrl.trainer.config.read import CONFIGS, DEFAULT_FOR_TASK, ConfigError, preset_names, read_config
from marsrl.trainer.main import main
from marsrl.trainer.runs.directory import RunDirectory

KEYS = [line.split(":")[0].strip() for line in (CONFIGS / "math_default.yaml").read_text().splitlines()]
LINE = 1 + KEYS.index("max_response_tokens")


def written(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words", "task"),
    [
        ("agents: {solver: {temperature: 0.5}}", [], "arithmetic"),
        ("task: arithmetic\nagents: {solver: {temperature: 0.5}}", [], "arithmetic"),
        ("task: math\nagents: {solver: {temperature: 0.5}}", [], "math"),
        ("task: arithmetic\nagents: {solver: {temperature: 0.5}}", ["task=math"], "math"),
    ],
)
def test_a_file_has_the_defaults_of_its_task_where_it_is_silent(
    tmp_path: Path, text: str, words: list[str], task: str
) -> None:
    config, origin = read_config(written(tmp_path, text), words)
    assert config == read_config(None, [f"task={task}", "agents.solver.temperature=0.5"])[0]
    layers = [f"preset {DEFAULT_FOR_TASK[task]}.yaml", str(tmp_path / "my.yaml"), *(["command line"] if words else [])]
    assert str(origin) == " < ".join(layers)
    assert origin.name == "my"


@pytest.mark.parametrize("preset", preset_names())
def test_presets_state_what_they_do_not_take_from_their_task(preset: str) -> None:
    """A preset gives the same config by name and as a file. It extends its task's preset or the one that it names, not itself."""
    config, origin = read_config(preset)
    assert config == read_config(CONFIGS / f"{preset}.yaml")[0] == read_config(f"{preset}.yaml")[0]
    settings = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text())
    chain = dict.fromkeys([DEFAULT_FOR_TASK[config.task], settings.pop("preset", preset), preset])
    assert str(origin) == " < ".join(f"preset {name}.yaml" for name in chain)
    assert origin.name == preset
    resolved = config.model_dump(mode="json")
    assert OmegaConf.merge(resolved, settings) == resolved


def test_mappings_are_merged_and_lists_replaced(tmp_path: Path) -> None:
    text = """
    policies: {main: {optimizer: {betas: [0.8, 0.9]}}, judge: {frozen: true, model: /models/judge}}
    agents: {verifier1: {policy: judge}, verifier2: {policy: judge, pick: random}}
    credit: {train_agents: [solver, corrector1]}
    """
    config, _ = read_config(written(tmp_path, text))
    preset, _ = read_config(None)
    optimizer = preset.policies["main"].optimizer
    assert config.policies["main"].optimizer == optimizer.model_copy(update={"betas": (0.8, 0.9)})
    assert list(config.policies) == ["main", "judge"] and config.policies["main"].dtype == "float32"
    assert list(config.agents) == list(preset.agents)
    assert config.agents["solver"] == preset.agents["solver"]
    assert config.agents["verifier1"] == preset.agents["verifier1"].model_copy(update={"policy": "judge"})
    assert config.agents["verifier2"].pick == "random"
    assert config.credit.train_agents == ("solver", "corrector1")


OWN_POLICIES = """
policies: {a: {model: /models/a}, b: {model: /models/b}}
agents: {solver: &a {policy: a}, verifier1: &b {policy: b}, corrector1: *a, verifier2: *b, corrector2: *a}
"""


def test_policies_given_for_all_agents_replace_the_presets(tmp_path: Path) -> None:
    path = written(tmp_path, OWN_POLICIES)
    assert list(read_config(path)[0].policies) == ["a", "b"]
    assert list(read_config(path, ["agents.solver.policy=main"])[0].policies) == ["main", "a", "b"]
    assert list(read_config(path, ["policies.main.model=/m"])[0].policies) == ["main", "a", "b"]


def test_a_file_may_inherit_another_preset_or_none(tmp_path: Path) -> None:
    config, origin = read_config(written(tmp_path, "preset: qwen3_8b\nrun: {steps: 7}"))
    assert config == read_config("qwen3_8b", ["run.steps=7"])[0]
    assert str(origin) == f"preset math_default.yaml < preset qwen3_8b.yaml < {tmp_path / 'my.yaml'}"
    bare, origin = read_config(written(tmp_path, "preset: none\nagents: {verifier1: {pick: random}}"))
    assert list(bare.agents) == list(config.agents) and bare.rollout.max_response_tokens == 1024
    assert bare.agents["verifier1"].pick == "random" and bare.agents["solver"].pick == "adaptive"
    assert str(origin) == str(tmp_path / "my.yaml")
    with pytest.raises(
        ConfigError, match=r"preset: 'qwen4' is unknown; expected .*qwen3_8b.* \(preset: .*my\.yaml:1\)"
    ):
        read_config(written(tmp_path, "preset: qwen4"))


@pytest.mark.parametrize("text", ["", OWN_POLICIES, "preset: qwen3_30b_a3b", "preset: none\ntask: math"])
def test_a_saved_config_gives_itself_again_whatever_it_came_from(tmp_path: Path, text: str) -> None:
    config, origin = read_config(written(tmp_path, text), ["run.seed=5", "task_options={workers: 3}"])
    run = RunDirectory.create(tmp_path, "a", "p")
    saved = run.write_config(config.model_dump(mode="json"), made_of=str(origin))
    assert saved.read_text().splitlines()[:2] == [f"# settings: {origin}", "preset: none"]
    again, origin = read_config(saved)
    assert again == config and str(origin) == str(saved)
    # A run that is resumed with its own file writes no second one.
    assert run.write_config(again.model_dump(mode="json"), made_of=str(origin)) == saved


@pytest.mark.parametrize("by_word", [True, False])
def test_a_presets_policies_without_agents_are_left_out(by_word: bool) -> None:
    """A single argument is enough to give both agents one policy, whether the preset is named by `preset` or by --config."""
    name = "cpu_solver_verifier"

    def policies(*words: str) -> list[str]:
        file, preset = (None, [f"preset={name}"]) if by_word else (CONFIGS / f"{name}.yaml", [])
        return list(read_config(file, [*preset, *words])[0].policies)

    assert policies() == ["solver", "verifier"]
    assert policies("agents.verifier.policy=solver") == policies("orchestration=solver") == ["solver"]
    assert policies("agents.verifier.policy=solver", "policies.verifier.shape=tiny") == ["solver", "verifier"]


def test_another_orchestration_drops_agents_of_lower_layers(tmp_path: Path) -> None:
    own = written(tmp_path, "agents: {solver: {temperature: 0.5}, verifier2: {pick: random}}")
    for path in (None, "qwen3_8b", own):
        config, _ = read_config(path, ["orchestration=solver"])
        assert list(config.agents) == ["solver"]
        assert config.agents["solver"] == read_config(path)[0].agents["solver"]
    message = refusal(None, "orchestration=solver", "agents.verifier1.pick=random")
    assert (
        message == "agents.verifier1: solver has no such agent; expected one of solver (agents.verifier1: command line)"
    )
    text = "orchestration: solver\nagents: {solver: {temperature: 0.5}}"
    both = written(tmp_path, text.replace("{solver:", "{corrector1: {}, solver:"))
    assert "agents.corrector1: solver has no such agent" in refusal(both)
    assert list(read_config(written(tmp_path, text))[0].agents) == ["solver"]
    back = read_config(written(tmp_path, text), ["orchestration=verifier_corrector"])[0]
    assert len(back.agents) == 5 and back.agents["solver"].temperature == 0.5
    assert "has no such agent" in refusal(written(tmp_path, "agents: {verifer1: {}}"), "orchestration=solver")
    error = refusal(None, "orchestration=debates")
    assert (
        error.count("orchestration is 'debates'; expected one of debate, dual_system, external, search_team, sol") == 1
    )
    config, _ = read_config(None, ["orchestration=debate", "orchestration_options.rounds=3"])
    assert list(config.agents) == ["debater"] and list(config.policies) == ["main"]
    error = refusal(None, "orchestration=debate", "orchestration_options.max_loops=3")
    assert "max_loops: unknown key; expected one of debaters, rounds" in error


def test_another_kind_of_section_drops_keys_of_lower_layers(tmp_path: Path) -> None:
    words = ["policies.main.model=/m", "data.train=x.jsonl"]
    for preset in ("mars_qwen3_8b", "mars_qwen2.5_7b"):  # presets whose search has kind serpapi, and reads pages
        config, _ = read_config(preset, words)
        assert isinstance(config.tools.search, SerpApiSearch) and isinstance(config.tools.scholar, SerpApiScholar)
        assert config.tools.search.read_pages and config.tools.scholar.read_pages and config.tools.visit is None
        server = ["tools.search.kind=http", "tools.search.url=http://h/retrieve", "tools.scholar=null"]
        config, _ = read_config(preset, [*words, *server])
        assert isinstance(config.tools.search, HttpSearch) and config.tools.scholar is None
        assert (config.tools.search.top_k, config.tools.search.timeout_s) == (10, 300)  # all kinds have them
    own = written(tmp_path, "tools: {search: {kind: http, url: 'http://h/retrieve', ur: 1}}")
    assert "tools.search.ur: unknown key" in refusal(own, "tools.search.kind=index")  # no kind has it
    said = refusal(own, "task=qa", "tools.search.kind=serpapi", "tools.search.url=http://h")
    assert "tools.search.url: unknown key; tools.search has this key only if its kind is http (command line)" in said


def test_a_removed_setting_is_refused_with_what_became_of_it() -> None:
    assert "tools.python.strict: unknown key; it was removed: without a" in refusal(None, "tools.python.strict=false")


OWN = """
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec

class Mine(Orchestration):
    agents = (AgentSpec("a"), AgentSpec("b"))
"""


def test_own_teams_are_found_beside_the_config_or_in_the_cwd(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    path = written(tmp_path, "orchestration: mine.py:Mine\nagents: {b: {temperature: 0.5}}")
    config, _ = read_config(path)
    assert config.orchestration == f"{tmp_path}/mine.py:Mine" and list(config.agents) == ["a", "b"]
    assert config.agents["b"].temperature == 0.5
    os.chdir(tmp_path)
    assert read_config(None, ["orchestration=mine.py:Mine"])[0].orchestration == f"{tmp_path}/mine.py:Mine"
    assert f"no file other.py in {tmp_path}; expected FILE.py:NAME" in refusal(None, "orchestration=other.py:Mine")


def refusal(path: Path | None, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(path, words)
    return str(caught.value)


def test_paths_are_relative_to_the_file_or_working_directory(tmp_path: Path) -> None:
    there, here, home = (tmp_path / name for name in ("there", "here", "home"))
    for folder in (there / "models/one", there / "models/two", here / "models/two", home):
        folder.mkdir(parents=True)
    os.chdir(here)
    os.environ["HOME"] = str(home)
    (there / "own.yaml").write_text(
        """
        task: math
        data: {train: [{path: a.jsonl, count: 1}, {path: ../b.jsonl, count: 2}], eval: ~/held_out.jsonl}
        policies:
          main: {model: models/one, reference: start}
          hub: {model: Qwen/Qwen3-0.6B, reference: models/two, adapter: {start: peft}}
        agents: {corrector2: {policy: hub}, solver: {prompt: words.yaml}}
        tools: {search: {kind: index, corpus: /all/corpus.jsonl, index: index.sqlite}}
        """
    )
    config, _ = read_config(there / "own.yaml")
    assert isinstance(config.data.train, tuple) and isinstance(config.tools.search, IndexSearch)
    assert [file.path for file in config.data.train] == [f"{there}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert config.data.eval == f"{home}/held_out.jsonl"
    assert (config.tools.search.corpus, config.tools.search.index) == ("/all/corpus.jsonl", f"{there}/index.sqlite")
    assert config.agents["solver"].prompt == f"{there}/words.yaml"
    main, hub = config.policies["main"], config.policies["hub"]
    assert (main.model, main.reference) == (f"{there}/models/one", "start")
    # There is no such folder, so this may be a name on the Hugging Face hub.
    assert (hub.model, hub.reference) == ("Qwen/Qwen3-0.6B", f"{there}/models/two")
    assert hub.adapter is not None and hub.adapter.start == f"{there}/peft"
    words = ["data.train=c.jsonl", "data.eval=[d.jsonl, {path: e.jsonl}]"]
    words += ["policies.main.model=~/mine", "policies.hub.model=Qwen/Qwen3-0.6B"]
    (here / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    config, _ = read_config(there / "own.yaml", words)
    assert config.data.train == f"{here}/c.jsonl" and isinstance(config.data.eval, tuple)
    assert [file.path for file in config.data.eval] == [f"{here}/d.jsonl", f"{here}/e.jsonl"]
    assert config.policies["main"].model == f"{home}/mine"
    assert config.policies["hub"].model == f"{here}/Qwen/Qwen3-0.6B"


def test_settings_of_an_unused_engine_are_warned_about_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, "rollout: {local: {max_num_seqs: 7}, vllm: {max_num_seqs: 64}}\n")

    def warned(*words: str) -> list[str]:
        found = preflight(read_config(path, [*words, "rollout.engines=1"])[0], world_size=1).warnings
        return [warning for warning in found if warning.startswith("rollout.engine is")]

    assert warned() == ["rollout.engine is vllm, which ignores rollout.local.max_num_seqs"]
    assert warned("rollout.engine=local") == []  # the file's vLLM settings would apply if vLLM decoded
    word = "rollout.vllm.max_num_seqs=8"
    ignored = "rollout.engine is local, which ignores rollout.vllm.max_num_seqs"
    assert warned("rollout.engine=local", word) == [ignored]


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["orchestration=solver", "rollout.picks=3"], "orchestration is solver, which ignores rollout.picks"),
        (
            ["orchestration=solver_verifier", "evaluate.max_iterations=3", "agents.verifier.pick=random"],
            "orchestration is solver_verifier, which ignores evaluate.max_iterations, agents.verifier.pick",
        ),
        (["orchestration=solver"], ""),  # the preset's settings of another team's evaluation are left out
        (
            [
                "orchestration=search_team",
                "tools.search={kind: http, url: http://x}",
                "agents.verifier.missing_verdict=correct",
            ],
            "",
        ),
        (
            ["orchestration=external", "external.function=x.py:run", "agents={solver: {long_prompts: cut_left}}"],
            "orchestration is external, which ignores agents.solver.long_prompts",
        ),
        (["policies.main.reference=start"], "loss.kl is none, which ignores policies.main.reference"),
        (["loss.kind=cispo", "loss.dual_clip=3"], "loss.kind is cispo, which ignores loss.dual_clip"),
        (
            ["loss.correction=tis", "loss.correction_low=0.1"],
            "loss.correction is tis, which ignores loss.correction_low",
        ),
        (["loss.correction_high=3"], "loss.correction is none, which ignores loss.correction_high"),
        (["loss.correction=icepop", "loss.correction_low=0.1", "loss.correction_high=3"], ""),
        (["preset=drmas_math", "loss.kind=cispo"], ""),  # the preset's dual_clip is left out
        (
            ["task=qa", "orchestration=external", "external.function=x.py:run", "agents={search: {temperature: 0.5}}"],
            "",  # so is long_prompts, which the preset sets for the agent `search` of another team
        ),
    ],
)
def test_settings_without_effect_are_warned_about_by_name(words: list[str], warning: str) -> None:
    config, _ = read_config(None, ["task=math", "data.train=x.jsonl", *words])
    assert ignored_settings(config) == ([warning] if warning else [])


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [  # {} stands for the file's name
        ("- 1\n- 2\n", [], "{}"),  # the file is not a mapping
        ("run: {seed: 1}\n\tsteps: 3\n", [], "{}:2: the line is indented with a tab; use spaces"),
        ("run:\n  seed: 1\n \tsteps: 3\n", [], "{}:3: the line is indented with a tab; use spaces"),
        ("", ["rollout.group_size", "=", "4"], "spaces around the = of 'rollout.group_size'; write key.sub=value"),
        ("", ["rollout.group_size=", "4"], "spaces around the = of 'rollout.group_size'; write key.sub=value"),
        ("", ["run.seed=1", "rollout.group_size", "=4"], "spaces around the = of 'rollout.group_size'"),
        ("", ["rollout.group_size =4"], "spaces around the = of 'rollout.group_size'"),
        ("", ["rollout.group_size:", "4"], "'rollout.group_size:' ends with a colon; write rollout.group_size=4"),
        ("", ["--rollout.group_size=4"], "begins with dashes; write rollout.group_size=4"),
        ("", ["\u2014rollout.group_size", "4"], "begins with dashes; write rollout.group_size=4"),
        ("", ["config=a.yaml"], "'config=a.yaml' is an option, not a setting; write --config a.yaml"),
        ("run:\nsteps: 3\n", [], "run: found None, expected a section; set run.NAME=value ({}:1)"),
        ("", ["\u2013config", "a.yaml"], "begins with a long dash; write --config"),
        ("", ["agents.solver.temperature=0"], "agents.solver.temperature is 0; expected above 0; for greedy decoding"),
        ("", ["evaluate.temperature=-1"], "evaluate.temperature is -1; expected above 0"),
        ("data: {eval: p.jsonl}", [], "data.eval is set, but task=arithmetic (the default) generates its problems; did you"),
        ("data: {train: [{path: p.jsonl, count: 1}]}", [], "problems; did you mean task=math?"),
        ("orchestration: external\nexternal: {function: p.py:run}\nagents: {a: {}}\n", [], "no task is set; set task=math"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", [], 'found duplicate key run in "{}", line 2'),
        ("run: {steps: 1}\n", ["run.steps=["], "command line: while parsing a flow node did not find"),
        ("run: {steps: '${nosuch}'}\n", [], "Interpolation key 'nosuch' not found full_key: run.steps"),
        ("run:\n  steps: many\n", [], "(found 'many') ({}:2)"),
        ("agents:\n  solver: {top_p: two}\n", [], " ({}:2)"),
        ("run: {steps: many}", ["run.steps=few"], " (command line)"),
        ("task: math\n\nrollout:\n  segments: 2\n", ["rollout.segment_length=100"],
         " (rollout.segments: {}:4; rollout.segment_length: command line; "
         f"rollout.max_response_tokens: preset math_default.yaml:{LINE})"),
        # This error's own path lacks `policies`.
        ("policies:\n  main:\n    optimizer:\n      overlap_param_gather: true\n", [],
         "(policies.main.optimizer.overlap_param_gather: {}:4)"),
        ("policies:\n  judge:\n    openai:\n      model: m\n      base_url: http://me:secret@host/v1\n", [],
         "and would be saved with the config; remove it (policies.judge.openai.base_url: {}:5)"),
        ("agents:\n  solver: &all\n    top_k: 5\n    top_p: 0.5\n  corrector1:\n    top_p: 0.7\n    <<: *all\n",
         ["credit.train_agents=[corrector1]"], "agents.corrector1.top_p: {}:6; agents.corrector1.top_k: {}:3"),
    ],
)  # fmt: skip
def test_errors_name_the_line_of_each_setting(text: str, words: list[str], expected: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    assert expected.replace("{}", str(path)) in refusal(path, *words)


def test_a_setting_may_be_empty_at_the_end_or_before_another() -> None:
    assert read_config(None, ["run.name=", "run.seed=3"])[0].run.name is None
    assert read_config(None, ["run.name="])[0].run.name is None


def test_a_dry_run_prints_settings_last_and_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run"]) == 0
    summary = capsys.readouterr().out
    assert summary.splitlines()[1] == "batch arithmetic:" and "max_response_tokens:" not in summary
    assert main(["--dry-run", "--full"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(f"{summary}settings:\n") and "  max_response_tokens: " in whole


def test_a_wrong_key_is_refused_before_heavy_imports() -> None:
    script = (
        "import sys; from marsrl.trainer.main import main; code = main(['rolout.group_size=4'])\n"
        "print(code, sorted({'torch', 'transformers', 'ray', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "2 []\n" and "did you mean rollout?" in done.stderr


def test_what_preflight_refuses_names_the_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "policies:\n  main:\n    layout:\n      tensor: 2\n")
    assert main(["--dry-run", "--config", str(path)]) == 2
    assert capsys.readouterr().err.endswith(f"data parallel only (policies.main.layout.tensor: {path}:4)\n")
