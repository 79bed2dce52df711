"""Seconds of a training step: the sum of floating-point work, memory traffic and communication.

No overlap is assumed: the trainer does not overlap collectives with computation, and a plan should be pessimistic. memory.py
explains the symbols.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.memory import Training, layer_bytes, optimizer_bytes
from marsrl.commands.plan.parameters import RankElements, adapter_elements, elements, rank_elements
from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.learner.megatron.layout import Layout


@dataclass(frozen=True)
class Work:
    """The data of one step, over all ranks.

    sequences: number of samples.
    tokens: number of prompt and completion tokens of all samples.
    trained: number of completion tokens of all samples.
    longest: number of tokens of the longest sample.
    updates: number of optimizer updates, each on a part of the samples.
    """

    sequences: int
    tokens: float
    trained: float
    longest: float = math.inf
    updates: int = 1

    @property
    def mean_length(self) -> float:
        """Mean sequence length with each sequence weighted by its length."""
        return min(self.tokens / self.sequences * hw.LENGTH_SPREAD.value, self.longest)


@dataclass
class StepTime:
    """Seconds of the parts of a step's updates.

    permutation: moving rows to their experts and back. launching: host time to launch kernels of layers with experts.
    gradients: adding gradients to float32 buffers. bubble: idle time of pipeline ranks. scoring: forward passes before the
    updates (reference, old log-probs). offloading: copying layers' inputs, and the state that trainer.sleep
    moves, to the host and back.
    """

    linear: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    elementwise: float = 0.0
    permutation: float = 0.0
    launching: float = 0.0
    gradients: float = 0.0
    tensor_parallel: float = 0.0
    expert_parallel: float = 0.0
    context_parallel: float = 0.0
    bubble: float = 0.0
    data_parallel: float = 0.0
    optimizer: float = 0.0
    scoring: float = 0.0
    offloading: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def step_time(
    setup: Training, work: Work, gpu: hw.Gpu, sweeps_entropy: bool, scored: Sequence[ModelShape] = ()
) -> StepTime:
    """Return the seconds of one policy's updates in a step. scored: shapes of models that only run forward, before the updates.

    linear      2 tokens P (3 + r) / (ranks peak share)          r = 1 with full recompute
                frozen base: 2 + r for its P, plus 3 + r for the parameters of the largest adapter
                selective: r = 1 for a dense layer's MLP only
    experts     as linear, + (3 + r) e (P + R (2 H + 3 F) a layer) a micro-batch / memory bandwidth
    attention   2 tokens N D length L (1 + 2.5 + r) / (...)      causal; full_but_attention: r = 0
    head        V H (6 trained + 2 swept) / (...)                frozen: 4 trained
    elementwise 3 x saved activations / memory bandwidth         written, read, and one intermediate access
    permutation 3.2 (+ 4 where ranks send rows) (2 + r) R H e a layer / memory bandwidth
    launching   L / PP x micro-batches x (1 + r / 3)             not overlapped: the host waits for the router in each layer
    gradients   bytes per number and micro-batch / memory bandwidth, with a separate constant for experts
    TP          10 (+ 4 r) collectives a layer, with experts 5 (+ 2 r), of T/CP H e (t-1)/t each
    EP          4 (+ 2 r) exchanges a layer of R H e (EP-1)/EP each
    CP          2 (+ r) exchanges a layer of keys and values, 2 T K D e / TP (CP-1)/CP each
    bubble      (PP - 1) / micro-batches of an update, times the sum of the above
    DP          per number 4 bytes of gradients reduced and e bytes of weights gathered, times (n-1)/n, over the slowest link
    optimizer   memory traffic of this rank's share; if offloaded, over PCIe and CPU memory; DP and optimizer: once per update
    offloading  2 L T/t H e over PCIe, not overlapped (ranking.py adds the transfers of trainer.sleep)
    """
    time, shape, layout, e = StepTime(), setup.shape, setup.layout, setup.size
    counts = elements(shape)
    ranks_of_replica = layout.tensor * layout.pipeline * layout.context
    replicas = setup.world_size / ranks_of_replica
    tokens = work.tokens / replicas  # per data-parallel replica
    again = 1.0 if setup.remakes_layers else 0.0
    flops, memory = gpu.flops, gpu.bandwidth * hw.MEMORY_SHARE.value
    micro_batches = max(1.0, tokens / setup.tokens)
    num_layers, trained = shape.num_layers / layout.pipeline, setup.trained(0)
    dense = counts.layer_cut + counts.layer_whole
    mlp = 0 if shape.num_experts else 3 * shape.hidden_size * shape.ffn_size
    remade = dense * again + (mlp if setup.recompute == "selective" else 0)
    passes = 2 if setup.adapters else 3  # a frozen weight has no gradient
    dense_work = (passes * dense + remade) * shape.num_layers + (3 + again) * _largest_adapter(setup).dense
    time.linear = 2 * tokens * dense_work / ranks_of_replica / (flops * hw.GEMM_SHARE.value)
    if shape.num_experts:
        active = counts.layer_experts * shape.experts_per_token / shape.num_experts * setup.expert_imbalance
        of_adapter = _largest_adapter(setup).expert * shape.experts_per_token / shape.num_experts
        time.experts = 2 * tokens * (active * shape.num_layers * (passes + again) + of_adapter * (3 + again))
        time.experts /= ranks_of_replica
        time.experts /= flops * hw.EXPERT_SHARE.value
        width = shape.ffn_size / layout.expert_tensor
        read = rank_elements(shape, layout, 0).expert + setup.rows * num_layers * (2 * shape.hidden_size + 3 * width)
        time.experts += micro_batches * (passes + again) * e * read / memory
    attended = 2 * tokens * shape.num_heads * shape.head_size * work.mean_length * shape.num_layers
    attention_again = 0.0 if setup.recompute == "full_but_attention" else again
    time.attention = attended * (3.5 + attention_again) / ranks_of_replica / (flops * gpu.attention)
    swept = hw.POSITIVE_SHARE.value if sweeps_entropy else 0.0
    time.head = (2 * work.trained * (1 + swept) + 4 * work.trained) * shape.hidden_size * shape.vocab_size / replicas
    time.head -= 2 * work.trained * shape.hidden_size * shape.vocab_size / replicas if setup.adapters else 0.0
    time.head /= layout.tensor * layout.context * flops * hw.HEAD_SHARE.value
    time.gradients = trained.dense * hw.GRADIENT_BYTES.value + trained.expert * hw.EXPERT_GRADIENT_BYTES.value
    time.gradients *= micro_batches / memory

    kept = layer_bytes(setup, "none") * num_layers * tokens / setup.tokens
    time.elementwise = (3 + again) * kept / memory

    hidden_bytes = tokens / layout.context * shape.hidden_size * e * num_layers
    collectives = 5 + 2 * again if shape.num_experts else 10 + 4 * again
    tensor_link = gpu.link(layout.tensor)
    time.tensor_parallel = collectives * hidden_bytes * (layout.tensor - 1) / layout.tensor / tensor_link
    if shape.num_experts:
        rows = hidden_bytes / layout.tensor * shape.experts_per_token
        across = layout.expert * layout.expert_tensor
        copies = hw.PERMUTATION_COPIES.value + (4 if across > 1 else 0)
        moved = rows * layout.expert_tensor * setup.expert_imbalance
        time.permutation = copies * (2 + again) * moved / memory
        launch = hw.LAUNCH_S if across > 1 else hw.LAUNCH_ALONE_S
        time.launching = num_layers * micro_batches * (1 + again / 3) * launch.value
        exchanges = 4 + 2 * again
        time.expert_parallel = exchanges * rows * (layout.expert - 1) / layout.expert / gpu.link(across)
        gathered = rows * (layout.expert_tensor - 1)
        time.expert_parallel += exchanges * gathered / gpu.link(layout.expert_tensor)
    keys = 2 * tokens * shape.num_kv_heads * shape.head_size / layout.tensor * e * num_layers
    time.context_parallel = (2 + again) * keys * (layout.context - 1) / layout.context
    time.context_parallel /= gpu.link(layout.tensor * layout.context)  # the group spans tensor-parallel groups
    time.bubble = time.total * (layout.pipeline - 1) / max(1.0, micro_batches / work.updates)
    time.data_parallel = _data_parallel(setup, gpu) * work.updates
    time.optimizer = _optimizer(setup, gpu) * work.updates
    time.scoring = sum(scoring_time(replace(setup, shape=each), work, gpu) for each in scored)
    if setup.recompute == "full_offload":
        time.offloading = 2 * hidden_bytes / layout.tensor / (gpu.pcie * hw.LINK_SHARE.value)
    return time


def _largest_adapter(setup: Training) -> RankElements:
    """Return the parameter counts, over all ranks, of the adapter with the highest cost per token."""
    found = [adapter_elements(setup.shape, Layout(1, 1, 1, 1, 1), (each,)) for each in setup.adapters]
    return max(found, key=lambda each: each.total, default=RankElements(0, 0))


def scoring_time(setup: Training, work: Work, gpu: hw.Gpu) -> float:
    """Return the seconds of a forward pass for the log-probs of the trained tokens.

    The pass takes these shares of a step without recomputation: a third of linear layers, experts, head, elementwise work and
    launching; 1/3.5 of attention; 2 of 5 collectives; half of the exchanges and of the permutation.
    """
    step = step_time(replace(setup, recompute="none"), work, gpu, sweeps_entropy=False)
    thirds = step.linear + step.experts + step.head + step.elementwise + step.launching
    halves = step.permutation + step.expert_parallel + step.context_parallel
    busy = thirds / 3 + step.attention / 3.5 + 0.4 * step.tensor_parallel + halves / 2
    waiting = step.bubble / (step.total - step.bubble - step.data_parallel - step.optimizer)
    return busy * (1 + waiting)


def _data_parallel(setup: Training, gpu: hw.Gpu) -> float:
    layout, counts = setup.layout, setup.trained(0)
    seconds = 0.0
    for number, sharers, inside in (
        (counts.dense, layout.data(setup.world_size) * layout.context, layout.tensor),
        (counts.expert, layout.expert_data(setup.world_size), layout.expert * layout.expert_tensor),
    ):
        num_bytes = number * (4 + setup.size) * (sharers - 1) / sharers
        seconds += num_bytes / gpu.link(sharers * inside)
    return seconds


def _optimizer(setup: Training, gpu: hw.Gpu) -> float:
    """Return the seconds of the optimizer step on this rank's share: norm, clipping, AdamW, bfloat16 weights, zeroing gradients.

    An offloaded AdamW moves 30 bytes per number in CPU memory: it reads and writes moments and float32 weights, reads gradients,
    and writes bfloat16 weights.
    """
    trained, memory = setup.trained(0), gpu.bandwidth * hw.MEMORY_SHARE.value
    numbers = optimizer_bytes(setup, trained) / (12 if setup.size == 2 else 8)
    if setup.offloads_optimizer:
        return numbers * (6 / (gpu.pcie * hw.LINK_SHARE.value) + 30 / hw.HOST_ADAM.value)
    return (numbers * hw.OPTIMIZER_BYTES.value + 4 * trained.total) / memory
