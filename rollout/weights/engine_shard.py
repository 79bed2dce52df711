"""Which part of a model each worker of an engine holds."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_MULTIPLE = 64  # vLLM's padding of the vocabulary


@dataclass(frozen=True, slots=True)
class EngineShard:
    """Part `part` of `parts` of a model; the default is all of it.

    kv_parts: into how many the key and value heads are cut: fewer than parts where several parts hold the same head.
    spreads_experts: each expert is whole in one part, instead of cut over all.
    """

    part: int = 0
    parts: int = 1
    kv_parts: int = 1
    spreads_experts: bool = False

    @classmethod
    def of(cls, part: int, parts: int, num_kv_heads: int, *, spreads_experts: bool = False) -> EngineShard:
        """As vLLM cuts a model with so many key and value heads."""
        return cls(part, parts, min(parts, num_kv_heads), spreads_experts)

    def experts(self, num_experts: int) -> range:
        """Those of which it holds something. Where whole ones do not come out even, the first parts have one more."""
        if not self.spreads_experts:
            return range(num_experts)
        each, more = divmod(num_experts, self.parts)
        first = self.part * each + min(self.part, more)
        return range(first, first + each + (self.part < more))
