"""From a command line to a Config: the recipe first, flags over it, then the checks.

Contains the order, the grammar of flags, and the build of the tree. Not here: parsing one value (values.py),
the checks themselves (checks.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config.aliases import hint_for, is_flags, sharding
from fsdp.config.checks import check
from fsdp.config.fields import FIELDS, FieldSpec, flatten
from fsdp.config.limits import OddFile, parse_toml, read_limited
from fsdp.config.sections import LAUNCHERS_OWN, Config
from fsdp.config.values import exists, parse_named, parse_value
from fsdp.config.writing import REMOVED

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).resolve().parents[2]
"""The folder of the code, which holds recipes/."""
FOREIGN_SUFFIXES = (".yaml", ".yml", ".json")
_COMPARE = "compare it with recipes/digits.toml"


def load(argv: Sequence[str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Applies defaults, recipes (--config), flags in their order, then overrides, and checks the result."""
    values: dict[str, Any] = {}
    flags = list(pair_flags(argv))
    for path in [value for name, value in flags if name == "config"]:
        for name, value in read_recipe(path).items():
            _set(values, name, value)
    for name, value in [*((n, v) for n, v in flags if n != "config"), *(overrides or {}).items()]:
        _set(values, name, value)
    config = _build(Config, values)
    check(config)
    return config


def replace(config: Config, **changes: Any) -> Config:
    """Returns a copy with `section__field=value` changed, and checks it."""
    flat = {**flatten(config), **{name.replace("__", "."): value for name, value in changes.items()}}
    new: Config = _build(Config, flat)
    check(new)
    return new


def accepts(config: Config, flags: str) -> bool:
    """Whether the configuration with these flags, as typed, passes the checks."""
    values = flatten(config)
    try:
        for name, value in pair_flags(shlex.split(flags)):
            _set(values, name, value)
        check(_build(Config, values))
    except ConfigError:
        return False
    return True


def read_recipe(path: str) -> dict[str, Any]:
    """Reads a TOML file as flat `section.field` values, not yet typed.

    A launcher's settings are left out if the file is a run directory's config.toml, and fields that are no
    more are left out of any.
    """
    if Path(path).suffix in FOREIGN_SUFFIXES:
        raise ConfigError(f"--config {path} is no recipe: recipes are TOML.", "docs/migrate.md")
    try:
        tree = parse_toml(_read(path).decode("utf-8-sig"))
    except OSError as error:
        hint = "ls recipes/ lists the recipes that ship"
        if isinstance(error, PermissionError):
            hint = f"ls -l {shlex.quote(path)} shows who may read it"
        raise ConfigError(f"--config {path} cannot be read ({error.strerror}).", hint) from None
    except OddFile as error:
        raise ConfigError(f"--config {path} cannot be used: {error}.", _COMPARE) from None
    except (ValueError, RecursionError) as error:
        # invalid TOML or UTF-8, a number of too many digits, tables nested too deeply
        raise ConfigError(f"--config {path} is not TOML: {error}.", _COMPARE) from None
    values = _without_removed(dict(_flatten(tree)), path)
    if not _is_of_a_run(Path(path)):
        return values
    # written by older versions
    return {name: value for name, value in values.items() if name.partition(".")[0] not in LAUNCHERS_OWN}


def _without_removed(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    for name in REMOVED.keys() & values.keys():
        if values[name] != REMOVED[name].default:
            _warn_once(f"{path}: {name} = {values[name]} is left out: {_gone(name)}")
    return {name: value for name, value in values.items() if name not in REMOVED}


@functools.cache
def _warn_once(text: str) -> None:
    """A run's file is read for its start, and for what has changed since the last one."""
    log.warning("%s", text)


def _gone(name: str) -> ConfigError:
    return ConfigError(f"--{name} is no flag any more.", REMOVED[name].instead)


def _read(path: str) -> bytes:
    place = _place_of(path)
    # `--config <(command)` is a pipe; a run directory's file is not
    return read_limited(place, pipes=place.name != "config.toml")


def _place_of(path: str) -> Path:
    """`recipes/NAME` is the recipe that ships, unless there is a file of that name here."""
    place = Path(path)
    shipped = SHIPPED / place
    return shipped if place.parts[:1] == ("recipes",) and not exists(place) and exists(shipped) else place


def _is_of_a_run(path: Path) -> bool:
    return path.name == "config.toml" and exists(path.with_name("history.jsonl"))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, Mapping) and not (
            name in REMOVED or (name in FIELDS and (FIELDS[name].is_args or FIELDS[name].is_tables))
        ):
            yield from _flatten(value, name + ".")
        else:
            yield name, value


