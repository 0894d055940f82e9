"""Conversations as text: the tokenizer's chat template, and the characters that the assistant writes.

A template with {% generation %} marks them itself, as transformers' return_assistant_tokens_mask reads it.
For others the conversation is rendered up to each assistant turn and again with it; what the turn adds is the
assistant's. That needs a template in which a longer conversation continues the text of a shorter one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.tokenize.tokenizer import HubTokenizer

Message = dict[str, Any]
Span = tuple[int, int]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    def __init__(self, tokenizer: HubTokenizer, own: str, name: str) -> None:
        """`own` is the text of --data.args.chat_template; empty: the tokenizer's template."""
        self._tokenizer = tokenizer.made
        self._text = own or _of_tokenizer(tokenizer, name)
        self._special = tuple(
            str(token.content) for token in self._tokenizer.added_tokens_decoder.values() if token.special
        )

    def render(self, messages: Sequence[Message], place: str, **more: Any) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, chat_template=self._text, **more
                )
            )
        except Exception as error:  # a template raises what it likes
            what = " ".join(str(error).split())[:200].rstrip(".")
            raise ConfigError(
                f"{place}: the chat template refuses the conversation: {what}.",
                f"roles here are {', '.join(str(m['role']) for m in messages)}; leave the row out, or "
                "--data.args.chat_template FILE",
            ) from None

    def spans(self, messages: Sequence[Message], place: str) -> tuple[str, list[Span]]:
        """The conversation's text, and the [start, end) that the assistant writes, by turn."""
        if MARKED.search(self._text):
            return self._marked(messages, place)
        whole = self.render(messages, place)
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        return whole, [self._turn(messages, n, whole, place) for n in turns]

    def _marked(self, messages: Sequence[Message], place: str) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        self.render(messages, place)  # its errors become one line
        kept = [{key: value for key, value in one.items() if value is not None} for one in messages]
        rendered: Any = render_jinja_template(
            conversations=[kept],
            chat_template=self._text,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **self._tokenizer.special_tokens_map,
        )
        texts, spans = rendered
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]]

    def _turn(self, messages: Sequence[Message], n: int, whole: str, place: str) -> Span:
        before = self.render(messages[:n], place, add_generation_prompt=True) if n else ""
        after = self.render(messages[: n + 1], place)
        if not whole.startswith(after):
            raise _not_a_prefix(place, n)
        if not after.startswith(before):  # a prompt that no turn begins with, such as an empty thought
            before = self.render(messages[:n], place)
        if not after.startswith(before):
            raise _not_a_prefix(place, n)
        start, end = len(before), len(after)
        content = messages[n].get("content")
        if isinstance(content, str) and content.strip() and not messages[n].get("tool_calls"):
            # Past the header of a first turn, or of a template without a generation prompt.
            start = max(start, after.find(content.strip(), start))
        bare = after.rstrip()
        return start, len(bare) if bare.endswith(self._special) and len(bare) > start else end


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


def check_messages(value: Any, field: str, place: str) -> list[Message]:
    """Raises ConfigError unless it is a list of messages with role and content."""
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise ConfigError(f"{place}: {field} is {shown}, not a list of messages.", _EXAMPLE)
    for n, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise ConfigError(f"{place}: message {n} of {field} is a {type(message).__name__}.", _EXAMPLE)
        for key in ("role", "content"):
            given = message.get(key)
            if given is None and (key == "role" or not message.get("tool_calls")):
                has = ", ".join(map(str, message)) or "nothing"
                raise ConfigError(f"{place}: message {n} of {field} has no {key}; it has {has}.", _EXAMPLE)
        if not isinstance(message["role"], str):
            raise ConfigError(
                f"{place}: role of message {n} of {field} is {message['role']!r}, not text.", _EXAMPLE
            )
        if isinstance(message.get("content"), str):
            check_unicode(message["content"], f"content of message {n} of {field}", place)
    return value


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


_EXAMPLE = """messages are [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]"""
