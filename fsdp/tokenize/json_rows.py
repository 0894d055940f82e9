"""A .json file as lines of JSON: a list of objects, one object that holds one list, or objects in a row.

The file is read a block at a time and its elements are written to the cache, one a line, with their own text:
memory is a block and the largest element, which LIMIT bounds. A .json file whose lines are whole objects is
read as a .jsonl file is.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.tokenize.cache import identity, made_once
from fsdp.tokenize.line_rows import LineRows, reading_tool, renaming_hint

BLOCK = 1 << 22
"""Bytes that are read at once."""
LIMIT = 1 << 27
"""Characters of one element at most."""
NEAR = 16
"""Characters of a token at most, strings apart: an error farther from a block's end is one of the file."""
SPACE = " \t\n\r"


def open_json(path: Path, plain: Path, name: str) -> LineRows:
    """The rows of the file `path`; `plain` is the same without compression."""
    if _holds_lines(plain):
        return LineRows(path, plain, name)
    lines = made_once("elements", identity(plain), lambda aside: _write_elements(path, plain, name, aside))
    rows = ElementRows(path, lines, name)
    if not rows.count:
        raise ConfigError(f"{name} has no rows.", f"rm {quoted(path)}, or write it again")
    return rows


class ElementRows(LineRows):
    """The elements of a file, each a line of its copy in the cache."""

    def _place(self, number: int) -> str:
        return f"{self._name} element {number}"

    def _show(self, number: int) -> str:
        return f"sed -n {number}p {quoted(self._plain)} shows it"


def _holds_lines(plain: Path) -> bool:
    """Whether the first line is a whole object, and others follow."""
    with plain.open("rb") as file:
        first = file.readline(BLOCK).removeprefix(codecs.BOM_UTF8)
        try:
            is_row = isinstance(json.loads(first), dict)
        except (ValueError, RecursionError):
            return False
        return is_row and any(line.strip() for line in iter(lambda: file.readline(BLOCK), b""))


def _write_elements(path: Path, plain: Path, name: str, aside: Path) -> None:
    # A string of JSON has no line break: outside of strings they are spaces.
    with plain.open("rb") as file, aside.open("w", encoding="utf-8") as out:
        for element in _elements(JsonScanner(iter(lambda: file.read(BLOCK), b""), path, name)):
            out.write(element.replace("\n", " ").replace("\r", " ") + "\n")


def _elements(text: JsonScanner) -> Iterator[str]:
    """The JSON of each row."""
    first = text.peek()
    if first == "[":
        yield from text.items()
    elif first == "{" and not text.is_row():
        yield from _only_list(text)
    else:
        while text.peek() and text.peek() not in ",]}":
            yield text.element()
    if text.peek():
        raise text.error("Extra data")


def _only_list(text: JsonScanner) -> Iterator[str]:
    """The elements of the one list that an object holds."""
    text.take("{")
    found: list[str] = []
    while text.peek() != "}":
        if text.peek() != '"':
            raise text.error("Expecting property name enclosed in double quotes")
        key = str(json.loads(text.value()))
        text.take(":")
        if text.peek() != "[":
            text.value()
        elif found:
            raise text.not_rows(f"holds several lists ({found[0]}, {key})", key)
        else:
            found.append(key)
            yield from text.items()
        if text.peek() != "}":
            text.take(",")
    text.take("}")
    if not found:
        raise text.not_rows("is an object that holds no list of rows", "")


