"""Prompt sets (users' YAML files, see docs/prompts.md, and built-in ones in prompt_sets/) and texts that teams add to chats.

turns:
  solver:
    - user: "{problem}"
  verifier:
    - system: Grade the solution. End with "Grade - right" or "Grade - wrong".
    - user: "{problem}\\n\\n{solution}"
answer: boxed
verdict:
  correct: {regex: "Grade - right"}
  wrong: {regex: "Grade - wrong"}

Every ValueError is one line that begins with the file and its line number.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NoReturn, TypeGuard, TypeVar

import yaml

from marsrl.rollout.agents.parsers import COMPATS, PARSERS, Compat, Parser, regex_text, regex_verdict
from marsrl.rollout.agents.roles import PLACEHOLDERS, READS, Role
from marsrl.rollout.types import Message

TAUGHT = ("chain", "facts")
"""Built-in sets for warm-started policies: the warm start teaches the form of answers, so their prompts need not ask for it."""

_SHIPPED = Path(__file__).parent / "prompt_sets"
_NAMES = tuple(dict.fromkeys(name for needed, allowed in PLACEHOLDERS.values() for name in (*needed, *allowed)))
# A placeholder, or doubled braces, which escape a literal {word}.
_FIELD = re.compile(rf"\{{\{{([a-z_]{{2,}})\}}\}}|\{{({'|'.join(_NAMES)})\}}")
# The keys for yes and no, in the order of a parser's expressions.
_KINDS = {
    "verdict": ("correct", "wrong"),
    "route": ("enough", "missing"),
}
_KEYS = ("turns", *PARSERS, "form", "purpose")
_SPEAKERS = ("system", "user", "assistant")
# Matches an unknown placeholder {word}, but not LaTeX, where braces follow a command, an argument, or a sub- or superscript.
_UNKNOWN = re.compile(r"(?<![\w\\}^{])\{([a-z_]{2,})\}(?!\})")
_Checked = TypeVar("_Checked")


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Chats by role, and the parsers of their completions.

    name: the built-in set's name, or the file's path. turns: chats with placeholders. parsers: parsers by kind (parsers.PARSERS).
    purpose: text that replaces {purpose} if a tool call states its purpose. form: text that asks for the form of answers; it is
    added to the last turn, unless the chat or its problem already shows the form. suffix: text with placeholders that is appended
    to every chat.
    """

    name: str
    turns: Mapping[Role, tuple[Message, ...]]
    parsers: Mapping[str, Parser]
    purpose: str = "{purpose}"
    form: str = ""
    suffix: str = ""

    def fill(self, role: Role, **values: str) -> tuple[Message, ...]:
        """Fill the chat's placeholders; those without a value become "". A placeholder inside a value is not filled."""
        if values.get("purpose"):
            values["purpose"] = self.purpose.replace("{purpose}", values["purpose"])

        def value(match: re.Match[str]) -> str:
            return f"{{{match[1]}}}" if match[1] else values.get(match[2], "")

        turns = self.turns[role]
        filled = [Message(turn.role, _FIELD.sub(value, turn.content)) for turn in turns]
        # Other agents' texts may show the form without asking for it.
        shown_texts = (
            values.get("problem", ""),
            self.suffix,
            *(turn.content for turn in turns),
        )
        below = []
        if self.form and READS.get(role) == "answer" and not self.parsers["answer"].is_shown(*shown_texts):
            below.append(self.form)
        if self.suffix:
            below.append(_FIELD.sub(value, self.suffix))
        if below:
            filled[-1] = Message("user", "\n\n".join((filled[-1].content, *below)))
        return tuple(filled)

    def with_words(self, roles: Collection[Role], system: str | None, suffix: str | None) -> PromptSet:
        """Return the set with `system` as system turn and `suffix` below the last user turn, in the chats of these roles.

        Raises ValueError if `system` or `suffix` has a placeholder that a role lacks, or if `system` would replace a turn with a
        placeholder that the role needs. The message begins with the setting's name.
        """
        turns = dict(self.turns)
        for role in [role for role in roles if role in turns]:
            for name, text in (("system", system), ("suffix", suffix)):
                if message := _wrong_placeholder(role, text or "")[1]:
                    raise ValueError(f"{name}: {message}")
            chat = [turn for turn in turns[role] if system is None or turn.role != "system"]
            if system is not None:
                chat.insert(0, Message("system", system))
            turns[role] = tuple(chat)
            texts = (suffix or "", *(turn.content for turn in chat))
            shown = {match[2] for text in texts for match in _FIELD.finditer(text)}
            if missing := [name for name in PLACEHOLDERS[role][0] if name not in shown]:
                raise ValueError(
                    f"system replaces the turn of {role} that shows {{{missing[0]}}}; add {{{missing[0]}}} to it"
                )
        return replace(self, turns=turns, suffix=suffix or "")

    def compat(self) -> Compat | None:
        """Return the parser of published code whose marker the Verifier's prompt asks for; None without one."""
        told = "".join(turn.content for turn in self.turns.get(Role.VERIFIER, ()))
        return next((each for each in COMPATS.values() if each.marker in told), None)


