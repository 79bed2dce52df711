"""A run with wrong settings or files ends with one message and exit code 2, and starts nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from small_run import MAIN
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, cuda

from marsrl.trainer.checks.placement import with_backend
from marsrl.trainer.config.read import read_config
from marsrl.trainer.main import main
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import RunLock

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


def start(*launcher: str) -> subprocess.CompletedProcess[str]:
    """Start a run with a wrong key."""
    command = [sys.executable, *launcher, str(MAIN), "rollout.group_sise=4"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return a function that starts a run in this process and returns its single error message.

    A new process for each run would take minutes. If the message begins with a key, a second line must say where to read more.
    """

    more = re.compile(r"\(more: docs/\w+\.md, marsrl config --explain [\w.<>]+\)")

    def refuse(*words: str) -> str:
        assert main(list(words)) == 2
        first, *others = capsys.readouterr().err.splitlines()
        assert first.startswith("marsrl: ") and len(others) <= 1 and all(map(more.fullmatch, others)), others
        return first

    return refuse


def test_a_rejected_run_exits_with_2_and_one_rank_says_why() -> None:
    message = "marsrl: rollout.group_sise: unknown key; did you mean rollout.group_size? (command line)"
    alone = start()
    assert (alone.returncode, alone.stderr) == (2, f"{message}\n")
    done = start("-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert done.returncode != 0
    assert done.stderr.splitlines().count(message) == 1
    *_, root_cause = done.stderr.partition("Root Cause (first observed failure):")  # torchrun prints its report last
    assert "rank      : 0 (local_rank: 0)" in root_cause and f"traceback : {message}\n" in root_cause


BOTH_FAIL = """
import os, time
from marsrl.trainer import build, main

def open_run(checked, directory):
    time.sleep(3 * (os.environ["RANK"] == "0"))  # as long as Ray takes to shut down
    raise ValueError("of both ranks")

build.open_run = open_run
raise SystemExit(main.main())
"""


def test_rank_0_reports_a_failure_of_all_ranks_even_if_slow(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH_FAIL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "both.py")]
    words = [f"run.dir={tmp_path}", "run.name=both", "rollout.engine=local"]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=600)
    said = "marsrl: the run failed: ValueError: of both ranks; it has no checkpoint yet"
    assert done.returncode == 1 and sum(line.startswith(said) for line in done.stderr.splitlines()) == 1, done.stderr


FILES = {
    "p.jsonl": '{"question": "1+1", "answer": "2"}\n',
    "cut.jsonl": '{"question": "1+1", "answer": "2"}\n{"question": \n',
    "empty.jsonl": "",
    "cut.json": '[{"prompt": "a"',
    "chat.jsonl": json.dumps(
        {"prompt": [{"role": role, "content": "q"} for role in ("system", "user", "assistant", "user")], "answer": "1"}
    ),
    "mine.py": "from marsrl.rollout.tasks.own_task import OwnTask\n\n\nclass Mine(OwnTask): ...\n",
}


