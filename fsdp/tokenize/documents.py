"""A row as a document: its tokens, and which of them are trained on.

text                    --data.args.text COLUMN; every token is trained on
messages                a conversation; the assistant's tokens, or --data.args.loss last or all;
                        without messages of weight 0
prompt, completion      the completion's; both are text, or lists of messages
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fsdp.base.errors import ConfigError
from fsdp.base.grouping import grouped
from fsdp.config.sections import expanded
from fsdp.tokenize.conversations import (
    EXAMPLE,
    ChatTemplate,
    Message,
    Span,
    check_all_trained,
    check_messages,
    check_unicode,
    template_arguments,
)
from fsdp.tokenize.rows import SourceRow
from fsdp.tokenize.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, load_tokenizer

PREFERENCE = ("chosen", "rejected")
"""The columns of a pair of answers, as DPO reads them."""
_TURN = {"role", "from", "content", "value"}
_TEXT_EXAMPLE = """write the rows with a column of text, such as {"text": "Once upon a time"}"""
AT_ONCE = 1 << 18
"""Characters that are encoded in one call."""
Loss = Literal["assistant", "all", "last"]
Form = Literal["text", "messages", "pairs"]


@dataclass(frozen=True)
class DocumentOptions:
    """What decides the tokens of a row, beside the row."""

    tokenizer: str = ""
    text: str = ""
    """The column; empty: messages, prompt and completion, or text, whichever the first row has."""
    loss: Loss = "assistant"
    chat_template: str = ""
    """The template's text."""


@dataclass(frozen=True)
class Document:
    tokens: np.ndarray
    trained: np.ndarray | None
    """1 for each token that is a target; None: all are."""


def form_of(row: SourceRow, options: DocumentOptions) -> Form:
    if not options.text:
        if "messages" in row.values:
            return "messages"
        if "prompt" in row.values and "completion" in row.values:
            return "pairs"
        if set(PREFERENCE) <= row.values.keys() and "text" not in row.values:
            raise ConfigError(
                f"{row.place} has {' and '.join(PREFERENCE)}: no loss of shardrun compares two answers.",
                "the chosen one as completion beside its prompt, or as messages, trains on it alone; for "
                "both, --data.name mine:build --train.loss mine:loss",
            )
    _column(row, options.text or "text")
    return "text"


def masks(form: Form, options: DocumentOptions) -> bool:
    """Whether some tokens are not trained on."""
    return form != "text" and options.loss != "all"


