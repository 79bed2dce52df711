"""The three GEMMs of a head: logits, gradient of the hidden states and gradient of the weight. Sums are float32."""

from collections.abc import Callable
from functools import cache, cached_property

import torch
from torch import Tensor

# Number of rows of a 16-bit weight that are converted to float32 at a time. At H = 256 they take 1 MiB, which is still in the
# CPU's cache when the GEMM reads it.
HOST_TILE_ROWS = 1024
DEVICE_TILE_ROWS = 4096


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Return True if the CPU has instructions for bfloat16 products (AVX512-BF16, AMX).

    A bfloat16 GEMM then takes half to a fifth of the time of a float32 GEMM; without the instructions oneDNN emulates it.
    Returns False if torch cannot list the instructions (2.11).
    """
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def why_no_full_float32(is_cuda: bool) -> str | None:
    """Return None if torch.mm multiplies float32 in full precision on this device, else the reason.

    Rounding operands to TF32 (10-bit mantissa) changes a logit of 30 by 0.03, and to bfloat16 (7-bit mantissa) by 0.1. That would
    change every probability ratio. torch has only a global setting for this, and changing it for one call would affect other
    threads.
    """
    name = "cuda" if is_cuda else "mkldnn"
    precision = getattr(torch.backends, name).matmul.fp32_precision
    if precision in ("none", "ieee"):
        return None
    return f"torch.backends.{name}.matmul.fp32_precision is {precision!r}, which rounds the operands of its products"


class HeadGemms:
    """GEMMs of one weight [V, H] with hidden states of one dtype. dz is the gradient with respect to the logits.

    On CUDA, bfloat16 hidden states and weight are multiplied directly, with float32 accumulators and results. The CPU's bfloat16
    GEMM rounds its result to bfloat16, so it is used only where that is the final result (collects_dz): for dX, and for a dW that
    is a single product. All other products have float32 operands, because float16 gradients underflow and torch has no GEMM of
    mixed dtypes. Unless both dtypes are bfloat16, the constructor raises RuntimeError if torch may round float32 operands.
    """

    def __init__(self, weight: Tensor, hidden_dtype: torch.dtype):
        self.weight = weight
        self._is_narrow = weight.dtype == hidden_dtype == torch.bfloat16
        self._multiplies_narrow = self._is_narrow and weight.is_cuda
        if not self._is_narrow and (reason := why_no_full_float32(weight.is_cuda)):
            found = f"hidden {hidden_dtype}, weight {weight.dtype}".replace("torch.", "")
            raise RuntimeError(
                f"output head ({found}): {reason}; call torch.set_float32_matmul_precision('highest'), or use bfloat16 for both"
            )
        # True if hidden_and_weight_gradient needs memory (`room`) for dz in bfloat16. False if V is not a multiple of 32: torch
        # 2.13's AMX product then reads past the end of a row of dz, so a NaN in one row would reach dX of the previous row.
        on_host = self._is_narrow and not weight.is_cuda
        self.collects_dz = on_host and weight.shape[0] % 32 == 0 and cpu_multiplies_bfloat16()
        self._converted: slice | None = None  # the rows of the weight whose float32 copy is in _tile

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype of the buffer of dz that the backward GEMMs read."""
        return torch.bfloat16 if self._is_narrow else torch.float32

    @property
    def is_converted(self) -> bool:
        """True if products read a float32 copy of the weight, which is made one piece at a time."""
        return self.weight.dtype != torch.float32 and not self._multiplies_narrow

    @property
    def _tile_rows(self) -> int:
        return DEVICE_TILE_ROWS if self.weight.is_cuda else HOST_TILE_ROWS

    @cached_property
    def _tile(self) -> Tensor:
        rows, size = self.weight.shape
        return torch.empty(min(self._tile_rows, rows), size, dtype=torch.float32, device=self.weight.device)

    def tiles(self) -> list[slice]:
        """Return the slices of the weight's rows that are multiplied one after the other."""
        rows, step = self.weight.shape[0], self._tile_rows
        if not self.is_converted:
            return [slice(0, rows)]
        return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    def _weight(self, tile: slice) -> Tensor:
        weight = self.weight[tile]
        if weight.dtype == torch.float32:
            return weight
        converted = self._tile[: weight.shape[0]]
        if self._converted != tile:
            converted.copy_(weight)
            self._converted = tile
        return converted

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Compute out [R, V] float32 = hidden [R, H] @ weight.T, without the temperature.

        Autocast does not apply to products with `out=`.
        """
        if self._multiplies_narrow:
            torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
            return
        hidden = hidden.float()
        for tile in self.tiles():
            self.tile_logits(hidden, tile, out[:, tile])

    def tile_logits(self, hidden: Tensor, tile: slice, out: Tensor) -> None:
        """Compute out [R, columns of the tile] float32 = hidden [R, H] float32 @ weight[tile].T."""
        torch.mm(hidden, self._weight(tile).t(), out=out)

    def hidden_gradient(self, dz: Tensor) -> Tensor:
        """Return dX = dz [n, V] @ weight, [n, H] float32."""
        gradient = torch.empty(dz.shape[0], self.weight.shape[1], dtype=torch.float32, device=dz.device)
        if self._multiplies_narrow:
            return torch.mm(dz, self.weight, out_dtype=torch.float32, out=gradient)
        dz = dz.float()
        for tile in self.tiles():
            if tile.start == 0:
                torch.mm(dz[:, tile], self._weight(tile), out=gradient)
            else:
                gradient.addmm_(dz[:, tile], self._weight(tile))
        return gradient

    def add_weight_gradient(self, total: Tensor | None, dz: Tensor, hidden: Tensor) -> Tensor:
        """Add dz [n, V].T @ hidden [n, H] to total [V, H] float32 in place, and return it.

        If total is None, return the product as a new tensor.
        """
        if self._multiplies_narrow:
            if total is None:
                total = torch.empty(self.weight.shape, dtype=torch.float32, device=dz.device)
                return torch.mm(dz.t(), hidden, out_dtype=torch.float32, out=total)
            return torch.addmm(total, dz.t(), hidden, out_dtype=torch.float32, out=total)
        dz, hidden = dz.float(), hidden.float()
        if total is None:
            total = torch.empty(self.weight.shape, dtype=torch.float32, device=dz.device)
            return torch.mm(dz.t(), hidden, out=total)
        return total.addmm_(dz.t(), hidden)

    def hidden_and_weight_gradient(
        self,
        dz_of: Callable[[slice], Tensor],
        hidden: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        adds: bool,
        room: Tensor | None = None,
    ) -> None:
        """Compute grad_hidden = dz @ weight and grad_weight = dz.T @ hidden; skip either if None.

        Takes one piece of the vocabulary at a time, so that each piece of the weight is converted to float32 once.

        dz: [n, V]. hidden, grad_hidden: [n, H]. weight, grad_weight: [V, H].
        dz_of: takes a slice from `tiles`, and returns these columns of dz, [n, columns] float32, valid until its next call.
        adds: accumulate into grad_weight, which must then be float32. Otherwise grad_weight may have any dtype, and is rounded
            once from float32.
        room: [n, V] bfloat16, memory in which all pieces of dz are collected. grad_hidden must then be bfloat16, and is computed
            as a single product, like a bfloat16 grad_weight. None: grad_hidden is float32.
        """
        narrow_hidden, hidden = hidden, hidden.float()
        in_one = room is not None and grad_weight is not None and grad_weight.dtype == room.dtype
        for tile in self.tiles():
            piece = dz_of(tile)
            if room is not None:
                room[:, tile].copy_(piece)
            elif grad_hidden is not None and tile.start == 0:
                torch.mm(piece, self._weight(tile), out=grad_hidden)
            elif grad_hidden is not None:
                grad_hidden.addmm_(piece, self._weight(tile))
            if grad_weight is None or in_one:
                continue
            of_tile = grad_weight[tile]
            if adds:
                of_tile.addmm_(piece.t(), hidden)
            elif grad_weight.dtype == torch.float32:
                torch.mm(piece.t(), hidden, out=of_tile)
            else:  # the product reuses the memory of the converted piece of the weight
                self._converted = None
                of_tile.copy_(torch.mm(piece.t(), hidden, out=self._tile[: of_tile.shape[0]]))
        if room is not None and grad_hidden is not None:
            torch.mm(room, self.weight, out=grad_hidden)
        if room is not None and in_one:
            torch.mm(room.t(), narrow_hidden, out=grad_weight)
