"""All five agents on math problems, with a scripted engine and the real learner, loop, rewards, logs and report."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import mcp_server
import numpy as np
import pytest
from held_port import held_port
from scripted_pool import (
    BRIEFLY,
    ScriptedWithWeights,
    engines_are,
    half_right,
    on_sevens,
    rows_of,
    samples_of,
    saying,
    train_here,
    untimed,
)
from small_run import sevens

from marsrl.commands import cli
from marsrl.rollout.engines.protocol import DecodeRequest, MemoryPart, WeightReceipt, WeightUpdate
from marsrl.rollout.types import FloatArray, IntArray
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_warnings
from marsrl.trainer.report.samples_log import read_samples
from marsrl.trainer.report.summary import load_summary
from marsrl.trainer.report.token_log import read_tokens
from marsrl.trainer.report.trace import read_trace
from marsrl.trainer.runs.directory import RunDirectory, step_files
from marsrl.trainer.runs.stop import Stopped

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

BRIEF = "agents.verifier.prompt=chain"  # this prompt has a tenth of the words of math's
AGENTS = {"solver", "verifier1", "corrector1", "verifier2", "corrector2"}


def script(request: DecodeRequest) -> str:
    """Answer by half_right, but with a hostile text without answer or verdict in one of eight cases."""
    rng = random.Random(request.uid)
    if rng.random() < 0.125:
        return "</think> <script>alert(1)</script> {report} Verdict: maybe \\boxed{"
    return half_right(request, rng)


CALLS: list[str] = []
"""Calls that the engine below received, in order."""


class Recorded(ScriptedWithWeights):
    """Engine that records its calls in CALLS. While asleep it refuses to serve, like ScriptedEngine."""

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        CALLS.append("submit")
        super().submit(requests, version=version)

    def score(
        self, sequences: Sequence[IntArray], adapter: str | Sequence[str] = "", temperature: float | None = None
    ) -> list[FloatArray]:
        CALLS.append("score")
        return super().score(sequences, adapter, temperature)

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        CALLS.append("update_weights")
        return super().update_weights(update)

    def sleep(self, keeps_weights: bool) -> None:
        CALLS.append("sleep, weights kept" if keeps_weights else "sleep")
        super().sleep(keeps_weights)

    def wake(self, part: MemoryPart) -> None:
        CALLS.append(f"wake {part}")
        super().wake(part)

    def forget_prefixes(self) -> None:
        CALLS.append("forget prefixes")
        super().forget_prefixes()


Play = Callable[..., RunDirectory]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """play("key=value", ..., says=script) trains, and returns the run's directory. Further calls use the same engines."""
    model = init_model("tiny", "bytes", tmp_path / "model")
    words = on_sevens(tmp_path, model)
    CALLS.clear()

    def trained(
        *settings: str, says: Callable[[DecodeRequest], str] = script, tokens_per_step: int | None = None
    ) -> RunDirectory:
        stack.enter_context(engines_are(saying(model, says, Recorded, tokens_per_step=tokens_per_step)))
        return train_here(tmp_path, [*words, *settings])

    with ExitStack() as stack:
        yield trained


OWN = """
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role

class Asked(Orchestration):
    agents = (AgentSpec("first"), AgentSpec("second"), AgentSpec("judge", Role.VERIFIER))

    def follow(self, episode):
        asks = [episode.ask("first"), episode.ask("second")]
        said = [episode.said(ask) for ask in asks]
        if episode.problem.question.endswith("3th time?") and None not in said:
            raise LookupError("no judge for this one")
        return asks if None in said else [*asks, *(episode.ask("judge", each) for each in said)]
"""


