"""A row as a document: its tokens, and which of them are trained on; and the tokenizers that make them.

    text                    --data.args.text COLUMN; every token is trained on
    messages                a conversation; the assistant's tokens, or --data.args.loss last or all;
                            without messages of weight 0
    prompt, completion      the completion's

A tokenizer is a folder or a cached id of transformers, or the bytes of UTF-8. Nothing is downloaded, and code
that a tokenizer brings (trust_remote_code) is never run. Its chat template writes a conversation. A template
with {% generation %} marks what the assistant writes, as transformers' return_assistant_tokens_mask reads it.
For others the conversation is rendered up to each assistant turn and again with it; what the turn adds is the
assistant's. That needs a template in which a longer conversation continues the text of a shorter one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import resource
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.text import byte_size, quoted
from fsdp.config.sections import expanded
from fsdp.tokenize.rows import NO_WEIGHTS, SourceRow

Message = dict[str, Any]
Span = tuple[int, int]
Loss = Literal["assistant", "all", "last"]
Form = Literal["text", "messages", "pairs"]
BYTES = "bytes"
TRAINED = ("weight", "train")
"""Keys of a message, as files of OpenAI and of axolotl have: 0 or false if it is not trained on."""
ENCODED_AT_ONCE = 256
"""Texts."""
TEMPLATE_S, TEMPLATE_BYTES = 5.0, 256 << 20
"""Processor time and memory of one rendering: a conversation takes some milliseconds and kilobytes."""
PROBE = "a question"
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
EXAMPLE = """messages are [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]"""


# ---------------------------------------------------------------- tokenizers


class ByteTokenizer:
    vocab_size, end = 256, 0
    """`end` is the token that ends a document: UTF-8 text has no zero byte."""

    def encode_all(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The tokens of each text, with those that the tokenizer puts around it."""
        return [text.encode("utf-8", "surrogatepass") for text in texts]

    def encode_with_spans(self, text: str, *, special: bool) -> tuple[Sequence[int], Sequence[Span]]:
        """Tokens, and the characters [start, end) of the text that each stands for."""
        spans = [(n, n + 1) for n, sign in enumerate(text) for _ in sign.encode("utf-8", "surrogatepass")]
        return self.encode_all([text])[0], spans

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class HubTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, name: str, *, ends: bool) -> None:
        """`ends`: whether texts are ended, for which it needs a token."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        folder, options = find_tokenizer(name), {"local_files_only": True, "trust_remote_code": False}
        try:
            import transformers

            logging.getLogger("transformers").setLevel(logging.ERROR)
            self.made: Any = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
            if not self.made.is_fast:
                raise ValueError("no tokenizer.json, so its tokens have no places in the text")
        except Exception as error:  # the library raises what its classes raise
            reason = f"--data.tokenizer {name} cannot be loaded: {message_line(error)}."
            hint = (
                f"ls {quoted(folder)}, which AutoTokenizer.save_pretrained writes; pip install transformers"
            )
            raise ConfigError(reason, hint) from None
        self.vocab_size = 1 + max(self.made.get_vocab().values(), default=0)
        self.end: int = self.made.eos_token_id
        """None where none is needed and it has none."""
        if self.end is None and ends:
            hint = f'"eos_token": "TOKEN", one of its tokens, in {folder / "tokenizer_config.json"}'
            raise ConfigError(f"--data.tokenizer {name} has no token that ends a text.", hint)

    def encode_all(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        tokens: list[list[int]] = self._encoded(list(texts), True, False)["input_ids"]
        return tokens

    def encode_with_spans(self, text: str, *, special: bool) -> tuple[Sequence[int], Sequence[Span]]:
        encoded = self._encoded(text, special, True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _encoded(self, texts: str | list[str], special: bool, spans: bool) -> Any:
        try:
            return self.made(
                texts,
                add_special_tokens=special,
                return_offsets_mapping=spans,
                return_attention_mask=False,
                truncation=False,
                verbose=False,
            )
        except Exception as error:  # the library raises Exception itself
            first = texts if isinstance(texts, str) else texts[0]
            reason = f"the tokenizer cannot encode the text from {first[:60]!a} on: {message_line(error)}."
            raise ConfigError(reason, "--data.tokenizer DIR, one that encodes any text") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.made.decode(list(tokens)))


Tokenizer = ByteTokenizer | HubTokenizer


def load_tokenizer(name: str, *, ends: bool = True) -> Tokenizer:
    """--data.tokenizer; an empty name is bytes."""
    return ByteTokenizer() if name in ("", BYTES) else HubTokenizer(name, ends=ends)


def find_tokenizer(name: str) -> Path:
    """Its folder. An id is looked up in Hugging Face's cache of this machine alone."""
    if (expanded(name) / "tokenizer_config.json").is_file():
        return expanded(name)
    with suppress(ImportError, ValueError):  # not the form of an id
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer_config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    raise ConfigError(
        f"--data.tokenizer {name} is neither a folder with tokenizer_config.json nor an id in this machine's "
        "cache of Hugging Face.",
        f"hf download {quoted(name)} --include '*.json' '*.jinja' '*.model' with a network; of a "
        "tokenizer.json, PreTrainedTokenizerFast(tokenizer_file=FILE, eos_token=TOKEN).save_pretrained(DIR)",
    )


