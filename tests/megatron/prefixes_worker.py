"""A job of one or two gloo ranks: a float64 update with shared prefixes, as trees and as flat batches.

Megatron's modules, this project's head, attention and adapters run as in training; only the optimizer is left out. See
test_shared_prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import megatron_models as tiny
import numpy as np
import torch
import torch.distributed as dist

from marsrl.kernels import PolicyObjective, linear_logprob
from marsrl.kernels.linear_logprob import LogProb
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import BatchShard, MiniBatch, scatter
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.layout import resolve
from marsrl.trainer.learner.step_stats import StepStats, update_stats
from marsrl.trainer.report.step_metrics import step_metrics

AGENTS = 2
MPT = MptConfig(scope="sample", entropy=3.98, probability=0.02)


def family(seed: int = 0) -> list[TrainSequence]:
    """Return samples that share prefixes, in random order.

    They are answers to one prompt, branches of a conversation, one that ends where others continue, and a copy.
    """
    rng = np.random.default_rng(seed)

    def drawn(number: int) -> list[int]:
        return rng.integers(0, tiny.VOCAB, number).tolist()

    system = drawn(3)
    chats: list[tuple[int, list[int]]] = []  # Number of tokens of the prompt, and all tokens.
    prompt = system + drawn(9)
    chats += [(len(prompt), prompt + drawn(int(rng.integers(4, 12)))) for _ in range(4)]
    trunk = system + drawn(14)
    chats += [(6, trunk + drawn(int(rng.integers(3, 9)))) for _ in range(3)]
    chats += [(6, trunk[:10])]  # This sample ends where the others continue.
    chats += [(8, trunk[:12] + drawn(5)), (4, trunk[:5] + drawn(7)), (4, drawn(11))]
    chats += [chats[0]]  # The same tokens, drawn twice.
    samples = []
    for number, (of_prompt, tokens) in enumerate(chats):
        is_sampled = rng.random(len(tokens) - of_prompt) > 0.2
        is_sampled[-1] = True
        samples.append(
            TrainSequence(
                uid=f"s{number}",
                prompt_ids=np.array(tokens[:of_prompt], np.int32),
                token_ids=np.array(tokens[of_prompt:], np.int32),
                is_sampled=is_sampled,
                rollout_logprobs=(-4 - 0.3 * rng.random(len(is_sampled))).astype(np.float32),
                advantage=float(rng.normal()),
                agent=number % AGENTS,
                temperature=1.0 if number % 3 else 0.75,
                is_positive=number % 3 == 0,
                weight=0.5 + rng.random(),
                token_advantages=rng.normal(size=len(is_sampled)).astype(np.float32) if number % 4 == 0 else None,
            )
        )
    order = rng.permutation(len(samples))
    return [samples[i] for i in order]


def recorded(samples: list[TrainSequence]) -> list[TrainSequence]:
    """Return the samples with kept tokens and recorded experts.

    The experts depend only on a token and its position, except in one sample.
    """

    def experts(s: TrainSequence) -> ExpertArray:
        ids = np.concatenate([s.prompt_ids, s.token_ids])[:-1]
        first = (ids + np.arange(len(ids)) + (s.uid == "s5")) % 4
        chosen = np.stack([first, (first + 1 + ids % 3) % 4], -1).astype(np.uint8)
        return np.stack([chosen, chosen[:, ::-1]], 1)

    def kept(s: TrainSequence) -> KeptTokens:
        return KeptTokens.of(
            [np.unique(np.array([token, 5, 40], np.int32))[: 3 * (token % 2)] for token in s.token_ids]
        )

    return [replace(s, routed_experts=experts(s), kept_tokens=kept(s)) for s in samples]


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside the block, make models, gradient buffers and messages between ranks float64."""
    from marsrl.trainer.learner.megatron import shim

    shim.install()  # Must precede any import of megatron.
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    from marsrl.trainer.learner.megatron import adapter, experts, head, model

    transformer_config = model.transformer_config

    def config(*args: Any) -> Any:
        made = transformer_config(*args)
        made.params_dtype = made.pipeline_dtype = torch.float64
        made.gradient_accumulation_fusion = False
        made.moe_router_dtype = "fp64"
        return made

    def in_float32(*args: Any, **options: Any) -> LogProb:
        """Return statistics for the gate and the old policy, which are kept in float32."""
        found = unsplit(linear_logprob)(*args, **options)
        return LogProb(found.logprobs.float(), found.entropy.float())

    def unsplit(op: Any) -> Any:
        """Give every rank the whole vocabulary: only the reference computes in float64, and it does not split the head."""

        def run(hidden: Any, weight: Any, *args: Any, tp_group: Any, main_grad: Any = None, **options: Any) -> Any:
            if (size := tp_group.size()) > 1:
                weight = gather_from_sequence_parallel_region(weight, tensor_parallel_output_grad=False, group=tp_group)
                hidden = hidden / size + hidden.detach() * (1 - 1 / size)  # The caller adds up the ranks' gradients.
            return op(hidden, weight, *args, **options)

        return run

    def without_main_grad(op: Any) -> Any:
        return lambda *args, main_grad=None, **options: op(*args, **options)

    def added(op: Any) -> Any:
        """Add the gradient of a leaf to main_grad in its own dtype."""

        def run(x: Any, weight: Any, counts: Any, main_grad: Any) -> Any:
            if main_grad is not None:
                weight.register_hook(main_grad.add_)
            return op(x, weight, counts)

        return run

    def plain(ddp_config: Any, **given: Any) -> Any:
        return ddp_config(**{**given, "grad_reduce_in_fp32": False, "use_distributed_optimizer": False})

    with ExitStack() as stack:

        def patch(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        patch(model, "transformer_config", config)
        patch(head, "linear_policy_loss", unsplit(head.linear_policy_loss))
        softmax = torch.softmax  # Megatron's router asks for float32.
        patch(
            torch,
            "softmax",
            lambda x, dim, dtype=None: softmax(x, dim, dtype=torch.promote_types(x.dtype, dtype or x.dtype)),
        )
        patch(head, "linear_logprob", in_float32)
        patch(experts, "grouped_linear", without_main_grad(experts.grouped_linear))
        patch(adapter, "grouped_linear", added(adapter.grouped_linear))
        patch(model, "DistributedDataParallelConfig", partial(plain, model.DistributedDataParallelConfig))
        yield


def passes_of(folder: str, case: dict[str, Any]) -> tuple[Any, Callable[[], None], Callable[[], dict[str, Any]]]:
    """Return the Passes of the case's policy, a function that zeroes its gradients, and one that returns them."""
    from marsrl.trainer.learner.megatron.adapter import Adapter, FrozenBase
    from marsrl.trainer.learner.megatron.convert import Converter
    from marsrl.trainer.learner.megatron.model import build_model
    from marsrl.trainer.learner.megatron.optimizer import BankOptimizer
    from marsrl.trainer.learner.megatron.passes import Model, Passes

    adapters = case.get("adapters", [])
    policy = PolicyConfig.model_validate(
        {"dtype": "float32", "layout": case.get("layout", {}), "recompute": case.get("recompute", "none")}
    )
    shape, layout = read_shape(folder), resolve(policy.layout)
    parallel.start(layout, 0)
    if adapters:
        configs = [PolicyConfig.model_validate({"adapter": each}).adapter for each in adapters]
        base = FrozenBase(folder, layout, policy)
        bank, model = base.trained, base.model
        for config in configs:
            assert config is not None
            bank.add(Adapter(base, config, 0))
        bank.join()
        bank.buffers |= {kind: replace(rows, gradients=rows.gradients.double()) for kind, rows in bank.buffers.items()}
        optimizer = BankOptimizer(bank, [policy.optimizer.model_copy(update={"distributed": False})] * len(adapters))
        model.config.finalize_model_grads_func = lambda *chunks, **options: optimizer.finalize()
        trained = Model(base.wrapped, bank, tuple(range(len(adapters))), (0, 1) if len(adapters) == AGENTS else ())
        zero, modules = optimizer.zero_grad, bank.adapters

        def gradients() -> dict[str, Any]:
            named = {}
            for slot, module in enumerate(modules):
                rows = {kind: rows.gradients[row] for kind, rows, row in bank.rows_of(slot)}
                pairs = zip(module.matrices(), bank.views(module, rows), strict=True)
                named |= {f"{slot}.{name}.{letter}": view.clone() for (name, letter, _), view in pairs}
            return named

    else:
        model, ddp = build_model(shape, layout, policy)
        Converter(model, shape).load(folder)
        trained, zero, modules = Model(ddp), ddp.zero_grad_buffer, [model]

        def gradients() -> dict[str, Any]:
            return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}

    assert all(parameter.dtype == torch.float64 for module in modules for parameter in module.parameters())
    passes = Passes(
        model,
        trained,
        None,
        layout,
        0.0,
        [PolicyObjective(**case.get("objective", {}), mpt_probability=MPT.probability)] * AGENTS,
        MPT,
        case.get("old_policy", "sais"),
        case.get("router_replay", "none"),
    )
    return passes, zero, gradients


