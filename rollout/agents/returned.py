"""Checks of values that a user's team returns, one function per method; each converts to the data contract's types.

They raise TypeError or ValueError with the found and the expected value, which Team turns into an error of the sample or
episode.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Real
from operator import attrgetter, is_
from pathlib import Path
from typing import get_args

import marsrl.rollout
from marsrl.rollout.types import Ask, Finish, Message, MessageRole, Reward, Sample, ToolCall

_ROLES = get_args(MessageRole)
_PARSED = ("shown", "answer", "verdict", "finish")
_NOT_PARSED = tuple(each.name for each in fields(Sample) if each.name not in _PARSED)
_not_parsed = attrgetter(*_NOT_PARSED)
_PACKAGE = Path(marsrl.rollout.__file__).parent.parent


def asks(value: object) -> list[Ask | ToolCall]:
    """Check the value of `follow`."""
    if isinstance(value, Iterable):
        items = list(value)
        if all(isinstance(item, Ask | ToolCall) for item in items):
            return items
        value = next(item for item in items if not isinstance(item, Ask | ToolCall))
    raise TypeError(f"expected a list of episode.ask(...) and episode.call(...), found {_shown(value)}")


def messages(value: object) -> tuple[Message, ...]:
    """Check the value of `messages`: Message objects, or dicts as in OpenAI's API."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TypeError(f"expected a list of messages, found {_shown(value)}")
    return tuple(map(_message, value))


def continuation(value: object) -> str | tuple[Message, ...] | None:
    """Check the value of `continuation`: text, messages, or None while the sample waits."""
    if value == "":
        raise ValueError("expected text, messages, or None while the sample waits, found ''")
    return value if value is None or isinstance(value, str) else messages(value)


def parsed(value: object, sample: Sample) -> Sample:
    """Check the value of `parse`: the given sample, with changes only in parsed fields."""
    if not isinstance(value, Sample):
        raise TypeError(f"expected a Sample, such as replace(sample, answer=...), found {_shown(value)}")
    if not all(map(is_, _not_parsed(value), _not_parsed(sample))):
        others = [name for name in _NOT_PARSED if getattr(value, name) is not getattr(sample, name)]
        raise ValueError(f"expected `parse` to change only {', '.join(_PARSED)}, found changes in {', '.join(others)}")
    _expect("shown", value.shown, str)
    _expect("answer", value.answer, str, None)
    _expect("verdict", value.verdict, bool, None)
    _expect("finish", value.finish, Finish)
    return value


def reward(returned: object) -> Reward:
    """Check the value of `reward`: a Reward, or a number that, clipped to [0, 1], is also `correct`."""
    if isinstance(returned, Real):
        value = _number("the reward", returned)
        return Reward(value, min(max(value, 0.0), 1.0) if value == value else value)
    if not isinstance(returned, Reward):
        raise TypeError(f"expected Reward(value, correct) or a number, found {_shown(returned)}")
    correct = _number("correct", returned.correct)
    if not (0 <= correct <= 1 or math.isnan(correct)):
        raise ValueError(f"expected `correct` from 0 to 1, found {correct:g}")
    _expect("note", returned.note, str)
    return Reward(_number("value", returned.value), correct, numbers(returned.parts), returned.note)


def turn_rewards(value: object, sample: Sample) -> tuple[float, ...]:
    """Check the value of `turn_rewards`: one number for each trained turn of the sample, or none."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"expected a list of numbers, found {_shown(value)}")
    if value and len(value) != (number := len(sample.trained_turns)):
        raise ValueError(f"expected {number} rewards, one for each turn of {sample.uid}, or none, found {len(value)}")
    return tuple(_number(f"the reward of turn {turn}", turn_reward) for turn, turn_reward in enumerate(value, 1))


def numbers(returned: object) -> dict[str, float]:
    """Check the value of `outcomes`, and a reward's parts: numbers by name."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"expected a dict of numbers, found {_shown(returned)}")
    for name in returned:
        _expect("a name", name, str)
    return {name: _number(name, value) for name, value in returned.items()}


def metrics(returned: object) -> dict[str, float]:
    """Check the value of `metrics`: numbers by name, which are averaged."""
    values = numbers(returned)
    for name, value in values.items():
        if math.isnan(value):
            raise ValueError(f"expected {name} to be a number, found nan")
    return values


def sample_or_none(value: object) -> Sample | None:
    """Check the value of `outcome` and `alone`."""
    _expect("the outcome", value, Sample, None)
    return value  # type: ignore[return-value]


def uids(value: object) -> Collection[str]:
    """Check the value of `redrawn`."""
    if isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(uid, str) for uid in value):
        return value
    raise TypeError(f"expected uids of samples, found {_shown(value)}")


def place_of(error: Exception, team: object, method: str) -> str:
    """Return the line of a user's file that raised ("my_team.py:12"), or else the method's first line.

    Returns "" if both are unknown.
    """
    kind = type(team)
    home = Path(inspect.getfile(kind)).parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if code := getattr(getattr(kind, method), "__code__", None):
        frames.insert(0, (Path(code.co_filename), code.co_firstlineno))
    user_lines = [
        f"{file.relative_to(home)}:{line}" for file, line in frames if file.is_relative_to(home) and not _is_ours(file)
    ]
    return user_lines[-1] if user_lines else ""


def _is_ours(file: Path) -> bool:
    return (
        any(file.is_relative_to(_PACKAGE / room) for room in ("rollout", "trainer", "commands"))
        or "site-packages" in file.parts
    )


def _message(value: object) -> Message:
    if isinstance(value, Mapping):
        if set(value) != {"role", "content"}:
            raise ValueError(f"expected a message with the keys role and content, found {', '.join(map(str, value))}")
        value = Message(value["role"], value["content"])
    if not isinstance(value, Message):
        raise TypeError(f"expected Message(role, content), found {_shown(value)}")
    if value.role not in _ROLES:
        raise ValueError(f"expected a message's role to be one of {', '.join(_ROLES)}, found {value.role!r}")
    _expect("a message's content", value.content, str)
    return value


def _expect(name: str, value: object, kind: type, *more: None) -> None:
    if not isinstance(value, kind) and not (more and value is None):
        raise TypeError(f"expected {name} to be {kind.__name__}{' or None' if more else ''}, found {_shown(value)}")
    if isinstance(value, str):
        value.encode()  # a lone surrogate, as from json.loads("\\ud800"), cannot be tokenised or stored


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"expected {name} to be a number, found {_shown(value)}")
    if math.isinf(value):
        raise ValueError(f"expected {name} to be finite, found {value}")
    return float(value)


def _shown(value: object) -> str:
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
