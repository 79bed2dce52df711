"""Which box of each Hugging Face tensor a rank holds, and that box as a matrix: what a sync without files sends.

Follows mapping.py: a shard of a Megatron parameter is one run of rows, or of columns, of each of its Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.bucket_plan import Box
from marsrl.trainer.learner.megatron.mapping import Unit, hf_shapes, hf_span, part_shape, split


def held_boxes(shape: ModelShape, unit: Unit, part: int, parts: int) -> Iterator[tuple[str, Box]]:
    """(name, box) for each of the unit's tensors, of shard `part` of `parts`; one that is all padding is left out."""
    for name, size in zip(unit.hf, hf_shapes(shape, unit), strict=True):
        rows, columns = size[0], size[1] if len(size) > 1 else 1
        if unit.cut is None:
            box = Box(0, rows, 0, columns)
        elif unit.hf_cut == 0:
            box = Box(*hf_span(unit, rows, part, parts), 0, columns)
        else:
            box = Box(0, rows, *hf_span(unit, columns, part, parts))
        if box.num_elements:
            yield name, box


def held_matrices(shape: ModelShape, unit: Unit, shard: Tensor, parts: int) -> Sequence[Tensor]:
    """The unit's tensors as far as a shard holds them, each as a matrix; padded rows of the vocabulary may follow."""
    view = shard.reshape(part_shape(shape, unit, parts))
    if unit.kind == "vocab":
        return [view]
    return [tensor.reshape(tensor.shape[0], -1) for tensor in split(shape, unit, view)]