def pair_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of `--name value` and `--name=value`; a bool field's flag needs no value."""
    rest = list(argv)
    for word in rest:
        _check_utf8(word)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word} is not a flag.", _word_hint(word))
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        yield name, value if equals else _value_after(name, rest)


def _check_utf8(word: str) -> None:
    """A file name of other bytes cannot be written to config.toml."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{word!a} is not UTF-8.", "mv the file to a name in UTF-8") from None


def _word_hint(word: str) -> str:
    """For a value without its flag, such as `ddp` or a file."""
    if (flags := sharding(word)) is not None:
        return flags
    if Path(word).suffix in (".toml", *FOREIGN_SUFFIXES):
        return f"--config {word}"
    return "flags are --section.field VALUE; python train.py --help lists them"


def _value_after(name: str, rest: list[str]) -> str:
    if rest and not rest[0].startswith("--"):
        return rest.pop(0)
    if name in FIELDS and FIELDS[name].type is bool:
        return "true"
    if name in FIELDS or name.rpartition(".")[0] in FIELDS or name == "config":
        default = FIELDS[name].default if name in FIELDS else ""
        raise ConfigError(f"--{name} has no value.", f"--{name} {default or 'VALUE'}")
    raise _unknown(name)


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    section, _, key = name.rpartition(".")
    if section in FIELDS and FIELDS[section].is_args:
        values[section] = {**values.get(section, {}), key: parse_named(FIELDS[section], key, value)}
    elif name in FIELDS and FIELDS[name].is_args:
        values[name] = {**values.get(name, {}), **_named(FIELDS[name], value)}
    elif name in FIELDS:
        values[name] = parse_value(FIELDS[name], value)
    else:
        raise _unknown(name, value)


def _named(spec: FieldSpec, value: Any) -> Mapping[str, Any]:
    """The table of a recipe, or the one value of `--model.args width=512`."""
    if isinstance(value, Mapping):
        return {key: parse_named(spec, key, one) for key, one in value.items()} if spec.is_texts else value
    key, equals, text = str(value).partition("=")
    if not (key and equals):
        hint = f"--{spec.name} NAME={value}" if spec.is_texts else f"--{spec.name}.NAME {value}"
        raise ConfigError(f"--{spec.name} {value} has no name.", hint)
    return {key: parse_named(spec, key, text)}


def _unknown(name: str, value: Any = "") -> ConfigError:
    old = next((old for old in REMOVED if f"{name}.".startswith(f"{old}.")), None)
    return _gone(old) if old else ConfigError(f"--{name} is not a flag.", _unknown_hint(name, value))


def _unknown_hint(name: str, value: Any = "") -> str:
    alias = hint_for(name, str(value))
    if alias is not None:
        return _as_typed(alias)
    tails = {n.rpartition(".")[2]: n for n in FIELDS}
    near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.6)
    tail = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1, cutoff=0.75)
    if near or tail:
        return f"did you mean --{near[0] if near else tails[tail[0]]}?"
    return "python train.py --help-all lists them"


def _as_typed(hint: str) -> str:
    """Returns the flags of a hint with valid values: the default replaces a typed value that is invalid."""
    if not is_flags(hint):
        return hint
    words = shlex.split(hint)
    for nth, (flag, value) in enumerate(zip(words[::2], words[1::2], strict=True)):
        spec = FIELDS[flag.removeprefix("--")]
        try:
            parse_value(spec, value)
        except ConfigError as error:
            known = (error.hint or "").removeprefix(f"{flag} ")
            words[2 * nth + 1] = known if error.hint != known and " " not in known else str(spec.default)
    return shlex.join(words)


def _build(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        name = prefix + f.name
        if dataclasses.is_dataclass(hints[f.name]):
            given[f.name] = _build(typing.cast(type, hints[f.name]), values, name + ".")
        elif name in values:
            given[f.name] = values[name]
    return cls(**given)
