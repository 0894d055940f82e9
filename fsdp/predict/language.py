"""Text generation, one token at a time, with the context length of training.

Not here: tokenizers (fsdp/tokenize/tokenizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.predict.trained import TrainedModel
from fsdp.tokenize.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 samples from all tokens."""

    tokens: int
    temperature: float
    top_k: int
    seed: int


def encode(trained: TrainedModel, prompt: str) -> list[int]:
    """A prompt as tokens of training's tokenizer; without one, numbers separated by spaces."""
    vocabulary = vocab_size(trained)
    tokenizer = _tokenizer(trained)
    if tokenizer is not None:
        tokens = [int(token) for token in tokenizer.encode(prompt, special=True).tokens]
        if len(tokens) > 1 and tokens[-1] == tokenizer.end:
            tokens.pop()
    else:
        numbers = prompt.replace(",", " ").split()
        if not all(number.isdecimal() for number in numbers):
            raise ConfigError(
                f"--prompt {prompt!r} is not a list of token numbers, on which this run was trained.",
                "--prompt '17 4 256'",
            )
        tokens = [int(number) for number in numbers]
    if not tokens:
        raise ConfigError("--prompt is empty.", "--prompt TEXT")
    if max(tokens) >= vocabulary:
        raise ConfigError(
            f"--prompt has token {max(tokens)}, beyond the vocabulary of {vocabulary}.", "smaller numbers"
        )
    return tokens


def decode(trained: TrainedModel, tokens: list[int]) -> str:
    tokenizer = _tokenizer(trained)
    if tokenizer is not None:
        return tokenizer.decode(tokens)
    return " ".join(map(str, tokens))


def _tokenizer(trained: TrainedModel) -> Tokenizer | None:
    """None if training read token files, which name no tokenizer."""
    name = trained.data.info.preprocess.get("tokenizer")
    return None if name is None else load_tokenizer(str(name))


def default_prompt(trained: TrainedModel) -> str:
    """The beginning of a Python function for bytes; else the beginning of a held-out sample."""
    if trained.data.info.preprocess.get("tokenizer") == "bytes":
        return "def "
    samples = trained.data.heldout or trained.data.train
    return decode(trained, samples.batch(np.zeros(1, np.int64))["inputs"][0, :16].tolist())


def vocab_size(trained: TrainedModel) -> int:
    """The data's: a model's embedding may be larger, with tokens that training never used."""
    return int(trained.data.info.facts.get("vocab_size", 1 << 62))


def generate(trained: TrainedModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """The prompt and the tokens after it, up to one that ends a document; deterministic for a seed."""
    generator = torch.Generator().manual_seed(sampling.seed)
    window = int(trained.data.info.facts.get("seq_len", len(prompt) + sampling.tokens))
    tokens = list(prompt)
    end = trained.data.info.preprocess.get("end")
    for _ in range(sampling.tokens):
        logits = trained.logits(torch.tensor([tokens[-window:]]))
        tokens.append(_choose(logits[0, -1, : vocab_size(trained)].float().cpu(), sampling, generator))
        if tokens[-1] == end:
            break
    return tokens


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if not sampling.temperature:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits / sampling.temperature).softmax(-1), 1, generator=generator))