def parse_prompts(text: str, name: str) -> PromptSet:
    """Parse a prompt set from a file's text. name: name of the set, which errors show as the file's name.

    Raises:
        ValueError: invalid YAML; an unknown key, role, parser or placeholder; a missing placeholder that the role needs; an
            expression that RE2 rejects.
    """
    return _File(name).prompts(text)


class _File:
    def __init__(self, name: str) -> None:
        self._name = name

    def prompts(self, text: str) -> PromptSet:
        try:
            top = yaml.compose(text, yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ValueError(f"{self._name}:{line}: {error.problem}") from error
        except yaml.YAMLError as error:  # a character that YAML rejects
            raise ValueError(f"{self._name}:1: {' '.join(str(error).split())}") from error
        if top is None:
            raise ValueError(f"{self._name}:1: the file is empty; expected `turns`")
        nodes = self._mapping(top, _KEYS)
        if "turns" not in nodes:
            self._fail(top, "the key turns is missing; expected chats by role")
        turn_nodes = self._mapping(nodes["turns"], [str(role) for role in PLACEHOLDERS])
        turns = {Role(role): self._turns(Role(role), node) for role, node in turn_nodes.items()}
        parsers = {part: self._parser(part, nodes[part]) for part in PARSERS if part in nodes}
        for role, part in READS.items():
            if role in turns and part not in parsers:
                self._fail(turn_nodes[role], f"the key {part} is missing; expected a parser for the {part} of {role}")
        form, purpose = (self._text(nodes[key]) if key in nodes else "" for key in ("form", "purpose"))
        if purpose and "{purpose}" not in purpose:
            self._fail(nodes["purpose"], "purpose lacks the placeholder {purpose}")
        return PromptSet(self._name, turns, parsers, purpose or "{purpose}", form)

    def _turns(self, role: Role, node: yaml.Node) -> tuple[Message, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            self._fail(node, f'expected a list of turns of {role}, such as `- user: "{{problem}}"`')
        needed, allowed = PLACEHOLDERS[role]
        turns, shown = [], set[str]()
        for turn_node in node.value:
            turn = self._mapping(turn_node, _SPEAKERS)
            if len(turn) != 1:
                self._fail(turn_node, f"expected one of {', '.join(_SPEAKERS)} in a turn, found {len(turn)}")
            ((speaker, content),) = turn.items()
            text = self._text(content)
            shown |= self._placeholders(role, content, text)
            turns.append(Message(speaker, text))  # type: ignore[arg-type]  # a key of the mapping
        if turns[-1].role != "user":
            self._fail(node.value[-1], f"the last turn of {role} is by {turns[-1].role}; expected user")
        if missing := [name for name in needed if name not in shown]:
            have = ", ".join(f"{{{name}}}" for name in (*needed, *allowed))
            self._fail(node, f"the turns of {role} lack {{{missing[0]}}}; its placeholders are {have}")
        return tuple(turns)

    def _placeholders(self, role: Role, node: yaml.Node, text: str) -> set[str]:
        start, message = _wrong_placeholder(role, text)
        if message:
            self._fail(node, message, text.count("\n", 0, start) + 1 if node.style == "|" else 0)
        return {match[2] for match in _FIELD.finditer(text) if match[2]}

    def _parser(self, part: str, node: yaml.Node) -> Parser:
        named = PARSERS[part]
        if isinstance(node, yaml.ScalarNode):
            name = self._text(node)
            if name not in named:
                self._fail(
                    node, f"{part}: no parser named {name!r}; expected one of {', '.join(named)}, or expressions"
                )
            return named[name]
        if part not in _KINDS:
            regex, example = self._expression(node)
            read = self._checked(node, f"{part}.regex", lambda: regex_text(regex))
            if example and "ANSWER" not in example:
                self._fail(node, f"{part}.example lacks ANSWER in place of the text to read")
            return Parser(read, (example,) if example else ())
        kinds = _KINDS[part]
        nodes = self._mapping(node, kinds)
        for kind in kinds:
            if kind not in nodes:
                self._fail(node, f"{part} lacks the key {kind}; expected an expression for {kind}")
        (yes, said_yes), (no, said_no) = (self._expression(nodes[kind]) for kind in kinds)
        verdict = self._checked(node, f"{part}: one of its expressions", lambda: regex_verdict(yes, no))
        for kind, example, right in zip(kinds, (said_yes, said_no), (True, False)):
            if example and verdict(example) is not right:
                self._fail(nodes[kind], f"{part}.{kind}.example {example!r} is not parsed as {kind}")
        return Parser(verdict, (said_yes, said_no) if said_yes and said_no else ())

    def _expression(self, node: yaml.Node) -> tuple[str, str]:
        """Return (the regular expression, an example that it matches or "")."""
        nodes = self._mapping(node, ("regex", "example"))
        if "regex" not in nodes:
            self._fail(node, "expected {regex: ..., example: ...}")
        return self._text(nodes["regex"]), self._text(nodes["example"]) if "example" in nodes else ""

    def _checked(self, node: yaml.Node, key: str, make: Callable[[], _Checked]) -> _Checked:
        try:
            return make()
        except ValueError as error:
            self._fail(node, f"{key} {' '.join(str(error).split())}")

    def _mapping(self, node: yaml.Node, keys: Collection[str]) -> Mapping[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"expected keys among {', '.join(keys)}, found {_shown(node)}")
        nodes: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in keys:
                near = difflib.get_close_matches(name, keys, n=1)
                self._fail(
                    key,
                    f"unknown key {name}; {f'did you mean {near[0]}?' if near else 'expected one of ' + ', '.join(keys)}",
                )
            if name in nodes:
                self._fail(key, f"the key {name} is given twice; remove one")
            nodes[name] = value
        return nodes

    def _text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null" or not node.value:
            quote = "; a text that begins with a brace needs quotes" if isinstance(node, yaml.MappingNode) else ""
            self._fail(node, f"expected a text, found {_shown(node)}{quote}")
        return str(node.value)

    def _fail(self, node: yaml.Node, message: str, lines_below: int = 0) -> NoReturn:
        raise ValueError(f"{self._name}:{node.start_mark.line + 1 + lines_below}: {message}")


def _wrong_placeholder(role: Role, text: str) -> tuple[int, str]:
    """Return (position, message) of the first placeholder that the role does not have; the message is "" without any."""
    needed, allowed = PLACEHOLDERS[role]
    known = (*needed, *allowed)
    found = [(match.start(), match[2]) for match in _FIELD.finditer(text) if match[2]]
    for start, name in (*found, *((match.start(), match[1]) for match in _UNKNOWN.finditer(text))):
        if name not in known:
            have = ", ".join(f"{{{each}}}" for each in known)
            return (
                start,
                f"{role} has no {{{name}}}; its placeholders are {have}; for a literal word in braces write {{{{{name}}}}}",
            )
    return 0, ""


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value[:60]) if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys"


def set_names() -> list[str]:
    """Return the names of built-in sets."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def is_prompt_file(name: str | None) -> TypeGuard[str]:
    """Return True if agents.<name>.prompt names a file, not a built-in set."""
    return name is not None and name.endswith((".yaml", ".yml"))


def digest_of(file: str) -> str:
    """Return eight hexadecimal digits that identify a prompt file's contents."""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=4).hexdigest()


def prompt_set(name: str) -> PromptSet:
    """Load the set of this name or file; ValueError gives the error and its position in one line."""
    if is_prompt_file(name):
        try:
            return parse_prompts(Path(name).read_text("utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ValueError(f"{name}: {reason}") from error
    return _shipped(name)


@lru_cache
def _shipped(name: str) -> PromptSet:
    return parse_prompts(text_of_set(name), name)


def text_of_set(name: str) -> str:
    """Return the file text of a built-in set; ValueError lists the sets."""
    if name not in set_names():
        raise ValueError(f"no prompt set named {name!r}; expected one of {', '.join(set_names())}, or FILE.yaml")
    return (_SHIPPED / f"{name}.yaml").read_text("utf-8")


def require_words(prompts: PromptSet, role: Role) -> None:
    """Raise ValueError, which lists suitable sets, if the set has no chat for the role."""
    if role not in prompts.turns:
        others = [name for name in set_names() if role in prompt_set(name).turns]
        raise ValueError(
            f"{prompts.name} has no chat for the role {role} (only for {', '.join(prompts.turns)}); set a prompt that "
            f"has one: {', '.join([*others, 'FILE.yaml'])}"
        )


NOTHING_SEARCHED = "Nothing has been searched for yet."


def searched(query: str, result: str) -> str:
    """Format one search and its result for a search team."""
    return f"<search>{query}</search>\n<information>{without_tags('information', result)}</information>"


TOOLS = {
    "search": '- search: {"queries": ["...", "..."]}, pages that a search engine finds for each query',
    "scholar": '- scholar: {"queries": ["...", "..."]}, papers, with year, citations and abstract',
    "visit": '- visit: {"urls": ["...", "..."]}, what pages say whose addresses you know',
    "python": '- python: {"code": "..."}, what a Python program prints; it has no network, and keeps nothing for the next call',
}
"""Descriptions of tools for a team with its own call format."""

NEXT_TURN = "There was no call of a tool and no answer. Go on."
NOTHING_READ = "(Nothing could be read of what was found.)"


def tool_response(text: str) -> str:
    """Format the result of a call, for a team with its own call format."""
    return f"<tool_response>\n{without_tags('tool_response', text)}\n</tool_response>"


def without_tags(tag: str, text: str) -> str:
    """Replace the brackets of these tags in untrusted text, which can then be put between such tags."""
    # Two adjacent \s* would let hostile text take quadratic time.
    return re.sub(rf"<(\s*(?:/\s*)?{tag}\s*)>", r"[\1]", text, flags=re.IGNORECASE)