def update_of(passes: Any, samples: list[TrainSequence], case: dict[str, Any], prefixes: Any, max_tokens: int) -> Any:
    from megatron.core import parallel_state

    shard = BatchShard(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        max_tokens=max_tokens,
        align=passes.layout.tensor,
        routes=parallel.routes(),
        adapters=passes.trained.adapter_of,
        shared_prefixes=prefixes,
    )
    given = (MiniBatch(tuple(samples), tiny.num_trained(samples)),) if dist.get_rank() == 0 else None
    (update,) = scatter(given, shard)
    return update


def run(folder: str, case: dict[str, Any], prefixes: str, max_tokens: int) -> tuple[dict[str, Any], StepStats, int]:
    """Return (this rank's gradients by name, statistics, computed tokens of this rank) of one update."""
    samples = family()
    samples = recorded(samples) if case.get("router_replay") == "rollout" else samples
    passes, zero, gradients_of = passes_of(folder, case)
    work = passes.prepare(update_of(passes, samples, case, prefixes, max_tokens), is_first=True)
    zero()
    results, replay, load = passes.forward_backward(work)
    gradients = gradients_of()
    (stats,) = update_stats(
        work, results, grad_norms=[0.0], rates=[0.0], replay=replay, load=load, agent_grad_norms=[()],
        keep=frozenset(s.uid for s in samples), agents=[None],
    )  # fmt: skip
    computed = sum(micro_batch.cut.batch.num_computed for micro_batch in work.micro_batches)
    parallel.stop(keep_world=True)
    return gradients, stats, computed


