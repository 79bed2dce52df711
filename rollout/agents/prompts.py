"""Prompt sets: a user's YAML files (docs/prompts.md) and those in prompt_sets/; and texts that teams add to their chats.

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

Every ValueError is one line that begins with the file and the line in it.
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
"""Sets that ship for policies that are taught here, so that they need not ask for the form of an answer."""

_SHIPPED = Path(__file__).parent / "prompt_sets"
_NAMES = tuple(dict.fromkeys(name for needed, allowed in PLACEHOLDERS.values() for name in (*needed, *allowed)))
# a placeholder, or doubled braces, an escaped literal {word}
_FIELD = re.compile(rf"\{{\{{([a-z_]{{2,}})\}}\}}|\{{({'|'.join(_NAMES)})\}}")
_KINDS = {"verdict": ("correct", "wrong"), "route": ("enough", "missing")}  # yes and no, where expressions read them
_KEYS = ("turns", *PARSERS, "form", "purpose")
_SPEAKERS = ("system", "user", "assistant")
# {word}, but not in LaTeX, where braces follow a command, an argument, or a sub- or superscript
_UNKNOWN = re.compile(r"(?<![\w\\}^{])\{([a-z_]{2,})\}(?!\})")
_Checked = TypeVar("_Checked")


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The roles' chats, and the parsers of their completions.

    name: of the set that ships, or the file's path; turns: with placeholders; parsers: by kind (parsers.PARSERS); purpose: the
    text for {purpose} if a tool call states one; form: asks for the form of answers, below the last turn of a chat that shows
    it neither in its turns nor in its problem; suffix: ends every chat, with placeholders.
    """

    name: str
    turns: Mapping[Role, tuple[Message, ...]]
    parsers: Mapping[str, Parser]
    purpose: str = "{purpose}"
    form: str = ""
    suffix: str = ""

    def fill(self, role: Role, **values: str) -> tuple[Message, ...]:
        """The chat with its placeholders filled, "" for those without a value. One pass: a "{report}" inside a value stays."""
        if values.get("purpose"):
            values["purpose"] = self.purpose.replace("{purpose}", values["purpose"])

        def value(match: re.Match[str]) -> str:
            return f"{{{match[1]}}}" if match[1] else values.get(match[2], "")

        turns = self.turns[role]
        filled = [Message(turn.role, _FIELD.sub(value, turn.content)) for turn in turns]
        told = (values.get("problem", ""), self.suffix, *(turn.content for turn in turns))  # no text of other agents
        below = []
        if self.form and READS.get(role) == "answer" and not self.parsers["answer"].is_shown(*told):
            below.append(self.form)
        if self.suffix:
            below.append(_FIELD.sub(value, self.suffix))
        if below:
            filled[-1] = Message("user", "\n\n".join((filled[-1].content, *below)))
        return tuple(filled)

    def with_words(self, roles: Collection[Role], system: str | None, suffix: str | None) -> PromptSet:
        """The set with this system turn, and this text below the user's last turn, in its chats of these roles.

        Raises ValueError that begins with the name of the text: it has a placeholder that a role lacks, or `system` replaces a
        turn with one that the role needs.
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
                    f"system replaces the turn of {role} that shows {{{missing[0]}}}: write that in it, too"
                )
        return replace(self, turns=turns, suffix=suffix or "")

    def compat(self) -> Compat | None:
        """The published code's parser whose marker the Verifier's prompt asks for; None without one."""
        told = "".join(turn.content for turn in self.turns.get(Role.VERIFIER, ()))
        return next((each for each in COMPATS.values() if each.marker in told), None)


def parse_prompts(text: str, name: str) -> PromptSet:
    """Parse a prompt set from a file's text; name: of the set, and of the file in errors.

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
            raise ValueError(f"{self._name}:1: it is empty, expected `turns`")
        found = self._mapping(top, _KEYS)
        if "turns" not in found:
            self._fail(top, "there is no key turns, the chats by role")
        of_roles = self._mapping(found["turns"], [str(role) for role in PLACEHOLDERS])
        turns = {Role(role): self._turns(Role(role), node) for role, node in of_roles.items()}
        parsers = {what: self._parser(what, found[what]) for what in PARSERS if what in found}
        for role, what in READS.items():
            if role in turns and what not in parsers:
                self._fail(of_roles[role], f"there is no key {what}, how the {what} of {role} is read")
        form, purpose = (self._text(found[key]) if key in found else "" for key in ("form", "purpose"))
        if purpose and "{purpose}" not in purpose:
            self._fail(found["purpose"], "purpose lacks {purpose}")
        return PromptSet(self._name, turns, parsers, purpose or "{purpose}", form)

    def _turns(self, role: Role, node: yaml.Node) -> tuple[Message, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            self._fail(node, f'expected a list of turns of {role}, such as `- user: "{{problem}}"`')
        needed, allowed = PLACEHOLDERS[role]
        turns, shown = [], set[str]()
        for each in node.value:
            turn = self._mapping(each, _SPEAKERS)
            if len(turn) != 1:
                self._fail(each, f"expected one of {', '.join(_SPEAKERS)} in a turn, found {len(turn)}")
            ((speaker, content),) = turn.items()
            text = self._text(content)
            shown |= self._placeholders(role, content, text)
            turns.append(Message(speaker, text))  # type: ignore[arg-type]  # a key of the mapping
        if turns[-1].role != "user":
            self._fail(node.value[-1], f"the last turn of {role} is the {turns[-1].role}'s, expected the user's")
        if missing := [name for name in needed if name not in shown]:
            have = ", ".join(f"{{{name}}}" for name in (*needed, *allowed))
            self._fail(node, f"the turns of {role} lack {{{missing[0]}}}; it has {have}")
        return tuple(turns)

    def _placeholders(self, role: Role, node: yaml.Node, text: str) -> set[str]:
        start, message = _wrong_placeholder(role, text)
        if message:
            self._fail(node, message, text.count("\n", 0, start) + 1 if node.style == "|" else 0)
        return {match[2] for match in _FIELD.finditer(text) if match[2]}

    def _parser(self, what: str, node: yaml.Node) -> Parser:
        named = PARSERS[what]
        if isinstance(node, yaml.ScalarNode):
            name = self._text(node)
            if name not in named:
                self._fail(node, f"{what}: no parser is called {name!r}; there are {', '.join(named)}, and expressions")
            return named[name]
        if what not in _KINDS:
            regex, example = self._expression(node)
            read = self._checked(node, f"{what}.regex", lambda: regex_text(regex))
            if example and "ANSWER" not in example:
                self._fail(node, f"{what}.example lacks ANSWER, where what is read stands")
            return Parser(read, (example,) if example else ())
        kinds = _KINDS[what]
        found = self._mapping(node, kinds)
        for kind in kinds:
            if kind not in found:
                self._fail(node, f"{what} has no key {kind}: how {kind} is said")
        (yes, said_yes), (no, said_no) = (self._expression(found[kind]) for kind in kinds)
        verdict = self._checked(node, f"{what}: one of its expressions", lambda: regex_verdict(yes, no))
        for kind, example, right in zip(kinds, (said_yes, said_no), (True, False)):
            if example and verdict(example) is not right:
                self._fail(found[kind], f"{what}.{kind}.example {example!r} is not read as {kind}")
        return Parser(verdict, (said_yes, said_no) if said_yes and said_no else ())

    def _expression(self, node: yaml.Node) -> tuple[str, str]:
        """(the regular expression, an example that it matches or "")."""
        found = self._mapping(node, ("regex", "example"))
        if "regex" not in found:
            self._fail(node, "expected {regex: ..., example: ...}")
        return self._text(found["regex"]), self._text(found["example"]) if "example" in found else ""

    def _checked(self, node: yaml.Node, key: str, make: Callable[[], _Checked]) -> _Checked:
        try:
            return make()
        except ValueError as error:
            self._fail(node, f"{key} {' '.join(str(error).split())}")

    def _mapping(self, node: yaml.Node, keys: Collection[str]) -> Mapping[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"expected keys among {', '.join(keys)}, found {_shown(node)}")
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in keys:
                near = difflib.get_close_matches(name, keys, n=1)
                self._fail(
                    key, f"unknown key {name}; {f'did you mean {near[0]}?' if near else 'there are ' + ', '.join(keys)}"
                )
            if name in found:
                self._fail(key, f"the key {name} is there twice")
            found[name] = value
        return found

    def _text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null" or not node.value:
            quote = "; a text that begins with a brace needs quotes" if isinstance(node, yaml.MappingNode) else ""
            self._fail(node, f"expected a text, found {_shown(node)}{quote}")
        return str(node.value)

    def _fail(self, node: yaml.Node, message: str, lines_below: int = 0) -> NoReturn:
        raise ValueError(f"{self._name}:{node.start_mark.line + 1 + lines_below}: {message}")


def _wrong_placeholder(role: Role, text: str) -> tuple[int, str]:
    """(position, message) of the first placeholder that the role does not have; the message is "" without any."""
    needed, allowed = PLACEHOLDERS[role]
    known = (*needed, *allowed)
    found = [(match.start(), match[2]) for match in _FIELD.finditer(text) if match[2]]
    for start, name in (*found, *((match.start(), match[1]) for match in _UNKNOWN.finditer(text))):
        if name not in known:
            have = ", ".join(f"{{{each}}}" for each in known)
            return start, f"{role} has no {{{name}}}; it has {have}; for the word in braces write {{{{{name}}}}}"
    return 0, ""


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value[:60]) if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys"


