"""Conversations as text: the tokenizer's chat template, and the characters that the assistant writes.

A template with {% generation %} marks them itself, as transformers' return_assistant_tokens_mask reads it.
For others the conversation is rendered up to each assistant turn and again with it; what the turn adds is the
assistant's. That needs a template in which a longer conversation continues the text of a shorter one.
"""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.units import byte_size
from fsdp.tokenize.tokenizer import HubTokenizer

Message = dict[str, Any]
Span = tuple[int, int]
TRAINED = ("weight", "train")
"""Keys of a message, as files of OpenAI and of axolotl have: 0 or false if it is not trained on."""
_PROBE = "probe\u2603content"
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


T = TypeVar("T")
TEMPLATE_S, TEMPLATE_BYTES = 5.0, 256 << 20
"""Processor time and memory of one rendering: a conversation takes some milliseconds and kilobytes."""


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
    def __init__(self, tokenizer: HubTokenizer, own: str, name: str) -> None:
        """`own` is the text of --data.args.chat_template; empty: the tokenizer's template."""
        self._tokenizer = tokenizer.made
        self._text = own or _of_tokenizer(tokenizer, name)
        self._special = tuple(
            str(token.content) for token in self._tokenizer.added_tokens_decoder.values() if token.special
        )

    def render(self, messages: Sequence[Message], place: str, **more: Any) -> str:
        text = self._rendered(messages, place, **more)
        for n, message in enumerate(messages, 1):
            content = message.get("content")
            if isinstance(content, list) and str(content) in text:
                raise ConfigError(
                    f"{place}: content of message {n} is a list, which the chat template does not read.",
                    """text as in "content": "Hi"; or --data.args.chat_template FILE that reads lists""",
                )
        return text

    def _rendered(self, messages: Sequence[Message], place: str, **more: Any) -> str:
        return self._limited(
            messages,
            place,
            lambda: str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, chat_template=self._text, **more
                )
            ),
        )

    @staticmethod
    def _limited(messages: Sequence[Message], place: str, render: Callable[[], T]) -> T:
        """A template is a program of whoever made the tokenizer."""
        try:
            with limits():
                return render()
        except Exception as error:  # a template raises what it likes
            what = message_line(error)
            raise ConfigError(
                f"{place}: the chat template refuses the conversation: {what}.",
                f"roles here are {', '.join(str(m['role']) for m in messages)}; leave the row out, or "
                "--data.args.chat_template FILE",
            ) from None

    def spans(self, messages: Sequence[Message], place: str, **more: Any) -> tuple[str, list[Span]]:
        """The conversation's text, and the [start, end) that the assistant writes, by turn. `more` are
        arguments of the template. A turn that is not trained on is an empty span at the end.
        """
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if MARKED.search(self._text):
            whole, found = self._marked(messages, place, **more)
        else:
            whole = self.render(messages, place, **more)
            found = [self._turn(messages, n, whole, place, **more) for n in turns]
        if not any(map(left_out_by, messages)):
            return whole, found
        if len(found) != len(turns):
            raise _not_a_mark_a_turn(messages, len(turns), len(found), place)
        nothing = (len(whole), len(whole))
        return whole, [
            nothing if left_out_by(messages[n]) else span for n, span in zip(turns, found, strict=True)
        ]

    def _marked(self, messages: Sequence[Message], place: str, **more: Any) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        self.render(messages, place, **more)  # which checks what it wrote
        kept = [{key: value for key, value in one.items() if value is not None} for one in messages]
        given: Any = {
            "conversations": [kept], "chat_template": self._text, "return_assistant_tokens_mask": True,
            "add_generation_prompt": False, **self._tokenizer.special_tokens_map, **more,
        }  # fmt: skip
        rendered: Any = self._limited(messages, place, lambda: render_jinja_template(**given))
        texts, spans = rendered
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]]

    def _turn(self, messages: Sequence[Message], n: int, whole: str, place: str, **more: Any) -> Span:
        before = self.render(messages[:n], place, **{**more, "add_generation_prompt": True}) if n else ""
        after = self._continued(self.render(messages[: n + 1], place, **more), whole)
        if not whole.startswith(after):
            raise _not_a_prefix(place, n)
        if not after.startswith(before):  # a prompt that no turn begins with, such as an empty thought
            before = self.render(messages[:n], place, **more)
        if not after.startswith(before):
            raise _not_a_prefix(place, n)
        start, end = len(before), len(after)
        content = messages[n].get("content")
        if isinstance(content, str) and content.strip() and not messages[n].get("tool_calls"):
            # Past the header of a first turn, or of a template without a generation prompt. As it is, or as a
            # template writes it that removes the space around it.
            places = [after.find(text, start) for text in (content, content.strip())]
            start = next((place for place in places if place >= 0), start)
        else:
            start = max(start, self._header_end(messages[:n], after, place, **more))
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

    def _header_end(self, earlier: Sequence[Message], after: str, place: str, **more: Any) -> int:
        """The end of the header of a turn without text of its own (tool calls alone): where text would stand.
        0 if the template writes another header for text.
        """
        probe = self.render([*earlier, {"role": "assistant", "content": _PROBE}], place, **more)
        header = probe.partition(_PROBE)[0]
        return len(header) if after.startswith(header) else 0


