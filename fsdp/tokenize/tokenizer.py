"""Tokenizers: a folder or a cached id of transformers, a tokenizer.json, or the bytes of UTF-8.

Nothing is downloaded, and code that a tokenizer brings (trust_remote_code) is never run.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.text import quoted
from fsdp.config.fields import expanded

BYTES = "bytes"
END_OF_BYTES = 0
"""Ends a document of bytes: UTF-8 text has no zero byte."""
PARTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<|eos|>")
"""Names of the token that ends a text, for a tokenizer.json alone, which states none."""


@dataclass(frozen=True)
class Encoded:
    """Tokens, and the characters [start, end) of the text that each stands for, where these were wanted."""

    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]] = ()


class ByteTokenizer:
    vocab_size, end = 256, END_OF_BYTES
    """`end` is the token that ends a document."""

    def encode(self, text: str, *, special: bool, spans: bool = False) -> Encoded:
        """`special` adds the tokens that the tokenizer puts around a text, such as one that begins it."""
        raw = text.encode("utf-8", "surrogatepass")
        if not spans:
            return Encoded(raw)
        places = [(n, n + 1) for n, sign in enumerate(text) for _ in sign.encode("utf-8", "surrogatepass")]
        return Encoded(raw, places)

    def encode_all(self, texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        """The tokens of each text, as `encode` finds them; faster, in one call of the library."""
        return [self.encode(text, special=special).tokens for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class HubTokenizer:
    """A tokenizer of transformers: of its folder, or of a tokenizer.json alone."""

    def __init__(self, name: str, path: Path, *, ends: bool) -> None:
        """`ends`: whether texts are ended, for which it needs a token."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # A config.json beside it has transformers import its model's packages, torchvision too.
        from fsdp.base.torch_private import prepare_torchvision

        prepare_torchvision()
        try:
            import transformers
        except ImportError:
            reason = f"--data.tokenizer {name} needs the package transformers."
            raise ConfigError(reason, "pip install transformers") from None
        logging.getLogger("transformers").setLevel(logging.ERROR)
        alone, options = path.is_file(), {"local_files_only": True, "trust_remote_code": False}
        try:
            self.made: Any = (
                transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
                if alone
                else transformers.AutoTokenizer.from_pretrained(str(path), **options)
            )
            if not self.made.is_fast:
                raise ValueError("no tokenizer.json, so its tokens have no places in the text")
        except Exception as error:  # the library raises what its classes raise
            reason = f"--data.tokenizer {name} cannot be loaded: {message_line(error)}."
            hint = f"ls {quoted(path)}; AutoTokenizer.save_pretrained of transformers 5 writes what it needs"
            raise ConfigError(reason, hint) from None
        vocabulary = self.made.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=0)
        named = (vocabulary[end] for end in ENDS if alone and end in vocabulary)
        end = next(named, self.made.eos_token_id)
        if end is None and ends:
            file = (path.parent if alone else path) / "tokenizer_config.json"
            hint = f'"eos_token": "TOKEN", one of its tokens, in {file}, and --data.tokenizer {file.parent}'
            raise ConfigError(f"--data.tokenizer {name} has no token that ends a text.", hint)
        self.end: int = end
        """None where none is needed and it has none."""

    def encode(self, text: str, *, special: bool, spans: bool = False) -> Encoded:
        encoded = self._encoded(text, special, spans)
        return Encoded(encoded["input_ids"], encoded["offset_mapping"] if spans else ())

    def encode_all(self, texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        tokens: list[list[int]] = self._encoded(list(texts), special, False)["input_ids"]
        return tokens

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
    return ByteTokenizer() if name in ("", BYTES) else HubTokenizer(name, find_tokenizer(name), ends=ends)


def find_tokenizer(name: str) -> Path:
    """The folder or the file. An id is looked up in Hugging Face's cache of this machine alone."""
    path = expanded(name)
    if path.is_dir() and not (path / "tokenizer_config.json").is_file():
        path = path / "tokenizer.json"
    if path.exists():
        return path
    with suppress(ImportError, ValueError):  # not the form of an id
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer_config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    raise ConfigError(
        f"--data.tokenizer {name} is neither a folder with tokenizer_config.json, nor a tokenizer.json, nor "
        "an id in this machine's cache of Hugging Face.",
        f"hf download {quoted(name)} --include '*.json' '*.jinja' '*.model' on a machine with a network",
    )


def digest_of_tokenizer(name: str) -> str:
    """Of the files that make its tokens; found without loading it."""
    if name in ("", BYTES):
        return BYTES
    path = find_tokenizer(name)
    files = [path] if path.is_file() else sorted(file for part in PARTS for file in path.glob(part))
    digest = hashlib.sha256()
    for file in files:
        if not file.name.endswith(".index.json"):  # of weights
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:20]
