"""Text generation, one token at a time, with the context length of training.

The tokenizer is that of training (fsdp/tokenize), else that of RUN/full_model; without one, prompts are token
numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from fsdp.base.errors import ConfigError
from fsdp.dist.collectives import broadcast_object
from fsdp.predict.trained import TrainedModel
from fsdp.tokenize.tokenizer import Tokenizer, load_tokenizer

GREEDY = 1e-30
"""A temperature below it would make float32 logits infinite; the likeliest token has all probability."""
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def continued(trained: TrainedModel, prompt: str, **sampling: Any) -> str:
    """The prompt and the text after it; `sampling` as `generate` has it."""
    return decode(trained, generate(trained, encode(trained, prompt), **sampling))


def encode(trained: TrainedModel, prompt: str) -> list[int]:
    """A prompt as tokens of training's tokenizer, or of the export's; without one, numbers separated by
    spaces.
    """
    vocabulary, tokenizer = vocab_size(trained), _tokenizer(trained)
    numbers = prompt.replace(",", " ").split()
    if tokenizer is not None:
        tokens = [int(token) for token in tokenizer.encode(prompt, special=True).tokens]
        if len(tokens) > 1 and tokens[-1] == tokenizer.end:
            tokens.pop()
    elif not all(number.isdecimal() for number in numbers):
        reason = f"--prompt {prompt!r} is not a list of token numbers, on which this run was trained."
        raise ConfigError(reason, "--prompt '17 4 256'")
    else:
        tokens = list(map(int, numbers))
    if not tokens:
        raise ConfigError("--prompt is empty.", "--prompt TEXT")
    if max(tokens) >= vocabulary:
        reason = f"--prompt has token {max(tokens)}, beyond the vocabulary of {vocabulary}."
        raise ConfigError(reason, "smaller numbers")
    return tokens


def decode(trained: TrainedModel, tokens: list[int]) -> str:
    tokenizer = _tokenizer(trained)
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def has_tokenizer(trained: TrainedModel, prompt: str | None) -> bool:
    """Whether a prompt is for the tokenizer of the export: data of a user's own has no kind."""
    return prompt is not None and any(
        (trained.run / "full_model" / name).is_file() for name in TOKENIZER_FILES
    )


def _tokenizer(trained: TrainedModel) -> Tokenizer | None:
    """Training's, else the export's; None if training read token files, which name no tokenizer."""
    name = trained.data.info.preprocess.get("tokenizer")
    exported = str(trained.run / "full_model") if has_tokenizer(trained, "") else None
    return _loaded(name or exported) if name or exported else None


@functools.cache
def _loaded(name: str) -> Tokenizer:
    return load_tokenizer(name, ends=False)


def default_prompt(trained: TrainedModel) -> str:
    """The beginning of a Python function for bytes; else the beginning of a held-out sample."""
    if trained.data.info.preprocess.get("tokenizer") == "bytes":
        return "def "
    samples = trained.data.heldout or trained.data.train
    return decode(trained, samples.batch(np.zeros(1, np.int64))["inputs"][0, :16].tolist())


def vocab_size(trained: TrainedModel) -> int:
    """The data's: a model's embedding may be larger, with tokens that training never used."""
    return int(trained.data.info.facts.get("vocab_size", 1 << 62))


def generate(
    trained: TrainedModel, prompt: list[int], *, tokens: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """The prompt and the tokens after it, up to one that ends a document; deterministic for a seed.

    temperature 0 is greedy; top_k 0 samples from all tokens. Each rank continues with rank 0's token.
    """
    generator = torch.Generator().manual_seed(seed)
    window = int(trained.data.info.facts.get("seq_len", len(prompt) + tokens))
    text, end = list(prompt), trained.data.info.preprocess.get("end")
    for _ in range(tokens):
        logits = trained.logits(torch.tensor([text[-window:]]))[0, -1, : vocab_size(trained)].float().cpu()
        if 0 < top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
        if temperature < GREEDY:
            chosen = logits.argmax()
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        text.append(broadcast_object(int(chosen)))
        if text[-1] == end:
            break
    return text