def compare(folder: str, case: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences between prefix trees and the flat batch, over all ranks, and rank 0's token counts."""
    with in_float64():
        flat, stats, num_flat = run(folder, case, "off", 64)
        tree, stats_of_tree, num_tree = run(folder, case, "on", case.get("max_tokens", 40))
    assert flat.keys() == tree.keys()
    largest = max(float(gradient.abs().max()) for gradient in flat.values())
    off = {"gradient": max(float((flat[name] - tree[name]).abs().max()) for name in flat) / largest}
    # In RL, weighted_nll depends on the samples of a micro-batch, and nothing reads it.
    names = [name for name in stats.agent_sums if name != "weighted_nll"]
    sums, of_tree = (
        torch.tensor([each.agent_sums[n] for n in names], dtype=torch.float64) for each in (stats, stats_of_tree)
    )
    off["sums"] = float(((sums - of_tree).abs() / sums.abs().clamp(min=1)).max())
    numbers = ("loss", "prob_diff_mean", "prob_diff_max", "k3", "gated_samples")
    off["stats"] = max(abs(getattr(stats, name) - getattr(stats_of_tree, name)) for name in numbers)
    off["tokens"] = abs(stats_of_tree.num_tokens + stats_of_tree.num_shared - stats.num_tokens)
    off["share"] = abs(
        step_metrics(stats_of_tree, ["a", "b"])["actor/shared_tokens"] - 1 + stats_of_tree.num_tokens / stats.num_tokens
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    own = [{tokens.uid: tokens for tokens in each.tokens} for each in (stats, stats_of_tree)]
    dist.all_gather_object(gathered, (own, off, [list(each.samples) for each in (stats, stats_of_tree)]))
    tokens_of_tree, expected = ({uid: t for part in gathered for uid, t in part[0][which].items()} for which in (1, 0))
    assert tokens_of_tree.keys() == expected.keys() and len(tokens_of_tree) == len(family())
    off = {name: max(part[1][name] for part in gathered) for name in off}
    for name in ("logprobs", "entropy", "marks"):
        pairs = [(getattr(tokens_of_tree[uid], name), getattr(expected[uid], name)) for uid in expected]
        off[name] = max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs)
    samples = [{s.uid: s for part in gathered for s in part[2][which]} for which in (0, 1)]
    assert samples[0].keys() == samples[1].keys()
    off["gaps"] = max(abs(samples[0][uid].gap - samples[1][uid].gap) for uid in samples[0])
    return off | {"flat": num_flat, "computed": num_tree, "gated_samples": stats.gated_samples}


def job(folders: dict[str, str], cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return {name: differences} of all cases. folders: {model: directory}. cases: {name: (model, case)}."""
    torch.set_num_threads(1)
    return {name: compare(folders[model], case) for name, (model, case) in cases.items()}
