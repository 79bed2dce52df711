"""File and line of each setting, for error messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from marsrl.rollout.text import in_one_line

_KEY = re.compile(r"[A-Za-z_]\w*(?:\.\w[\w-]*)+")  # Matches rollout.segments, and other dotted words.
# Word processors replace hyphens by long dashes.
_DASHED = re.compile("([-\u2010-\u2015\u2212]+)([A-Za-z][\\w.-]*)")
_FIRST_WORD = re.compile(r"([A-Za-z_]\w*)(?=[:=]| is )")  # Matches task in `task: ...` or `task is`.


class ConfigError(ValueError):
    """Invalid config; the message names the keys, the values found and the values expected."""


def refuse(reason: str | None) -> None:
    """Raise ConfigError with this reason; do nothing if it is None."""
    if reason is not None:
        raise ConfigError(reason)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of settings: a preset, the user's file, or the command line.

    label: name of the source in messages.
    file: path of the file; None for the command line.
    settings: nested settings, as OmegaConf merges them.
    places: dotted key -> "my.yaml:12", sections included.
    """

    label: str
    file: Path | None
    settings: DictConfig
    places: Mapping[str, str]


def layer_of_file(path: Path, label: str) -> Layer:
    """Return a YAML file's settings, each with label:line; ConfigError if the file is unreadable."""
    try:
        settings = OmegaConf.load(path)
        node = yaml.compose(path.read_text("utf-8"))
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)  # Only YAML syntax errors have one.
        lines = [] if mark is None else [*path.read_text("utf-8").splitlines(), ""]
        if mark is not None and lines[mark.line].lstrip(" ").startswith("\t"):
            raise ConfigError(f"{label}:{mark.line + 1}: the line is indented with a tab; use spaces") from error
        raise ConfigError(f"{label}: {in_one_line(error)}") from error
    if not isinstance(settings, DictConfig):
        raise ConfigError(f"{label}: expected a mapping of settings at the top")
    return Layer(label, path.resolve(), settings, {key: f"{label}:{line}" for key, line in _keys(node, "")})


def layer_of_words(words: Sequence[str], label: str) -> Layer:
    """Return the settings given as words `key.sub=value`; ConfigError for a malformed word. label: source, for messages."""
    check_words(words)
    for word in words:
        if "=" not in word[1:]:
            raise ConfigError(f"{label}: {word!r} is not a setting; expected key.sub=value (--help lists the options)")
    try:
        settings = OmegaConf.from_dotlist(list(words))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{label}: {in_one_line(error)}") from error
    return Layer(label, None, settings, {key: label for key, _ in _keys(yaml.compose(OmegaConf.to_yaml(settings)), "")})


def check_words(words: Sequence[str], options: Collection[str] | None = None) -> None:
    """Raise ConfigError for leading or long dashes, a colon for =, spaces around =, and config=FILE.

    options: names of the command's options, if they are still among the words. Then only dashes are checked.
    """
    from marsrl.trainer.config import RunConfig

    for index, word in enumerate(words):
        (key, equals, value), after = word.partition("="), [*words[index + 1 :], ""][0]
        suggested = value if equals else after if after and "=" not in after else "VALUE"
        if (dashed := _DASHED.fullmatch(key)) is not None and key not in (options or ()):
            name = dashed[2]
            if "." in name or name in RunConfig.model_fields or (equals and options is None):
                raise ConfigError(f"command line: {word!r} begins with dashes; write {name}={suggested}")
            if not dashed[1].isascii():
                raise ConfigError(f"command line: {word!r} begins with a long dash; write --{name}")
        if options is not None:
            continue
        if key == "config" and equals:
            raise ConfigError(f"command line: {word!r} is an option, not a setting; write --config {suggested}")
        if key.endswith(":") and not equals:
            raise ConfigError(f"command line: {word!r} ends with a colon; write {key[:-1]}={suggested}")
        has_space = key != key.rstrip() or (not value and after and "=" not in after)
        if after[:1] == "=" or (equals and has_space):
            raise ConfigError(
                f"command line: spaces around the = of {key.strip()!r}; write key.sub=value without spaces"
            )


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield (dotted key, line) for every key of a YAML mapping."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
        if key.value == "<<":  # Keys merged by << are yielded first, because explicit keys override them.
            yield from _keys(value, prefix)
            continue
        yield prefix + str(key.value), key.start_mark.line + 1
        yield from _keys(value, f"{prefix}{key.value}.")


@dataclass(frozen=True, slots=True)
class ConfigOrigin:
    """Layers of a config, later ones win. str() gives "preset cpu_default.yaml < my.yaml < command line"."""

    layers: Sequence[Layer]

    def __str__(self) -> str:
        return " < ".join(layer.label for layer in self.layers)

    @property
    def name(self) -> str:
        """Stem of the last file: the default name of a run."""
        files = [layer.file for layer in self.layers if layer.file is not None]
        return files[-1].stem if files else "run"

    @property
    def places(self) -> dict[str, str]:
        """Dotted key -> file and line, or other source, that set it last."""
        return {key: place for layer in self.layers for key, place in layer.places.items()}

    def place(self, key: Sequence[str]) -> str:
        """Return file and line of a key, else of the innermost section around it; "" for a default."""
        places = self.places
        return next((places[k] for end in range(len(key), 0, -1) if (k := ".".join(key[:end])) in places), "")

    def with_places(self, message: str) -> str:
        """Append to the message the file and line of each setting that the message names, except defaults.

        The message may name a setting by the end of its key: layout.tensor for policies.<name>.layout.tensor.
        """
        places = self.places
        mentioned = _KEY.findall(message)
        first = _FIRST_WORD.match(message)
        # A message about a whole section, such as `rollout`, needs no line.
        is_section = first and any(key.startswith(f"{first[0]}.") for key in places)
        if first and not is_section:
            mentioned.insert(0, first[0])
        placed = {
            key: f"{key}: {place}"
            for mention in mentioned
            for key, place in places.items()
            if key == mention or key.endswith(f".{mention}")
        }
        return f"{message} ({'; '.join(placed.values())})" if placed else message

    @contextmanager
    def places_in_errors(self) -> Iterator[None]:
        """Turn a ValueError of the body into a ConfigError with the source of each setting that the message names."""
        try:
            yield
        except ValueError as error:
            raise ConfigError(self.with_places(str(error))) from error