class DocumentReader:
    """Turns rows of one form into documents."""

    def __init__(self, options: DocumentOptions, form: Form) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(options.tokenizer)
        self._options, self._template = options, None
        if form == "messages":
            self._template = self._chat("the rows are conversations")
        ways: Mapping[Form, Callable[[SourceRow], Document]] = {
            "text": self._text,
            "messages": self._messages,
            "pairs": self._pair,
        }
        self._form, self.read = form, ways[form]

    def read_all(self, rows: Iterable[SourceRow]) -> Iterator[Document]:
        """The documents of the rows, in their order. Texts are encoded many at a time."""
        if self._form != "text":
            yield from map(self.read, rows)
            return
        for texts in grouped(map(self._text_of, rows), len, AT_ONCE):
            for tokens in self.tokenizer.encode_all(texts, special=True):
                yield Document(self._ended(tokens), None)

    def _chat(self, why: str) -> ChatTemplate:
        if not isinstance(self.tokenizer, HubTokenizer):
            given = self._options.tokenizer or "bytes"
            raise ConfigError(
                f"{why}, and the tokenizer {given} has no chat template.",
                "--data.tokenizer DIR, a folder with tokenizer_config.json",
            )
        return ChatTemplate(self.tokenizer, self._options.chat_template, self._options.tokenizer)

    # ------------------------------------------------------------ text

    def _text(self, row: SourceRow) -> Document:
        return Document(self._ended(self.tokenizer.encode(self._text_of(row), special=True).tokens), None)

    def _text_of(self, row: SourceRow) -> str:
        name = self._options.text or "text"
        return self._string(row, name, _column(row, name))

    def _string(self, row: SourceRow, name: str, value: Any) -> str:
        text = _string(row, name, value)
        if not isinstance(self.tokenizer, ByteTokenizer):
            check_unicode(text, name, row.place)
        return text

    def _ended(self, tokens: Any) -> np.ndarray:
        found = _array(tokens)
        return (
            found if found.size and found[-1] == self.tokenizer.end else np.append(found, self.tokenizer.end)
        )

    # ------------------------------------------------------------ conversations

    def _messages(self, row: SourceRow) -> Document:
        assert self._template is not None
        messages = check_messages(_column(row, "messages"), "messages", row.place)
        return self._conversation(self._template, row, messages, 0)

    def _conversation(
        self, template: ChatTemplate, row: SourceRow, messages: list[Message], given: int
    ) -> Document:
        """The first `given` messages are a prompt, which is not trained on."""
        more = template_arguments(row.values, row.place)
        if self._options.loss == "all":
            check_all_trained(messages, row.place)
            return Document(_array(self._plain(template.render(messages, row.place, **more)).tokens), None)
        whole, spans = template.spans(messages, row.place, **more)
        if given:
            before = len(template.render(messages[:given], row.place, **more))
            spans = [span for span in spans if span[0] >= before]
        if self._options.loss == "last":
            spans = spans[-1:]
        encoded = self._plain(whole)
        return Document(_array(encoded.tokens), _within(encoded.spans, spans))

    def _plain(self, text: str) -> Any:
        """The template has written the special tokens already."""
        return self.tokenizer.encode(text, special=False, spans=True)

    # ------------------------------------------------------------ pairs

    def _pair(self, row: SourceRow) -> Document:
        prompt, completion = _column(row, "prompt"), _column(row, "completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            self._template = self._template or self._chat(
                f"prompt and completion of {row.place} are messages"
            )
            said = check_messages(prompt, "prompt", row.place)
            return self._conversation(
                self._template, row, said + check_messages(completion, "completion", row.place), len(said)
            )
        before = self._string(row, "prompt", prompt)
        encoded = self.tokenizer.encode(
            before + self._string(row, "completion", completion), special=True, spans=True
        )
        tokens = self._ended(encoded.tokens)
        if self._options.loss == "all":
            return Document(tokens, None)
        # From the token that reaches into the completion. One that a prompt's end and it share is trained on.
        first = next((n for n, (_, end) in enumerate(encoded.spans) if end > len(before)), len(tokens) - 1)
        return Document(tokens, (np.arange(len(tokens)) >= first).astype(np.uint8))


def _within(tokens: Any, spans: list[Span]) -> np.ndarray:
    """1 for each token that has a character in one of the spans."""
    places = np.asarray(tokens, np.int64).reshape(-1, 2)
    trained = np.zeros(len(places), np.uint8)
    for start, end in spans:
        trained |= ((places[:, 1] > start) & (places[:, 0] < end) & (places[:, 1] > places[:, 0])).astype(
            np.uint8
        )
    return trained


def _array(tokens: Any) -> np.ndarray:
    return (
        np.frombuffer(tokens, np.uint8).astype(np.int64)
        if isinstance(tokens, bytes)
        else np.asarray(tokens, np.int64)
    )


def _column(row: SourceRow, name: str) -> Any:
    if name not in row.values:
        here = ", ".join(map(str, row.values)) or "none"
        raise ConfigError(f"{row.place} has no column {name}; its columns are {here}.", _columns_hint(row))
    return row.values[name]


def _columns_hint(row: SourceRow) -> str:
    found: dict[str, Any] = {}
    for name in row.values:
        with contextlib.suppress(ConfigError):  # a column that cannot be read
            found[name] = row.values[name]
    lists = [value for value in found.values() if isinstance(value, list)]
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    if any(map(_has_turns, lists)) or (lists and not texts):
        return EXAMPLE
    if not texts:
        return _TEXT_EXAMPLE
    longest = max(texts, key=lambda name: len(texts[name]))
    pairs = "; or columns prompt and completion, of which the completion is trained on"
    return f"--data.args.text {shlex.quote(str(longest))}{pairs if len(texts) > 1 else ''}"


def _has_turns(values: list[Any]) -> bool:
    """Whether it may be a conversation of any form."""
    return any(isinstance(one, dict) and len(_TURN & one.keys()) > 1 for one in values)


def _string(row: SourceRow, name: str, value: Any) -> str:
    if not isinstance(value, str):
        shown = "null" if value is None else f"a {type(value).__name__}"
        raise ConfigError(
            f"{row.place}: {name} is {shown}, not text.", "write the row again, with text there"
        )
    return value


def template_text(path: str) -> str:
    if not path:
        return ""
    try:
        return expanded(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"--data.args.chat_template {path} cannot be read ({what}).", "a file with a Jinja template"
        ) from None
