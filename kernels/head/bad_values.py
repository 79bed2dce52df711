"""Checks for targets outside the vocabulary and invalid temperatures.

On the CPU they raise at once; on a device they set a flag that is read once per step.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels.head.vocabulary import Head

_NONE = torch.iinfo(torch.int64).max


@dataclass
class _Flag:
    """Earliest bad target or temperature of an op.

    first: [1] int64 on the device, encoded as token * 2^32 + (number + 2^31), where number is the target or the temperature's
    float32 bits. _NONE: no bad value.
    """

    first: Tensor
    expected: str


_FLAGS: dict[tuple[str, str, torch.device], _Flag] = {}


def check_values(head: Head, temperature: float | Tensor, mask: Tensor | None) -> float | Tensor:
    """Raise ValueError for the first token inside mask [T] with a bad target or temperature.

    A target must be in the vocabulary, and a temperature a positive, finite number. Returns the temperature.

    On a device, the host reads no value. A bad value sets the flag, which raise_bad_values reads later, and makes the token's
    log-prob NaN. To do so, bad temperatures become NaN in `head` and in the returned temperature.
    """
    is_bad = (head.targets < 0) | (head.targets >= head.vocab_size)
    expected = f"0..{head.vocab_size - 1}; mask the tokens that have no target"
    _check(head.op, "targets", head.targets, _inside(is_bad, mask), expected)
    if head.inverse_temperature is None or not isinstance(temperature, Tensor):
        return temperature
    is_bad = _inside(~((temperature > 0) & (temperature < torch.inf)), mask)
    _check(head.op, "temperature", temperature, is_bad, "a positive, finite number")
    if temperature.device.type == "cpu":
        return temperature
    head.inverse_temperature.masked_fill_(is_bad, torch.nan)
    return temperature.masked_fill(is_bad, torch.nan)


def _inside(is_bad: Tensor, mask: Tensor | None) -> Tensor:
    return is_bad if mask is None else is_bad & mask


def _check(op: str, name: str, values: Tensor, is_bad: Tensor, expected: str) -> None:
    if values.device.type != "cpu":
        _keep_first(op, name, values, is_bad, expected)
    elif is_bad.any():
        token = int(is_bad.nonzero()[0])
        raise ValueError(_message(op, name, token, values[token].item(), expected))


def _keep_first(op: str, name: str, values: Tensor, is_bad: Tensor, expected: str) -> None:
    """Queue the update of the op's flag to its earliest bad value, without synchronisation."""
    if values.numel() == 0:
        return
    key = (op, name, values.device)
    if key not in _FLAGS:
        with torch.inference_mode(False):  # a later call outside of inference mode must be able to write the flag
            _FLAGS[key] = _Flag(torch.full((1,), _NONE, device=values.device), expected)
    flag = _FLAGS[key]
    flag.expected = expected
    if values.is_floating_point():
        values = values.detach().float().view(torch.int32).long()
    tokens = torch.arange(values.numel(), device=values.device)
    codes = (tokens << 32) + (values.clamp(-(2**31), 2**31 - 1) + 2**31)
    torch.minimum(flag.first, torch.where(is_bad, codes, _NONE).min(), out=flag.first)


def raise_bad_values() -> None:
    """Raise ValueError if any call on a device since the last check had a bad target or temperature.

    A target must be in the vocabulary, and a temperature a positive, finite number.

    Synchronises with the device: call it where the host waits anyway, such as when it reads a step's loss. All ranks of a
    vocabulary-parallel group get the same result.
    """
    for (op, name, _), flag in _FLAGS.items():
        code = int(flag.first)
        if code != _NONE:
            flag.first.fill_(_NONE)
            number = (code & 0xFFFFFFFF) - 2**31
            value = number if name == "targets" else struct.unpack("f", struct.pack("i", number))[0]
            raise ValueError(_message(op, name, code >> 32, value, flag.expected))


def _message(op: str, name: str, token: int, value: float, expected: str) -> str:
    return f"{op}: {name}[{token}] is {value}, expected {expected}"
