"""Checks of an op's arguments: each error names the argument, what was found and what was expected.

Checks never synchronise with a device: they read shapes, dtypes and devices of all tensors, but values only of CPU tensors.
"""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)


def check(
    op: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Check a tensor's shape (None stands for any size), dtype and device.

    Raises:
        ValueError: the shape, dtype or device is not the expected one.
        RuntimeError: a transform of torch.func (vmap, grad, jvp) is active, which no op supports.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{op} does not support torch.func transforms (vmap, grad, jvp); call it outside of them")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{op}: {name} is a {type(tensor).__name__}, expected a tensor")
    actual = tensor.shape
    if actual != shape and not _fits(actual, shape):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{op}: {name} has shape {list(actual)}, expected [{expected}]")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{op}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected {names}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} like the first argument")


def check_cu_seqlens(
    op: str, cu_seqlens: Tensor, num_tokens: int, device: torch.device, name: str = "cu_seqlens"
) -> int:
    """Check the boundaries of packed sequences and return S, the number of sequences.

    Values are checked only on the CPU.
    """
    check(op, name, cu_seqlens, (None,), INTEGERS, device)
    if cu_seqlens.numel() == 0:
        raise ValueError(f"{op}: {name} is empty, expected [S+1] boundaries that start with 0")
    if cu_seqlens.device.type == "cpu" and not _rises(cu_seqlens, num_tokens):
        bounds = _short(cu_seqlens.tolist())
        raise ValueError(f"{op}: {name} is {bounds}, expected to rise from 0 to {num_tokens} tokens")
    return cu_seqlens.numel() - 1


def check_range(op: str, name: str, values: Tensor, largest: int) -> None:
    """Raise ValueError if the tensor is on the CPU and has an integer outside of 0..largest."""
    if values.device.type != "cpu" or values.numel() == 0:
        return
    low, high = map(int, values.aminmax())
    if low < 0 or high > largest:
        raise ValueError(f"{op}: {name} has values in {low}..{high}, expected 0..{largest}")


def why_not_double(name: str, tensor: Tensor | None) -> str | None:
    """Return why the tensor is unsupported if it is float64, else None.

    The kernels compute in float32. Without a tensor, the result is None.
    """
    if tensor is None or tensor.dtype != torch.float64:
        return None
    return f"{name} is float64, the kernels compute in float32"


def _fits(actual: torch.Size, shape: tuple[int | None, ...]) -> bool:
    return len(actual) == len(shape) and all(want is None or have == want for have, want in zip(actual, shape))


def _rises(bounds: Tensor, end: int) -> bool:
    """Return True if the bounds start with 0, never decrease, and finish with `end`."""
    values = bounds.numpy()  # NumPy takes a quarter of PyTorch's time for a few numbers
    return bool(values[0] == 0 and values[-1] == end and (values[1:] >= values[:-1]).all())


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"


def rows_dense(x: Tensor) -> Tensor:
    """Return x [..., D] if its last dimension has stride 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return [T] int64, the sequence that each packed token belongs to."""
    return torch.repeat_interleave(cu_seqlens.diff().long(), output_size=num_tokens)


def kept_first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of tokens in mask [T], [] int64; indices of all tokens, those in the mask first, [T] int64).

    Does not synchronise: the list also has the tokens outside the mask, so a caller can gather an upper bound of rows before the
    host knows the number.
    """
    before = mask.long().cumsum(0)
    number = mask.sum()
    index = torch.arange(mask.numel(), device=mask.device)
    position = torch.where(mask, before - 1, number + index - before)
    return number, torch.empty_like(index).scatter_(0, position, index)
