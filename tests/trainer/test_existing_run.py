"""Which settings may differ when a run is resumed, and its prompt files. tests/integration/test_bad_input.py has dry runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from marsrl.rollout.tasks.data import fingerprint
from marsrl.rollout.types import Problem
from marsrl.trainer.checks import dtypes
from marsrl.trainer.checks.dtypes import decide_dtypes
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.evaluate.identity import evaluation_identity, team_identity
from marsrl.trainer.machine import native_dtype
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.existing_run import (
    as_it_began,
    keep_settings,
    resume_lines,
    settings_to_resume,
    with_kept_prompts,
)
from marsrl.trainer.supervised.warm_start import name_of, recipe_of


def settings(*words: str) -> RunConfig:
    return read_config(None, ["run.name=mine", *words])[0]


def begun(folder: Path, *words: str) -> RunDirectory:
    """Return a run with these settings and a checkpoint of step 4."""
    run, config = RunDirectory.create(folder, "mine", "preset"), settings(*words)
    keep_settings(run, config, "")
    run.checkpoint(4).mkdir(parents=True)
    run.mark_latest(4)
    return run


@pytest.mark.parametrize("began", ["float32", "bfloat16"])
def test_a_run_keeps_its_dtype_on_another_machine(began: str, tmp_path: Path) -> None:
    """One of the two dtypes is not the one that this machine computes with natively."""
    run = begun(tmp_path, f"policies.main.dtype={began}")
    again = settings("policies.main.dtype=auto", f"run.dir={tmp_path}", "run.resume=auto")
    decided, messages = decide_dtypes(again, settings_to_resume(again))
    assert decided.policies["main"].dtype == began and messages == [
        f"policies.main.dtype=auto: {began} (kept from its start)"
    ]
    resume_lines(run, decided, {})  # would refuse a dtype that differs from the checkpoint's
    native, why = native_dtype()
    new = again.model_copy(update={"run": settings().run})
    decided, messages = decide_dtypes(new, settings_to_resume(new))
    assert decided.policies["main"].dtype == native and messages == [f"policies.main.dtype=auto: {native} ({why})"]


def test_an_automatic_dtype_is_checked_with_other_settings() -> None:
    """Preflight decides on float32 for this machine, but vLLM quantises only 16-bit weights."""
    frozen = "policies={main: {model: /m, frozen: true, dtype: auto}}"
    fp8 = read_config(None, [frozen, "rollout.vllm.quantization=fp8"], trains=False)[0]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="set rollout.vllm.dtype=bfloat16"):
        patch.setattr(dtypes, "native_dtype", lambda: ("float32", "the test says so"))
        preflight(fp8, world_size=1, trains=False)


def test_a_run_without_latest_says_where_it_resumes(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run.checkpoints / "latest").write_text("step_9")
    assert "goes back to its newest intact checkpoint (" in resume_lines(run, settings("run.resume=previous"), {})[0]
    gone = "names step_9, which does not exist; .*; run.resume=previous resumes from the newest intact one"
    with pytest.raises(ValueError, match=gone):
        resume_lines(run, settings("run.resume=auto"), {})
    run.config.write_text("of: another version\n")
    run.mark_latest(4)
    assert resume_lines(run, settings("run.resume=auto"), {})[1] == (
        f"{run.config} is of another version, so changed settings cannot be listed"
    )


COSINE = ["policies.main.optimizer={lr: 1.0e-5, warmup_steps: 0, decay: cosine, final_lr_ratio: 0.1}", "run.steps=5"]


@pytest.mark.parametrize(
    ("words", "rates", "causes"),
    [
        (["run.steps=50"], "9.85e-06; under config.yaml it was 1e-06, 9.85 times as much", "run.steps 5 -> 50"),
        (
            ["run.steps=6", "policies.main.optimizer.decay=constant"],
            "1e-05; under config.yaml it was 1e-06, 10 times",
            "optimizer.decay cosine -> constant",
        ),
        (
            ["policies.main.optimizer.lr=2.0e-5"],
            "2e-06; under config.yaml it was 1e-06, 2 times",
            "optimizer.lr 1e-05 -> 2e-05",
        ),
        (
            ["policies.main.optimizer.warmup_steps=100"],
            "5e-07; under config.yaml it was 1e-06, 0.5 times",
            "optimizer.warmup_steps 0 -> 100",
        ),
    ],
)
def test_a_resume_tells_both_learning_rates(words: list[str], rates: str, causes: str, tmp_path: Path) -> None:
    """The message gives the next step's learning rates, and is shown once, not at another start with the same settings."""
    run, again = begun(tmp_path, *COSINE), settings("run.resume=auto", *COSINE, *words)
    *_, said = resume_lines(run, again, {})
    assert said.startswith(f"warning: step 5 trains policies.main at a learning rate of {rates}") and causes in said
    keep_settings(run, again, "")
    assert not any(line.startswith("warning") for line in resume_lines(run, again, {}))


