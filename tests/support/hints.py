"""What a HINT tells a person to type, checked against the flags, commands and files that there are."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp.base.errors import ConfigError, ShardrunError, without_hint
from fsdp.config.command_line import CommandParser
from fsdp.config.read import pair_flags, parse_named, parse_value
from fsdp.config.sections import FIELDS
from fsdp.config.write import REMOVED

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted(ROOT.glob("fsdp/**/*.py")), *sorted(ROOT.glob("launch/*.py")), ROOT / "train.py"]
HOLE = "…"
"""In a text of the source: what is filled in when it is printed."""
PLACEHOLDER = re.compile(rf"[A-Z][A-Z_]*(=.*)?|.*{HOLE}.*|.*[{{}}].*")
"""Of a value: FILE, VALUE, a hole: not to be typed as it is."""
ENDS = r"(?= (?:or|shows?|writes|runs|lists|copies|needs|if|with|for|of|and|to|on)\b|[;,)`]|$)"
"""Where what is typed ends in a hint, and its prose goes on."""
TOOL = re.compile(r"python -m ((?:fsdp|launch|bench)\.\w+)((?: .*?)??)" + ENDS)
FLAG = re.compile(rf"(?<![\w-])--(?!section\.field)([a-z][\w.-]*\w)(?![\w.-]*{HOLE})")
PAGE = re.compile(
    r"\b(?:docs|recipes|slurm|examples)/[\w/-]+\.(?:md|toml|sbatch|sh|env|py)|\brequirements\.txt"
)
SECTIONS = {name.partition(".")[0] for name in FIELDS if "." in name} | {"plan", "parity"}
FOREIGN = {
    "torchrun": "nproc_per_node nproc-per-node nnodes numa-binding max-restarts node-rank",
    "sbatch|srun|submit": "exclude mem nodes ntasks ntasks-per-node gpus-per-node array time overlap",
    "docker": "env-file memory",
    "apptainer": "nv",
    "hf download": "include",
    "aws": "recursive exclude",
    "ray start": "head",
    "containers need": "device",
}
"""Flags of other programs, by a pattern of the text that names the program."""
TOOLS = (
    *(f"fsdp.{name}" for name in ("checkpoint", "doctor", "parity", "plan", "predict", "report", "tokenize")),
    *("launch.local", "launch.submit"),
)
SUBMITS = ("parse_known_intermixed_args",)
"""Where launch.submit parses: its main would submit."""
HELP = {"fsdp.checkpoint": "RUN export --help"}
GENERAL = {"help", "help-all", "dry-run", "config", "preflight", "trust-code", "backend"}


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is no docstring; of an f-string with HOLE for its values."""
    inner = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(node.value)
        if isinstance(node, ast.JoinedStr):
            inner.update(node.values)
            parts = [str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.lineno, node.value


class Parsed(BaseException):
    """A command's line has been parsed; nothing of the command runs."""


@functools.cache
def command(module: str, words: str) -> tuple[str, str]:
    """What a tool prints for a line, and why its own parser refuses it; empty if that takes it."""
    if module not in TOOLS:
        return "", "" if importlib.util.find_spec(module) else f"there is no {module}"

    def stop(parse: Callable[..., object]) -> Callable[..., object]:
        def parsed(*args: object, **options: object) -> object:
            parse(*args, **options)
            raise Parsed

        return parsed

    main = importlib.import_module(module if module.startswith("launch") else f"{module}.__main__").main
    said = StringIO()
    with ExitStack() as stack:
        for name in SUBMITS if module == "launch.submit" else ("parse", "parse_with_run_flags"):
            stack.enter_context(mock.patch.object(CommandParser, name, stop(getattr(CommandParser, name))))
        stack.enter_context(redirect_stdout(said))
        stack.enter_context(redirect_stderr(said))
        try:
            code = main(shlex.split(words))
        except Parsed:
            code = 0
        except SystemExit as end:
            code = end.code
    return said.getvalue(), said.getvalue() if code else ""


def flag_problem(name: str, text: str) -> str:
    """Why `--name` is no flag of the commands that a text names; of any, where it names none."""
    name = name.removesuffix(".NAME")
    section, dot, _ = name.rpartition(".")
    tools = {module for module, _ in TOOL.findall(text)} & {*TOOLS} or TOOLS
    if dot and section.partition(".")[0] in SECTIONS:
        known = name in FIELDS or name in REMOVED or (section in FIELDS and FIELDS[section].is_args)
        return (
            "" if known or name in FLAG.findall(command("fsdp.parity", "--help")[0]) else f"no flag --{name}"
        )
    foreign = {
        flag for program, flags in FOREIGN.items() if re.search(program, text) for flag in flags.split()
    }
    known = name in GENERAL | foreign or any(
        name in FLAG.findall(command(t, HELP.get(t, "--help"))[0]) for t in tools
    )
    return "" if known else f"--{name} is a flag of no command named there"


def typed(hint: str) -> list[list[str]]:
    """The alternatives of a hint that are flags with their values, as a person types them."""
    found = []
    for part in re.split(r"[,;]? or |; ", hint.removeprefix("did you mean ").removesuffix("?")):
        match = re.match(r"(?:--[\w.-]+ (?!--)(?:'[^']*'|[^\s,;]+) ?)+", part)
        try:
            words = shlex.split(match[0].strip()) if match else []
        except ValueError:
            words = []
        if words and ".NAME" not in part and not any(PLACEHOLDER.fullmatch(word) for word in words[1::2]):
            found.append(words)
    return found


def value_problems(hint: str) -> Iterator[str]:
    """Values of flags that the product's own parser refuses."""
    for words in typed(hint) if not hint.endswith(".") else ():
        try:
            for name, value in pair_flags(words):
                section, _, key = name.rpartition(".")
                if name in FIELDS and not FIELDS[name].is_args:
                    parse_value(FIELDS[name], value)
                elif section in FIELDS:
                    parse_named(FIELDS[section], key, value)
        except ConfigError as error:
            yield str(error)


def problems(hint: str, *, printed: bool = False) -> list[str]:
    """What in a hint cannot be typed. `printed`: it has its values; flags of commands are in its source."""
    found = [flag_problem(name, hint) for name in FLAG.findall(hint) if "." in name or not printed]
    found += [f"there is no {page}" for page in PAGE.findall(hint) if not (ROOT / page).exists()]
    found += [
        command(module, words)[1]
        for module, words in TOOL.findall(hint)
        if not re.search(HOLE + "|VALUE|%s", words)
    ]
    return [*filter(None, found), *value_problems(hint)]


Attempt = Callable[[Sequence[str]], object]


def follow(words: Sequence[str], attempt: Callable[[Sequence[str]], object], most: int = 5) -> list[str]:
    """Types each alternative of each hint behind a command that fails, until it succeeds or a hint is prose:
    the messages. An error that comes again is a loop.
    """
    try:
        attempt(words)
    except ShardrunError as error:
        message, hint = without_hint(error), error.hint or ""
        assert most, f"{shlex.join(words)} leads to nothing: {message} HINT: {hint}"
        assert not problems(hint), f"{message} HINT: {hint}: {problems(hint)}"
        kept = [*words]
        if wrong := re.match(r"(--\S+) (is not a flag|has no value)", message):
            at = kept.index(wrong[1])
            del kept[at : at + 1 + (wrong[2] == "is not a flag")]
        later: list[str] = []
        for flags in typed(hint):
            later = follow([*kept, *flags], attempt, most - 1)
            assert message not in later, f"{shlex.join(words)}: {message} HINT: {hint} comes again"
        return [message, *later]
    return []


def check_each() -> None:
    """From now on each ShardrunError of this process and its forks has a hint that can be typed."""
    init = ShardrunError.__init__

    def checked(self: ShardrunError, message: str, hint: str | None = None, **more: Any) -> None:
        init(self, message, hint, **more)
        wrong = problems(hint, printed=True) if hint else []
        assert not wrong, f"{message} HINT: {hint}: {wrong}"

    ShardrunError.__init__ = checked  # type: ignore[method-assign]
