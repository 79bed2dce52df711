"""What every Triton route of the heads launches around its own kernels: lists of rows, statistics from pieces of rows."""

import torch
import triton
from torch import Tensor

from marsrl.kernels.head.rows import triton_kernels
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import on_device_of

# Columns that one program reads. 151936 columns are 5 pieces: 15 rows still fill 75 multiprocessors, and a piece is
# long enough (128 KiB) to run at the speed of memory. Not measured yet.
PIECE_COLUMNS = 32768
BLOCK_COLUMNS = 4096  # a step of the loop: 16 elements a thread
NUM_WARPS = 8
JOIN_ELEMENTS = 256  # rows x pieces that one step of a join reads
JOIN_PIECES = 32
BLOCK_TOKENS = 1024


def list_active(
    rows: Rows, coefficient: Tensor, entropy_coefficient: Tensor, active: Tensor | None
) -> tuple[Tensor | None, LateCount]:
    """(place of each row [R] int32 among those that have a coefficient, -1: it has none; how many have), and the tokens
    of these to active. Where that is None every row has its own place: (None, R). On the device of the tensors."""
    if active is None:
        return None, LateCount(rows.count)
    place_of = torch.empty(rows.count, dtype=torch.int32, device=coefficient.device)
    count = torch.empty(1, dtype=torch.int32, device=coefficient.device)
    triton_kernels.list_active[(1,)](
        rows.count,
        rows.ids,
        rows.first,
        coefficient,
        entropy_coefficient,
        place_of,
        active,
        count,
        BLOCK=BLOCK_TOKENS,
    )
    return place_of, LateCount(count)  # its copy is queued before what comes after: the host learns it early


def token_arguments(rows: Rows, head: Head) -> tuple[Tensor | int | float | None, ...]:
    """What a kernel that reads logits asks of their rows: ids, first, targets, first_column, inverse temperatures."""
    return (
        rows.ids,
        rows.first,
        head.targets,
        head.first_column,
        head.inverse_temperature,
        head.inverse_temperature_of_all,
    )


def put_statistics(pieces: Tensor, rows: Rows, head: Head, out: Statistics) -> None:
    """Fill `out` at these rows from their parts [4, pieces, >= R] float32, the form of row_partials."""
    block = _join_block(pieces)
    with on_device_of(pieces):
        triton_kernels.finish_rows[(triton.cdiv(rows.count, block["BLOCK"]),)](
            pieces,
            pieces.shape[1],
            pieces.shape[2],
            rows.count,
            head.num_columns,
            rows.ids,
            rows.first,
            head.targets,
            head.inverse_temperature,
            head.inverse_temperature_of_all,
            out.logprobs,
            out.entropy,
            out.maximum,
            out.log_sum,
            **block,
        )


def shard_partials(pieces: Tensor, rows: Rows, head: Head) -> Tensor:
    """RowKernels.partials from the parts of the rows [4, pieces, >= R] float32."""
    block = _join_block(pieces)
    out = torch.empty(4, rows.count, dtype=torch.float64, device=pieces.device)
    with on_device_of(pieces):
        triton_kernels.join_pieces[(triton.cdiv(rows.count, block["BLOCK"]),)](
            pieces,
            pieces.shape[1],
            pieces.shape[2],
            rows.count,
            rows.ids,
            rows.first,
            head.inverse_temperature,
            head.inverse_temperature_of_all,
            out,
            **block,
        )
    return out


def _join_block(pieces: Tensor) -> dict[str, int]:
    """Few pieces: many rows a program. Many: 8 rows, a 32-byte sector, so that 96 programs share 768 rows."""
    at_once = min(JOIN_PIECES, triton.next_power_of_2(max(1, pieces.shape[1])))
    return {"BLOCK": JOIN_ELEMENTS // at_once, "BLOCK_PIECES": at_once}


def with_padding(rows: Tensor) -> Tensor:
    """[R, stride]: the rows [R, V] with what lies between them, and behind the last one."""
    return rows.as_strided((rows.shape[0], rows.stride(0)), (rows.stride(0), 1))
