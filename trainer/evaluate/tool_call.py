"""`marsrl tool`: one call of one tool, with the settings of a run and through the pool that bounds it in training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import TOOL_NAMES, how_to_set
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.types import ToolCall, ToolOutput
from marsrl.trainer.config import RunConfig


@dataclass(frozen=True, slots=True)
class Called:
    """What came of a call. seconds: of the tool alone."""

    output: ToolOutput
    seconds: float
    is_cut: bool

    def text(self) -> str:
        """For a terminal, which is to show what a tool says and not to obey it."""
        said = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in self.output.text)
        num = len(self.output.parts)
        parts = f", {num} part{'s' * (num > 1)}" if num else ""
        return f"{said}\n# {self.seconds:.3f} s{parts}, {'cut' if self.is_cut else 'whole'}"


def call_tool(config: RunConfig, name: str, argument: str) -> Called:
    """Call the tool.

    argument: the one text that it takes, or a JSON object of its arguments.

    Raises:
        ValueError: there is no such tool, or its settings cannot be used.
        OSError: a corpus cannot be read.
    """
    if name not in TOOL_NAMES:
        raise ValueError(f"there is no tool {name!r}; there are: {', '.join(TOOL_NAMES)}")
    if name not in config.tools.names:
        raise ValueError(f"tools.{name} is not set; set its keys, {how_to_set(name)} (docs/tools.md)")
    with ExitStack() as stack:
        documents: Sequence[Document] = ()
        papers: Sequence[Document] = ()
        if config.task == "qa" and config.data.train is None:  # no other task has any
            task = build_task(config.task, config.task_options)
            stack.callback(task.close)
            documents, papers = task.documents, task.papers
        check_tools(config.tools, [name], documents, papers)
        pool = build_tools(config.tools, [name], documents, papers)
        stack.callback(pool.close)
        output = pool.submit(ToolCall(f"{name}#0", name, _arguments(argument, pool.argument(name)))).result()
        counts = pool.take_counts()
    return Called(output, counts[f"tools/{name}/seconds"], bool(counts[f"tools/{name}/truncated"]))


def _arguments(given: str, name: str) -> str:
    """What is a JSON object stays one; any other text is the argument of this name."""
    try:
        is_object = isinstance(json.loads(given), dict)
    except (ValueError, RecursionError):
        is_object = False
    return given if is_object else json.dumps({name: given})
