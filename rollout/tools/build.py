"""Tools from their settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import islice

from marsrl.rollout.tools.config import HttpSearch, ToolsConfig
from marsrl.rollout.tools.documents import Document, read_corpus
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.tools.protocol import Tool
from marsrl.rollout.tools.search import IndexSearch, build_index, open_index

_LOOKED_AT = 1000  # documents of a corpus, before anything starts


def build_tools(config: ToolsConfig, names: Sequence[str], documents: Sequence[Document]) -> ToolPool:
    """The tools of these names, which the settings have, behind a pool. Close it.

    documents: the task's own, for a search without a corpus.

    Raises:
        ValueError: a corpus cannot be read as one.
        OSError: or not at all.
    """
    search = config.search
    if "search" not in names or search is None:
        return ToolPool({})
    tool: Tool
    if isinstance(search, HttpSearch):
        from marsrl.rollout.tools.retrieval import Retrieval

        tool = Retrieval(search)
    else:
        index = build_index(documents) if search.corpus is None else open_index(search.corpus, search.index)
        tool = IndexSearch(index, search.top_k)
    return ToolPool({"search": tool}, {"search": search})


def check_tools(config: ToolsConfig, names: Sequence[str], documents: Sequence[Document]) -> None:
    """Refuse what build_tools would; of a corpus the first lines are looked at.

    Raises:
        ValueError, OSError: as build_tools; the text names the key.
    """
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
