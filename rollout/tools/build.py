"""Tools from their settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import islice

from marsrl.rollout.tools.config import HttpSearch, SearchConfig, ToolLimits, ToolsConfig
from marsrl.rollout.tools.documents import Document, read_corpus
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.tools.protocol import Tool
from marsrl.rollout.tools.search import IndexSearch, build_index, open_index

_LOOKED_AT = 1000  # documents of a corpus, before anything starts


def build_tools(config: ToolsConfig, names: Sequence[str], documents: Sequence[Document]) -> ToolPool:
    """The tools of these names, which the settings have, behind a pool. Close it.

    documents: the task's own, for a search without a corpus.

    Raises:
        ValueError: a corpus cannot be read as one; this machine has no sandbox for tools.python.
        OSError: or not at all.
    """
    tools: dict[str, Tool] = {}
    limits: dict[str, ToolLimits] = {}
    if "search" in names and config.search is not None:
        tools["search"], limits["search"] = _search(config.search, documents), config.search
    if "python" in names and config.python is not None:
        from marsrl.rollout.tools.python.tool import PythonInterpreter

        tools["python"], limits["python"] = PythonInterpreter(config.python), config.python
    return ToolPool(tools, limits)


def _search(search: SearchConfig, documents: Sequence[Document]) -> Tool:
    if isinstance(search, HttpSearch):
        from marsrl.rollout.tools.retrieval import Retrieval

        return Retrieval(search)
    index = build_index(documents) if search.corpus is None else open_index(search.corpus, search.index)
    return IndexSearch(index, search.top_k)


def check_tools(config: ToolsConfig, names: Sequence[str], documents: Sequence[Document]) -> None:
    """Refuse what build_tools would; of a corpus the first lines are looked at.

    Raises:
        ValueError, OSError: as build_tools; the text names the key.
    """
    if "python" in names and config.python is not None:
        from marsrl.rollout.tools.python.launcher import choose_launcher

        choose_launcher(config.python)
    search = config.search
    if "search" not in names or search is None:
        return
    if isinstance(search, HttpSearch):
        if importlib.util.find_spec("httpx") is None:
            raise ValueError("tools.search.kind=http needs the package httpx: pip install httpx (marsrl[openai])")
    elif search.corpus is not None:
        try:
            for _ in islice(read_corpus(search.corpus), _LOOKED_AT):
                pass
        except (ValueError, OSError) as error:
            raise ValueError(f"tools.search.corpus: {error}") from error
    elif not documents:
        raise ValueError(
            "tools.search.corpus is null, and the task has no documents of its own (only task=qa without data.train has); "
            "give a jsonl file of {id, title, text}, or tools.search.kind=http"
        )
