"""From a command line to a Config: the recipe first, flags over it, then the checks.

A value is parsed to its field's type and range, from a flag's text or a recipe's value. `[[data.sources]]`:

    [[data.sources]]
    name = "notes/"        name, dir, tokenizer and args as in [data]
    label = "notes"        its name in metrics; without it the last part of dir or name
    weight = 2             its proportion of samples; or epochs = 1, how often the run sees it

Not here: fields that conflict (checks.py), a run directory's config.toml (trust.py), how sources are mixed
(fsdp/data/mixture.py).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import shlex
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fsdp.base.errors import ConfigError
from fsdp.base.proc import read_regular
from fsdp.base.text import byte_size, nearest
from fsdp.config.checks import check
from fsdp.config.sections import (
    FIELDS,
    LAUNCHERS_OWN,
    Config,
    FieldSpec,
    MixedSource,
    default_label,
    exists,
    expanded,
    flatten,
)
from fsdp.config.write import REMOVED

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).resolve().parents[2]
"""The folder of the code, which holds recipes/."""
FOREIGN_SUFFIXES = (".yaml", ".yml", ".json")
MOST_BYTES = 1 << 20
"""Of a recipe, far above any real one: it may be a stranger's."""


ONE_DATA_SET = ("data.name", "data.dir", "data.args", "data.validation")


