"""Benchmarks run, and refuse to time a wrong kernel."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import BENCHMARKS, call

sys.path.insert(0, str(BENCHMARKS))
import run
from case import Bench, Case, Judgement, Missing, Shape, Variant

from marsrl.trainer.models.init_model import init_model


@pytest.mark.slow
@pytest.mark.smoke
def test_no_number_is_printed_for_a_wrong_kernel() -> None:
    right = torch.ones(3)

    def build(shape: Shape) -> Bench:
        ours = Variant("ours", lambda: {"out": right + 1e-3})
        return Bench([ours], lambda: Judgement({"out": right.double()}, {"out": right}), 1, 1, 0)

    case = Case("made up", lambda device, quick: [], build)
    table = run.measure(case, Shape("cpu"), 1, 1.0, False, None, [])
    assert table.rows == () and table.failure is not None and "error 1.000e-03" in table.failure
    assert "WRONG, so nothing is measured" in run.text(table)


@pytest.mark.slow
def test_a_quick_run_compares_judges_and_measures_memory(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["linear_policy_loss", "--device", "cpu", "--quick", "--rounds", "1", "--json", str(file)]
    # Skip variants that take half a minute each, in this process and in the one that measures memory.
    compiled = ("torch F.linear_cross_entropy", "torch.compile")
    skipped = [name + rows for name in compiled for rows in ("", ", unmasked rows only")]
    few = ["--shape", "mask share 0.5", *(word for name in skipped for word in ("--skip", name))]
    done = call(str(BENCHMARKS / "run.py"), *words, *few)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(file.read_text())["tables"]
    rows = {row["name"]: row for row in table["rows"]}
    scaled = "Liger fused linear scaled CE, unmasked rows only"
    assert {"ours", "torch eager", "Liger fused linear GRPO", scaled} <= rows.keys()
    # Both are judged by the errors of the same log-probs, entropy and gradients.
    assert rows[scaled]["errors"].keys() == rows["torch eager"]["errors"].keys()
    assert rows["ours"]["is_right"] and rows["ours"]["extra_bytes"] is not None
    assert "QuACK chunked CE, mean" in table["skipped"]


def test_liger_s_hopper_head_is_skipped_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import peers

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setitem(sys.modules, "cutlass", None)
    (scaled,) = (peer for peer in peers.fused_peers("cuda") if peer.name == "Liger fused linear scaled CE")
    assert isinstance(scaled, Missing) and "cutlass" in scaled.reason


@pytest.mark.slow
def test_a_step_on_two_ranks_equals_megatron_and_the_reference(tmp_path: Path) -> None:
    """The benchmark compares gradient norms before it prints anything."""
    words = ["--model", "slice_tiny", "--no-dmmpt", "--repeats", "1", "--layout", "tensor=2", "expert=2"]
    words += ["--skip", "reference, sorted and dropped"]
    done = call(str(BENCHMARKS / "train_step.py"), *words, "--json", str(tmp_path / "train_step.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "train_step.json").read_text())["results"]["DMMPT off"]["rows"]
    ranks = {"ours": 2, "plain Megatron, packed and dropped": 2, "reference": 1}
    assert {name: row["ranks"] for name, row in rows.items()} == ranks
    assert all(0 < row["mfu"] < 1 for row in rows.values())
    assert done.stdout.splitlines()[-1].startswith("ratio: ")


@pytest.mark.slow
def test_a_step_is_split_into_parts_by_recompute_mode(tmp_path: Path) -> None:
    words = ["--model", "slice_tiny", "--parts", "none", "full_but_attention", "--micro-batch", "320", "--repeats", "1"]
    done = call(str(BENCHMARKS / "train_step.py"), *words, "--json", str(tmp_path / "parts.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "parts.json").read_text())
    rows = found["results"]["parts"]
    assert list(rows) == ["none", "full_but_attention"] and found["micro_batch"] == 320
    for mode, row in rows.items():
        assert row["parts"].keys() == {"forward", "backward", "optimizer", "rest"} and min(row["parts"].values()) > 0
        assert sum(row["parts"].values()) >= row["seconds"][0]
        assert row["mfu"].keys() == {"step", "forward", "backward"} and 0 < row["head_flops"] < row["flops"]
        assert any(line.split()[0] == mode and "%" in line for line in done.stdout.splitlines())


def test_nested_parts_exclude_each_other_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import part_clock

    now = [0.0]

    class Event:
        """CUDA event of a GPU whose clock advances only where the test sets it."""

        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end.at - self.at)

    class Step:
        def forward(self) -> None:
            now[0] += 1

        def backward(self) -> None:
            now[0] += 2
            self.forward()
            now[0] += 4

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(part_clock, "import_module", lambda name: SimpleNamespace(Step=Step))
    monkeypatch.setattr(part_clock, "PLACES", {name: [("", "Step", name)] for name in ("forward", "backward")})
    clock = part_clock.PartClock(is_cuda=True)
    for _ in range(2):
        clock.start()
        now[0] += 8
        Step().backward()
        assert clock.seconds() == {"rest": 8, "forward": 1, "backward": 6}


@pytest.mark.slow
def test_a_step_of_adapters_equals_that_of_peft(tmp_path: Path) -> None:
    """The benchmark compares the gradient norms of four adapters together before it prints anything."""
    words = [
        "--adapter",
        "attention",
        "experts",
        "--model",
        "slice_tiny",
        "--repeats",
        "1",
        "--skip",
        "ours, all weights",
    ]
    done = call(str(BENCHMARKS / "train_step.py"), *words, "--json", str(tmp_path / "train_step.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "train_step.json").read_text())["results"]
    rows = results["adapters of attention and experts"]["rows"]
    assert list(rows) == ["ours", "reference", "reference, sorted and dropped"]
    assert rows["ours"]["flops"] == rows["reference, sorted and dropped"]["flops"] < rows["reference"]["flops"]


@pytest.mark.slow
def test_a_step_with_shared_prefixes_equals_the_flat_batchs(tmp_path: Path) -> None:
    """The benchmark compares gradient norms before it prints anything."""
    words = [
        "--model",
        "tiny",
        "--patterns",
        "thoughts",
        "brief",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "out.json"),
    ]
    done = call(str(BENCHMARKS / "shared_prefixes.py"), *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    tokens = {name: (row["samples"], row["fed"], row["once"]) for name, row in rows.items()}
    assert tokens == {"thoughts": (8, 9936, 2544), "brief": (64, 8960, 3360)}
    assert all(row["ratio"] > 0 and len(row["turns"]) == 1 for row in rows.values())


@pytest.mark.slow
def test_a_real_models_directory_is_trained_in_turns(tmp_path: Path) -> None:
    """Time our learner and the reference alternately on a dense model. Gradient norms are compared before anything is printed."""
    # Imported late, because it takes a second.
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=300, intermediate_size=48, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--no-dmmpt", "--repeats", "2", "--json", str(tmp_path / "out.json")]
    done = call(str(BENCHMARKS / "train_step.py"), *words)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rows = found["results"]["DMMPT off"]["rows"]
    assert len(rows) == 4 and all(len(row["seconds"]) == 2 for row in rows.values())
    assert found["dtype"] == "float32" and found["versions"]["megatron-core"] and found["load"] >= 0
    assert "ours over reference: " in done.stdout and "(turns " in done.stdout


@pytest.mark.slow
def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    init_model("tiny", "bytes", tmp_path / "model", seed=0, dtype="float32")
    problems = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(16)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    words = ["task=math", f"policies.main.model={tmp_path / 'model'}", f"data.train={tmp_path / 'problems.jsonl'}"]
    words += [f"run.dir={tmp_path / 'runs'}", "run.steps=2", "run.checkpoint_every=0", "run.evaluate=false"]
    words += ["rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=2", "rollout.group_size=2"]
    words += ["orchestration=solver", "rollout.max_response_tokens=16", "loss.entropy_coef=0.01"]
    done = call(str(BENCHMARKS / "step_parts.py"), "--json", str(tmp_path / "out.json"), *words)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    parts = found["parts"]
    known = {"prefill", "decode", "forward", "backward", "optimizer", "publish: checksums", "publish: probe, engine"}
    assert found["steps"] == 2 and known < parts.keys()
    whole = parts.pop("all")
    for key in ("seconds", "cpu_seconds"):
        assert all(part[key] >= 0 for name, part in parts.items() if name != "the rest")
        assert sum(part[key] for part in parts.values()) == pytest.approx(whole[key])
    assert parts["backward"]["calls"] == parts["forward"]["calls"] == 1  # the probe's passes count as part of publish


@pytest.mark.slow
def test_the_real_teams_recipe_reports_accuracy_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    words = ["--tiny", "--folder", str(tmp_path / "team"), "--engine", "vllm", "--json", str(tmp_path / "out.json")]
    done = call(str(BENCHMARKS / "real_team.py"), *words)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["engine"] == "vllm" and len(found["steps"]) == 1
    assert all(0 <= found["accuracy"][when]["system"]["mean"] <= 1 for when in ("before", "after"))
    assert found["seconds"].keys() == {"problems", "sft", "train"}


@pytest.mark.slow
def test_the_probe_lets_honest_syncs_pass() -> None:
    words = ("--honest", "1", "--kinds", "dense", "--layers", "2", "--dtypes", "float32")
    done = call(str(BENCHMARKS / "probe.py"), *words)
    assert done.stdout.endswith("false alarms: 0 of 2 honest syncs of random models\n"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("curate.py", "--rows 2000"),
        ("view.py", "--samples 2000 --folder {}"),
        ("weight_sync.py", "--mib 8 --repeats 1 --bucket-mib 1 --changed 0.2"),
        ("gateway.py", "--sessions 8 --rounds 1"),
        ("adapters.py", "--adapters 1 2 --repeats 1 --model tiny --sequences 4 --rank 2"),
    ],
)
def test_a_benchmark_measures(script: str, words: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = call(str(BENCHMARKS / script), *words.format(tmp_path).split(), "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    if script == "curate.py":  # the script must find the near-duplicates that it planted
        assert results["recall"] > 0.97 and results["precision"] > 0.97 and results["dropped_unplanted"] == 0
    elif script == "view.py":
        assert results["samples"] == 2000 and all(seconds > 0 for seconds in results["filters_s"].values())
    elif script == "gateway.py":  # all calls are answered, otherwise the script fails
        (row,) = results["calls"]
        assert row["sessions"] == 8 and len(row["rounds"]) == 1 and 0 < row["session_bytes"] < 2**21
        assert all(number > 0 for each in row["rounds"] for number in each.values())
    elif script == "adapters.py":
        assert results["seconds"].keys() == {"1", "2"}
        assert all(parts["step"][0] > 0 and parts["publish"][0] > 0 for parts in results["seconds"].values())
    else:
        assert [row["backend"] for row in results["rows"]] == ["shm", "ipc", "nccl", "delta"]
        assert len({row["num_bytes"] for row in results["rows"]}) == 1 and "not measured: 61 GB" in done.stdout


@pytest.mark.slow
def test_a_sleeping_engine_receives_weights_each_round(tmp_path: Path) -> None:
    file = tmp_path / "asleep.json"
    done = call(str(BENCHMARKS / "asleep.py"), "--tiny", "--folder", str(tmp_path / "asleep"), "--json", str(file))
    assert done.returncode == 0, done.stderr
    rounds = json.loads(file.read_text())["rounds"]
    assert len(rounds) == 3 and all(each["sent_bytes"] > 0 and each["sleep_s"] > 0 for each in rounds)
