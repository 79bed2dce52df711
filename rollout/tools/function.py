"""User's Python function as a tool, called in a separate process (rollout/worker_process.py).

A request is {"arguments": JSON text}, a reply {"text"} or {"error"}. The first request is {}; its reply is the
function's schema, {"description", "parameters"}, or {"refused": why the function cannot be a tool}.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from marsrl.rollout.config import problems_of
from marsrl.rollout.own_classes import own_function
from marsrl.rollout.tools.config import FunctionTool
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.types import ToolFunction
from marsrl.rollout.worker_process import START_TIMEOUT_S, Answer, Failed, NotStarted, WorkerPool

_MOST_SHOWN = 300  # characters of an error about arguments
_PASSED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class PythonFunction:
    """Tool that passes arguments to a function by name, and returns its result: text unchanged, other values as JSON.

    Raises:
        ValueError: no such function, or it cannot be a tool; the text begins with the key.
    """

    def __init__(self, name: str, settings: FunctionTool) -> None:
        self.name, self.is_deterministic = name, settings.deterministic
        self._timeout_s = settings.timeout_s
        arguments = {"key": f"tools.{name}.function", "name": settings.function}
        self._workers = WorkerPool(
            settings.concurrency, f"{__name__}:load_function", arguments, settings.memory_mib << 20
        )
        try:
            about = self._workers.ask({}, timeout_s=START_TIMEOUT_S)
        except (NotStarted, Failed) as error:
            about = {"refused": f"tools.{name}.function is {settings.function!r}: its process {error}"}
        if "refused" in about:
            self.close()
            raise ValueError(about["refused"])
        self.functions = (ToolFunction(name, about["description"], about["parameters"]),)

    def run(self, arguments: Mapping[str, object]) -> str:
        try:
            request = {"arguments": json.dumps(arguments)}
            reply = self._workers.ask(request, timeout_s=self._timeout_s, wait_s=self._timeout_s)
        except Failed as error:
            raise ToolError(f"{self.name} {error}") from None
        if "error" in reply:
            raise ToolError(reply["error"])
        return str(reply["text"])

    def close(self) -> None:
        """End the processes; pending calls fail. May be called twice."""
        self._workers.close()


# The functions below run in the worker process.


class _WithoutTitles(GenerateJsonSchema):
    """Schemas without titles, which only repeat parameter names, to keep prompts short."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _reader(signature: str, function: Callable[..., Any]) -> tuple[TypeAdapter[dict[str, Any]], dict[str, Any]]:
    """Return (parser of JSON text to keyword arguments, schema of the arguments); ValueError says why models cannot call the
    function."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in _PASSED_BY_NAME:
            raise ValueError(f"{signature} takes {parameter}; expected only parameters that can be passed by name")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"{signature} has no annotation for {parameter.name}; expected one, for the JSON schema")
    if not inspect.getdoc(function):
        raise ValueError(f"{signature} has no docstring; expected one that tells models what the function does")

    @functools.wraps(function)  # keeps the signature; separates errors in the arguments from errors in the function
    def arguments(**given: Any) -> dict[str, Any]:
        return given

    arguments.__annotations__ = {**function.__annotations__, "return": dict[str, Any]}
    try:
        # TypeAdapter accepts functions, but its type hints do not.
        reader: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)  # type: ignore[arg-type]
        return reader, reader.json_schema(schema_generator=_WithoutTitles)
    except (PydanticUserError, NameError, TypeError) as error:
        raise ValueError(
            f"{signature} has no JSON schema ({str(error).splitlines()[0]}); change its annotations"
        ) from error


def _answer(key: str, name: str) -> Answer:
    """Return the worker's answering function; ValueError says why the user's function cannot be a tool."""
    function = own_function(key, name)
    signature = f"{key} is {name!r}: {function.__name__}{inspect.signature(function)}"
    reader, parameters = _reader(signature, function)

    def answer(request: dict[str, Any]) -> dict[str, object]:
        if "arguments" not in request:
            return {"description": inspect.getdoc(function), "parameters": parameters}
        try:
            arguments = reader.validate_json(request["arguments"])
        except ValidationError as error:
            return {"error": f"wrong arguments: {problems_of(error)[:_MOST_SHOWN]}"}
        result = function(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return {"text": result if isinstance(result, str) else to_json(result).decode()}

    return answer


def load_function(key: str, name: str) -> Answer:
    """Return the worker's answering function; for a function that cannot be a tool, one that answers with the reason."""
    try:
        return _answer(key, name)
    except ValueError as error:
        refused = {"refused": str(error)}
        return lambda asked: refused