def _of_tokenizer(tokenizer: HubTokenizer, name: str) -> str:
    try:
        return str(tokenizer.made.get_chat_template())
    except ValueError:
        raise ConfigError(
            f"--data.tokenizer {name} has no chat template, and the rows are conversations.",
            "--data.args.chat_template FILE with a template, or the tokenizer of an instruction-tuned model",
        ) from None


def _not_a_prefix(place: str, turn: int) -> ConfigError:
    return ConfigError(
        f"{place}: the chat template writes message {turn + 1} in another way when more messages follow, "
        "so the assistant's part cannot be found.",
        "--data.args.chat_template FILE with {% generation %} around it, or --data.args.loss all",
    )


def _not_a_mark_a_turn(messages: Sequence[Message], turns: int, marks: int, place: str) -> ConfigError:
    key = next(filter(None, map(left_out_by, messages)))
    return ConfigError(
        f"{place}: a message has {key} 0, and the chat template marks {marks} parts of {turns} turns of the "
        "assistant, so its part cannot be found.",
        "--data.args.chat_template FILE with one {% generation %} around each turn of the assistant",
    )


def left_out_by(message: Message) -> str:
    """The key that leaves the message out of the loss; empty if none does."""
    return next((key for key in TRAINED if message.get(key) == 0), "")


def check_all_trained(messages: Sequence[Message], place: str) -> None:
    """For --data.args.loss all. Raises ConfigError for a message that is not to be trained on."""
    for n, message in enumerate(messages, 1):
        if key := left_out_by(message):
            raise ConfigError(
                f"{place}: message {n} has {key} 0, and --data.args.loss all trains on every message.",
                "leave --data.args.loss out: the assistant's other messages are trained on",
            )


def check_messages(value: Any, field: str, place: str) -> list[Message]:
    """Raises ConfigError unless it is a list of messages with role and content."""
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise ConfigError(f"{place}: {field} is {shown}, not a list of messages.", EXAMPLE)
    for n, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise ConfigError(f"{place}: message {n} of {field} is a {type(message).__name__}.", EXAMPLE)
        for key in ("role", "content"):
            given = message.get(key)
            if given is None and (key == "role" or not message.get("tool_calls")):
                has = ", ".join(map(str, message)) or "nothing"
                raise ConfigError(f"{place}: message {n} of {field} has no {key}; it has {has}.", EXAMPLE)
        if not isinstance(message["role"], str):
            raise ConfigError(
                f"{place}: role of message {n} of {field} is {message['role']!r}, not text.", EXAMPLE
            )
        _check_content(message.get("content"), f"content of message {n} of {field}", place)
        _check_trained(message, f"message {n} of {field}", place)
    return value


def _check_trained(message: Message, name: str, place: str) -> None:
    for key in TRAINED:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise ConfigError(
                f"{place}: {key} of {name} is {value!r}, not 0 or 1.",
                f'"{key}": 1 for a message of the assistant to train on, 0 for one to leave out of the loss',
            )
        if value and message["role"] != "assistant":
            raise ConfigError(
                f"{place}: {name} has {key} {value!r} and role {message['role']}: of a conversation, the "
                "assistant's messages are trained on.",
                f'"{key}": 0 there, or none',
            )


def _check_content(content: Any, name: str, place: str) -> None:
    """Text, a list of parts such as {"type": "text", "text": "Hi"}, or nothing."""
    if isinstance(content, str):
        check_unicode(content, name, place)
    elif isinstance(content, list):
        for part in content:
            if not isinstance(part, dict):
                raise ConfigError(
                    f"{place}: {name} is a list with a {type(part).__name__}, not of parts.", EXAMPLE
                )
    elif content is not None:
        raise ConfigError(f"{place}: {name} is a {type(content).__name__}, not text.", EXAMPLE)


def template_arguments(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What a row has for its chat template beside the messages, in the columns that TRL reads: `tools`, a
    list or its JSON, and `chat_template_kwargs`.
    """
    given = values.get("chat_template_kwargs") or {}
    tools = values.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: tools is text that is not JSON: {error}.", _TOOLS) from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise ConfigError(f"{place}: tools is a {type(tools).__name__}, not a list of objects.", _TOOLS)
    if not isinstance(given, dict) or (wrong := _OWN_ARGUMENTS & given.keys()):
        what = f"has {min(wrong)}" if isinstance(given, dict) else f"is a {type(given).__name__}"
        raise ConfigError(
            f"{place}: chat_template_kwargs {what}, not an object of a template's own variables.",
            'as in {"enable_thinking": false}',
        )
    return {**given, **({"tools": tools} if tools else {})}


def check_unicode(text: str, name: str, place: str) -> None:
    """Raises ConfigError for half of a surrogate pair, which JSON can escape and tokenizers refuse."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: {name} has {text[error.start]!a} at character {error.start + 1}, half of a surrogate "
            "pair.",
            "write the row again, in Python with text.encode('utf-8', 'replace').decode()",
        ) from None


_TOOLS = """tools are [{"type": "function", "function": {"name": "f", "parameters": {}}}], or such JSON"""
_OWN_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations",
    "messages", "return_assistant_tokens_mask", "tokenize",
}  # fmt: skip
EXAMPLE = """messages are [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]"""