def load(argv: Sequence[str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Applies defaults, recipes (--config), flags in their order, then overrides, and checks the result.

    Of a field's values the last alone is parsed, so that the flag of a HINT may follow the one that it mends.
    """
    values: dict[str, Any] = {}
    flags = list(pair_flags(argv))
    recipes = [pair for name, path in flags if name == "config" for pair in read_recipe(path).items()]
    if dict(flags).get("data.sources", "none") != "none":  # a recipe's one data set gives way
        recipes = [pair for pair in recipes if pair[0] not in ONE_DATA_SET]
    given = [*recipes, *(pair for pair in flags if pair[0] != "config"), *(overrides or {}).items()]
    last = {name: nth for nth, (name, _) in enumerate(given)}
    for nth, (name, value) in enumerate(given):
        if nth == last[name] or (name in FIELDS and FIELDS[name].is_args):
            _set(values, name, value)
    path = evaluated_path(dict(flags))
    if path and values.get("train.evaluate_only"):
        args = {name: value for name, value in values.get("data.args", {}).items() if name != "heldout"}
        values |= {"data.validation": path, "data.args": args}
    config: Config = _build(Config, values)
    check(config)
    return config


def evaluated_path(flags: Mapping[str, str]) -> str:
    """The data that a command line names by a path: with --train.evaluate_only all of them are evaluated.
    Empty without one, and beside a flag that says what is held out.
    """
    path = flags.get("data.dir") or flags.get("data.name", "")
    named = path.startswith("hf:") or exists(expanded(path)) or any(sign in path for sign in "*?[")
    return path if path and named and not flags.keys() & {"data.validation", "data.args.heldout"} else ""


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


def _build(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            fields[field.name] = _build(typing.cast(type, hints[field.name]), values, name + ".")
        elif name in values:
            fields[field.name] = values[name]
    return cls(**fields)


# ---------------------------------------------------------------- a recipe


def shipped(path: str | Path) -> Path:
    """The path; if it is one of recipes/ that is not here, that of the folder of the code."""
    there = Path(path).parts[:1] == ("recipes",) and not exists(Path(path)) and exists(SHIPPED / path)
    return SHIPPED / path if there else Path(path)


def read_recipe(path: str) -> dict[str, Any]:
    """Reads a TOML file as flat `section.field` values, not yet typed.

    A launcher's settings are left out if the file is a run directory's config.toml, and fields that are no
    more are left out of any.
    """
    if Path(path).suffix in FOREIGN_SUFFIXES:
        raise ConfigError(f"--config {path} is no recipe: recipes are TOML.", "docs/migrate.md")
    file = shipped(path)
    like = f"compare it with {shipped('recipes/digits.toml')}"
    values = dict(_flatten(_read_toml("--config", path, file, like)))
    for name in REMOVED.keys() & values.keys():
        if (value := values.pop(name)) != REMOVED[name][0]:
            _warn_once(f"{path}: {name} = {value} is left out: {_gone(name)}")
    if file.name == "config.toml" and exists(file.with_name("history.jsonl")):  # written by older versions
        values = {name: v for name, v in values.items() if name.partition(".")[0] not in LAUNCHERS_OWN}
    return values


def _read_toml(flag: str, typed: str, file: Path, hint: str) -> dict[str, Any]:
    try:
        if file.name == "config.toml":
            data = read_regular(file, MOST_BYTES)
        else:  # `--config <(command)` is a pipe
            with file.open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {byte_size(MOST_BYTES)}")
        return tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        hint = f"ls -l {shlex.quote(typed)} shows who may read it"
        if not isinstance(error, PermissionError):
            hint = f"ls {shlex.quote(str(shipped('recipes')))}/ lists the recipes that ship"
        raise ConfigError(f"{flag} {typed} cannot be read ({error.strerror}).", hint) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} {typed} is not TOML: {error}.", hint) from None


@functools.cache
def _warn_once(text: str) -> None:
    """A run's file is read for its start, and for what has changed since the last one."""
    log.warning("%s", text)


def _gone(name: str) -> ConfigError:
    return ConfigError(f"--{name} is no flag any more.", REMOVED[name][1])


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = prefix + key
        spec = FIELDS.get(name)
        is_value = name in REMOVED or (spec is not None and (spec.is_args or spec.is_tables))
        if isinstance(value, Mapping) and not is_value:
            yield from _flatten(value, name + ".")
        else:
            yield name, value


# ---------------------------------------------------------------- flags


def pair_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of `--name value` and `--name=value`; a bool field's flag needs no value."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            flags = f"--config {word}" if Path(word).suffix in (".toml", *FOREIGN_SUFFIXES) else ""
            hint = "flags are --section.field VALUE; python train.py --help lists them"
            from fsdp.config.aliases import sharding

            raise ConfigError(f"{word} is not a flag.", sharding(word) or flags or hint)
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        yield name, value if equals else _value_after(name, rest)


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
    from fsdp.config.aliases import hint_for, nearest_flags

    old = next((old for old in REMOVED if f"{name}.".startswith(f"{old}.")), None)
    if old is not None:
        return _gone(old)
    if (alias := hint_for(name, str(value))) is not None:
        return ConfigError(f"--{name} is not a flag.", _as_typed(alias))
    near = nearest_flags(name)
    hint = f"did you mean {' or '.join(near)}?" if near else "python train.py --help-all lists them"
    return ConfigError(f"--{name} is not a flag.", hint)


def _as_typed(hint: str) -> str:
    """Returns the flags of a hint with valid values: the default replaces a typed value that is invalid."""
    from fsdp.config.aliases import is_flags

    if not is_flags(hint):
        return hint
    words = shlex.split(hint)
    for nth, flag in enumerate(words[::2]):
        spec = FIELDS[flag.removeprefix("--")]
        try:
            parse_value(spec, words[2 * nth + 1])
        except ConfigError as error:
            known = (error.hint or "").removeprefix(f"{flag} ")
            words[2 * nth + 1] = str(spec.default) if known == error.hint else known
    return shlex.join(words)


# ---------------------------------------------------------------- a value

_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""torch's names of the dtypes that flags name."""


def parse_value(spec: FieldSpec, value: Any) -> Any:
    """Converts a string from a flag, or a TOML value, to the field's type, and checks its range."""
    if spec.is_tables:
        return parse_sources(value)
    choices = typing.get_args(spec.type) if typing.get_origin(spec.type) is Literal else ()
    names = choices or spec.meta["names"]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    default = f"--{spec.name} {str(spec.default).lower() if spec.type is bool else spec.default}"
    if names:
        if text not in names and (choices or ":" not in text):
            more = "" if choices else " or package.module:function"
            fault = f"--{spec.name} {value} is not one of {', '.join(names)}{more}."
            raise ConfigError(fault, _choice_hint(spec, text, names))
        return text
    if spec.type is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"--{spec.name} {value} is not true or false.", default)
        return text.lower() in _TRUE
    if spec.type is str:
        return text
    number = _number(spec, value, default)
    low, high, above, below = (spec.meta[name] for name in ("low", "high", "above", "below"))
    bounds = {
        f"at least {low}": low is None or number >= low,
        f"above {above}": above is None or number > above,
        f"at most {high}": high is None or number <= high,
        f"below {below}": below is None or number < below,
    }
    if not all(bounds.values()) or (isinstance(number, float) and not math.isfinite(number)):
        wanted = " and ".join(text for text in bounds if not text.endswith("None")) or "a number"
        raise ConfigError(f"--{spec.name} {number} is out of range: {wanted}.", default)
    return number


def _number(spec: FieldSpec, value: Any, default: str) -> float | int:
    try:
        if isinstance(value, bool):
            raise ValueError
        if spec.type is int and str(value).lstrip("+-").replace("_", "").isdigit():
            return int(value)  # not by way of a float, which is exact up to 2⁵³
        number = float(value)
        if spec.type is int and int(number) != number:  # "1e6" is a whole number too; 2.5 is not
            raise ValueError
        return number if spec.type is float else int(number)
    except (ValueError, OverflowError, TypeError):
        kind = "a whole number" if spec.type is int else "a number"
        raise ConfigError(f"--{spec.name} {value} is not {kind}.", default) from None


def _choice_hint(spec: FieldSpec, text: str, choices: Sequence[str]) -> str:
    from fsdp.config.aliases import sharding

    if spec.name == "mesh.strategy" and (known := sharding(text)) is not None:
        return known
    word = text.lower().removeprefix("torch.")
    return f"--{spec.name} {nearest(DTYPES.get(word, word), choices, '{}', str(spec.default))}"


def parse_named(spec: FieldSpec, name: str, value: Any) -> Any:
    """Parses the value of `--model.args.NAME`, or of `--ray.env.NAME`, which stays text."""
    if not spec.is_texts:
        return parse_free_value(value)
    if isinstance(value, (str, int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    raise ConfigError(f"--{spec.name}.{name} {value} is not text.", f"--{spec.name} {name}=VALUE")


def parse_free_value(text: Any) -> Any:
    """Parses the value of `--model.args.NAME`, which has no declared type: a TOML literal, else a string."""
    if not isinstance(text, str):
        return text
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return {"True": True, "False": False}.get(text, text)


# ---------------------------------------------------------------- [[data.sources]]

TABLE = "[[data.sources]]"
_SOURCE = {field.name: field.type for field in dataclasses.fields(MixedSource)}


def parse_sources(value: Any) -> tuple[MixedSource, ...]:
    """`value` is a recipe's list of tables, or a flag's text: a TOML file with such tables; none for none."""
    if value in ("", "none"):
        return ()
    hint = f"{TABLE} with a name, before each source"
    tables = value
    if isinstance(value, str):
        data = _read_toml("--data.sources", value, Path(value), hint).get("data")
        tables = data.get("sources") if isinstance(data, Mapping) else None
    if not (
        isinstance(tables, Sequence) and tables and all(isinstance(t, (Mapping, MixedSource)) for t in tables)
    ):
        raise ConfigError(f"data.sources = {value} is not a list of tables.", hint)
    sources = tuple(
        table if isinstance(table, MixedSource) else _source(nth, table)
        for nth, table in enumerate(tables, 1)
    )
    check_labels(sources)
    return sources


def check_labels(sources: Sequence[MixedSource]) -> None:
    """Raises ConfigError unless each source has a label of its own that a metric's name may have."""
    labels = [source.label for source in sources]
    for nth, label in enumerate(labels, 1):
        if not re.fullmatch(r"[\w.+-]+", label) or labels.count(label) > 1:
            other = default_label(label) if labels.count(label) == 1 else f"{label}-{nth}"
            problem = f"{TABLE} {nth}: label = {label!a} is not one of its own, of letters, digits, _ . + -."
            raise ConfigError(problem, f'label = "{other}"')


_KINDS: dict[Any, tuple[Any, str, str]] = {
    "str": (str, "text", '"VALUE"'),
    "Args": (Mapping, "a table", '{NAME = "VALUE"}'),
    "float": ((int, float), "a number above 0", "1"),
}


def _source(nth: int, table: Mapping[str, Any]) -> MixedSource:
    where = f"{TABLE} {nth}"
    for key, value in table.items():
        if key not in _SOURCE:
            other = f'args = {{{key} = "VALUE"}}, if the data set has it; here: {", ".join(_SOURCE)}'
            hint = nearest(key, _SOURCE, "{} = VALUE", other)
            raise ConfigError(f"{where}: {key} is not a field of a source.", hint)
        kind, name, example = _KINDS[_SOURCE[key]]
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not is_kind or (_SOURCE[key] == "float" and not 0 < value < math.inf):
            raise ConfigError(f"{where}: {key} = {value} is not {name}.", f"{key} = {example}")
    if not table.get("name"):
        raise ConfigError(f"{where} has no name.", 'name = "FILE or FOLDER", or a data set of --data.name')
    if "weight" in table and "epochs" in table:
        problem = f"{where}: weight and epochs both set how often {table['name']} is seen."
        raise ConfigError(problem, "leave one of them out")
    return MixedSource(**table)
