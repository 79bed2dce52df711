"""`marsrl tool`: one tool call with a run's settings, through the pool that limits calls in training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import TOOL_NAMES, how_to_set
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.types import ToolCall, ToolFunction
from marsrl.trainer.config import RunConfig
from marsrl.trainer.visible import visible


def call_tool(config: RunConfig, name: str, argument: str) -> tuple[str, bool]:
    """Call a tool; return (its output as text that is safe for a terminal, True if the output is an error).

    argument: the tool's first argument as text, or a JSON object of its arguments.

    Raises:
        ValueError: the tool does not exist, or settings are invalid.
        OSError: a corpus cannot be read.
    """
    if name not in (known := dict.fromkeys((*TOOL_NAMES, *config.tools.given))):
        raise ValueError(f"there is no tool {name!r}; expected one of {', '.join(known)}")
    if name not in config.tools.given:
        raise ValueError(f"tools.{name} is not set; set its keys, {how_to_set(name)} (docs/tools.md)")
    with ExitStack() as stack:
        documents: Sequence[Document] = ()
        papers: Sequence[Document] = ()
        if config.task == "qa" and config.data.train is None:  # only the built-in world has documents
            task = build_task(config.task, config.task_options)
            stack.callback(task.close)
            documents, papers = task.documents, task.papers
        check_tools(config.tools, [name], documents, papers)
        pool = build_tools(config.tools, [name], documents, papers)
        stack.callback(pool.close)
        output = pool.submit(ToolCall(f"{name}#0", name, _arguments(argument, pool.functions(name)[0]))).result()
        counts = pool.take_counts()
    parts = f", {len(output.parts)} part{'s' * (len(output.parts) > 1)}" if output.parts else ""
    cut = "cut" if counts[f"tools/{name}/truncated"] else "whole"
    return f"{visible(output.text)}\n# {counts[f'tools/{name}/seconds']:.3f} s{parts}, {cut}", output.is_error


def _arguments(text: str, function: ToolFunction) -> str:
    """Return the call's arguments as JSON.

    A JSON object is not changed. Other text becomes the first argument, or the name of a server's tool.
    """
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    properties: Any = {"name": {}} if function.server else function.parameters.get("properties") or {"": {}}
    name, schema = next(iter(properties.items()))
    return json.dumps({name: [text] if schema.get("type") == "array" else text})
