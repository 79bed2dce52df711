"""`marsrl sft` from the command line to a model that a run can start from, and the reading of data.demonstrations."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from desk import MODEL
from documented_commands import run_by
from rank_pair import RankPair
from safetensors.torch import load_file
from thinking_templates import TEMPLATES, renderer_of
from transformers import PreTrainedTokenizerFast

from marsrl.commands import cli
from marsrl.commands.sft.demonstrations import Demonstrations, read_demonstrations
from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.prompts import prompt_set
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.types import Message
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.supervised.imitation import DemonstrationTokens, Goal

SENTENCES = ("seven is odd", "eight is even", "nine is odd", "ten is even")
WORDS = (
    "task=math", "data.train=none.jsonl", "policies.main.dtype=float32", "run.evaluate=false", "sft.batch=4",
    "sft.epochs=3", "sft.lr=1e-2", "sft.held_out=0.25", "run.checkpoint_every=2", "run.keep_checkpoints=9",
)  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    os.chdir(tmp_path)
    init_model("tiny", "bytes", tmp_path / "model")
    lines = [{"agent": "solver", "prompt": f"{i}: ", "completion": SENTENCES[i % 4]} for i in range(16)]
    (tmp_path / "demos.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [*WORDS, f"policies.main.model={tmp_path / 'model'}", "data.demonstrations=demos.jsonl"]


def losses(run: Path) -> dict[int, dict[str, float | None]]:
    return {row.step: dict(row.values) for row in read_metrics(run / "metrics.jsonl")}


def cross_entropy(model_dir: Path, lines: list[str]) -> float:
    """Return the cross-entropy of the completions with their end tokens, computed by transformers."""
    from transformers import AutoModelForCausalLM

    model, renderer = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), ChatRenderer(model_dir)
    total, count = 0.0, 0
    for line in map(json.loads, lines):
        prompt = renderer.encode_trusted(line["prompt"]).tolist()
        completion = [*renderer.encode_trusted(line["completion"]).tolist(), renderer.eos_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum"))
        count += len(completion)
    return total / count


def test_a_learning_rate_of_0_measures_the_model_as_it_is(words: list[str]) -> None:
    """One batch has all lines, and the step's loss equals that of transformers."""
    one = ["sft.batch=16", "sft.epochs=1", "sft.held_out=0", "sft.lr=0", "run.name=still"]
    assert cli.main(["sft", *words, *one]) == 0
    expected = cross_entropy(Path("model"), Path("demos.jsonl").read_text().splitlines())
    assert losses(Path("runs/still"))[1]["sft/loss"] == pytest.approx(expected, rel=1e-5)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in ("model", "runs/still/hf"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_loss_falls_and_a_resumed_run_equals_an_unbroken_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sft", *words, "run.name=whole"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out.count("policies.main.model=runs/whole/hf") == 1
    assert out[1] == "a turn of policies.main ends with <|im_end|> (258), as the chat template writes"
    rows = losses(Path("runs/whole"))
    assert list(rows) == list(range(10))  # 12 of 16 lines, 4 a step, 3 epochs
    held_out = {step: row["sft/held_out/loss"] for step, row in rows.items() if "sft/held_out/loss" in row}
    assert list(held_out) == [0, 3, 6, 9]
    for first, last in ((held_out[0], held_out[9]), (rows[1]["sft/loss"], rows[9]["sft/loss"])):
        assert first is not None and last is not None and last < 0.75 * first
    shutil.copytree("runs/whole", "runs/killed")
    shutil.rmtree("runs/killed/hf")
    (Path("runs/killed/checkpoints/latest")).write_text("step_4\n")  # resume in the second epoch
    again = ["run.name=killed", "run.resume=auto"]
    assert cli.main(["sft", *words, *again, "sft.batch=2"]) == 2
    assert "cannot be resumed: section sft or run.seed differs" in capsys.readouterr().err
    Path("other.jsonl").write_text(Path("demos.jsonl").read_text().replace("seven", "three"))
    assert cli.main(["sft", *words, *again, "data.demonstrations=other.jsonl"]) == 2
    assert "cannot be resumed: the demonstrations have changed" in capsys.readouterr().err
    assert cli.main(["sft", *words, *again]) == 0
    whole, killed = (load_file(f"runs/{name}/hf/model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert losses(Path("runs/killed")) == rows
    assert "differs from" not in capsys.readouterr().out
    assert cli.main(["sft", *words, *again, "policies.main.optimizer.grad_clip=0.5"]) == 0  # the run has finished
    out = capsys.readouterr().out
    assert "policies.main.model=runs/killed/hf" in out  # the location of the model is printed again
    assert "differs from runs/killed/config.yaml: policies.main.optimizer.grad_clip 1.0 -> 0.5\n" in out


def test_training_stops_when_held_out_lines_are_learned(words: list[str]) -> None:
    assert cli.main(["sft", *words, "run.name=whole"]) == 0
    whole = losses(Path("runs/whole"))
    after_3, after_6 = (whole[step]["sft/held_out/loss"] for step in (3, 6))
    assert after_3 is not None and after_6 is not None and after_6 < after_3
    assert all(0 <= (whole[step]["sft/held_out/accuracy"] or 0.0) <= 1 for step in (0, 3, 6, 9))
    goal = f"sft.stop_loss={(after_3 + after_6) / 2}"
    assert cli.main(["sft", *words, goal, "run.name=short"]) == 0
    assert losses(Path("runs/short")) == {step: row for step, row in whole.items() if step <= 6}
    stopped = load_file("runs/short/hf/model.safetensors")
    shutil.rmtree("runs/short/hf")
    # The run was killed before it wrote its model.
    assert cli.main(["sft", *words, goal, "run.name=short", "run.resume=auto"]) == 0
    assert list(losses(Path("runs/short"))) == list(range(7))
    again = load_file("runs/short/hf/model.safetensors")
    assert all(torch.equal(stopped[name], again[name]) for name in stopped)


@pytest.mark.parametrize(
    ("goal", "is_reached"),
    [
        (Goal(), False),
        (Goal(loss=1.0), False),
        (Goal(loss=1.1), True),
        (Goal(accuracy=0.5), True),
        (Goal(accuracy=0.6), False),
        (Goal(loss=1.1, accuracy=0.5), True),
        (Goal(loss=1.1, accuracy=0.6), False),
    ],
)
def test_a_goal_needs_all_that_it_names(goal: Goal, is_reached: bool) -> None:
    assert goal.is_reached(1.0, 0.5) is is_reached
    assert not goal.is_reached(math.nan, math.nan)


def test_a_stop_rule_needs_held_out_lines() -> None:
    with pytest.raises(ValueError, match=r"sft.held_out is 0, but sft.stop_loss and sft.stop_accuracy need"):
        read_config(None, ["sft.held_out=0", "sft.stop_accuracy=0.9"])


def test_the_templates_end_token_is_imitated_not_eos_token(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"'))
    renderer = ChatRenderer(tmp_path)
    assert renderer.tokenizer.eos_token_id == 256
    sequence = DemonstrationTokens(renderer).sequence([Message("user", "2 + 2?")], "4", 0)
    chat = [Message("user", "2 + 2?"), Message("assistant", "4"), Message("user", "")]
    tokens = [*sequence.prompt_ids, *sequence.token_ids]
    assert tokens == renderer.render(chat)[0][: len(tokens)].tolist() and tokens[-1] == 258


def test_a_base_model_s_files_name_the_end_that_was_trained(words: list[str]) -> None:
    config = Path("model/tokenizer_config.json")
    config.write_text(config.read_text().replace('"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"'))
    ends = Path("model/generation_config.json")
    before = {**json.loads(ends.read_text()), "eos_token_id": 256}
    ends.write_text(json.dumps(before))
    assert cli.main(["sft", *words, "sft.epochs=1", "run.name=base"]) == 0
    after = json.loads(Path("runs/base/hf/generation_config.json").read_text())
    assert after == {**before, "eos_token_id": [258, 256]}
    assert cli.main(["export", "runs/base", "exported"]) == 0
    assert json.loads(Path("exported/generation_config.json").read_text()) == after


def test_training_continues_from_the_peft_files_of_an_adapter(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = ["policies.main.adapter={rank: 4, targets: [attention]}"]
    assert cli.main(["sft", *words, *adapter, "run.name=one"]) == 0
    (start,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policies.main")]
    assert start == "policies.main.adapter.start=runs/one/hf"
    assert cli.main(["sft", *words, *adapter, start, "run.name=two"]) == 0
    last, first = losses(Path("runs/one"))[9], losses(Path("runs/two"))[0]
    assert first["sft/held_out/loss"] == pytest.approx(last["sft/held_out/loss"], rel=1e-5)
    assert cli.main(["export", "runs/one", "exported"]) == 0
    one, exported = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("runs/one/hf", "exported"))
    assert one.keys() == exported.keys() and all(torch.equal(one[name], exported[name]) for name in one)


@pytest.mark.parametrize("command", run_by("test_a_command_of_the_documents_teaches"))
def test_a_command_of_the_documents_teaches(command: str, words: list[str], tmp_path: Path) -> None:
    given = shlex.split(MODEL.sub(str(tmp_path / "model"), command))
    task = [] if "task=math" in given else ["task=math"]
    assert cli.main([*given[1:], *task, "data.train=none.jsonl", "policies.main.dtype=float32"]) == 0
    (run,) = Path("runs").iterdir()
    assert (run / "hf/model.safetensors").is_file() and run.name.startswith("sft-")


@pytest.mark.slow
def test_two_ranks_sharing_matrices_or_data_learn_as_one_does(
    words: list[str], tmp_path: Path, two_ranks: RankPair
) -> None:
    words = [*words, "sft.lr=1e-3"]
    assert cli.main(["sft", *words, "run.name=one"]) == 0
    expected = losses(Path("runs/one"))
    for name, layout in (("tensor", ["policies.main.layout.tensor=2"]), ("data", [])):
        arguments = {"folder": str(tmp_path), "words": [*words, *layout, f"run.name={name}"]}
        assert two_ranks.run(Path(__file__).with_name("sft_worker.py"), arguments) == 0
        said = [Path(f"said_{rank}").read_text() for rank in range(2)]
        assert said[0].count("policies.main.model=") == 1 and said[1] == ""
        for step, row in losses(Path("runs") / name).items():
            found, wanted = ({k: v for k, v in each.items() if k.startswith("sft/")} for each in (row, expected[step]))
            assert found == pytest.approx(wanted, rel=1e-3), (name, step)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.demonstrations=null"], "data.demonstrations is not set"),
        (["policies.main.model=null"], "policies.main.model is not set"),
        (["policies.main.layout.tensor=2"], "layout"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    words: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sft", *words, *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[0] and not Path("runs").exists()


CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "No."},
]


Read = Callable[..., Demonstrations]


@pytest.fixture
def read(tmp_path: Path, renderer: ChatRenderer) -> Read:
    """Return a function that reads lines as demonstrations.

    longest: maximum number of tokens in a sequence. words: settings of the config. renderer: renderer of all policies.
    """

    def read(
        *lines: object, longest: int = 10_000, words: Sequence[str] = (), renderer: ChatRenderer = renderer
    ) -> Demonstrations:
        file, (config, _) = tmp_path / "demos.jsonl", read_config(None, ["task=math", "data.train=p.jsonl", *words])
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        names = list(config.trained_policies)
        return read_demonstrations(file, config, dict.fromkeys(names, renderer), dict.fromkeys(names, longest))

    return read


def test_the_prompt_is_the_agent_s_and_the_rest_is_imitated(read: Read, renderer: ChatRenderer) -> None:
    fields = {"problem": "2 + 2", "solution": "It is 5."}
    demonstrations = read(
        {"agent": "verifier1", "prompt": fields, "completion": "wrong"},
        {"messages": [*CHAT, {"role": "assistant", "content": "4"}]},
        {"prompt": "<|im_start|>2 + 2 =", "completion": " 4"},
    )
    asked = prompt_set("math").fill(Role.VERIFIER, **fields)
    chat = [Message(each["role"], each["content"]) for each in CHAT]  # type: ignore[arg-type]
    expected = [
        ("verifier1", renderer.render(asked)[0], "wrong"),
        ("any", renderer.render(chat)[0], "4"),
        ("any", renderer.encode_trusted("<|im_start|>2 + 2 ="), " 4"),
    ]
    for line, (writer, prompt, completion) in zip(demonstrations.lines, expected, strict=True):
        sequence = line.sequence
        assert (line.policy, demonstrations.writers[sequence.agent]) == ("main", writer)
        assert np.array_equal(sequence.prompt_ids, prompt) and sequence.is_sampled.all()
        assert renderer.decode(sequence.token_ids) == completion and sequence.token_ids[-1] == renderer.eos_id
        assert sequence.advantage == 1 and sequence.token_advantages is None
    row = {"agent": "verifier1", "prompt": fields, "completion": "wrong"}
    (line,) = read(row, words=["agents.verifier1.suffix=Be strict."]).lines
    asked = prompt_set("math").with_words([Role.VERIFIER], None, "Be strict.").fill(Role.VERIFIER, **fields)
    assert np.array_equal(line.sequence.prompt_ids, renderer.render(asked)[0])


@pytest.mark.parametrize("kind", ["qwen3", "r1"])
def test_earlier_thoughts_are_prompted_as_the_template_has_them(
    kind: str, read: Read, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """The prompt has no thoughts of earlier turns; only the last turn is trained, with its thought."""
    thinks = renderer_of(TEMPLATES[kind], tmp_path / kind)
    thought, ask = "<think>\nI add.\n</think>\n\n", CHAT[-1]
    chat = [ask, {"role": "assistant", "content": f"{thought}4"}, {"role": "user", "content": "and 5?"}]
    said = {"role": "assistant", "content": f"{thought}9"}
    (line,) = read({"messages": [*chat, said]}, renderer=thinks).lines
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / kind))
    given = {"add_generation_prompt": True, "return_dict": False}
    assert line.sequence.prompt_ids.tolist() == tokenizer.apply_chat_template(chat, **given)
    # R1's template opens the thought, which must not be opened twice.
    expected = f"{thought}9".removeprefix("<think>\n" if kind == "r1" else "")
    assert thinks.decode(line.sequence.token_ids) == expected
    assert thinks.encode_trusted("</think>")[0] in line.sequence.token_ids
    without = [ask, {"role": "assistant", "content": "4"}]
    if kind == "r1":
        with pytest.raises(ValueError, match="opens a <think> block, but the completion does not close it"):
            read({"messages": without}, renderer=thinks)
    else:
        assert len(read({"messages": without}, renderer=thinks).lines) == 1


def test_templates_get_the_other_fields_of_messages(read: Read, tmp_path: Path) -> None:
    """As gpt-oss's template, which shows `thinking` of earlier turns."""
    template = "{% for turn in messages %}{{ turn.thinking or '' }}{{ turn.content }}{{ eos_token }}{% endfor %}"
    renderer = renderer_of(template, tmp_path / "model")
    chat = [
        CHAT[-1],
        {"role": "assistant", "content": "4", "thinking": "I add."},
        {"role": "user", "content": "and 5?"},
    ]
    (line,) = read({"messages": [*chat, {"role": "assistant", "content": "9"}]}, renderer=renderer).lines
    assert "I add.4" in renderer.decode(line.sequence.prompt_ids)


def test_arguments_of_calls_may_be_objects_or_json_in_a_string(read: Read, renderer: ChatRenderer) -> None:
    """A template that writes arguments with tojson would write such a string in quotes, and the model would learn that."""
    output = {"role": "tool", "content": "4"}
    sequences = []
    for arguments in ({"a": 2, "b": 2}, '{"a": 2, "b": 2}'):
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        calls = {"role": "assistant", "content": None, "tool_calls": [call]}
        (line,) = read({"messages": [CHAT[0], calls, output, calls]}).lines
        sequences.append((renderer.decode(line.sequence.prompt_ids), renderer.decode(line.sequence.token_ids)))
    assert sequences[0] == sequences[1]
    assert all('{"name": "add", "arguments": {"a": 2, "b": 2}}' in text for text in sequences[0])


def test_a_demonstration_trains_the_policy_of_its_agent(read: Read) -> None:
    """If several policies are trained, a demonstration must name its agent."""
    policies = "policies={a: {model: /a}, b: {model: /b}}", "agents={solver: {policy: a}, verifier1: {policy: b}}"
    words = (*policies, "agents={corrector1: {policy: a}, verifier2: {policy: b}, corrector2: {policy: a}}")
    said = [*CHAT, {"role": "assistant", "content": "4"}]
    found = read(*({"agent": name, "messages": said} for name in ("verifier1", "solver")), words=words)
    assert [line.policy for line in found.lines] == ["b", "a"]
    with pytest.raises(ValueError, match=r"demos.jsonl:1: agent is missing, but several policies are trained \(a, b\)"):
        read({"messages": said}, words=words)


def test_an_agents_template_options_reach_its_lines_alone(read: Read, tmp_path: Path) -> None:
    """The options apply to chats and to filled prompts. A line without an agent is rendered without them."""
    renderer = renderer_of(TEMPLATES["qwen3"], tmp_path / "qwen3")
    chat = {"messages": [CHAT[0], {"role": "assistant", "content": "4"}]}
    filled = {"agent": "solver", "prompt": {"problem": "2 + 2?"}, "completion": "4"}
    words = ["agents.solver.template_options={enable_thinking: false}"]
    lines = read({**chat, "agent": "solver"}, filled, chat, renderer=renderer, words=words).lines
    prompts = [renderer.prompt_text(line.sequence.prompt_ids) for line in lines]
    assert [text.endswith("<think>\n\n</think>\n\n") for text in prompts] == [True, True, False]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "not JSON"),
        ({"prompt": "a"}, "completion: expected text, found nothing"),
        ({"completion": "a"}, "expected messages, or prompt and completion"),
        ({"prompt": "", "completion": "a"}, "the prompt is empty"),
        (
            {"agent": "solver7", "prompt": "a", "completion": "b"},
            "agent is 'solver7'; expected one of the team's: solver, verifier1",
        ),
        ({"prompt": {"problem": "a"}, "completion": "b"}, "prompt is an object, but agent is missing"),
        (
            {"agent": "verifier1", "prompt": {"problem": "a"}, "completion": "b"},
            "the prompt of verifier1 requires problem, solution",
        ),
        ({"prompt": CHAT, "completion": "a"}, "prompt is a chat; write it as messages"),
        ({"messages": CHAT}, "messages: expected at least two, the last of them from the assistant"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}, "expected a list of {role, content}"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "4", "reasoning": "a"}]},
            "messages: reasoning is not supported",
        ),
        ({"messages": [*CHAT, {"role": "assistant", "content": "4", "weight": 0}]}, "weight of the last message is 0"),
        ({"messages": [*CHAT, {"role": "assistant", "content": ""}]}, "the completion is empty"),
        ({"prompt": "a", "completion": " "}, "the completion is empty"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]},
            "expected tool_calls of functions with a name",
        ),
        ({"prompt": "a", "completion": "\ud800"}, "completion has a lone surrogate"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(read: Read, line: object, problem: str, tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(ValueError) as raised:
        read(good, line)
    assert str(raised.value).startswith(f"{tmp_path / 'demos.jsonl'}:2: ") and problem in str(raised.value)
    found = read(good, line, words=["data.on_bad_line=skip"])
    assert len(found.lines) == 1 and "1 lines are not demonstrations" in found.notes[0]


def test_a_demonstration_without_room_is_left_out_and_counted(read: Read) -> None:
    lines = [{"prompt": "a", "completion": "b" * 7}, {"prompt": "a", "completion": "b" * 8}]
    found = read(*lines, longest=9)  # the prompt, seven letters and the end
    assert [line.sequence.num_tokens for line in found.lines] == [9]
    assert found.notes[0].startswith("1 demonstrations are longer") and "demos.jsonl:2 with 10 tokens" in found.notes[0]
    with pytest.raises(ValueError, match="has no demonstration to train on: 2 demonstrations are longer"):
        read(*lines, longest=8)