def digest_of_tokenizer(name: str) -> str:
    """Of the files that make its tokens; found without loading it."""
    if name in ("", BYTES):
        return BYTES
    folder, digest = find_tokenizer(name), hashlib.sha256()
    for file in sorted(file for pattern in NO_WEIGHTS for file in folder.glob(pattern)):
        if not file.name.endswith(".index.json"):  # of weights
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:20]


# ---------------------------------------------------------------- documents


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
    _string(row, options.text or "text")
    return "text"


class DocumentReader:
    """Turns rows of one form into documents."""

    def __init__(self, options: DocumentOptions, form: Form) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(options.tokenizer)
        self._options, self._form = options, form
        self._template = ChatTemplate(self.tokenizer, options) if form == "messages" else None

    def read_all(self, rows: Iterable[SourceRow]) -> Iterator[tuple[SourceRow, Document | ConfigError]]:
        """The rows in their order, each with its document or what is wrong with it. Texts are encoded many
        at a time.
        """
        rows, texts = iter(rows), self._form == "text"
        for group in iter(lambda: list(itertools.islice(rows, ENCODED_AT_ONCE if texts else 1)), []):
            yield from zip(group, self._texts(group) if texts else [self._read(group[0])], strict=True)

    def _read(self, row: SourceRow) -> Document | ConfigError:
        try:
            return self._pair(row) if self._template is None else self._conversation(self._template, row)
        except ConfigError as error:
            return error

    def _texts(self, rows: Sequence[SourceRow]) -> list[Document | ConfigError]:
        try:
            texts = [_string(row, self._options.text or "text") for row in rows]
            return [Document(self._ended(tokens), None) for tokens in self.tokenizer.encode_all(texts)]
        except ConfigError as error:
            return [error] if len(rows) == 1 else [self._texts([row])[0] for row in rows]

    def _ended(self, tokens: Sequence[int]) -> np.ndarray:
        array, end = _array(tokens), self.tokenizer.end
        return array if array.size and array[-1] == end else np.append(array, end)

    def _conversation(self, template: ChatTemplate, row: SourceRow) -> Document:
        messages = check_messages(_column(row, "messages"), row.place)
        if "tool_calls" not in template.text and any(message.get("tool_calls") for message in messages):
            reason = f"{row.place}: the chat template does not write tool_calls, which would be lost."
            raise ConfigError(reason, "--data.args.chat_template FILE, one that does")
        every = self._options.loss == "all"
        write = template.render if every else template.spans
        text, spans = write(messages, row.place, template_arguments(row))
        # The template has written the special tokens already.
        tokens, token_spans = self.tokenizer.encode_with_spans(text, special=False)
        if every:
            return Document(_array(tokens), None)
        begins, ends = np.asarray(token_spans, np.int64).reshape(-1, 2).T
        trained = np.zeros(len(begins), np.bool_)
        for start, end in spans[-1:] if self._options.loss == "last" else spans:
            trained |= (ends > start) & (begins < end) & (ends > begins)
        return Document(_array(tokens), trained.astype(np.uint8))

    def _pair(self, row: SourceRow) -> Document:
        before, after = _string(row, "prompt"), _string(row, "completion")
        tokens, spans = self.tokenizer.encode_with_spans(before + after, special=True)
        array = self._ended(tokens)
        if self._options.loss == "all":
            return Document(array, None)
        # From the token that reaches into the completion. One that a prompt's end and it share is trained on.
        first = next((n for n, (_, end) in enumerate(spans) if end > len(before)), len(array) - 1)
        return Document(array, (np.arange(len(array)) >= first).astype(np.uint8))


