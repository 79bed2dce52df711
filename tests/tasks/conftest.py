"""The linked facts of a module's OPTIONS, and the tool that finds them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marsrl.rollout.tasks.linked_facts import World
from marsrl.rollout.tools.search import CorpusSearch, build_index


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> World:
    return World(request.module.OPTIONS)


@pytest.fixture(scope="module")
def tool(world: World) -> Iterator[CorpusSearch]:
    tool = CorpusSearch(build_index(world.documents), top_k=1)
    yield tool
    tool.close()
