"""Prompt sets by name: those that ship, in the folder prompt_sets/, or a user's file. And what teams say beside their chats."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

from marsrl.rollout.agents.prompt_file import PromptSet, parse_prompts
from marsrl.rollout.agents.roles import Role

_SHIPPED = Path(__file__).parent / "prompt_sets"


def set_names() -> list[str]:
    """The sets that ship."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def is_prompt_file(name: str | None) -> TypeGuard[str]:
    """Does agents.<name>.prompt name a file, not a set that ships?"""
    return name is not None and name.endswith((".yaml", ".yml"))


def digest_of(file: str) -> str:
    """Eight hexadecimal digits that tell a prompt file's words from another's."""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=4).hexdigest()


def prompt_set(name: str) -> PromptSet:
    """The set of this name, or of this file; ValueError says in one line what is wrong, and where."""
    if is_prompt_file(name):
        try:
            return parse_prompts(Path(name).read_text("utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise ValueError(f"{name}: {reason}") from error
    return _shipped(name)


@lru_cache
def _shipped(name: str) -> PromptSet:
    return parse_prompts(text_of_set(name), name)


def text_of_set(name: str) -> str:
    """The file of a set that ships; ValueError names the sets there are."""
    if name not in set_names():
        raise ValueError(f"no prompt set is called {name!r}; there are {', '.join(set_names())}, and files (FILE.yaml)")
    return (_SHIPPED / f"{name}.yaml").read_text("utf-8")


def require_words(prompts: PromptSet, role: Role) -> None:
    """Raise ValueError where the set has no chat for the role; it names the sets that have."""
    if role not in prompts.turns:
        others = [name for name in set_names() if role in prompt_set(name).turns]
        raise ValueError(
            f"{prompts.name} has no words for the role {role} (it has them for {', '.join(prompts.turns)}); give a prompt that "
            f"has: {', '.join([*others, 'FILE.yaml'])}"
        )


NOTHING_SEARCHED = "Nothing has been searched for yet."


def searched(query: str, found: str) -> str:
    """One search and its result, as a search team reads them."""
    return f"<search>{query}</search>\n<information>{_inside('information', found)}</information>"


TOOLS = {
    "search": '- search: {"queries": ["...", "..."]}, pages that a search engine finds for each query',
    "scholar": '- scholar: {"queries": ["...", "..."]}, papers, with year, citations and abstract',
    "visit": '- visit: {"urls": ["...", "..."]}, what pages say whose addresses you know',
    "python": '- python: {"code": "..."}, what a Python program prints; it has no network, and keeps nothing for the next call',
}
"""Descriptions of the tools for a team that calls them in its own words."""

NEXT_TURN = "There was no call of a tool and no answer. Go on."
NOTHING_READ = "(Nothing could be read of what was found.)"


def tool_response(text: str) -> str:
    """The result of a call, for a team that calls tools in its own words."""
    return f"<tool_response>\n{_inside('tool_response', text)}\n</tool_response>"


def _inside(tag: str, text: str) -> str:
    """A stranger's text that is to stand between these tags: such tags of its own lose their brackets."""
    return re.sub(rf"<(\s*/?\s*{tag}\s*)>", r"[\1]", text, flags=re.IGNORECASE)
