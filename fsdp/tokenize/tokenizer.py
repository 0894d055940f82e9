"""Tokenizers: a folder or a cached id of transformers, a tokenizer.json, or the bytes of UTF-8.

Nothing is downloaded, and code that a tokenizer brings (trust_remote_code) is never run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdp.base.errors import ConfigError, message_line
from fsdp.config.sections import expanded

BYTES = "bytes"
END_OF_BYTES = 0
"""Ends a document of bytes: UTF-8 text has no zero byte."""
PARTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


@dataclass(frozen=True)
class Encoded:
    """Tokens, and the characters [start, end) of the text that each stands for, where these were wanted."""

    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]] = ()


class Tokenizer(Protocol):
    vocab_size: int
    end: int
    """The token that ends a document."""

    def encode(self, text: str, *, special: bool, spans: bool = False) -> Encoded:
        """`special` adds the tokens that the tokenizer puts around a text, such as one that begins it."""
        ...

    def encode_all(self, texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        """The tokens of each text, as `encode` finds them; faster, in one call of the library."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    vocab_size, end = 256, END_OF_BYTES

    def encode(self, text: str, *, special: bool, spans: bool = False) -> Encoded:
        raw = text.encode("utf-8", "surrogatepass")
        if not spans:
            return Encoded(raw)
        return Encoded(
            raw, [(n, n + 1) for n, one in enumerate(text) for _ in one.encode("utf-8", "surrogatepass")]
        )

    def encode_all(self, texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        return [self.encode(text, special=special).tokens for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json alone."""

    def __init__(self, path: Path) -> None:
        library = _library("tokenizers", path)
        try:
            self._made = library.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(
                f"--data.tokenizer {path} is not a tokenizer.json: {message_line(error)}.",
                f"head -c 300 {path}",
            ) from None
        self._made.no_truncation()
        self._made.no_padding()
        vocabulary = self._made.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=0)
        names = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<|eos|>")
        self.end = _end(path, next((vocabulary[name] for name in names if name in vocabulary), None))

    def encode(self, text: str, *, special: bool, spans: bool = False) -> Encoded:
        with _encoding([text]):
            made = self._made.encode(text, add_special_tokens=special)
        return Encoded(made.ids, made.offsets)

    def encode_all(self, texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        encode = getattr(self._made, "encode_batch_fast", self._made.encode_batch)
        with _encoding(texts):
            return [one.ids for one in encode(list(texts), add_special_tokens=special)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._made.decode(list(tokens)))


class HubTokenizer:
    """A tokenizer of transformers, from its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        library = _library("transformers", folder)
        library.logging.set_verbosity_error()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            self.made: Any = library.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ConfigError(
                f"--data.tokenizer {name} cannot be loaded: {message_line(error)}.",
                f"ls {folder}; a folder of AutoTokenizer.save_pretrained, without code of its own",
            ) from None
        if not self.made.is_fast:
            raise ConfigError(
                f"--data.tokenizer {name} has no tokenizer.json, so its tokens have no places in the text.",
                "AutoTokenizer.from_pretrained(NAME).save_pretrained(DIR) with transformers 5 writes one",
            )
        self.vocab_size = 1 + max(self.made.get_vocab().values(), default=0)
        self.end = _end(Path(name), self.made.eos_token_id)
        self._encode_fast = _without_places(self.made, library.PreTrainedTokenizerFast)

    def encode(self, text: str, *, special: bool, spans: bool = False) -> Encoded:
        made = self._encoded(text, special, spans)
        return Encoded(made["input_ids"], made["offset_mapping"] if spans else ())

    def encode_all(self, texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        if self._encode_fast is None:
            found: list[list[int]] = self._encoded(list(texts), special, False)["input_ids"]
            return found
        with _encoding(texts):
            return [one.ids for one in self._encode_fast(list(texts), add_special_tokens=special)]

    def _encoded(self, texts: str | list[str], special: bool, spans: bool) -> Any:
        with _encoding([texts] if isinstance(texts, str) else texts):
            return self.made(
                texts,
                add_special_tokens=special,
                return_offsets_mapping=spans,
                return_attention_mask=False,
                truncation=False,
                verbose=False,
            )

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.made.decode(list(tokens)))


@contextmanager
def _encoding(texts: Sequence[str]) -> Iterator[None]:
    """An error of the library becomes one line, as that of a vocabulary without an unknown token."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # the library raises Exception itself
        first = (
            f"{'one of the texts' if len(texts) > 1 else 'the text'} from {next(iter(texts), '')[:60]!a} on"
        )
        raise ConfigError(
            f"the tokenizer cannot encode {first}: {message_line(error)}.",
            "--data.tokenizer DIR, one that encodes any text; its unknown token, unk_token or unk_id, is in "
            "its tokenizer.json",
        ) from None


def _without_places(made: Any, base: type) -> Callable[..., Any] | None:
    """The tokenizers library's batch encoding without places in the text, a quarter faster than with them.

    None if the class of this tokenizer encodes in a way of its own, or the library has no such method.
    """
    ways = ("__call__", "_encode_plus", "_batch_encode_plus")  # of transformers 5, and of 4
    fast: Callable[..., Any] | None = getattr(made.backend_tokenizer, "encode_batch_fast", None)
    if any(getattr(type(made), way, None) is not getattr(base, way, None) for way in ways):
        return None
    made("", truncation=False)  # sets truncation and padding of the library's tokenizer, as each call does
    return fast


def load_tokenizer(name: str) -> Tokenizer:
    """--data.tokenizer; an empty name is bytes."""
    if name in ("", BYTES):
        return ByteTokenizer()
    place = find_tokenizer(name)
    return FileTokenizer(place) if place.is_file() else HubTokenizer(name, place)


def modules_of(name: str) -> tuple[str, ...]:
    """The modules that a process which only tokenizes imports first, in this order; () if one is missing."""
    if name in ("", BYTES):
        return ()
    if find_tokenizer(name).is_file():
        return ("tokenizers",) if importlib.util.find_spec("tokenizers") else ()
    if importlib.util.find_spec("transformers") is None:
        return ()
    return (
        "fsdp.tokenize.without_torch",
        "transformers.models.auto.tokenization_auto",
        "transformers.tokenization_utils_tokenizers",
    )


_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)
"""The form of an id of Hugging Face, not of a path such as /tokenizers/mine."""


def find_tokenizer(name: str) -> Path:
    """The folder or the file. An id is looked up in Hugging Face's cache of this machine alone."""
    path = expanded(name)
    if path.is_dir() and not (path / "tokenizer_config.json").is_file():
        path = path / "tokenizer.json"
    if path.exists():
        return path
    hub = _library("huggingface_hub", path) if importlib.util.find_spec("huggingface_hub") else None
    try:
        found = hub.try_to_load_from_cache(name, "tokenizer_config.json") if hub else None
    except ValueError:  # not the form of an id
        found = None
    if isinstance(found, str):
        return Path(found).parent
    raise ConfigError(
        f"--data.tokenizer {name} is neither a folder with tokenizer_config.json, nor a tokenizer.json, nor "
        "an id in this machine's cache of Hugging Face.",
        f"hf download {name} --include '*.json' '*.jinja' '*.model' on a machine with a network"
        if _ID.fullmatch(name)
        else f"ls {shlex.quote(str(path.parent))}",
    )


def digest_of_tokenizer(name: str) -> str:
    """Of the files that make its tokens; found without loading it."""
    if name in ("", BYTES):
        return BYTES
    place = find_tokenizer(name)
    files = [place] if place.is_file() else sorted(one for part in PARTS for one in place.glob(part))
    whole = hashlib.sha256()
    for file in files:
        if file.name.endswith(".index.json"):  # of weights
            continue
        whole.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()[:20]


def _library(name: str, path: Path) -> Any:
    without_torch = sys.modules.get("fsdp.tokenize.without_torch")
    if name == "transformers" and not (without_torch and without_torch.HIDDEN):
        # A config.json beside the tokenizer has transformers import its model's packages, torchvision too.
        from fsdp.base.torchvision_import import prepare_torchvision

        prepare_torchvision()
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"--data.tokenizer {path} needs the package {name}, which is not installed.",
            f"pip install {name}",
        ) from None


def _end(path: Path, token: int | None) -> int:
    if token is None:
        folder = path.parent if path.is_file() else path
        raise ConfigError(
            f"--data.tokenizer {path} has no token that ends a text.",
            f'"eos_token": "TOKEN", one of its tokens, in {folder}/tokenizer_config.json'
            + (f"; then --data.tokenizer {folder}" if path.is_file() else ""),
        )
    return token