def test_a_resume_at_the_same_rate_tells_none(tmp_path: Path) -> None:
    constant = "policies.main.optimizer={lr: 1.0e-5, warmup_steps: 0, decay: constant}"
    run = begun(tmp_path, constant, "run.steps=5")
    longer = settings("run.resume=auto", constant, "run.steps=50", "policies.main.optimizer.final_lr_ratio=0.5")
    assert [line.partition(" ")[0] for line in resume_lines(run, longer, {})] == ["run:", "differs"]
    done = begun(tmp_path / "done", *COSINE)
    done.checkpoint(5).mkdir()
    done.mark_latest(5)
    assert len(resume_lines(done, settings("run.resume=auto", *COSINE), {})) == 1


OTHER = "policies.other={model: /models/other, frozen: true}"
ADAPTER = ["policies.main.adapter={}"]
TWO = [OTHER, "credit.train_agents=[solver]"]
KL = ["loss.kl=k3", "policies.main.reference=start"]
PAST = [*KL, "policies.main.reference=past", "policies.main.reference_every=2"]


@pytest.mark.parametrize(
    ("had", "words", "says"),
    [
        ([], ["policies.main.dtype=bfloat16"], "policies.main.dtype (the run has float32, now bfloat16)"),
        ([], ["policies.main.model=/models/a"], "policies.main.model (the run has the warm-started model, now /models/a)"),
        ([], ["policies.main.shape=tiny"], "policies.main.model (the run has the shape cpu_default, now tiny)"),
        ([], [OTHER], "policies (the run has main, now main, other)"),
        ([], ["task=math", "policies.main.model=/models/a"], "task (the run has arithmetic, now math); "),
        (TWO, [*TWO, "agents.verifier1.policy=other"], "agents.verifier1.policy (the run has main, now other)"),
        ([], ["policies.main.optimizer.distributed=false"], "policies.main.optimizer.distributed (the run has True"),
        ([], ["policies.main.adapter={}"], "policies.main.adapter (the run has None, now rank=32"),
        (KL, PAST, "policies.main.reference (the run has start, now past)"),
        (ADAPTER, ["policies.main.adapter={rank: 8}"], "policies.main.adapter (the run has rank=32"),
        (TWO, [*TWO, "policies.other.frozen=false"], "policies.other.frozen (the run has True, now False)"),
    ],
)  # fmt: skip
def test_settings_that_a_checkpoint_fixes_are_refused(
    had: list[str], words: list[str], says: str, tmp_path: Path
) -> None:
    run = begun(tmp_path, *had)
    with pytest.raises(ValueError) as caught:
        resume_lines(run, settings("run.resume=auto", *words), {})
    assert str(caught.value).startswith(f"run.resume=auto: {run.path} cannot resume with a changed {says}")
    assert str(caught.value).endswith("; undo this or start another run")


BASE = ["policies.main.model=/models/a", "policies.main.adapter={}"]
SECOND = ["policies.second={base: main, adapter: {rank: 4}}", "agents.verifier1.policy=second"]


@pytest.mark.parametrize(("had", "has"), [(BASE, [*BASE, *SECOND]), ([*BASE, *SECOND], BASE)])
def test_adapters_of_a_base_may_be_added_and_removed(had: list[str], has: list[str], tmp_path: Path) -> None:
    run = begun(tmp_path, *had)
    where, differs = resume_lines(run, settings("run.resume=auto", *has), {})
    assert "resumes after step 4" in where and "agents.verifier1.policy" in differs


def test_a_moved_model_is_accepted_but_not_another_shape(tmp_path: Path) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    moved = init_model("tiny", "bytes", tmp_path / "moved")
    other = init_model("tiny", "bytes", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7, "vocab_size": 9}))
    run = begun(tmp_path, f"policies.main.model={model}")
    _, differs = resume_lines(run, settings(f"policies.main.model={moved}"), {})
    assert differs.endswith(f": policies.main.model {model} -> {moved}")
    differing = rf"num_layers: the run has 2, {other} has 7, vocab_size: the run has \d+, {other} has 9"
    wanted = rf"policies.main.model \({differing}\); undo"
    with pytest.raises(ValueError, match=wanted):
        resume_lines(run, settings(f"policies.main.model={other}"), {})
    (model / "config.json").unlink()  # the model's config is gone: the checkpoint's tensors decide
    assert len(resume_lines(run, settings(f"policies.main.model={moved}"), {})) == 2


def test_another_seed_keeps_the_runs_warm_start(tmp_path: Path) -> None:
    began = settings("run.seed=3", "warm_start.slip_solver=0.2")
    run = RunDirectory.create(tmp_path, "mine", "preset")
    run.write_config(began.model_dump(mode="json"))

    def made(config: RunConfig) -> str:
        return name_of(recipe_of(config))

    other = settings("run.seed=4", "run.resume=auto", "task_options.max_operations=5")
    assert made(as_it_began(run, other)) == made(began) != made(other)
    assert as_it_began(run, other).run.resume == "auto"
    fresh = settings("run.seed=4")
    assert as_it_began(run, fresh) is fresh


