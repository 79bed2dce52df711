"""Compare losses, gradients and trained weights of every parallel layout with those of one rank.

For each family of models, one rank is compared with transformers. Adapters in every layout are compared with PEFT.

    python benchmarks/parity.py [--only tp2 cp2 ...] [--json FILE]

Four gloo ranks are forked once, after importing Megatron, and run the layouts in turn; ranks that a layout does not use
otherwise are data parallel. The setup is float32, with a tiny Qwen3-MoE (transformers is also compared on a Qwen3, a Llama with
all biases and a Mistral), packed samples of uneven length, clipping relative to rollout log-probs, DMMPT, and the fused head.
One line per layout:

    loss       |difference| of one step                                                            at most 2e-6
    gradient   largest |difference| of any parameter / largest entry of the whole gradient          at most 1.5e-6
    sgd        largest |difference| of a weight after two SGD steps                                at most 1e-6
    adam       the same after two AdamW steps; has no limit, because AdamW follows the sign even of a rounding error

The gradient is computed from the weights before and after one SGD step with a large power of two as learning rate, so it includes
reduction, scatter, update and gather.

Adapters are compared with PEFT on transformers in float64. They adapt attention and experts if the layout has expert parallelism,
otherwise attention and MLP of a Qwen3:

    loss       |difference| of one step                                                            at most 2e-6
    gradient   largest |difference| / largest entry, for the worst of the tensors A and B           at most 5e-6
    logprobs   largest |difference|, nats                                                          at most 2e-5
    norm       relative difference of the gradient's norm                                          at most 1e-5

The last line has the number of lines that FAIL; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import multiprocessing.connection
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal

import numpy as np
import parity_adapters
import parity_model
import torch
from random_models import write_model

WORLD = 4
VOCABULARY = 323
# The bound of gradients is about 12 ulp of the largest entry. At the worst parameter, the first layer's o_proj, one rank and
# transformers differ by 0.6e-6 to 0.8e-6, and two layouts by 0.7e-6 to 1.1e-6, because norms and attention round in a different
# order.
LIMITS = {"loss": 2e-6, "gradient": 1.5e-6, "sgd": 1e-6}
COLUMNS = (*LIMITS, "adam")
REFERENCE_LIMITS = {"loss": 2e-6, "gradient": 1e-5}
PROBE_LR = 4096.0  # a power of two, so that (before - after) / lr is the gradient without another rounding error
SGD_LR = 0.5


@dataclass(frozen=True)
class Case:
    """A line of the table: sizes of the layout, settings of the policy and its optimizer, and trainer.shared_prefixes."""

    name: str
    layout: dict[str, int] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    shared_prefixes: Literal["off", "on"] = "off"


OVERLAP = {"overlap_grad_reduce": True}
CASES = (
    Case("dp4"),
    Case("dp4, whole optimizer", optimizer={"distributed": False}),
    Case("dp4, overlapped", optimizer={**OVERLAP, "overlap_param_gather": True}),
    Case("ep2 dp4", {"expert": 2}),
    Case("ep4 dp4", {"expert": 4}),
    Case("tp2 dp2", {"tensor": 2}),
    Case("tp2 ep2 etp1 dp2", {"tensor": 2, "expert": 2}),
    Case("tp2 ep2 etp2 dp2", {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    Case("tp2 ep4 dp2", {"tensor": 2, "expert": 4}),
    Case("pp2 dp2", {"pipeline": 2}),
    Case("tp2 pp2", {"tensor": 2, "pipeline": 2}),
    Case("ep2 pp2 dp2", {"expert": 2, "pipeline": 2}),
    Case("cp2 dp2", {"context": 2}),
    Case("cp4", {"context": 4}),
    Case("cp2 ep2 dp2", {"context": 2, "expert": 2}),
    Case("cp2 pp2", {"context": 2, "pipeline": 2}),
    Case("tp2 cp2 ep2", {"tensor": 2, "context": 2, "expert": 2}),
    Case("recompute full, tp2 cp2", {"tensor": 2, "context": 2}, {"recompute": "full"}),
    Case("recompute full_but_attention, cp2 ep2", {"context": 2, "expert": 2}, {"recompute": "full_but_attention"}),
    Case("recompute full_but_attention, tp2 pp2", {"tensor": 2, "pipeline": 2}, {"recompute": "full_but_attention"}),
    Case("recompute selective, tp2 ep2", {"tensor": 2, "expert": 2}, {"recompute": "selective"}),
    Case("overlapped, whole optimizer, ep2 dp4", {"expert": 2}, optimizer={**OVERLAP, "distributed": False}),
    Case("shared prefixes, dp4", shared_prefixes="on"),
    Case("shared prefixes, tp2 pp2", {"tensor": 2, "pipeline": 2}, shared_prefixes="on"),
    Case("shared prefixes, ep2 pp2 dp2", {"expert": 2, "pipeline": 2}, shared_prefixes="on"),
    Case(
        "shared prefixes, recompute full, tp2 ep2",
        {"tensor": 2, "expert": 2},
        {"recompute": "full"},
        shared_prefixes="on",
    ),
)


def with_exact_attention() -> None:
    """Disable torch's fused attention on a CPU.

    The error of its exp is up to 20 ulp and depends on the position in a block. It would dominate the differences (up to 1.2e-6
    of a gradient).
    """
    torch.backends.cuda.enable_flash_sdp(False)


def samples() -> list[Any]:
    """Return 24 samples of 8 to 40 tokens; two of three samples begin with the first tokens of the sample before them.

    Every length is a multiple of 8, so that context parallelism pads nothing.
    """
    from marsrl.trainer.data.packing import TrainSequence

    rng = np.random.default_rng(0)
    out: list[TrainSequence] = []
    for i in range(24):
        prompt, total = int(rng.integers(2, 6)), 8 * int(rng.integers(1, 6))
        n = total - prompt
        is_sampled = rng.random(n) > 0.15
        is_sampled[-1] = True
        # Token 256 is padding, which transformers does not train.
        tokens = rng.integers(0, 256, total).astype(np.int32)
        if i % 3:
            before = np.concatenate([out[-1].prompt_ids, out[-1].token_ids])
            shared = min(total, len(before)) * 3 // 4
            tokens[:shared] = before[:shared]
        out.append(
            TrainSequence(
                uid=f"s{i}",
                prompt_ids=tokens[:prompt],
                token_ids=tokens[prompt:],
                is_sampled=is_sampled,
                rollout_logprobs=rng.normal(0, 0.1, n).astype(np.float32),  # noise; loss_of adds log-probs
                advantage=float(rng.normal()),
                agent=i % 2,
                temperature=1.0,
                is_positive=i % 3 == 0,
            )
        )
    return out


# No entropy or probability is so close to these thresholds that float32 rounding matters; they mask four of the eight positive
# samples.
MPT_ENTROPY, MPT_PROBABILITY = 5.702, 0.004


def loss_of(
    model: Any, sequences: list[Any], dtype: torch.dtype
) -> tuple[list[Any], torch.Tensor, int, dict[str, torch.Tensor]]:
    """Run transformers' model on one sequence at a time; return (samples, loss, masked tokens, log-probs).

    The returned samples have rollout log-probs near those of the model.
    """
    num_trained = sum(s.num_sampled for s in sequences)
    total, masked, out, logprobs = torch.zeros((), dtype=dtype), 0, [], {}
    for s in sequences:
        ids = torch.tensor([*s.prompt_ids.tolist(), *s.token_ids.tolist()])
        logp = model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1].to(dtype).log_softmax(-1)
        chosen = logp.gather(1, torch.from_numpy(s.token_ids).long()[:, None])[:, 0]
        rollout = (chosen.detach() + torch.from_numpy(s.rollout_logprobs)).float()
        out.append(dataclasses.replace(s, rollout_logprobs=rollout.numpy()))
        trained = torch.from_numpy(s.is_sampled)
        keep, logprobs[s.uid] = trained.clone(), chosen.detach()[trained]
        entropy = -(logp.exp() * logp).sum(-1)[trained].mean()
        if s.is_positive and float(entropy.detach()) < MPT_ENTROPY:
            keep &= chosen.detach().exp() < MPT_PROBABILITY
        masked += int((trained & ~keep).sum())
        ratio = (chosen - rollout).exp()
        surrogate = torch.minimum(ratio * s.advantage, ratio.clamp(0.8, 1.2) * s.advantage)
        total = total - (surrogate * keep).sum()
    return out, total / num_trained, masked, logprobs


def reference(model_dir: Path, sequences: list[Any]) -> tuple[list[Any], float, dict[str, torch.Tensor], int]:
    """Run transformers. Return (samples with rollout log-probs near the model's, loss, gradients, masked tokens)."""
    import transformers
    from safetensors.torch import load_file

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    out, loss, masked, _ = loss_of(model, sequences, torch.float32)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():  # transformers stacks the experts, but saves a tensor for each.
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(model_dir.parent / "gradient")
    return out, float(loss.detach()), load_file(model_dir.parent / "gradient" / "model.safetensors"), masked


def open_learner(model_dir: str | Path, case: Case, optimizer: dict[str, Any], **policy: Any) -> Any:
    """Create a learner of this layout on the ranks of this world."""
    from marsrl.kernels import PolicyObjective
    from marsrl.trainer.config import MptConfig, PolicyConfig
    from marsrl.trainer.learner.learner import Learner

    optimizer = {**optimizer, "grad_clip": 1e9, **case.optimizer}
    settings = {"dtype": "float32", "layout": case.layout, "optimizer": optimizer, **case.policy, **policy}
    return Learner(
        PolicyConfig.model_validate(settings),
        model_dir,
        objectives=[PolicyObjective()] * 2,
        mpt=MptConfig(scope="sample", entropy=MPT_ENTROPY, probability=MPT_PROBABILITY),
        total_steps=8,
        seed=0,
        old_policy="sais",
    )


def one_update(learner: Any, sequences: list[Any], case: Case) -> list[Any]:
    from marsrl.trainer.data.scatter import Update, micro_batches

    num_tokens = float(sum(s.num_sampled for s in sequences))
    return [Update(tuple(micro_batches(sequences, learner.shard(160, case.shared_prefixes))), num_tokens)]


def train(model_dir: Path, case: Case, sequences: list[Any]) -> dict[str, Any]:
    """Train on the ranks of this world. Rank 0 returns losses, gradients, and weights after two steps of each optimizer."""
    from marsrl.trainer.learner.megatron import parallel

    learner = open_learner(model_dir, case, {"lr": 1e-3})
    updates = one_update(learner, sequences, case)
    before = dict(learner.held().export())
    results: dict[str, Any] = {}
    for _ in range(2):
        stats = learner.train_step(updates)
    results["adam"] = dict(learner.held().export())
    with_sgd(learner)
    for name, lrs in (("gradient", (PROBE_LR,)), ("sgd", (SGD_LR, SGD_LR))):
        learner.read_weights(model_dir)
        for lr in lrs:
            stats = learner.train_step(updates, lr=lr)
            results.setdefault("loss", stats.loss)
            results.setdefault("gated", stats.gated_samples)
            results.setdefault("masked", sum(stats.agent_sums["masked_tokens"]))
        results[name] = dict(learner.held().export())
    results["gradient"] = gradient(before, results["gradient"])
    parallel.stop(keep_world=True)
    return results


def train_adapter(model_dir: Path, adapter: Path, kind: str, case: Case, sequences: list[Any]) -> dict[str, Any]:
    """Train one step on the ranks of this world. Rank 0 returns loss, log-probs, gradients of A and B, and the gradient norm."""
    import torch.distributed as dist

    from marsrl.trainer.learner.megatron import parallel

    learner = open_learner(model_dir, case, {}, adapter={**parity_adapters.ADAPTERS[kind], "start": str(adapter)})
    with_sgd(learner)
    before = dict(learner.held().export())
    stats = learner.train_step(one_update(learner, sequences, case), lr=PROBE_LR, keep=[s.uid for s in sequences])
    after = dict(learner.held().export())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {tokens.uid: torch.from_numpy(tokens.logprobs) for tokens in stats.tokens})
    parallel.stop(keep_world=True)
    return {
        "loss": stats.loss,
        "norm": stats.grad_norm,
        "masked": sum(stats.agent_sums["masked_tokens"]),
        "logprobs": {uid: values for part in parts for uid, values in part.items()},
        "gradient": gradient(before, after),
    }


