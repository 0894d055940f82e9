"""Text that goes on, a token at a time. The model sees as many tokens at once as in training.

Not here: a tokenizer beyond bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.predict.trained import TrainedModel


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the likeliest token; top_k 0 draws from all."""

    tokens: int
    temperature: float
    top_k: int
    seed: int


def encode(trained: TrainedModel, prompt: str) -> list[int]:
    """A prompt as tokens: bytes where training read bytes, else numbers with spaces between."""
    vocabulary = vocab_size(trained)
    if trained.data.info.preprocess.get("tokenizer") == "bytes":
        tokens = list(prompt.encode())
    else:
        words = prompt.replace(",", " ").split()
        if not all(word.isdecimal() for word in words):
            raise ConfigError(
                f"--prompt {prompt!r}: this run was trained on token numbers.", "--prompt '17 4 256'"
            )
        tokens = [int(word) for word in words]
    if not tokens:
        raise ConfigError("--prompt is empty.", "--prompt TEXT")
    if max(tokens) >= vocabulary:
        raise ConfigError(
            f"--prompt has token {max(tokens)}, beyond the vocabulary of {vocabulary}.", "smaller numbers"
        )
    return tokens


def decode(trained: TrainedModel, tokens: list[int]) -> str:
    if trained.data.info.preprocess.get("tokenizer") == "bytes":
        return bytes(tokens).decode(errors="replace")
    return " ".join(map(str, tokens))


def default_prompt(trained: TrainedModel) -> str:
    """Python where it learned Python; else the beginning of a held-out sample."""
    if trained.data.info.preprocess.get("tokenizer") == "bytes":
        return "def "
    samples = trained.data.heldout or trained.data.train
    return decode(trained, samples.batch(np.zeros(1, np.int64))["inputs"][0, :16].tolist())


def vocab_size(trained: TrainedModel) -> int:
    """The data's: a model may have room for more, which it has never seen."""
    return int(trained.data.info.facts.get("vocab_size", 1 << 62))


def go_on(trained: TrainedModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """The prompt and what follows it: a function of the seed."""
    generator = torch.Generator().manual_seed(sampling.seed)
    window = int(trained.data.info.facts.get("seq_len", len(prompt) + sampling.tokens))
    tokens = list(prompt)
    for _ in range(sampling.tokens):
        logits = trained.logits(torch.tensor([tokens[-window:]]))
        tokens.append(_choose(logits[0, -1, : vocab_size(trained)].float().cpu(), sampling, generator))
    return tokens


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if not sampling.temperature:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits / sampling.temperature).softmax(-1), 1, generator=generator))
