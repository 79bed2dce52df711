"""Bytes of a training rank: permanent state, a micro-batch's activations, and the peak of both.

Symbols of the formulas: T tokens of a micro-batch (divided by CP, unless the formula names CP), t = TP, e = bytes per number in
the model's dtype, H hidden, N query heads, K key/value heads, D head size, F width of the MLP (of an expert), E experts, k active
experts per token, R = T k / t rows that a rank's experts receive from a balanced router, L layers of a stage, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marsrl.commands.plan.hardware import BLOCKS, PINNED
from marsrl.commands.plan.parameters import RankElements, adapter_elements, rank_elements
from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.routed_experts import expert_dtype
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.learner.megatron.mapping import padded_rows

Recompute = Literal["none", "selective", "full_but_attention", "full", "full_offload"]
RouterReplay = Literal["none", "recompute", "rollout"]
SIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Training:
    """The settings that determine the memory of training ranks.

    tokens: size of the largest micro-batch. num_micro_batches: micro-batches per step and rank. head_rows: rows of logits in
    memory at once. expert_imbalance: rows of the busiest rank's experts over the mean.
    reference: the frozen model of a KL term, in the same layout and dtype; None: no such term.
    deterministic: attention keeps separate copies of the queries' gradient. router_replay: replay mode of a model with experts.
    adapters: adapters trained on one frozen copy of the model; (): the model itself is trained.
    sleeps: trainer.sleep, with engines on the same GPUs.
    overlaps_dispatch: a micro-batch's forward pass runs beside the backward pass of the previous one.
    """

    shape: ModelShape
    layout: Layout
    world_size: int
    dtype: Literal["float32", "bfloat16"]
    recompute: Recompute
    tokens: int
    num_micro_batches: int
    head_rows: int
    offloads_optimizer: bool = False
    distributes_optimizer: bool = True
    expert_imbalance: float = 1.0
    reference: ModelShape | None = None
    deterministic: bool = False
    router_replay: RouterReplay = "none"
    adapters: tuple[AdapterConfig, ...] = ()
    sleeps: bool = False
    overlaps_dispatch: bool = False

    def trained(self, stage: int) -> RankElements:
        """Return the counts of trained parameters, with gradient and optimizer state, on a rank of this pipeline stage."""
        if self.adapters:
            return adapter_elements(self.shape, self.layout, self.adapters)
        return rank_elements(self.shape, self.layout, stage)

    @property
    def size(self) -> int:
        return SIZE[self.dtype]

    @property
    def remakes_layers(self) -> bool:
        return self.recompute not in ("none", "selective")

    @property
    def tokens_of_rank(self) -> int:
        """Tokens per rank, T / CP."""
        return -(-self.tokens // self.layout.context)

    @property
    def rows(self) -> float:
        """R of the busiest rank, the rows that its experts receive: T k / (CP TP), gathered over ETP ranks."""
        share = self.tokens_of_rank / self.layout.tensor * self.layout.expert_tensor
        return share * self.shape.experts_per_token * self.expert_imbalance


@dataclass(frozen=True)
class RankMemory:
    """Peak bytes of one rank of pipeline stage `stage`.

    activations: tensors saved for the backward of all micro-batches in flight. working: temporary bytes at the peak, which occurs
    in `moment`. reference: weights of the KL term's frozen model. head: a chunk of logits, the gradient of the hidden states, and
    the float32 gradient of the output layer. replay: recorded expert choices of all micro-batches of the step.
    asleep: weights, reference and optimizer state that trainer.sleep moves to pinned CPU memory while engines decode.
    host: pinned CPU memory. It holds the offloaded optimizer state with its float32 gradients, the offloaded inputs of layers,
    `asleep`, and with router_replay "recompute" the recorded experts.
    """

    stage: int
    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    working: int
    moment: Literal["head", "layer"]
    replay: int
    asleep: int
    host: int

    @property
    def static(self) -> int:
        return self.weights + self.reference + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.static + self.activations + self.replay + self.working


def most_loaded_rank(setup: Training) -> RankMemory:
    """Return the rank with the highest peak: early stages hold more micro-batches, and the last stage holds the head."""
    return max((rank_memory(setup, stage) for stage in range(setup.layout.pipeline)), key=lambda memory: memory.peak)


def rank_memory(setup: Training, stage: int) -> RankMemory:
    """Return the bytes of a rank of one pipeline stage.

        peak = weights + reference + gradients + optimizer + in_flight L layer + micro-batches (batch + replay)
             + max(head, a layer's recomputed and temporary bytes)

    in_flight = min(micro-batches, PP - stage), as forward and backward passes alternate. overlaps_dispatch adds one layer. The
    optimizer's fused update makes no copies. The reference model scores before the update's first forward and saves nothing for a
    backward, so apart from its weights it needs less memory than the update.
    """
    layout = setup.layout
    counts, trained = rank_elements(setup.shape, layout, stage), setup.trained(stage)
    optimizer = optimizer_bytes(setup, trained)
    num_layers = setup.shape.num_layers // layout.pipeline
    in_flight = min(setup.num_micro_batches, layout.pipeline - stage)
    is_last = stage == layout.pipeline - 1
    is_overlapped = setup.overlaps_dispatch and setup.num_micro_batches > 1
    num_saved = in_flight * num_layers + is_overlapped
    saved = num_saved * layer_bytes(setup, setup.recompute) + (in_flight + is_overlapped) * angle_bytes(setup)
    saved += setup.num_micro_batches * batch_bytes(setup)
    head = head_bytes(setup) if is_last else 0
    offloaded = in_flight * num_layers * layer_bytes(setup, "full") if setup.recompute == "full_offload" else 0
    replayed, recorded = (setup.num_micro_batches * each for each in replay_bytes(setup))
    layer = remade_bytes(setup) + max(layer_working_bytes(setup), attention_copies_bytes(setup))
    layer += adapters_working_bytes(setup)
    working, moment = max((head, "head"), (layer, "layer"))
    weights = (counts.total + (trained.total if setup.adapters else 0)) * setup.size
    reference = rank_elements(setup.reference, layout, stage).total * setup.size if setup.reference else 0
    on_gpu = 0 if setup.offloads_optimizer else optimizer
    asleep = weights + reference + on_gpu if setup.sleeps else 0
    return RankMemory(
        stage=stage,
        weights=weights,
        reference=reference,
        gradients=trained.total * 4,
        optimizer=on_gpu,
        activations=saved,
        head=head,
        working=working,
        moment=moment,  # type: ignore[arg-type]  # one of the two above
        replay=replayed,
        asleep=asleep,
        host=recorded
        + round(
            (optimizer / 12 * (12 + 4 * PINNED.value)) * setup.offloads_optimizer + (offloaded + asleep) * PINNED.value
        ),
    )


def optimizer_bytes(setup: Training, counts: RankElements) -> int:
    """Return the bytes of AdamW's state: two float32 moments, plus a float32 copy of bfloat16 weights.

    (8 or 12) (dense / (DP CP) + expert / EDP) if ranks with the same shard divide the state; otherwise each holds all of it.
    """
    layout = setup.layout
    per_number = 12 if setup.dtype == "bfloat16" else 8
    if not setup.distributes_optimizer:
        return per_number * counts.total
    sharers = layout.data(setup.world_size) * layout.context
    return per_number * (-(-counts.dense // sharers) + -(-counts.expert // layout.expert_data(setup.world_size)))


def layer_bytes(setup: Training, recompute: Recompute) -> int:
    """Return the bytes that one layer saves of one micro-batch for its backward.

    full: its input, T H e / t; full_offload: nothing; full_but_attention: the input, and attention's output and statistics. none,
    with sequence parallelism:

        norms      2 T/t (H e + 4) [input, and 4 bytes a row]; QK-norm: T/t (N D e + 4 (N + K)) [keys are a view of qkv]
        inputs     2 T/t H e                                          of the QKV projection and of the MLP or router
        attention  T/t D e (N + 2K [qkv] + N + K [rotated q, k] + N [output]) + 4 T N/t [statistics]
                   + 4 T D e [angles; with QK-norm all layers share theirs]
                   with CP, for rotated k: 2 CP + 1 of K [keys and values that the rank's queries see]
        dense MLP  T/t F e 3 [gate, up, product]
        experts    R (H e [rows] + F/ETP e 3 [gate, up, weighted product] + 4) + T/t (36 k + 8) [choice and order of rows]
                   + T/t 4 E [scores that replayed experts are taken from]

    selective: of the norms only the inputs, T/t H e each; no `inputs` and no `dense MLP`; of the experts' F/ETP only gate and up.

    Adapters also save A x, at the largest rank r: T e (3 + 1/t) r in attention, T e (2 + 1/t) r in a dense MLP, R e 3 r
    in experts.
    """
    s, layout, e = setup.shape, setup.layout, setup.size
    t, tokens = layout.tensor, setup.tokens_of_rank
    local = tokens / t
    heads, kv = s.num_heads / t, s.num_kv_heads / t
    if recompute == "full_offload":
        return 0
    if recompute in ("full", "full_but_attention"):
        attended = tokens * heads * (s.head_size * e + 4) if recompute == "full_but_attention" else 0
        return round(local * s.hidden_size * e + attended)
    is_selective = recompute == "selective"
    if is_selective:
        total = 2 * local * s.hidden_size * e
    else:
        total = 2 * local * (s.hidden_size * e + 4) + 2 * local * s.hidden_size * e
    if s.has_qk_norm:
        total += tokens * (s.head_size * heads * e + 4 * (heads + kv))
    keys = kv if layout.context == 1 else (2 * layout.context + 1) * kv
    total += tokens * s.head_size * e * (3 * heads + 2 * kv + keys + (0 if s.has_qk_norm else 4))
    total += tokens * heads * 4
    if s.num_experts:
        width = s.ffn_size / layout.expert_tensor
        total += setup.rows * (s.hidden_size * e + (2 if is_selective else 3) * width * e + 4)
        total += local * (36 * s.experts_per_token + 8 + (0 if setup.router_replay == "none" else 4 * s.num_experts))
    elif not is_selective:
        total += tokens * s.ffn_size / t * e * 3
    return round(total + adapters_bytes(setup))


def adapters_bytes(setup: Training) -> float:
    """Return the bytes that a layer's adapters save for the backward, if a whole micro-batch belongs to the largest adapter."""
    s, t, tokens = setup.shape, setup.layout.tensor, setup.tokens_of_rank
    total = 0.0
    if ranks := [adapter.rank for adapter in setup.adapters if "attention" in adapter.targets]:
        total += tokens * (3 + 1 / t) * max(ranks)
    if not s.num_experts and (ranks := [adapter.rank for adapter in setup.adapters if "mlp" in adapter.targets]):
        total += tokens * (2 + 1 / t) * max(ranks)
    if s.num_experts and (
        ranks := [adapter.rank_in_experts(s) for adapter in setup.adapters if "experts" in adapter.targets]
    ):
        total += setup.rows * 3 * max(ranks)
    return total * setup.size


def adapters_working_bytes(setup: Training) -> int:
    """Return the temporary bytes of the adapters' output in a layer, until the base layer's output is added.

    T e 1.5 (N + 2K) D / t of q, k, v (1.5 is measured); T e F/t of a dense MLP's gate and up; R e F of the experts'.
    """
    s, tokens = setup.shape, setup.tokens_of_rank
    targets = {target for each in setup.adapters for target in each.targets}
    of_attention = 1.5 * tokens * s.head_size * (s.num_heads + 2 * s.num_kv_heads) / setup.layout.tensor
    of_mlp = setup.rows * s.ffn_size if s.num_experts else tokens * s.ffn_size / setup.layout.tensor
    wide = of_attention * ("attention" in targets)
    wide += of_mlp * (("experts" if s.num_experts else "mlp") in targets)
    return round(wide * setup.size)


def remade_bytes(setup: Training) -> int:
    """Return the bytes recomputed at a time: those of one layer, except its input if that is saved.

    selective: one norm's output and copies, and the MLP's or the experts' activation, R F/ETP e.
    """
    s, layout, e = setup.shape, setup.layout, setup.size
    if setup.recompute == "none":
        return 0
    if setup.remakes_layers:
        return layer_bytes(setup, "none") - layer_bytes(setup, setup.recompute)
    norm_bytes = setup.tokens_of_rank / layout.tensor * s.hidden_size * 2 * e
    if s.num_experts:
        return round(norm_bytes + setup.rows * s.ffn_size / layout.expert_tensor * e)
    return round(norm_bytes + setup.tokens_of_rank * 3 * s.ffn_size / layout.tensor * e)


def angle_bytes(setup: Training) -> int:
    """Return the bytes of the token ids and of the rotary angles that all layers share, [T, D] float32."""
    return setup.tokens_of_rank * (setup.shape.head_size * 4 + 8)


def batch_bytes(setup: Training) -> int:
    """Return the bytes of a packed micro-batch, which stays on the device for the whole step.

    Per token: positions, targets and scored rows, 8 bytes each; rollout log-probs, 4 bytes; the mask.
    """
    return setup.tokens_of_rank * 29


def replay_bytes(setup: Training) -> tuple[int, int]:
    """Return (device, host) bytes of a micro-batch's recorded experts, kept for the whole step.

    trainer.router_replay=rollout needs both rows below; recompute needs only the second. b = 1 or 2 bytes per expert.

    recording   T L k b [as packed: all layers, on every rank] + T/CP L k b [split, if CP > 1]
    replay      T/(CP t) L/PP k b [this rank's tokens and layers; with recompute, on the host]
                + 2 T/(CP t) L/PP [masks of forced and of differing choices]
    """
    s, layout = setup.shape, setup.layout
    if setup.router_replay == "none" or not s.num_experts:
        return 0, 0
    token_bytes = s.experts_per_token * expert_dtype(s.num_experts).itemsize
    local_tokens = -(-setup.tokens_of_rank // layout.tensor) * (s.num_layers // layout.pipeline)
    if setup.router_replay == "recompute":
        return 2 * local_tokens, local_tokens * token_bytes
    packed = setup.tokens + (setup.tokens_of_rank if layout.context > 1 else 0)
    return packed * s.num_layers * token_bytes + local_tokens * (token_bytes + 2), 0


def head_bytes(setup: Training) -> int:
    """Return the bytes of the final norm and the fused head, with `rows` rows and V/t columns of logits at once:

    T/t (H e + 4) + T (H e [hidden] + H e [its gradient] + 40) + rows (4 V/t + 8 H) + 4 H V/t [dW]

    The backward adds the weight's gradient, dW, to Megatron's buffer. A frozen base model under adapters has no dW.
    """
    s, tokens = setup.shape, setup.tokens_of_rank
    width = padded_rows(s.vocab_size, setup.layout.tensor) // setup.layout.tensor
    rows = min(tokens, setup.head_rows)
    total = tokens / setup.layout.tensor * (s.hidden_size * setup.size + 4)
    total += tokens * (2 * s.hidden_size * setup.size + 40)
    return round(total + rows * (4 * width + 8 * s.hidden_size) + (0 if setup.adapters else 4 * s.hidden_size * width))


def attention_copies_bytes(setup: Training) -> int:
    """Return the bytes of the query gradient's copies in flash-attn 2's deterministic backward, which PyTorch also uses.

    4 T D N/t for each of ceil(blocks / (N/t)) copies, if the micro-batch is a single sequence.
    """
    if not setup.deterministic:
        return 0
    heads = setup.shape.num_heads // setup.layout.tensor
    copies = -(-int(BLOCKS.value) // heads)
    return copies * 4 * setup.tokens_of_rank * setup.shape.head_size * heads


def layer_working_bytes(setup: Training) -> int:
    """Return the temporary bytes of one layer, forward or backward, without its saved activations.

    dense    T/t H e 2 + T F/t e 2 [gradients of gate and up]
    experts  forward: R H e [results] + if other ranks send rows
               R H e (1 [unsorted rows] + 1/ETP [this rank's permuted rows] + 1/ETP [received rows, if EP > 1])
               ETP > 1: R H (4 [a float32 copy, if e = 2] + 4/ETP [the float32 sums])
             + T/t H e [if layers are recomputed: the gradient of their output], or
             backward: T/t H e 2 + the maximum of
               R (H e + F/ETP e) + E/EP H F/ETP e [gradients of results, of the product and of the second weights]
               R F/ETP 2 e [gradients of gate and up; the product is freed]
               R (H e - F/ETP e) + E/EP 2 H F/ETP e [gradients of rows and weights; gate, up and their product are freed]
                 + R H e [gradient of unsorted rows] if other ranks send rows
    """
    s, layout, e = setup.shape, setup.layout, setup.size
    local = setup.tokens_of_rank / layout.tensor
    if not s.num_experts:
        return round(2 * local * s.hidden_size * e + 2 * setup.tokens_of_rank * s.ffn_size / layout.tensor * e)
    width = s.ffn_size / layout.expert_tensor
    shards, is_alone = layout.expert_tensor, layout.expert * layout.expert_tensor == 1
    moved = 0 if is_alone else 1 + (1 if layout.expert == 1 else 2) / shards
    wide = 0 if shards == 1 else 4 / shards + (4 if e == 2 else 0)
    forward = setup.rows * s.hidden_size * (e * (1 + moved) + wide)
    forward += setup.remakes_layers * local * s.hidden_size * e
    weights = 0.0 if setup.adapters else s.num_experts / layout.expert * 2 * s.hidden_size * width * e
    product_bytes = setup.rows * (s.hidden_size + width) * e + weights / 2
    gate_and_up_bytes = setup.rows * 2 * width * e
    weight_bytes = setup.rows * ((1 if is_alone else 2) * s.hidden_size - width) * e + weights
    backward = 2 * local * s.hidden_size * e + max(product_bytes, gate_and_up_bytes, weight_bytes)
    return round(max(forward, backward))