def gradient(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradient, in float64, from the weights before and after one SGD step at PROBE_LR."""
    return {name: (before[name].double() - tensor.double()) / PROBE_LR for name, tensor in after.items()}


def with_sgd(learner: Any) -> None:
    """Replace AdamW by plain SGD over the same shards, which are views of Megatron's buffer; SGD's constructor rejects views."""
    for part in learner.optimizer.parts():
        sgd = torch.optim.SGD([torch.zeros(1)], lr=0.0)
        sgd.param_groups = [{**sgd.defaults, **group, "fused": False} for group in part.optimizer.param_groups]
        part.optimizer = sgd


def line_of(one: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the differences of a layout from one rank."""
    off = differences(results, one)
    same = (results["gated"], results["masked"]) == (one["gated"], one["masked"])
    return {**off, "is_ok": same and all(off[name] <= limit for name, limit in LIMITS.items())}


def differences(results: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the differences of loss, gradient, and weights after SGD and AdamW steps."""
    out = {"loss": abs(results["loss"] - expected["loss"])}
    for name in ("gradient", "sgd", "adam"):
        if name in expected:
            assert results[name].keys() == expected[name].keys(), "a parameter is missing"
            off = {n: float((results[name][n] - expected[name][n]).abs().max()) for n in expected[name]}
            largest = max(float(g.abs().max()) for g in expected[name].values())
            out[name] = max(off.values()) / (largest if name == "gradient" else 1.0)
    return out


def against_transformers(title: str, model: Path) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    """Compare one rank with transformers, and print the line.

    Returns (results of the rank, samples with rollout log-probs near the model's, the line).
    """
    begin = time.perf_counter()
    sequences, loss, gradient, masked = reference(model, samples())
    one_rank = train(model, Case("one rank"), sequences)
    off = differences(one_rank, {"loss": loss, "gradient": gradient})
    is_ok = all(off[n] <= limit for n, limit in REFERENCE_LIMITS.items()) and one_rank["masked"] == masked > 0
    line = {"layout": title, "seconds": time.perf_counter() - begin, **off, "is_ok": is_ok}
    print(row(line), flush=True)
    return one_rank, sequences, line


def against_peft(folder: Path) -> list[dict[str, Any]]:
    """Compare an adapter of each family on one rank with PEFT. Print and return the lines; write files for `worker`."""
    titles = "".join(f"{title:>10s}" for title in parity_adapters.LIMITS)
    print(
        f"{'adapters':38s}{titles}\n{'at most':38s}"
        + "".join(f"{limit:10.1e}" for limit in parity_adapters.LIMITS.values())
    )
    lines, expected = [], {}
    for kind in parity_adapters.ADAPTERS:
        begin = time.perf_counter()
        model = write_model(kind, 2, folder / kind / "model", vocab_size=VOCABULARY, num_key_value_heads=2)
        settings = parity_adapters.ADAPTERS[kind]
        adapter = parity_adapters.random_adapter(model, settings, folder / kind / "adapter")
        expected[kind] = parity_adapters.peft_reference(model, adapter, samples(), loss_of)
        results = train_adapter(model, adapter, kind, Case("one rank"), expected[kind]["samples"])
        lines.append(
            {"layout": f"adapters, {kind}, one rank", "seconds": time.perf_counter() - begin}
            | parity_adapters.line_of(expected[kind], results)
        )
        print(row(lines[-1], parity_adapters.LIMITS), flush=True)
    torch.save(expected, folder.parent / "adapters.pt")
    return lines


def import_learner() -> None:
    """Import all that ranks need, before the fork."""
    from marsrl.trainer.learner.megatron import shim

    shim.install()  # must precede any import of megatron
    for name in ("model", "optimizer", "passes"):
        importlib.import_module(f"marsrl.trainer.learner.megatron.{name}")
    importlib.import_module("marsrl.trainer.learner.learner")


def worker(rank: int, folder: Path, names: list[str], is_given: Event) -> None:
    """Run one of the four ranks. The folder has the model, the samples and the results of a single rank.

    Rank 0 prints a line for each layout and writes the report.
    """
    import torch.distributed as dist

    from marsrl.rollout.state import decode
    from marsrl.trainer.data.scatter import MiniBatch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    noise = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # collects the warnings of four ranks
    os.dup2(noise, 2)
    is_given.wait()
    # A file instead of a port, which another program could take before rank 0 listens.
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    sequences = list(decode(MiniBatch, (folder / "samples").read_bytes()).sequences)
    one_rank = torch.load(folder / "one.pt", weights_only=True)
    adapters = torch.load(folder / "adapters.pt", weights_only=False)  # safe to unpickle: written by this program
    chosen = [case for case in CASES if not names or case.name in names]
    runs: list[tuple[str, Callable[[], Any], Callable[[Any], dict[str, Any]], Iterable[str]]] = []
    for case in chosen:
        runs.append((case.name, partial(train, folder / "model", case, sequences), partial(line_of, one_rank), COLUMNS))
    for case in chosen:
        kind = "moe" if "expert" in case.layout else "dense"
        if kind == "moe" and case.layout.get("expert_tensor", 1) > 1:
            continue  # adapters of experts do not support tensor parallelism
        model, expected = folder / "adapters" / kind, adapters[kind]
        run = partial(train_adapter, model / "model", model / "adapter", kind, case, expected["samples"])
        line_of_run = partial(parity_adapters.line_of, expected)
        runs.append((f"adapters, {kind}, {case.name}", run, line_of_run, parity_adapters.LIMITS))
    report: list[dict[str, Any]] = []
    for title, train_it, line_of_it, columns in runs:
        begin = time.perf_counter()
        results = train_it()
        if rank == 0:
            report.append({"layout": title, "seconds": time.perf_counter() - begin, **line_of_it(results)})
            print(row(report[-1], columns), flush=True)
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def wait(ranks: list[Any]) -> list[int]:
    """Return the exit codes of the ranks. If a rank fails, kill the others, which would wait for it."""
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                for process in running.values():
                    process.terminate()
    return [process.exitcode for process in ranks]


def row(line: dict[str, Any], columns: Iterable[str] = COLUMNS) -> str:
    """Return one layout's line, ending in ok or FAIL."""
    verdict = "ok" if line["is_ok"] else "FAIL"
    cells = "".join(f"{line[name]:10.1e}" if name in line else f"{'':10s}" for name in columns)
    return f"{line['layout']:38s}{cells}{line['seconds']:7.1f} s  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="LAYOUT", help="run only these layouts of the table")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="instead of layouts, compare this directory's model in trainer and engines",
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="dtypes for --model")
    parser.add_argument("--engines", nargs="*", default=["local", "vllm"], help="engines for --model")
    parser.add_argument("--prompts", type=int, default=50, help="number of prompts for --model, at most 50")
    parser.add_argument("--json", metavar="FILE", help="write the lines to this file")
    arguments = parser.parse_args()
    names = [case.name for case in CASES]
    if unknown := [name for name in arguments.only if name not in names]:
        parser.error(f"no layout {', '.join(unknown)}; there are: {'; '.join(names)}")
    begin = time.perf_counter()
    torch.set_num_threads(1)
    with_exact_attention()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if arguments.model is not None:
        import_learner()
        lines = []
        print(f"{'':38s}" + "".join(f"{title:>10s}" for title in parity_model.COLUMNS))
        for line in parity_model.model_lines(arguments.model, arguments.dtypes, arguments.engines, arguments.prompts):
            lines.append(line)
            print(row(line, parity_model.COLUMNS), flush=True)
        return ended(lines, 0, begin, arguments.json)
    from marsrl.rollout.state import encode
    from marsrl.trainer.data.scatter import MiniBatch
    from marsrl.trainer.models.init_model import SMALL, init_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        import_learner()
        # Fork before this process computes anything, because a forked child lacks the threads of its parent.
        fork = multiprocessing.get_context("fork")
        is_given = fork.Event()
        ranks = [
            fork.Process(target=worker, args=(i, folder, arguments.only, is_given), daemon=True) for i in range(WORLD)
        ]
        for process in ranks:
            process.start()
        model = init_model(replace(SMALL, vocab_size=VOCABULARY), "bytes", folder / "model")
        titles = "".join(f"{title:>10s}" for title in COLUMNS)
        print(f"{'':38s}{titles}\n{'at most':38s}" + "".join(f"{limit:10.1e}" for limit in LIMITS.values()))
        one_rank, sequences, first = against_transformers("one rank against transformers", model)
        lines = [first]
        for kind in ("dense", "llama", "mistral"):
            other_model = write_model(kind, 2, folder / kind / "model", vocab_size=VOCABULARY)
            lines.append(against_transformers(f"as above, a {kind} model", other_model)[2])
        lines += against_peft(folder / "adapters")
        torch.save(one_rank, folder / "one.pt")
        (folder / "samples").write_bytes(encode(MiniBatch(tuple(sequences), sum(s.num_sampled for s in sequences))))
        is_given.set()
        codes = wait(ranks)
        if not any(codes):
            lines += json.loads((folder / "report.json").read_text("utf-8"))
        else:
            print((folder / "stderr").read_text("utf-8", errors="replace")[-6000:])
    if any(codes):
        print(f"the ranks ended with exit codes {codes}")
    return ended(lines, int(any(codes)), begin, arguments.json)


def ended(lines: list[dict[str, Any]], failed: int, begin: float, file: str | None) -> int:
    """Print the number of lines that FAIL, plus `failed`, write all lines to the file, and return the exit code."""
    failed += sum(not line["is_ok"] for line in lines)
    print(f"{len(lines)} lines, {failed} FAIL, {time.perf_counter() - begin:.0f} s")
    if file:
        Path(file).write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
