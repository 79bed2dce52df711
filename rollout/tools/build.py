"""Construction of tools from their settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

from marsrl.rollout.imports import check_installed
from marsrl.rollout.tools.config import (
    FunctionTool,
    HttpSearch,
    IndexScholar,
    IndexSearch,
    McpServer,
    OwnTool,
    PagesConfig,
    PythonTool,
    SerpApiSearch,
    ToolLimits,
    ToolsConfig,
    VisitTool,
)
from marsrl.rollout.tools.documents import Document, read_corpus, read_papers
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.tools.protocol import SHIPPED, ReadPages, Tool
from marsrl.rollout.tools.search import CorpusSearch, build_index, open_index
from marsrl.rollout.types import ToolCall, ToolFunction, ToolOutput

_LOOKED_AT = 1000  # number of a corpus's documents that are checked before the run starts


def build_tools(
    config: ToolsConfig, names: Sequence[str], documents: Sequence[Document], papers: Sequence[Document] = ()
) -> ToolPool:
    """Build a pool of the named tools. The caller must close it.

    names: tools to build; those without settings are skipped. documents, papers: the task's corpora, for search and scholar
        without a configured corpus.

    Raises:
        ValueError, OSError: a corpus is invalid or cannot be read; this machine has no sandbox for tools.python.
    """
    tool_settings = {name: config.given[name] for name in names if name in config.given}
    if any(map(_reads_pages, tool_settings.values())):
        tool_settings["pages"] = config.pages

    def read_pages(urls: Sequence[str], wait_s: float) -> list[ToolOutput]:
        calls = [pool.submit(ToolCall(f"pages#{i}", "pages", json.dumps({"url": u}))) for i, u in enumerate(urls)]
        in_time, _ = wait(calls, wait_s)
        late = ToolOutput("error: the page did not arrive in time", is_error=True)
        return [call.result() if call in in_time and not call.cancelled() else late for call in calls]

    with ExitStack() as stack:
        tools: dict[str, Tool] = {}
        for name, settings in tool_settings.items():
            tools[name] = _build_tool(name, settings, papers if name == "scholar" else documents, read_pages)
            stack.callback(tools[name].close)
        stack.pop_all()  # the pool owns the tools now
    pool = ToolPool(tools, tool_settings)
    return pool


def _reads_pages(settings: ToolLimits) -> bool:
    return isinstance(settings, VisitTool) or (isinstance(settings, SerpApiSearch) and settings.read_pages)


def _build_tool(name: str, settings: ToolLimits, documents: Sequence[Document], read_pages: ReadPages) -> Tool:
    if isinstance(settings, HttpSearch | SerpApiSearch):
        from marsrl.rollout.tools.servers import Retrieval, SerpApi

        return Retrieval(settings) if isinstance(settings, HttpSearch) else SerpApi(name, settings, read_pages)
    if isinstance(settings, VisitTool | PagesConfig):
        from marsrl.rollout.tools.pages import Pages, Visit

        return Visit(settings, read_pages) if isinstance(settings, VisitTool) else Pages(settings)
    if isinstance(settings, PythonTool):
        from marsrl.rollout.tools.python.tool import PythonInterpreter

        return PythonInterpreter(settings)
    if isinstance(settings, FunctionTool):
        from marsrl.rollout.tools.function import PythonFunction

        return PythonFunction(name, settings)
    if isinstance(settings, McpServer):
        from marsrl.rollout.tools.mcp_client import McpTools

        return McpTools(name, settings)
    assert isinstance(settings, IndexSearch), settings
    if settings.corpus is None:
        index = build_index(documents)
    else:
        index = open_index(settings.corpus, settings.index, _reader(settings))
    return CorpusSearch(index, settings.top_k, "Paper" if name == "scholar" else "Doc")


def check_tools(
    config: ToolsConfig, names: Sequence[str], documents: Sequence[Document], papers: Sequence[Document] = ()
) -> dict[str, Sequence[ToolFunction]]:
    """Check the tools' settings as build_tools does, and return each tool's functions, as chat templates show them.

    Reads only the first lines of a corpus, and starts a user's own tools briefly.

    Raises:
        ValueError, OSError: as build_tools, or two tools have a function of the same name; the message names the key.
    """
    for name in names:
        settings, key = config.given.get(name), f"tools.{name}"
        if settings is not None and _reads_pages(settings):
            read = key if name == "visit" else f"{key}.read_pages"
            check_installed(read, "httpx", "trafilatura", "pypdf", extra="web")
        if isinstance(settings, McpServer):
            check_installed(f"{key}.kind=mcp", "mcp", extra="mcp")
        if isinstance(settings, PythonTool):
            from marsrl.rollout.tools.python.launcher import check_sandbox

            check_sandbox(settings)
        elif isinstance(settings, HttpSearch | SerpApiSearch):
            check_installed(f"{key}.kind={settings.kind}", "httpx", extra="openai")
            if isinstance(settings, SerpApiSearch):
                from marsrl.rollout.config import read_key

                read_key(settings.api_key_env, f"{key}.api_key_env")
        elif isinstance(settings, IndexSearch) and settings.corpus is not None:
            try:
                for _ in islice(_reader(settings)(settings.corpus), _LOOKED_AT):
                    pass
            except (ValueError, OSError) as error:
                raise ValueError(f"{key}.corpus: {error}") from error
        elif isinstance(settings, IndexSearch) and not (papers if name == "scholar" else documents):
            what, form = ("papers", "{title, abstract}") if name == "scholar" else ("documents", "{id, title, text}")
            raise ValueError(
                f"{key}.corpus is null, but the task has no {what} (only task=qa without data.train has); set it to a "
                f"jsonl file of {form}, or set another {key}.kind"
            )
    own_tools = [name for name in names if isinstance(config.given.get(name), OwnTool)]
    with closing(build_tools(config, own_tools, ())) as pool:
        shown = {
            name: pool.functions(name) if name in own_tools else (SHIPPED[name],)
            for name in names
            if name in config.given
        }
    having: dict[str, str] = {}
    for name, functions in shown.items():
        for function in functions:
            if (other := having.setdefault(function.name, name)) != name:
                raise ValueError(
                    f"tools.{other} and tools.{name} both have a function {function.name}, but models call functions by name; "
                    "rename one, or omit it (tools of kind mcp: `tools`)"
                )
    return shown


def _reader(settings: IndexSearch) -> Callable[[str | Path], Iterator[Document]]:
    return read_papers if isinstance(settings, IndexScholar) else read_corpus
