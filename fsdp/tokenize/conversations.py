"""A row as a document: its tokens, and which of them are trained on.

    text                    --data.args.text COLUMN; every token is trained on
    messages                a conversation; the assistant's tokens, or --data.args.loss last or all;
                            without messages of weight 0
    prompt, completion      the completion's; both are text, or lists of messages

The tokenizer's chat template writes a conversation. A template with {% generation %} marks what the assistant
writes, as transformers' return_assistant_tokens_mask reads it. For others the conversation is rendered up to
each assistant turn and again with it; what the turn adds is the assistant's. That needs a template in which a
longer conversation continues the text of a shorter one.
"""

from __future__ import annotations

import itertools
import json
import re
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.text import byte_size, quoted
from fsdp.config.fields import expanded
from fsdp.tokenize.rows import SourceRow
from fsdp.tokenize.tokenizer import HubTokenizer, Tokenizer, load_tokenizer

Message = dict[str, Any]
Span = tuple[int, int]
Loss = Literal["assistant", "all", "last"]
Form = Literal["text", "messages", "pairs"]
T = TypeVar("T")
TRAINED = ("weight", "train")
"""Keys of a message, as files of OpenAI and of axolotl have: 0 or false if it is not trained on."""
ENCODED_AT_ONCE = 256
"""Texts."""
TEMPLATE_S, TEMPLATE_BYTES = 5.0, 256 << 20
"""Processor time and memory of one rendering: a conversation takes some milliseconds and kilobytes."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "probe\u2603content"
EXAMPLE = """messages are [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]"""


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
    _column(row, options.text or "text")
    return "text"


class DocumentReader:
    """Turns rows of one form into documents."""

    def __init__(self, options: DocumentOptions, form: Form) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(options.tokenizer)
        self._options, self._form = options, form
        self._template = self._chat("the rows are conversations") if form == "messages" else None

    def read_all(self, rows: Iterable[SourceRow]) -> Iterator[Document]:
        """The documents of the rows, in their order. Texts are encoded many at a time."""
        if self._form != "text":
            yield from map(self._messages if self._form == "messages" else self._pair, rows)
            return
        column = self._options.text or "text"
        texts = (self._string(row, column) for row in rows)
        for group in iter(lambda: list(itertools.islice(texts, ENCODED_AT_ONCE)), []):
            for tokens in self.tokenizer.encode_all(group, special=True):
                yield Document(self._ended(tokens), None)

    def read(self, row: SourceRow) -> Document:
        return next(self.read_all([row]))

    def _chat(self, reason: str) -> ChatTemplate:
        if not isinstance(self.tokenizer, HubTokenizer):
            raise ConfigError(
                f"{reason}, and the tokenizer bytes has no chat template.",
                "--data.tokenizer DIR, a folder with tokenizer_config.json",
            )
        return ChatTemplate(self.tokenizer, self._options.chat_template, self._options.tokenizer)

    def _string(self, row: SourceRow, name: str) -> str:
        value = _column(row, name)
        if not isinstance(value, str):
            kind = "null" if value is None else f"a {type(value).__name__}"
            raise ConfigError(f"{row.place}: {name} is {kind}, not text.", f"text in {name}, or no such row")
        return value

    def _ended(self, tokens: Sequence[int]) -> np.ndarray:
        array, end = _array(tokens), self.tokenizer.end
        return array if array.size and array[-1] == end else np.append(array, end)

    def _messages(self, row: SourceRow) -> Document:
        assert self._template is not None
        messages = check_messages(_column(row, "messages"), "messages", row.place)
        return self._conversation(self._template, row, messages, 0)

    def _conversation(
        self, template: ChatTemplate, row: SourceRow, messages: list[Message], prompt: int
    ) -> Document:
        """The first `prompt` messages are not trained on."""
        arguments = template_arguments(row)
        if self._options.loss == "all":
            if any(map(left_out_by, messages)):
                raise ConfigError(
                    f"{row.place}: a message has weight 0, and --data.args.loss all trains on all.",
                    "leave --data.args.loss out: the assistant's other messages are trained on",
                )
            text = template.render(messages, row.place, **arguments)
            return Document(_array(self.tokenizer.encode(text, special=False).tokens), None)
        text, spans = template.spans(messages, row.place, **arguments)
        if prompt:
            before = len(template.render(messages[:prompt], row.place, **arguments))
            spans = [span for span in spans if span[0] >= before]
        if self._options.loss == "last":
            spans = spans[-1:]
        # The template has written the special tokens already.
        encoded = self.tokenizer.encode(text, special=False, spans=True)
        return Document(_array(encoded.tokens), _within(encoded.spans, spans))

    def _pair(self, row: SourceRow) -> Document:
        prompt, completion = _column(row, "prompt"), _column(row, "completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            self._template = self._template or self._chat("prompt and completion are messages")
            asked = check_messages(prompt, "prompt", row.place)
            answered = check_messages(completion, "completion", row.place)
            return self._conversation(self._template, row, asked + answered, len(asked))
        before = self._string(row, "prompt")
        encoded = self.tokenizer.encode(before + self._string(row, "completion"), special=True, spans=True)
        tokens = self._ended(encoded.tokens)
        if self._options.loss == "all":
            return Document(tokens, None)
        # From the token that reaches into the completion. One that a prompt's end and it share is trained on.
        first = next((n for n, (_, end) in enumerate(encoded.spans) if end > len(before)), len(tokens) - 1)
        return Document(tokens, (np.arange(len(tokens)) >= first).astype(np.uint8))


def _within(token_spans: Any, spans: list[Span]) -> np.ndarray:
    """1 for each token that has a character in one of the spans."""
    begins, ends = np.asarray(token_spans, np.int64).reshape(-1, 2).T
    trained = np.zeros(len(begins), np.bool_)
    for start, end in spans:
        trained |= (ends > start) & (begins < end) & (ends > begins)
    return trained.astype(np.uint8)


def _array(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else tokens, np.int64)


def _column(row: SourceRow, name: str) -> Any:
    if name not in row.values:
        texts = [column for column, value in row.values.items() if isinstance(value, str)]
        longest = max(texts, key=lambda column: len(row.values[column]), default="")
        columns = ", ".join(map(str, row.values)) or "none"
        hint = (
            f"--data.args.text {quoted(longest)}"
            if longest
            else f'{{"text": "Once upon a time"}}; or {EXAMPLE}'
        )
        raise ConfigError(f"{row.place} has no column {name}; its columns are {columns}.", hint)
    return row.values[name]


# ---------------------------------------------------------------- chat templates


@contextmanager
def limits() -> Iterator[None]:
    """Raises TimeoutError or MemoryError beyond them, on the main thread."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"it computes for more than {TEMPLATE_S:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    most = used + TEMPLATE_BYTES
    before = signal.signal(signal.SIGPROF, too_long)
    try:
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        signal.setitimer(signal.ITIMER_PROF, TEMPLATE_S, 1.0)
        yield
    except MemoryError:
        raise MemoryError(f"it takes more than {byte_size(TEMPLATE_BYTES)}") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class ChatTemplate:
    def __init__(self, tokenizer: HubTokenizer, text: str, name: str) -> None:
        """`text` is that of --data.args.chat_template; empty: the tokenizer's template."""
        self._tokenizer = tokenizer.made
        try:
            self._text = text or str(self._tokenizer.get_chat_template())
        except ValueError:
            raise ConfigError(
                f"--data.tokenizer {name} has no chat template, and the rows are conversations.",
                "--data.args.chat_template FILE, or the tokenizer of an instruction-tuned model",
            ) from None
        tokens = self._tokenizer.added_tokens_decoder.values()
        self._special = tuple(str(token.content) for token in tokens if token.special)

    def render(self, messages: Sequence[Message], place: str, **arguments: Any) -> str:
        values = {"tokenize": False, "chat_template": self._text, **arguments}
        text: str = _limited(
            messages, place, lambda: str(self._tokenizer.apply_chat_template(list(messages), **values))
        )
        if any(isinstance(m.get("content"), list) and str(m["content"]) in text for m in messages):
            raise ConfigError(
                f"{place}: the content of a message is a list, which the chat template does not read.",
                """text as in "content": "Hi"; or --data.args.chat_template FILE that reads lists""",
            )
        return text

    def spans(self, messages: Sequence[Message], place: str, **arguments: Any) -> tuple[str, list[Span]]:
        """The conversation's text, and the [start, end) that the assistant writes, by turn. A turn that is
        not trained on is an empty span at the end.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        text = self.render(messages, place, **arguments)
        if MARKED.search(self._text):
            text, spans = self._marked(messages, place, **arguments)
        else:
            spans = [self._turn(messages, turn, text, place, **arguments) for turn in turns]
        if not any(map(left_out_by, messages)):
            return text, spans
        if len(spans) != len(turns):
            raise _not_found(place, f"marks {len(spans)} of {len(turns)} turns, and a message has weight 0")
        empty = (len(text), len(text))
        pairs = zip(turns, spans, strict=True)
        return text, [empty if left_out_by(messages[turn]) else span for turn, span in pairs]

    def _marked(self, messages: Sequence[Message], place: str, **arguments: Any) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        filled = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values: Any = {
            "conversations": [filled],
            "chat_template": self._text,
            "return_assistant_tokens_mask": True,
            "add_generation_prompt": False,
            **self._tokenizer.special_tokens_map,
            **arguments,
        }
        rendered: Any = _limited(messages, place, lambda: render_jinja_template(**values))
        texts, spans = rendered
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]]

    def _turn(self, messages: Sequence[Message], turn: int, whole: str, place: str, **arguments: Any) -> Span:
        """What the turn adds to the text before it, from its content to the special token that ends it."""
        asked = {**arguments, "add_generation_prompt": True}
        before = self.render(messages[:turn], place, **asked) if turn else ""
        after = self._continued(self.render(messages[: turn + 1], place, **arguments), whole)
        if whole.startswith(after) and not after.startswith(before):
            # a prompt that no turn begins with, such as an empty thought
            before = self.render(messages[:turn], place, **arguments)
        if not (whole.startswith(after) and after.startswith(before)):
            raise _not_found(place, f"writes message {turn + 1} in another way when more messages follow")
        start, end = len(before), len(after)
        content = messages[turn].get("content")
        if isinstance(content, str) and content.strip() and not messages[turn].get("tool_calls"):
            # Past the header of a first turn, or of a template without a generation prompt. As it is, or as a
            # template writes it that removes the space around it.
            starts = [after.find(text, start) for text in (content, content.strip())]
            start = next((position for position in starts if position >= 0), start)
        else:
            # Tool calls alone: the header ends where text would stand, if the template writes the same.
            probe = [*messages[:turn], {"role": "assistant", "content": PROBE}]
            header = self.render(probe, place, **arguments).partition(PROBE)[0]
            start = max(start, len(header) if after.startswith(header) else 0)
        bare = after.rstrip()
        return start, len(bare) if bare.endswith(self._special) and len(bare) > start else end

    def _continued(self, after: str, whole: str) -> str:
        """`after` without the special tokens that end a conversation but no turn, where `whole` continues."""
        text = after
        while not whole.startswith(text):
            bare = text.rstrip()
            end = next((token for token in self._special if bare.endswith(token)), "")
            if not end:
                return after
            text = bare.removesuffix(end)
        return text


def _limited(messages: Sequence[Message], place: str, render: Callable[[], T]) -> T:
    """A template is a program of whoever made the tokenizer."""
    try:
        with limits():
            return render()
    except Exception as error:  # a template raises what it likes
        raise ConfigError(
            f"{place}: the chat template refuses the conversation: {message_line(error)}.",
            f"roles here are {', '.join(str(message['role']) for message in messages)}; leave it out, or "
            "--data.args.chat_template FILE",
        ) from None


def _not_found(place: str, what: str) -> ConfigError:
    return ConfigError(
        f"{place}: the chat template {what}, so the assistant's part cannot be found.",
        "--data.args.chat_template FILE with one {% generation %} around each turn, or --data.args.loss all",
    )


def template_text(path: str) -> str:
    try:
        return expanded(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = f"--data.args.chat_template {path} cannot be read ({message_line(error)})."
        raise ConfigError(reason, "a file with a Jinja template") from None


# ---------------------------------------------------------------- checks of a row's conversation


def left_out_by(message: Message) -> bool:
    """Whether the message is not trained on."""
    return any(message.get(key) == 0 for key in TRAINED)


def check_messages(value: Any, field: str, place: str) -> list[Message]:
    """Raises ConfigError unless it is a list of messages with role and content."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place}: {field} is not a list of messages.", EXAMPLE)
    for number, message in enumerate(value, 1):
        if problem := _problem_of(message):
            raise ConfigError(f"{place}: message {number} of {field} {problem}.", EXAMPLE)
    return value


def _problem_of(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "has no role"
    content, assistant = message.get("content"), message["role"] == "assistant"
    if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
        return "has no content of text, or a list of parts"
    trained = {key: message.get(key) for key in TRAINED}
    wrong = [key for key, value in trained.items() if value not in (None, 0, 1) or (value and not assistant)]
    return (
        f"has {wrong[0]} {trained[wrong[0]]!r}: 1 trains on the assistant's, 0 leaves one out"
        if wrong
        else ""
    )


def template_arguments(row: SourceRow) -> dict[str, Any]:
    """What a row has for its chat template beside the messages, in the columns that TRL reads: `tools`, a
    list or its JSON, and `chat_template_kwargs`.
    """
    tools = row.values.get("tools") or None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        arguments = dict(row.values.get("chat_template_kwargs") or {})
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{row.place}: tools are not JSON, or chat_template_kwargs no object: {message_line(error)}.",
            """as in [{"type": "function", "function": {"name": "f"}}] and {"enable_thinking": false}""",
        ) from None
    return {**arguments, **({"tools": tools} if tools else {})}