@pytest.mark.parametrize(
    ("team", "agents", "settings"),
    [
        ("solver_verifier", ["solver", "verifier"], ["orchestration_options.max_loops=3", "rollout.segments=2", BRIEF]),
        ("debate", ["debater"], ["credit.reward_scheme=outcome", "rollout.overlap=1"]),
        ("own", ["first", "second", "judge"], ["credit.reward_scheme=outcome", "agents.judge.prompt=chain"]),
    ],
)
def test_teams_of_independent_episodes_train_whole_and_resume(
    play: Play, tmp_path: Path, team: str, agents: list[str], settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    name = f"{tmp_path}/mine.py:Asked" if team == "own" else team
    words = [f"orchestration={name}", "credit.normalise=agent", "run.checkpoint_every=1", *settings]
    run = play(*words, "run.steps=3", says=lambda request: script(request).replace("maybe", "wrong"))
    play(*words, "run.steps=5", "run.resume=auto", "run.name=scripted")
    files = step_files(run.samples)
    assert list(files) == [1, 2, 3, 4, 5]
    of_step = [list(read_samples(path)) for path in files.values()]
    uids = [record.uid for records in of_step for record in records]
    assert len(set(uids)) == len(uids) and {r.agent for records in of_step for r in records} == set(agents)
    episodes = [{(record.rollout_id, record.uid.partition("/")[0]) for record in records} for records in of_step]
    drawn = [rollout_id for found in episodes for rollout_id in {name for name, _ in found}]
    assert len(set(drawn)) == len(drawn)  # an instance is trained in one step
    assert set().union(*episodes) == {(name, f"{name}.{i}") for name in drawn for i in range(4)}
    groups = {record.group_id for records in of_step for record in records}
    assert groups <= {f"{name}/{agent}" for name in drawn for agent in agents}
    rows = rows_of(run)
    assert any(row.get("actor/grad_norm") for row in rows)
    assert any(f"drmas/{agent}/variance_inflation" in row for row in rows for agent in agents)
    failed = sum(row.get("rollout/failed_episodes") or 0 for row in rows)
    assert (failed > 0) == (team == "own") == ("Asked.follow: LookupError: no judge for this one" in caplog.text)
    summary = load_summary(run.summary)
    assert summary.after is not None and set(summary.after.agents) <= set(agents) and summary.after.system.n == 3


OWN_TASK = """
from marsrl.rollout.tasks.own_task import OwnTask

class Sevens(OwnTask):
    def problems(self):
        return [(f"Seven, {i}?", "7") for i in range(12)]

    def held_out(self):
        return [(f"Seven, held out, {i}?", "7") for i in range(3)]

    def reward(self, problem, answer):
        if problem.question == "Seven, 5?":
            raise LookupError("five")
        return 1 if answer == problem.answer else 0.25
"""


def test_a_task_of_one_s_own_is_trained_resumed_and_evaluated(
    play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_task.py").write_text(OWN_TASK)
    words = [
        f"task={tmp_path}/my_task.py:Sevens", "task_options={workers: 1}", "data.train=null", "orchestration=solver_verifier",
        "run.evaluate=false", "rollout.prompts_per_step=4", "rollout.group_size=2", "rollout.pipeline=trajectory", BRIEF,
    ]  # fmt: skip
    run = play(*words, "run.steps=2")
    play(*words, "run.steps=3", "run.resume=auto", "run.name=scripted")
    samples = samples_of(run)
    drawn = {r.rollout_id: r.problem_id for r in samples if r.agent == "solver"}
    assert len(drawn) == 12 == len(set(drawn.values()))  # no problem repeats within the epoch, even across the resume
    judged = [r for r in samples if r.answer is not None and r.problem_id != "problems:6"]
    assert {(r.answer, r.correct) for r in judged} == {("7", 1.0), ("8", 0.25)}
    unknown = [r for r in samples if r.answer is not None and r.problem_id == "problems:6"]
    assert unknown and {(r.reward, r.note) for r in unknown} == {(None, "the judge failed: LookupError: five")}
    truth = {r.uid: r.correct for r in samples}
    verdicts = [r for r in samples if r.agent == "verifier" and r.verdict is not None and r.reward is not None]
    assert {r.reward == float(r.verdict == (truth[r.parent_uid] == 1)) for r in verdicts} == {True}
    rows = rows_of(run)
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    for row in rows:
        assert 0 < row["latency_s/episode_p50"] <= row["latency_s/episode_p95"]
        of_agents = row["cost/solver/output_tokens"] + row["cost/verifier/output_tokens"]
        assert of_agents == row["policy_cost/main/output_tokens"]
    assert sum(row.get("reward/solver/missing", 0) for row in rows) == sum(r.agent == "solver" for r in unknown)
    capsys.readouterr()
    same = f"{{model: {tmp_path / 'model'}}}"
    (tmp_path / "two.yaml").write_text(
        "task: my_task.py:Sevens\norchestration: solver_verifier\nagents: {verifier: {policy: judge}}\n"
        f"policies: {{main: {same}, judge: {same}}}\n"
    )
    words = ["rollout.engine=local", "rollout.max_response_tokens=120", "evaluate.repeat=4"]
    assert cli.main(["evaluate", "--config", str(tmp_path / "two.yaml"), *words]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["alone"]["n"] == 12 and result["alone"]["mean"] * 12 == pytest.approx(5.75)  # partial credit counts
    assert {name: used["policy"] for name, used in result["usage"].items()} == {"solver": "main", "verifier": "judge"}
    assert all(min(used["input_tokens"], used["output_tokens"]) > 0 for used in result["usage"].values())
    assert "two.yaml" in shown.err and "verifier (judge)" in shown.err


def test_evaluations_between_steps_do_not_change_the_steps(
    play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The team has a tool; evaluations do not add to its counts, and engines drop the prefixes that evaluations have cached."""
    words = ["task=qa", "data.train=null", "task_options.people=20", "run.steps=2"]
    words += [f"agents.{name}.prompt=facts" for name in ("verifier", "search", "answer")]
    run = play(*words, "run.evaluate=false", says=searches)
    without = untimed(run)
    assert "forget prefixes" not in CALLS and without[1]["tools/search/calls"] > 0
    late = load_summary(play(*words, "run.resume=auto", "run.steps=3", says=searches).summary)
    assert late.before is None and late.after is not None  # the weights have changed since the first step
    CALLS.clear()
    shutil.rmtree(run.path)
    evaluated = untimed(play(*words, "run.eval_every=1", says=searches))
    own = [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in evaluated]
    assert own == without and "forget prefixes" in CALLS
    assert all(row["eval/system/low"] <= row["eval/system"] <= row["eval/system/high"] for row in evaluated)
    # The evaluation after the run reuses the draws of step 2.
    assert "evaluation after: 3 of 3 draws are reused" in capsys.readouterr().err
    folders = sorted((run.path / "evaluations").iterdir())
    assert [folder.name for folder in folders] == ["step_0", "step_1", "step_2"]
    assert run.steps_on_disk() == [1, 2]  # the last step is kept, and step 1, which may have the best evaluation
    best = 1 + (evaluated[1]["eval/system"] > evaluated[0]["eval/system"])
    assert (run.checkpoints / "best").read_text() == f"step_{best}\n"


def searches(request: DecodeRequest) -> str:
    """Return completions of a search team that decides in two of three turns to search for more."""
    rng, agent = random.Random(request.uid), request.uid.rpartition("/")[2].partition(":")[0]
    route = rng.choice(["yes", "no", "no"])
    query = rng.choice(["the home of mira holt", "friend of odo", "' OR *", "the"])
    completions = {
        "verifier": f"<verify>{route}</verify>",
        "search": f"<search>{query}</search>" if rng.random() < 0.8 else "no idea",
        "answer": f"<answer>{rng.choice(['baker', 'tarn', 'ebb', 'mason'])}</answer>",
    }
    return completions[agent]


def test_refilled_steps_resume_exactly_despite_evaluations(play: Play, tmp_path: Path) -> None:
    def says(request: DecodeRequest) -> str:
        is_right = request.uid.endswith(":0") and request.uid[5] in "0369"  # no answer of an evaluation is right
        return f"So the answer is \\boxed{{{8 - is_right}}}."

    words = [
        "orchestration=solver",
        "rollout.refill={groups: 2, most: 4.0}",
        "data.rest=2",
        f"data.train={sevens(tmp_path, 8)}",
    ]
    words += ["policies.main.optimizer.decay=constant", "run.checkpoint_every=1"]
    run = play(*words, "run.steps=4", "run.eval_every=1", says=says)
    whole, drawn = untimed(run), [record.rollout_id for record in samples_of(run)]
    shutil.move(run.path, tmp_path / "whole")
    words += ["run.name=scripted", "run.evaluate=false"]
    play(*words, "run.steps=2", says=says)
    again = play(*words, "run.steps=4", "run.resume=auto", says=says)
    assert [record.rollout_id for record in samples_of(again)] == drawn
    shown = untimed(again)
    for row, other in zip(whole, shown, strict=True):
        assert {name: value for name, value in row.items() if not name.startswith("eval/")} == other
    assert [row["refill/live"] for row in shown] == [2] * 4 and not any(row["refill/short"] for row in shown)
    assert sum(row["refill/problems"] for row in shown) > 8 and any(row["data/resting"] for row in shown)
    assert all(row["actor/grad_norm"] > 0 for row in shown)


def test_agents_call_function_and_server_tools_and_train(play: Play, tmp_path: Path) -> None:
    (tmp_path / "units.py").write_text(
        'def twice(value: int) -> int:\n    """Twice the value."""\n    return 2 * value\n'
    )
    asked: Counter[str] = Counter()

    def calls(request: DecodeRequest) -> str:
        asked[request.uid] += 1
        if asked[request.uid] > 1:
            return script(request)
        is_verifier = request.uid.rpartition("/")[2].startswith("verifier")
        name, arguments = ("greet", {}) if is_verifier else ("twice", {"value": 21})
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    words = [
        "orchestration=solver_verifier", "orchestration_options.max_loops=2", "run.steps=2", "rollout.max_response_tokens=400",
        "rollout.pipeline=trajectory", "run.evaluate=false", BRIEF, "agents.solver.tools=[twice]",
        f"tools.twice={{kind: function, function: '{tmp_path}/units.py:twice', concurrency: 2}}",
        f"tools.hello={{kind: mcp, command: [{sys.executable}, {mcp_server.__file__}]}}", "agents.verifier.tools=[hello]",
    ]  # fmt: skip
    run = play(*words, says=calls)
    samples = samples_of(run)
    assert {sample.agent for sample in samples} == {"solver", "verifier"}
    for sample in samples:
        said = "42" if sample.agent == "solver" else "hello world"
        assert f"<tool_response>\n{said}\n</tool_response>" in sample.text and sample.reward is not None
        assert ('"name": "twice"' in sample.prompt) == (sample.agent == "solver")
    rows = rows_of(run)
    for tool in ("twice", "hello"):
        assert sum(row[f"tools/{tool}/calls"] for row in rows) >= 16
        assert not sum(row[f"tools/{tool}/errors"] for row in rows)
    assert any(row.get("actor/grad_norm") for row in rows)


def test_a_team_that_mostly_fails_stops_the_run_and_says_why(play: Play, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace('.endswith("3th time?")', ""))
    words = [f"orchestration={tmp_path}/mine.py:Asked", "rollout.max_error_share=0.25", "run.evaluate=false"]
    with pytest.raises(RuntimeError, match="step 1: 0 of 16 samples and 8 episodes ended in an error, more than"):
        play(*words, "run.steps=3")


def test_overlap_mixes_versions_and_resume_repeats_no_problem(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("rollout.overlap=2", "rollout.segments=3", "rollout.group_size=2", "run.evaluate=false", *BRIEFLY)
    settings += ("run.token_log_every=1", "run.token_log_groups=999")
    settings += ("run.checkpoint_minutes=1e-9", "run.keep_checkpoints=9")  # a checkpoint is due after every step
    before = set(threading.enumerate())
    play(*settings, "run.steps=3")
    # With run.evaluate=false, no table of evaluations is shown.
    assert "resumes after" not in (said := capsys.readouterr().err) and "not measured" not in said
    run = play(*settings, "run.steps=7", "run.resume=auto")
    assert "resumes after step 3: 4 of 7 steps are left" in capsys.readouterr().err
    rows = rows_of(run)
    assert len(rows) == 7 and run.steps_on_disk() == [1, 2, 3, 4, 5, 6, 7]
    summary = load_summary(run.summary)
    # Syncs of this start only, including that of the first weights.
    assert summary.engine.kind == "scripted" and summary.verified_syncs == 5
    assert {f"reward/{agent}/mean" for agent in AGENTS} <= set().union(*rows)
    assert any(row.get("actor/grad_norm") for row in rows)
    assert max(row["rollout/staleness_max"] for row in rows) in range(1, 2 + 3 + 1)
    assert max(row["rollout/staleness_mean"] for row in rows) > 0
    samples = samples_of(run)
    assert max(Counter(r.uid for r in samples).values()) == 1
    logged = [r for path in step_files(run.tokens).values() for r in read_tokens(path)]
    assert {r.uid: r.segments for r in logged} == {r.uid: r.segments for r in samples}
    solved = Counter(r.problem_id for r in samples if r.agent == "solver")
    assert len(solved) >= 2 * 5 and set(solved.values()) == {2}  # one group of 2 samples for each problem
    assert {r.agent for r in samples} == AGENTS
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("marsrl-")]


def test_sleeping_engines_keep_weights_if_no_publish_follows(play: Play, tmp_path: Path) -> None:
    """With two policies, the first one's engine already has its new weights when the second is trained."""
    colocated = ("run.steps=2", "run.evaluate=false", "rollout.placement=colocated", *BRIEFLY)
    together = play(*colocated)
    sync = ["wake weights", "update_weights", "wake kv_cache", "score"]
    # At the start, the sync probes the engines before and after it sends the initial weights; they are awake.
    assert CALLS[:3] == ["score", "update_weights", "score"]
    assert CALLS[3:] == ["submit", "sleep", *sync] * 2  # weights are not kept, because each step publishes new ones
    spans = [span for span in read_trace(together.trace) if span.lane == "rank/0"]
    assert [s.name for s in spans if s.name in ("sleep", "step", "publish")][-6:] == ["sleep", "step", "publish"] * 2
    shutil.rmtree(together.path)
    CALLS.clear()
    second = (f"policies.second.model={tmp_path / 'model'}", "policies.second.dtype=float32")
    play(*colocated, *second, "agents.verifier1.policy=second", "agents.verifier2.policy=second")
    calls = [call for call in CALLS if call != "submit"]
    step = ["sleep", "sleep", *sync, "sleep, weights kept", *sync]
    assert calls[6:] == [*step, "wake weights", "wake kv_cache", *step]


def note_the_trainer_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add to CALLS when a learner falls asleep or wakes up."""
    from marsrl.trainer.learner.sleep import Memory

    def noted(change: Callable[[Memory], None], state: str) -> Callable[[Memory], None]:
        def changed(memory: Memory) -> None:
            before = memory.is_asleep
            change(memory)
            CALLS.extend([state] * (memory.is_asleep != before))

        return changed

    monkeypatch.setattr(Memory, "sleep", noted(Memory.sleep, "trainer asleep"))
    monkeypatch.setattr(Memory, "wake", noted(Memory.wake, "trainer awake"))


def test_a_trainer_that_sleeps_beside_engines_trains_the_same(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines sleep while the learner is awake to score, train, save or load."""
    colocated = ("run.steps=2", "rollout.placement=colocated", "run.checkpoint_every=1", "loss.kl=k3", *BRIEFLY)
    colocated += ("policies.main.reference=past", "policies.main.reference_every=1")
    expected = play(*colocated)
    rows, sent = untimed(expected), expected.publishes.read_text()
    assert "sleep, weights kept" not in CALLS
    shutil.rmtree(expected.path)
    CALLS.clear()
    note_the_trainer_s_memory(monkeypatch)
    found = play(*colocated, "trainer.sleep=true")
    assert untimed(found) == rows
    digests = [json.loads(line)["digest"] for line in found.publishes.read_text().splitlines()]
    assert digests == [json.loads(line)["digest"] for line in sent.splitlines()] and len(set(digests)) == 3
    sync = ["wake weights", "update_weights", "wake kv_cache", "score"]
    calls = [call for call in CALLS if call not in ("submit", "forget prefixes")]
    awake = ["sleep", "trainer awake", "trainer asleep"]
    save = ["sleep, weights kept", *awake[1:], "wake weights", "wake kv_cache"]  # then a stage or the evaluation
    start = ["trainer asleep", "score"]
    assert calls == [*start, *awake, *sync, *awake, *sync, *save, *awake, *sync, *save]
    CALLS.clear()
    play(*colocated, "trainer.sleep=true", "run.steps=3", "run.resume=auto")
    calls = [call for call in CALLS if call != "submit"]
    assert calls[:11] == [*start, *awake, *awake[1:], *sync]  # the learner wakes to load, and again to score


def test_a_trainer_that_sleeps_saves_when_stopped_in_a_stage(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def stopping(request: DecodeRequest) -> str:
        asked.append(request.uid)
        if len(asked) == 20:  # this request is of step 2: step 1 has 16 requests, all to the Solver
            signal.raise_signal(signal.SIGINT)
        return script(request)

    colocated = ("run.steps=2", "run.evaluate=false", "rollout.placement=colocated", *BRIEFLY)
    expected = untimed(play(*colocated))
    shutil.rmtree(tmp_path / "runs" / "scripted")
    note_the_trainer_s_memory(monkeypatch)
    CALLS.clear()
    with pytest.raises(Stopped):
        play(*colocated, "trainer.sleep=true", says=stopping, tokens_per_step=9)
    assert CALLS[-4:] == ["submit", "sleep, weights kept", "trainer awake", "trainer asleep"]
    assert untimed(play(*colocated, "trainer.sleep=true", "run.resume=auto")) == expected


def test_engines_that_cannot_sleep_are_refused(play: Play) -> None:
    with pytest.raises(ValueError, match=r"no sleep mode on a CPU.*rollout\.placement=disaggregated"):
        play("rollout.placement=colocated", "rollout.engine=vllm")
    with pytest.raises(ValueError, match=r"rollout\.overlap is 1; set overlap=0"):
        play("rollout.placement=colocated", "rollout.overlap=1")
    with pytest.raises(ValueError, match=r"rollout\.placement is local; set rollout\.placement=colocated"):
        play("trainer.sleep=true")


def test_a_run_in_which_nothing_trains_stops_and_says_why(play: Play, tmp_path: Path) -> None:
    small = ("run.steps=5", "run.evaluate=false", "rollout.prompts_per_step=1", "rollout.group_size=2")
    dull = r"step 2: no sample had a gradient in 2 steps in a row .* of the last step's 2 samples 2 have the same reward as all"
    with pytest.raises(RuntimeError, match=dull):
        play(*small, "run.evaluate=true", "trainer.max_empty_steps=2", says=lambda request: "I do not know.")
    run = RunDirectory(tmp_path / "runs" / "scripted")
    assert [row["answers/solver/missing"] for row in rows_of(run)] == [1, 1]  # the steps are on disk
    form = "the form \\boxed{...} or #### ... or Answer: ..."
    zeros = f'solver\'s completions (2 of 2) have no answer in {form}; one ends "I do not know."'
    told = [(step, text) for step, text in read_warnings(run.warnings) if "completions" in text]
    assert told[0] == (0, f"evaluation before: 100 % of {zeros.replace('2 of 2', '3 of 3')}")
    # The evaluation's five warnings, one for each agent, come first.
    assert told[5:] == [(step, f"100 % of {zeros}") for step in (1, 2)]
    shutil.rmtree(run.path)
    rows = [{"question": f"{i} is 7? " * (2000 if i else 1), "answer": "7"} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": "What is 8?", "answer": "8"}) + "\n")
    with pytest.raises(
        RuntimeError, match="step 1: no completion arrived .*: 1 prompts were longer than agents.<name>"
    ):
        play(*small, f"data.eval={tmp_path}/eval.jsonl")


def test_prometheus_is_answered_while_the_run_goes_on(play: Play) -> None:
    pages: list[str] = []

    def looks(request: DecodeRequest) -> str:
        pages.append(urllib.request.urlopen(address).read().decode())
        return script(request)

    words = ["orchestration=solver", "run.evaluate=false", "run.steps=2"]
    with held_port() as port:
        address = f"http://127.0.0.1:{port}/metrics"
        first, _ = rows_of(play(*words, f"run.prometheus_port={port}", says=looks))
        with pytest.raises(OSError):
            urllib.request.urlopen(address)
    assert "marsrl_step 1.0" not in pages[0] and 'marsrl_run{run="scripted"} 1.0' in pages[0]
    # The page was read in step 2, after step 1.
    assert "marsrl_step 1.0" in pages[-1] and 'marsrl_engines{policy="main"} 1.0' in pages[-1]
    assert f'marsrl_metric{{name="reward/solver/mean"}} {first["reward/solver/mean"]}' in pages[-1]


def test_tokens_of_some_groups_are_logged_at_some_steps(play: Play) -> None:
    """Each step makes two updates, so in the second one ratios differ from 1 and are clipped."""
    words = [
        "run.evaluate=false", "trainer.updates_per_step=2", "loss.clip_low=0.0001", "loss.clip_high=0.0001",
        "policies.main.optimizer.lr=1e-3", "mpt.entropy=9", "mpt.probability=0.003", "orchestration=solver",
        "trainer.max_tokens_per_micro_batch=900", "run.token_log_groups=4", "rollout.prompts_per_step=4",
    ]  # fmt: skip
    run = play(*words, "run.steps=3", "run.token_log_every=2")
    assert list(step_files(run.tokens)) == [2]
    samples, logged = list(read_samples(step_files(run.samples)[2])), read_tokens(step_files(run.tokens)[2])
    assert len({record.group_id for record in logged}) == 4 and len(logged) == 16
    for record in logged:
        sample = samples[record.line - 1]
        assert (record.uid, record.segments, record.policy) == (sample.uid, sample.segments, "main")
        assert record.text == sample.text + "<|im_end|>" * (sample.finish == "stop")
        assert np.isfinite(record.rollout_logprobs).all() and np.isfinite(record.logprobs).all() == (record.update > 0)
        assert not record.update or bool((record.logprobs < 0).all() and (record.entropy > 0).all())
    clipped = {record.update for record in logged if record.is_clipped.any()}
    assert {record.update for record in logged} >= {1, 2} and clipped == {2}  # the first update's ratios are 1
    assert any(record.is_gated.any() and record.is_masked.any() for record in logged)


def test_shared_prefixes_leave_a_run_as_it_is(tmp_path: Path) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model", dtype="float32")
    words = [
        *on_sevens(tmp_path, model), "orchestration=solver", "run.evaluate=false", "run.steps=2", "rollout.placement=local",
        "policies.main.dtype=float32", "trainer.updates_per_step=2",
    ]  # fmt: skip
    with engines_are(saying(model, half_right)):
        flat, tree = (
            rows_of(train_here(tmp_path / name, [*words, f"trainer.shared_prefixes={name}"]))
            for name in ("off", "auto")
        )
    for row, other in zip(tree, flat, strict=True):
        assert "actor/shared_tokens" not in other and 0.2 < row["actor/shared_tokens"] < 0.9
        same = ("actor/loss", "actor/grad_norm", "actor/entropy", "train_rollout/prob_diff_mean", "actor/tokens")
        assert [row[name] for name in same] == pytest.approx([other[name] for name in same], rel=1e-3, abs=1e-6)
