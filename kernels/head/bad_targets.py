"""Targets outside the vocabulary: an error at once on the CPU, on a device a flag that is read once a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

_NONE = torch.iinfo(torch.int64).max


@dataclass
class _Flag:
    """first: [1] int64 on the device, token * 2^32 + (target + 2^31) of the earliest bad one; _NONE: all were good."""

    first: Tensor
    vocab_size: int


_FLAGS: dict[tuple[str, torch.device], _Flag] = {}


def check_targets(op: str, targets: Tensor, mask: Tensor | None, vocab_size: int) -> None:
    """Raise ValueError for the first of targets [T] int64 inside mask [T] that is not in 0..vocab_size - 1.

    On a device nothing is read: the finding is kept until raise_bad_targets, and that token's log-prob is NaN.
    """
    is_bad = (targets < 0) | (targets >= vocab_size)
    if mask is not None:
        is_bad &= mask
    if targets.device.type != "cpu":
        _keep_first(op, targets, is_bad, vocab_size)
    elif is_bad.any():
        token = int(is_bad.nonzero()[0])
        raise ValueError(_message(op, token, int(targets[token]), vocab_size))


def _keep_first(op: str, targets: Tensor, is_bad: Tensor, vocab_size: int) -> None:
    """Queue the update of the op's flag; the host waits for nothing."""
    if targets.numel() == 0:
        return
    key = (op, targets.device)
    if key not in _FLAGS:
        with torch.inference_mode(False):  # whoever calls first: the flag is written outside of it too
            _FLAGS[key] = _Flag(torch.full((1,), _NONE, device=targets.device), vocab_size)
    flag = _FLAGS[key]
    flag.vocab_size = vocab_size
    tokens = torch.arange(targets.numel(), device=targets.device)
    codes = (tokens << 32) + (targets.clamp(-(2**31), 2**31 - 1) + 2**31)
    torch.minimum(flag.first, torch.where(is_bad, codes, _NONE).min(), out=flag.first)


def raise_bad_targets() -> None:
    """Raise ValueError where a call on a device since the last time had a target outside the vocabulary.

    Waits for the device: call it where the host waits anyway, say when a step's loss is read. Every rank of a
    vocabulary-parallel group finds the same.
    """
    for (op, _), flag in _FLAGS.items():
        code = int(flag.first)
        if code != _NONE:
            flag.first.fill_(_NONE)
            raise ValueError(_message(op, code >> 32, (code & 0xFFFFFFFF) - 2**31, flag.vocab_size))


def _message(op: str, token: int, target: int, vocab_size: int) -> str:
    return f"{op}: targets[{token}] is {target}, expected 0..{vocab_size - 1}; mask the tokens that have no target"