def train(files: str, task: str = "math") -> list[str]:
    return [f"task={task}", "policies.main.model=/nowhere", f"data.train={files}"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["policies.main.layout.tensor=2"], "is 2, which does not divide the 1 ranks; on 1 rank(s) this would fit: data"),
        (["policies.main.model=%s/nothing"], "nothing is not a directory"),
        (["task=math", "data.train=%s/p.jsonl"], "policies.main.model is not set"),
        (train("%s/p.jsonl", "arithmetic"), "data.train is set, but task=arithmetic (the default) generates its"),
        (["data.eval=%s/p.jsonl"], "problems; did you mean task=math?"),
        (train("%s/chat.jsonl"), "/chat.jsonl:1: prompt is a chat of system, user, assistant, user; expected the question's"),
        (train("%s/cut.json"), "/cut.json: the array is not JSON: the file is cut off at line 1, column 16"),
        (train("%s/cut.jsonl"), "/cut.jsonl:2: not JSON: cut off at column 13, in the middle of an object"),
        (train("%s/empty.jsonl"), "marsrl: data.train: %s/empty.jsonl has no problems: the file is empty"),
        ([*train("%s/p.jsonl"), "data.eval=%s/gone"], "marsrl: data.eval: %s/gone does not exist; expected a jsonl or"),
        (train("[{path: %s/p.jsonl, weight: 1}]", "%s/mine.py:Mine"), "data.train has weights, but task="),
        (train("[]"), "data.train is []; expected a path"),
        (train("[{path: %s/p.jsonl}]"), "data.train[0]: found a mix of counts and weights, or neither"),
        (train("[{path: %s/p.jsonl, count: 1}, {path: b, weight: 1}]"), "data.train[1]: found a mix of counts"),
        (train("[{path: %s/p.jsonl, weight: .inf}]"), "data.train[0].weight: Input should be"),
        (train("[{path: %s/p.jsonl, wieght: 1}]"), "wieght: unknown key; did you mean data.train[0].weight?"),
    ],
)  # fmt: skip
def test_data_and_models_that_cannot_be_used_are_named(
    words: list[str], says: str, tmp_path: Path, refusal: Refusal
) -> None:
    """In `words` and `says`, %s stands for the folder of FILES."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    message = refusal(*(word.replace("%s", str(tmp_path)) for word in words))
    assert says.replace("%s", str(tmp_path)) in message and ("data.train[" not in says or "command line" in message)


SERVED = "policies.judge={frozen: true, engine: openai, model: /nowhere, openai: {base_url: 'http://h/v1', model: m}}"
Spoil = Callable[[Path], object]
EMBEDDINGS, OUT = ("model.embed_tokens.weight", "lm_head.weight"), "model.layers.1.self_attn.o_proj.weight"


def file(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def config(**changes: object) -> Spoil:
    return file("config.json", lambda text: json.dumps(json.loads(text) | changes).encode())


def weights(change: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
SPOILED: dict[str, tuple[list[Spoil], str]] = {
    "without shards": (
        [lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json"),
         file("model.safetensors.index.json", lambda _: json.dumps(SHARDS).encode())],
        "missing: model-1.safetensors, model-2.safetensors"),
    "an index cut short": (
        [lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(SHARDS)[:-9])],
        "model.safetensors.index.json is not an index of weight files"),
    "cut short": ([file("model.safetensors", lambda all: all[:-1000])], "model.safetensors is not a complete safetensors file"),
    "without a tensor": (
        [weights(lambda held: held.pop("model.norm.weight"))],
        "has no tensor model.norm.weight, which config.json requires"),
    "without a tokenizer": ([lambda folder: [path.unlink() for path in folder.glob("*token*")]], "tokenizer"),
    "without a template": (
        [lambda folder: (folder / "chat_template.jinja").unlink()], "the tokenizer has no chat template"),
    "a template that refuses": (
        [file("chat_template.jinja", lambda _: b"{{ raise_exception('no such role') }}")],
        "the chat template rejects these turns (user): no such role"),
    "quantised": (
        [weights(lambda held: held.update({OUT: held[OUT].char()}))],
        "o_proj.weight is I8; quantised weights cannot be trained: convert them to BF16 or F16 or F32"),
    "too many tokens": (
        [weights(lambda held: held.update({name: held[name][:100].clone() for name in EMBEDDINGS})),
         config(vocab_size=100, eos_token_id=1, pad_token_id=1)],
        "config.json's vocab_size is 100"),
    "too few positions": (
        [config(max_position_embeddings=32)],
        "policies.main.model has 32 positions (max_position_embeddings, or a shorter sliding_window)"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_an_unloadable_model_is_rejected_before_the_start(how: str, tmp_path: Path, refusal: Refusal) -> None:
    folder, (spoils, says) = init_model("tiny", "bytes", tmp_path / "spoiled"), SPOILED[how]
    for spoil in spoils:
        spoil(folder)
    message = refusal("--dry-run", f"policies.main.model={folder}")
    assert says in message and ("spoiled" in message or "policies.main.model has" in says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rollout.group_size=1"], "rollout.group_size is 1, and with credit.normalise=group"),
        (
            ["rollout.group_size=1", "orchestration=solver_verifier", "credit.normalise=trajectory"],
            "rollout.group_size is 1, and with credit.normalise=trajectory episodes are compared: every",
        ),
        (["credit.train_agents=[solver]", "agents.solver.loss_weight=0"], "agents.solver.loss_weight: 0 for every trained agent"),
        (["agents.solver.max_input_tokens=3"], "agents.solver.max_input_tokens is 3, but the shortest of 64 prompts has "),
        *([] if find_spec("wandb") else [(["run.wandb=mine"], "run.wandb=mine needs wandb, which this environment lacks")]),
        (["run.name=x", "run.dir=/dev/null/runs"], "run.dir=/dev/null/runs: /dev/null is a file; name a folder"),
        (["run.dir=/dev/null"], "run.dir=/dev/null: /dev/null is a file; name a folder"),
        (["run.dir=/proc/runs"], "; set run.dir to a folder that can be created and written to"),
        (["policies.main.layout.expert=3"], "layout.expert is 3, which does not divide the 8 experts"),
        (["rollout.vllm.tensor_parallel=3"], "which does not divide the model's 4 attention heads"),
        (["loss.kl=k3", "policies.main.reference=/nowhere"], "policies.main.reference: /nowhere is not a directory"),
        ([SERVED, "judge={policy: judge}"], "tokenizer directory /nowhere does not exist"),
        *([] if cuda.is_available() else [(["policies.main.layers=transformer_engine"], "no CUDA device; set auto or ours")]),
        *([] if cuda.is_available() else [(["policies.main.recompute=full_offload"], "PyTorch sees no CUDA device")]),
    ],
)  # fmt: skip
def test_settings_that_would_fail_later_are_rejected_at_start(words: list[str], says: str, refusal: Refusal) -> None:
    for dry_run in ([], ["--dry-run"]):
        assert says in refusal(*dry_run, *words)


def test_only_rank_0_rejects_an_unset_server_key(tmp_path: Path, refusal: Refusal) -> None:
    served = SERVED.replace("/nowhere", str(init_model("tiny", "bytes", tmp_path / "model")))
    words = ["--dry-run", served, "judge={policy: judge}", "policies.judge.openai.api_key_env=NO_SUCH_KEY"]
    assert "policies.judge.openai.api_key_env names NO_SUCH_KEY, which is not set or empty" in refusal(*words)
    os.environ["RANK"] = "1"  # another host, which need not have the key
    assert main(words) == 0


def test_a_bos_that_only_the_server_would_add_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = "<|reserved_0|>"
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 261)])
    tokenizer.save(str(model / "tokenizer.json"))
    words = ["--dry-run", SERVED.replace("/nowhere", str(model)), "judge={policy: judge}"]
    said = f"policies.judge.openai.prompt is text, and a server's tokenizer adds {begin} to the prompt, which the chat template"
    for more, is_warned in ([], True), (["policies.judge.openai.prompt=tokens"], False):
        assert main([*words, *more]) == 0
        assert (f"warning: {said}" in capsys.readouterr().out) == is_warned


def test_faults_of_the_data_are_counted_and_located(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    rows = [("2+2", "4"), ("1+1", "2"), ("1+1", "3"), ("1+1", "2"), ("long " * 500, "1"), ("show it", "proof")]
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
    data, other = tmp_path / "p.jsonl", tmp_path / "q.jsonl"
    data.write_text("\n".join(lines))
    other.write_text("\n".join([*lines, json.dumps({"question": "3+3", "answer": "6"})]))
    words = ["--dry-run", "task=math", f"policies.main.model={model}", f"data.train={data}", f"data.eval={other}"]
    assert main([*words, "agents.solver.max_input_tokens=1000"]) == 0
    out = capsys.readouterr().out
    long = "1 of 5 prompts are longer than agents.solver.max_input_tokens (1000 tokens) and will "
    for warning in (
        "5 of the 6 problems of data.eval are also in data.train, first q.jsonl:1; their results",
        "data.train: 1 question(s) occur with different answers, first p.jsonl:2 (answer '2') and p.jsonl:3 ('3')",
        "data.eval: 1 problem(s) repeat an earlier question and answer",
        f"{long}be skipped",
        f"{data}: 1 of 6 problems are skipped, because their answer is a placeholder that any completion can repeat ('proof' 1)",
        f"{other}: 1 of 7 problems are skipped",
    ):
        assert f"warning: {warning}" in out
    assert main([*words, "agents.solver.max_input_tokens=1000", "agents.solver.long_prompts=cut_middle"]) == 0
    assert f"{long}be cut (agents.solver.long_prompts)" in capsys.readouterr().out
    assert main([*words, "agents.solver.max_input_tokens=10", "agents.solver.long_prompts=cut_left"]) == 2
    assert "is 10, but the chat template alone fills it" in capsys.readouterr().err
    assert main([*words, f"data.eval={data}"]) == 2
    assert "5 of the 5 problems of data.eval are also in data.train" in capsys.readouterr().err


def test_a_dry_run_says_what_becomes_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    words = ["--dry-run", f"run.dir={tmp_path}"]

    def output_of(*more: str) -> str:
        assert main([*words, *more]) == 0
        return capsys.readouterr().out

    out = output_of()
    assert f"run: a new one, {tmp_path}/cpu_default-<UTC time>\n" in out
    assert "a turn of policies.main ends with <|end|> (4), as the chat template writes\n" in out
    assert f"run: a new one, {tmp_path}/mine\n" in output_of("run.name=mine")
    run = RunDirectory.create(tmp_path, "mine", "p")
    run.write_config(with_backend(read_config(None, [])[0], on_gpus=False).model_dump(mode="json"))
    words.append("run.name=mine")
    RunLock(run).release()
    assert f"run: {run.path}, left by a failed start: begins at step 1" in output_of()
    run.metrics.write_text('{"step": 1}\n')
    assert "exists and is never overwritten" in refusal(*words)
    words.append("run.resume=auto")
    assert f"run: {run.path} has no checkpoint yet: begins again at step 1" in output_of()
    for step in (2, 4):
        run.checkpoint(step).mkdir(parents=True)
    run.mark_latest(4)
    files = sorted(tmp_path.rglob("*"))
    out = output_of("run.steps=9", "run.seed=7", "rollout.picks=3")
    assert f"run: {run.path} resumes after step 4; run.steps is 9: 5 of 9 steps are left" in out
    assert f"differs from {run.config}: run.steps 24 -> 9, run.seed 0 -> 7, rollout.picks 2 -> 3\n" in out
    assert "resumes after step 4; run.steps is 3: no steps are left" in output_of("run.steps=3")
    lock = RunLock(run)
    assert f"{run.path} is being written by process {os.getpid()} on " in refusal(*words)
    lock.release()
    assert sorted(tmp_path.rglob("*")) == files
