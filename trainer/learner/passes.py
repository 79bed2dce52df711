"""One policy's model run over micro-batches by megatron's schedule: forward for log-probs, and backward for gradients.

passes = Passes(model, ddp, layout, num_experts=0, router_replay="none")
logprobs = passes.forward(batches)                                    # [T] each
results, replay = passes.forward_backward(batches, inputs, experts, mpt)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels import LossInputs
from marsrl.trainer.config import MptConfig
from marsrl.trainer.data.packing import PackedBatch
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.machine import training_device

if TYPE_CHECKING:  # megatron is imported when a Learner is made: after the CPU shim is in force
    from marsrl.trainer.learner.megatron.head import HeadResult
    from marsrl.trainer.learner.megatron.router_replay import Choices, ReplayCounts


class Passes:
    """Every method is collective over the ranks of a replica. router_replay: trainer.router_replay."""

    def __init__(
        self,
        model: Any,
        ddp: Any,
        layout: Layout,
        *,
        num_experts: int,
        router_replay: Literal["none", "recompute", "rollout"],
    ) -> None:
        """model: the bare one; ddp: the same wrapped for training."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._model, self._ddp, self._layout = model, ddp, layout
        self._num_experts, self._router_replay = num_experts, router_replay
        self._run_schedule = get_forward_backward_func()
        self._is_last_stage = parallel_state.is_pipeline_last_stage()
        self._pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self._last_rank = parallel_state.get_pipeline_model_parallel_last_rank()

    def forward(self, batches: Sequence[PackedBatch], model: Any = None) -> list[Tensor]:
        """The last stage's [T] log-probs on every stage, nats; model: another than the policy's."""

        def forward_step(data: Iterator[PackedBatch], model: Any) -> tuple[Any, Any]:
            return model(next(data)), _as_it_is

        outputs = self._schedule(forward_step, batches, list(batches), model=model)
        if self._layout.pipeline > 1:
            if not self._is_last_stage:
                outputs = [torch.empty(batch.num_tokens, device=training_device()) for batch in batches]
            for output in outputs:
                dist.broadcast(output, self._last_rank, group=self._pipeline_group)
        return outputs

    def forward_and_experts(
        self, batches: Sequence[PackedBatch], *, needs_logprobs: bool
    ) -> tuple[list[Tensor], Sequence[Choices | None]]:
        """Log-probs where they are needed, and the experts to force: R2 records them in the same forward pass."""
        none: Sequence[Choices | None] = [None] * len(batches)
        from marsrl.trainer.learner.megatron.router_replay import record_experts, replay_experts

        if self._router_replay == "none":
            return self.forward(batches) if needs_logprobs else [], none
        if self._router_replay == "rollout":
            experts = self._rollout_experts(batches)
            if not needs_logprobs:
                return [], experts
            with replay_experts(self._model, experts, self._num_experts):  # old and new log-probs of the same experts
                return self.forward(batches), experts
        with record_experts(self._model, self._num_experts) as recorded:
            logprobs = self.forward(batches)
        return logprobs, recorded.of_batches(len(batches))

    def forward_backward(
        self,
        batches: Sequence[PackedBatch],
        inputs: Sequence[LossInputs],
        experts: Sequence[Choices | None],
        mpt: MptConfig,
    ) -> tuple[list[HeadResult], ReplayCounts | None]:
        """The results of this rank's micro-batches, empty before the last stage; what replaying experts changed."""
        from marsrl.trainer.learner.megatron.router_replay import replay_experts

        def forward_step(data: Iterator[tuple[PackedBatch, LossInputs]], model: Any) -> tuple[Any, Any]:
            batch, of_batch = next(data)
            return model(batch, of_batch, mpt), _loss_of

        data = list(zip(batches, inputs, strict=True))
        if self._router_replay == "none":
            return self._schedule(forward_step, batches, data, has_backward=True), None
        with replay_experts(self._model, experts, self._num_experts) as replayed:
            results = self._schedule(forward_step, batches, data, has_backward=True)
        return results, replayed.counts()

    def _rollout_experts(self, batches: Sequence[PackedBatch]) -> Sequence[Choices | None]:
        from marsrl.trainer.learner.megatron.router_replay import experts_of_rank

        cut = self._layout.uses_sequence_parallel
        experts = [batch.routed_experts for batch in batches]
        return [None if each is None else experts_of_rank(self._model, each, sequence_parallel=cut) for each in experts]

    def _schedule(
        self,
        forward_step: Any,
        batches: Sequence[PackedBatch],
        data: list[Any],
        *,
        has_backward: bool = False,
        model: Any = None,
    ) -> list[Any]:
        return self._run_schedule(
            forward_step_func=forward_step,
            data_iterator=iter(data),
            model=[self._ddp if model is None else model],
            num_microbatches=len(data),
            seq_length=batches[0].num_tokens,
            micro_batch_size=1,
            forward_only=not has_backward,
        )


def _loss_of(result: HeadResult) -> tuple[Tensor, Tensor, HeadResult]:
    """megatron's 3-tuple: the loss, which it may change in place, a token count it does not use, what it hands back."""
    return result.policy.loss.clone(), torch.zeros((), dtype=torch.int, device=result.policy.loss.device), result


def _as_it_is(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return output.sum(), torch.zeros((), dtype=torch.int, device=output.device), output