class JsonScanner:
    """The text of a JSON file, value by value; errors name the line and the column."""

    def __init__(self, blocks: Iterator[bytes], path: Path, name: str) -> None:
        self._blocks, self._path, self._name = blocks, path, name
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._whole = "", 0, False
        self._line, self._column, self._bytes = 1, 0, 0
        """Before the text: the line, characters of it, and bytes of the file."""
        self._count = 0
        """Elements so far."""
        self._other = ""
        """The HINT for a file whose first bytes are of another kind."""

    def peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._read():
                return ""

    def take(self, sign: str) -> None:
        found = self.peek()
        if found != sign:
            raise self.error(f"Expecting '{sign}'") if found else self._cut_short()
        self._at += 1

    def value(self) -> str:
        """The text of the next value."""
        end = self._end_of_value()
        text, self._at = self._text[self._at : end], end
        return text

    def element(self) -> str:
        """The text of the next row."""
        self._count += 1
        return self.value()

    def items(self) -> Iterator[str]:
        """The texts of a list's elements."""
        self.take("[")
        if self.peek() != "]":
            yield self.element()
        while self.peek() != "]":
            self.take(",")
            yield self.element()
        self.take("]")

    def is_row(self) -> bool:
        """Whether the object that begins here has the columns of a row, or another object follows it."""
        while len(self._text) - self._at < BLOCK and self._read():
            pass
        try:
            value, end = self._decoder.raw_decode(self._text, self._at)
        except (ValueError, RecursionError):
            return False
        columns = "messages" in value or "text" in value or {"prompt", "completion"} <= set(value)
        return columns or bool(self._text[end:].strip())

    # ------------------------------------------------------------ reading

    def _end_of_value(self) -> int:
        if not self.peek():
            raise self._cut_short()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except JSONDecodeError as error:
                behind = self._text[error.pos :]
                if not (_may_be_cut(error, behind) and self._more()):
                    raise self._broken(error.msg, behind) from None
            except (ValueError, RecursionError) as error:
                raise self.error(str(error)) from None
            else:
                # A number that ends with the block may continue in the next one.
                if end < len(self._text) or not self._more():
                    return end

    def _more(self) -> bool:
        """Reads as much again as the value has, so that each character is decoded a few times at most."""
        held = len(self._text) - self._at
        if held > LIMIT:
            raise self.error(f"a value of more than {LIMIT:,} characters, or a string without its end")
        while len(self._text) - self._at < 2 * held and self._read():
            pass
        return len(self._text) - self._at > held

    def _read(self) -> bool:
        """Drops what is behind and decodes one more block; False at the end of the file."""
        if self._whole:
            return False
        block = next(self._blocks, b"")
        self._whole = not block
        if not (self._bytes or self._text):
            self._other = renaming_hint(self._path, block)
        try:
            more = self._utf8.decode(block, final=self._whole)
        except UnicodeDecodeError as error:
            raise self._not_text(error) from None
        self._drop()
        if not self._bytes and not self._text and more.startswith("\ufeff"):
            more, self._bytes = more[1:], len(codecs.BOM_UTF8)
        self._text += more
        return not self._whole

    def _drop(self) -> None:
        behind, self._text, self._at = self._text[: self._at], self._text[self._at :], 0
        self._line, self._column = self._line_and_column(behind)
        self._bytes += len(behind.encode())

    def _line_and_column(self, behind: str) -> tuple[int, int]:
        breaks = behind.count("\n")
        column = len(behind) - behind.rindex("\n") - 1 if breaks else self._column + len(behind)
        return self._line + breaks, column

    # ------------------------------------------------------------ errors

    def error(self, what: str) -> ConfigError:
        line, column = self._line_and_column(self._text[: self._at])
        element = f" (element {self._count})" if self._count else ""
        shown = self._other or self._show(self._bytes + len(self._text[: self._at].encode()))
        return ConfigError(
            f"{self._name} line {line} column {column + 1}{element} is not JSON: {what}.", shown
        )

    def _broken(self, what: str, behind: str) -> ConfigError:
        """`behind` is the text from the error on."""
        if what.startswith("Unterminated string") or not behind.strip():
            return self._cut_short()
        self._at = len(self._text) - len(behind)
        return self.error(what)

    def not_rows(self, what: str, key: str) -> ConfigError:
        """For JSON of another form; the HINT takes one list of several."""
        name = str(self._path)
        if not key:
            return ConfigError(
                f"{self._name} {what}.",
                """a list of rows, such as [{"text": "a"}]; to read it as text: """
                f"--data.name text --data.dir {quoted(name)}",
            )
        take = f"import json; [print(json.dumps(row)) for row in json.load(open({name!r}))[{key!r}]]"
        lines = quoted(f"{name.removesuffix('.json')}.{key}.jsonl")
        return ConfigError(f"{self._name} {what}.", f"python -c {quoted(take)} > {lines} takes {key} alone")

    def _show(self, byte: int) -> str:
        return f"{self._piped(f'tail -c +{max(0, byte - 40) + 1}')} | head -c 80 shows it"

    def _piped(self, command: str) -> str:
        tool, file = reading_tool(self._path), quoted(self._path)
        return f"{tool} {file} | {command}" if tool else f"{command} {file}"

    def _cut_short(self) -> ConfigError:
        where = f" within element {self._count}" if self._count else ""
        return ConfigError(
            f"{self._name} is cut short: its JSON has no end{where}.",
            f"copy it again; {self._piped('tail -c 80')} shows its end",
        )

    def _not_text(self, error: UnicodeDecodeError) -> ConfigError:
        byte = self._bytes + len(self._text.encode()) + error.start
        return ConfigError(
            f"{self._name} is not UTF-8 at byte {byte}: {error.reason}.", self._other or self._show(byte)
        )


def _may_be_cut(error: JSONDecodeError, behind: str) -> bool:
    """Whether more text may complete it: a string without its end, or an error in the last token."""
    return error.msg.startswith("Unterminated string") or len(behind) <= NEAR