def test_a_run_does_not_go_on_with_other_problems(tmp_path: Path) -> None:
    began = [Problem("a", "1+1", "2", "math"), Problem("b", "2+2", "4", "math")]
    data = {"data.train": fingerprint(began), "data.eval": fingerprint(began[:1])}
    run = begun(tmp_path)
    # Runs of old versions have no fingerprints of their data.
    assert resume_lines(run, settings("run.resume=auto"), data)
    run.keep_data(data)
    assert resume_lines(run, settings("run.resume=auto"), data)
    shorter = {**data, "data.train": fingerprint(began[:1])}
    other = {**data, "data.eval": fingerprint([Problem("a", "1+1", "3", "math")])}
    for given, word, expected in (
        (
            shorter,
            "evaluate.num_problems=3",
            r"a changed data.train \(the run has 2 problems, now 1\); .* 300 -> 3; undo this",
        ),
        (
            other,
            "run.resume=auto",
            r"a changed data.eval \(questions, answers or their order changed\); settings that differ: none; ",
        ),
    ):
        with pytest.raises(ValueError, match=expected):
            resume_lines(run, settings("run.resume=auto", word), given)
    run.keep_data(shorter)  # a run that has begun keeps its own fingerprint
    assert resume_lines(run, settings("run.resume=auto"), data)


WORDS = 'answer: answer_word\nturns:\n  solver:\n    - user: "{problem} SAY"\n'


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "words.yaml"
    path.parent.mkdir()
    path.write_text(WORDS)
    return path


def test_a_run_resumes_and_evaluates_with_its_kept_prompts(words: Path, tmp_path: Path) -> None:
    given = ["orchestration=solver", "run.resume=auto", f"agents.solver.prompt={words}"]
    run, config = begun(tmp_path / "runs", *given), settings(*given)
    kept = yaml.safe_load(run.config.read_text())["agents"]["solver"]["prompt"]
    assert (run.path / kept).read_text() == WORDS and not Path(kept).is_absolute()
    assert len(resume_lines(run, config, {})) == 1  # nothing differs
    moved = run.path.rename(tmp_path / "moved")
    words.unlink()
    again = read_config(moved / "config.yaml")[0]
    assert Path(again.agents["solver"].prompt or "").read_text() == WORDS
    assert len(resume_lines(RunDirectory(moved), again, {})) == 1
    assert with_kept_prompts(again).agents["solver"].prompt == kept


def test_a_changed_prompt_file_is_refused_but_not_a_renamed_one(words: Path, tmp_path: Path) -> None:
    given = ["orchestration=solver", "run.resume=auto", f"agents.solver.prompt={words}"]
    run, config = begun(tmp_path / "runs", *given), settings(*given)
    words.write_text(WORDS.replace("SAY", "TELL"))
    (kept,) = (run.path / "prompts").iterdir()
    said = rf"cannot resume with a changed agents.solver.prompt \(the file has changed; .*{kept}"
    with pytest.raises(ValueError, match=said):
        resume_lines(run, config, {})
    other = words.rename(words.with_name("other.yaml"))
    _, differs = resume_lines(run, settings(*given[:2], f"agents.solver.prompt={other}"), {})
    assert f"agents.solver.prompt prompts/{kept.name} -> prompts/other-" in differs
    assert len(resume_lines(run, settings(*given[:2], f"agents.solver.prompt={kept}"), {})) == 1


def test_answer_keys_depend_on_file_contents_not_paths(words: Path) -> None:
    copy = words.with_name("copy.yaml")
    copy.write_text(WORDS)
    one, other = (settings("orchestration=solver", f"agents.solver.prompt={path}") for path in (words, copy))
    before = team_identity(one)
    assert before == team_identity(other)
    words.write_text(WORDS.replace("SAY", "TELL"))
    assert before != team_identity(one)


@pytest.mark.parametrize("key", ["system", "suffix"])
def test_another_system_turn_or_suffix_is_another_prompt(key: str, tmp_path: Path) -> None:
    plain, other = settings("run.resume=auto"), settings("run.resume=auto", f"agents.solver.{key}=Hi")
    assert team_identity(plain) != team_identity(other)
    _, differs = resume_lines(begun(tmp_path), other, {})
    assert differs.endswith(f": agents.solver.{key} None -> Hi")


def test_answer_keys_depend_on_vllms_dtype() -> None:
    given = ("loss.correction=tis", "rollout.vllm.dtype=bfloat16")
    plain, more = (team_identity(settings(*given, f"rollout.vllm.max_num_seqs={most}")) for most in (4, 8))
    assert plain == more != team_identity(settings(*given, "rollout.vllm.quantization=fp8"))


def test_answer_keys_depend_on_the_adapter_and_its_files(tmp_path: Path) -> None:
    for name in ("model", "one", "other"):
        (tmp_path / name).mkdir()
    given = [f"policies.main.model={tmp_path}/model", "policies.main.adapter.start="]
    one, other = (evaluation_identity(settings(given[0], f"{given[1]}{tmp_path}/{name}")) for name in ("one", "other"))
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"trained further")
    further = evaluation_identity(settings(given[0], f"{given[1]}{tmp_path}/one"))
    assert one != other and one != further and other != further