def set_names() -> list[str]:
    """Names of the sets that ship."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def is_prompt_file(name: str | None) -> TypeGuard[str]:
    """True if agents.<name>.prompt names a file, not a set that ships."""
    return name is not None and name.endswith((".yaml", ".yml"))


def digest_of(file: str) -> str:
    """Eight hexadecimal digits that identify a prompt file's contents."""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=4).hexdigest()


def prompt_set(name: str) -> PromptSet:
    """The set of this name or file; ValueError with one line that says what is wrong, and where."""
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
    """The file text of a set that ships; ValueError names the sets."""
    if name not in set_names():
        raise ValueError(f"no prompt set is called {name!r}; there are {', '.join(set_names())}, and files (FILE.yaml)")
    return (_SHIPPED / f"{name}.yaml").read_text("utf-8")


def require_words(prompts: PromptSet, role: Role) -> None:
    """Raise ValueError, which names suitable sets, if the set has no chat for the role."""
    if role not in prompts.turns:
        others = [name for name in set_names() if role in prompt_set(name).turns]
        raise ValueError(
            f"{prompts.name} has no words for the role {role} (it has them for {', '.join(prompts.turns)}); give a prompt that "
            f"has: {', '.join([*others, 'FILE.yaml'])}"
        )


NOTHING_SEARCHED = "Nothing has been searched for yet."


def searched(query: str, found: str) -> str:
    """One search and its result, as shown to a search team."""
    return f"<search>{query}</search>\n<information>{without_tags('information', found)}</information>"


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
    """The result of a call, for a team with its own call format."""
    return f"<tool_response>\n{without_tags('tool_response', text)}\n</tool_response>"


def without_tags(tag: str, text: str) -> str:
    """Untrusted text to be put between these tags: the same tags inside it lose their brackets."""
    # no two \s* side by side: hostile text would take quadratic time
    return re.sub(rf"<(\s*(?:/\s*)?{tag}\s*)>", r"[\1]", text, flags=re.IGNORECASE)