def _array(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else tokens, np.int64)


def _column(row: SourceRow, name: str) -> Any:
    if name not in row.values:
        columns = ", ".join(map(str, row.values)) or "none"
        texts = [str(column) for column, value in row.values.items() if isinstance(value, str)]
        hint = "rename a question to prompt and its answer to completion; or " * (len(texts) > 1)
        hint += f"--data.args.text {quoted(texts[-1])}" if texts else f'{{"text": "Once"}}; or {EXAMPLE}'
        raise ConfigError(f"{row.place} has no column {name}; its columns are {columns}.", hint)
    return row.values[name]


def _string(row: SourceRow, name: str) -> str:
    value = _column(row, name)
    if not isinstance(value, str):
        reason = f"{row.place}: {name} is a {type(value).__name__}, not text."
        raise ConfigError(reason, f"text in {name}, or no such row; {EXAMPLE}")
    return value


def untrained_reason(row: SourceRow, document: Document) -> str:
    """Why a document has no token to train on; empty if it has one."""
    if len(document.tokens) < 2:
        return "it has no text"
    if document.trained is None or document.trained[1:].any():
        return ""
    messages = row.values.get("messages", ())
    if not any(message["role"] == "assistant" for message in messages):
        return "no message is the assistant's" if messages else "its completion is empty"
    return "every message of the assistant is empty, or has weight 0"


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
    def __init__(self, tokenizer: Tokenizer, options: DocumentOptions) -> None:
        """The text of --data.args.chat_template; empty: the tokenizer's template."""
        try:
            if not isinstance(tokenizer, HubTokenizer):
                raise ValueError("a token is a byte")
            self._tokenizer = tokenizer.made
            self.text = options.chat_template or str(self._tokenizer.get_chat_template())
        except ValueError:
            name = options.tokenizer or BYTES
            raise ConfigError(
                f"--data.tokenizer {name} has no chat template, and the rows are conversations.",
                "--data.tokenizer DIR of an instruction-tuned model, or --data.args.chat_template FILE too",
            ) from None
        tokens = self._tokenizer.added_tokens_decoder.values()
        self._special = tuple(str(token.content) for token in tokens if token.special)
        self._marked = MARKED.search(self.text) is not None
        for self._in_parts in (False, True):  # templates of models that see pictures read parts alone
            with suppress(ConfigError):
                if PROBE in self.render([{"role": "user", "content": PROBE}], "", {})[0]:
                    break
        else:
            self._in_parts = False

    def spans(
        self, messages: Sequence[Message], place: str, arguments: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        """The conversation's text, and the [start, end) that the assistant writes, by turn. A turn that is
        not trained on is an empty span.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        text, spans = self.render(messages, place, arguments, marked=self._marked)
        if not self._marked:
            spans = [self._turn(messages, turn, text, place, arguments) for turn in turns]
        if any(map(left_out_by, messages)):
            if len(spans) != len(turns):
                raise _not_found(place, f"marks {len(spans)} of {len(turns)} turns, and one has weight 0")
            pairs = zip(turns, spans, strict=True)
            spans = [(0, 0) if left_out_by(messages[turn]) else span for turn, span in pairs]
        return text, spans

    def render(
        self, messages: Sequence[Message], place: str, arguments: dict[str, Any], **options: bool
    ) -> tuple[str, list[Span]]:
        """`options`: `prompt` of a further assistant turn; `marked`, with the spans of its marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        filled = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if self._in_parts:
            filled = [{**m, "content": [{"type": "text", "text": m.get("content", "")}]} for m in filled]
        values: dict[str, Any] = {
            **self._tokenizer.special_tokens_map,
            **arguments,
            "conversations": [filled],
            "chat_template": self.text,
            "return_assistant_tokens_mask": options.get("marked", False),
            "add_generation_prompt": options.get("prompt", False),
        }
        try:
            with limits():  # a template is a program of whoever made the tokenizer
                rendered: Any = render_jinja_template(**values)
        except Exception as error:  # a template raises what it likes
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(
                f"{place}: the chat template refuses the conversation: {message_line(error)}.",
                f"roles here are {roles}; leave it out, or --data.args.chat_template FILE",
            ) from None
        texts, spans = rendered
        return str(texts[0]), [(int(start), int(end)) for start, end in (spans[0] if spans else ())]

    def _turn(
        self, messages: Sequence[Message], turn: int, whole: str, place: str, arguments: dict[str, Any]
    ) -> Span:
        """What the turn adds to the text before it, from its content to the special token that ends it."""
        before = self.render(messages[:turn], place, arguments, prompt=True)[0] if turn else ""
        after = self.render(messages[: turn + 1], place, arguments)[0]
        if not (whole.startswith(after) and after.startswith(before)):
            raise _not_found(place, f"writes message {turn + 1} in another way when more messages follow")
        start, content = len(before), messages[turn].get("content") or ""
        if content.strip():
            # Past the header of a first turn, or of a template without a generation prompt.
            start = max(start, after.find(content, start))
        elif not turn or before == self.render(messages[:turn], place, arguments)[0]:
            raise _not_found(place, f"has no prompt before message {turn + 1}, which has no text")
        bare = after.rstrip()
        return start, len(bare) if bare.endswith(self._special) and len(bare) > start else len(after)


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
        raise ConfigError(reason, "a file with a Jinja template; chat_template.jinja of an export") from None


# ---------------------------------------------------------------- checks of a row's conversation


def left_out_by(message: Message) -> bool:
    """Whether the message is not trained on."""
    return any(message.get(key) == 0 for key in TRAINED)


def check_messages(value: Any, place: str) -> list[Message]:
    """Raises ConfigError unless it is a list of messages with role and content; parts of text are joined."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place}: messages is not a list of messages.", EXAMPLE)
    messages = [_joined(message, f"{place}: message {number}") for number, message in enumerate(value, 1)]
    for number, message in enumerate(messages, 1):
        if not _is_message(message):
            reason = f"{place}: message {number} has no role, no content of text, or a weight that is not 0"
            raise ConfigError(f"{reason} or the assistant's 1: {str(message)[:80]!a}.", EXAMPLE)
    return messages


def _joined(message: Any, place: str) -> Any:
    """The message with the text of its parts, [{"type": "text", "text": "Hi"}], as its content."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            reason = f"{place} has a part of type {kind!a:.40}, and parts of text alone are read."
            raise ConfigError(reason, EXAMPLE)
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content, most = message.get("content"), message["role"] == "assistant"
    weighed = all(message.get(key) in (None, 0, int(most)) for key in TRAINED)
    return weighed and (isinstance(content, str) or (content is None and bool(message.get("tool_calls"))))


def template_arguments(row: SourceRow) -> dict[str, Any]:
    """What a row has for its chat template beside the messages, in the columns that TRL reads: `tools`, a
    list or its JSON, and `chat_template_kwargs`.
    """
    tools = row.values.get("tools") or None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return {**dict(row.values.get("chat_template_kwargs") or {}), "tools": tools}
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"{row.place}: tools are not JSON, or chat_template_kwargs no object: {message_line(error)}."
        raise ConfigError(reason, """as in [{"type": "function"}] and {"enable_thinking": false}""") from None
