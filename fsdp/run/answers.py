"""Answers of a language model: to prompts, and to whole held-out questions beside their references.

A model of transformers answers by its own `generate`, in a batch and with its cache of keys and values. It
may be sharded: every rank calls it with the same rows. Any other model is called on all tokens so far, in the
window of training, once a token and prompt; the ranks continue with rank 0's token.

A question is what a held-out row has before the first tokens that are trained on, by the masks of its
targets: the conversation up to an assistant's turn, or a prompt. Not here: the command (fsdp/predict).
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.text import printable_line, quoted
from fsdp.data.types import MASKED, DataInfo, Samples
from fsdp.distributed.collectives import broadcast_object, ranks
from fsdp.models.attention import text_config
from fsdp.models.loss import read_output
from fsdp.models.registry import POSITIONS
from fsdp.run.build import RunParts
from fsdp.run.evaluate import buffers_of_rank_0
from fsdp.rundir import history
from fsdp.tokenize.conversations import (
    ChatTemplate,
    DocumentOptions,
    HubTokenizer,
    Message,
    Tokenizer,
    check_messages,
    load_tokenizer,
)

log = logging.getLogger(__name__)

GREEDY = 1e-30
"""A temperature below it would make float32 logits infinite; the likeliest token has all probability."""
EVALUATED_TOKENS, EVALUATED_S = 128, 30.0
"""Of an answer, and of all answers, at an evaluation."""
LONGEST = 400
"""Characters of a question, a reference or an answer in the log."""
ROWS_READ = 256
"""Held-out rows in which questions are looked for."""
QUESTIONS = "questions"
"""The entry of DataInfo.preprocess of data whose rows have questions: messages or pairs."""

Rows = list[list[int]]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 draw from all tokens."""

    tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    seconds: float = 0.0
    """After which answers end as they are; 0: no limit."""


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    reference: list[int]


# ---------------------------------------------------------------- generation


def generates(model: nn.Module) -> bool:
    """Whether it is a model of transformers with `generate`."""
    transformers: Any = sys.modules.get("transformers.modeling_utils")  # whose import takes seconds
    known: Any = model if transformers and isinstance(model, transformers.PreTrainedModel) else None
    return known is not None and known.can_generate()  # type: ignore[no-any-return]


def generated(
    model: nn.Module, prompts: Rows, how: Sampling, *, ends: Collection[int], device: torch.device
) -> Rows:
    """What a model of transformers adds to each prompt, up to one of `ends` or of its generation_config.
    Collective.
    """
    made: Any = model
    config, width = copy.deepcopy(made.generation_config), max(map(len, prompts))
    text, named = text_config(made), config.eos_token_id
    most = how.tokens
    if getattr(text, "rope_parameters", None) is None:  # a table of positions
        most = min(most, getattr(text, "max_position_embeddings", width + most) - width)
    stops = {*ends, *(named if isinstance(named, list) else [] if named is None else [named])}
    config.update(
        max_new_tokens=max(1, most),
        max_length=None,
        max_time=how.seconds or None,
        do_sample=how.temperature >= GREEDY,
        temperature=how.temperature if how.temperature >= GREEDY else None,
        top_k=how.top_k if how.temperature >= GREEDY else None,
        top_p=how.top_p if how.temperature >= GREEDY else None,
        eos_token_id=sorted(stops) or None,
        pad_token_id=min(stops, default=0),
        use_cache=True,
    )
    tokens = torch.full((len(prompts), width), config.pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, shown, prompt in zip(tokens, mask, prompts, strict=True):
        row[width - len(prompt) :] = torch.tensor(prompt)
        shown[width - len(prompt) :] = 1
    with _attention_of_transformers(made), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(how.seed)
        found = made.generate(
            tokens.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            synced_gpus=ranks() > 1,
        )
    return [_until(row, stops) for row in found[:, width:].tolist()]


def _until(tokens: list[int], stops: Collection[int]) -> list[int]:
    """With the first of `stops`: what follows in a batch is padding."""
    return tokens[: next((n + 1 for n, token in enumerate(tokens) if token in stops), len(tokens))]


@contextmanager
def _attention_of_transformers(model: Any) -> Iterator[None]:
    """The attention of packed rows reads no cache: transformers' stands in for it."""
    chosen = model.config._attn_implementation
    if chosen is None or not chosen.startswith("shardrun"):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def continued_by(
    logits_of: Callable[[Tensor], Tensor],
    prompt: list[int],
    how: Sampling,
    *,
    ends: Collection[int],
    vocab_size: int,
    window: int,
) -> list[int]:
    """What a model without `generate` adds to a prompt, up to one of `ends`. Collective."""
    generator, began = torch.Generator().manual_seed(how.seed), time.monotonic()
    text = list(prompt)
    for _ in range(how.tokens):
        logits = logits_of(torch.tensor([text[-window:]]))[0, -1, :vocab_size].float().cpu()
        token = int(_drawn(logits, how, generator))
        late = how.seconds and time.monotonic() - began > how.seconds
        token, late = broadcast_object((token, late))
        text.append(token)
        if token in ends or late:
            break
    return text[len(prompt) :]


def _drawn(logits: Tensor, how: Sampling, generator: torch.Generator) -> Tensor:
    if how.temperature < GREEDY:
        return logits.argmax()
    if 0 < how.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(how.top_k).values[-1], -torch.inf)
    chances = (logits / how.temperature).softmax(-1)
    if how.top_p < 1:
        likely, order = chances.sort(descending=True)
        chances[order[likely.cumsum(0) - likely > how.top_p]] = 0
    return torch.multinomial(chances, 1, generator=generator)


# ---------------------------------------------------------------- held-out questions


def held_out_questions(samples: Samples, count: int) -> list[Question]:
    """Up to `count` whole ones, of evenly spread rows, then of the first ROWS_READ."""
    spread = (np.arange(count, dtype=np.int64) * len(samples) // count).tolist() if count else []
    questions: list[Question] = []
    for index in dict.fromkeys([*spread, *range(min(len(samples), ROWS_READ))]):
        if len(questions) < count:
            row = {name: value[0].numpy() for name, value in samples.batch(np.array([index])).items()}
            positions = row.get(POSITIONS, np.arange(len(row["inputs"])))
            questions += [q for q in _first(row["inputs"], row["targets"], positions) if q not in questions]
    return questions


def _first(inputs: np.ndarray, targets: np.ndarray, positions: np.ndarray) -> list[Question]:
    """The first question of a row of documents whose reference the row holds whole, if there is one."""
    trained, starts = targets != MASKED, np.flatnonzero(positions == 0)
    edges = np.diff(trained.astype(np.int8), prepend=0)
    for begin in np.flatnonzero(edges > 0).tolist():
        start = int(starts[starts <= begin].max())
        ends = [*np.flatnonzero(edges < 0), *starts]  # the end of the row may cut the reference
        end = min((int(end) for end in ends if end > begin), default=0)
        if start < begin < end:
            return [Question(inputs[start : begin + 1].tolist(), targets[begin:end].tolist())]
    return []


def maybe_answers(parts: RunParts) -> HeldOutAnswers | None:
    sizes = parts.job.sizes
    if sizes.tensor == sizes.context == 1:
        return HeldOutAnswers(parts)
    log.info(
        "no held-out question is answered at evaluations: ranks share each row (%s). HINT: "
        "python -m fsdp.predict %s, after a save, answers them",
        f"tensor {sizes.tensor}, context {sizes.context}",
        quoted(parts.run.path),
    )
    return None


class HeldOutAnswers:
    """The questions of a run, answered greedily at its evaluations, beside their references."""

    def __init__(self, parts: RunParts) -> None:
        data, count = parts.job.data, parts.config.train.eval_answers
        assert data.heldout is not None
        self._parts, self._info = parts, data.info
        self._tokenizer = tokenizer_of(data.info)
        self._questions = held_out_questions(data.heldout, count)
        if not self._questions:
            log.info("no held-out question is answered: none is whole within --data.seq_len")

    def record(self, step: int) -> None:
        """Answers and records all questions. Collective."""
        sharded, info = self._parts.sharded, self._info
        ends = ends_of(info, self._tokenizer, self._questions)
        how = Sampling(EVALUATED_TOKENS, seconds=EVALUATED_S)
        prompts = [question.prompt for question in self._questions]
        if not prompts:
            return
        with (
            buffers_of_rank_0(sharded.root),
            sharded.evaluating(),
            torch.compiler.set_stance("force_eager"),  # each token would be another shape
        ):
            model, device = sharded.called, sharded.device
            found = answered(model, self._logits, prompts, how, info=info, ends=ends, device=device)
        if not self._parts.env.is_main:
            return
        rows = [shown(self._tokenizer, *pair) for pair in zip(self._questions, found, strict=True)]
        for row in rows:
            history.append_if_possible(self._parts.run.answers, {"step": step, **row})
        lines = (
            f"  {name:<9}  {printable_line(' '.join(text.split()))[:LONGEST]}"
            for row in rows
            for name, text in row.items()
        )
        self._parts.recorder.texts("eval/answers", step, rows, "\n".join(lines))

    def _logits(self, tokens: Tensor) -> Tensor:
        sharded = self._parts.sharded
        logits = read_output(sharded.called(tokens.to(sharded.device))).logits
        assert logits is not None
        return logits


def answered(
    model: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    prompts: Rows,
    how: Sampling,
    *,
    info: DataInfo,
    ends: Collection[int],
    device: torch.device,
) -> Rows:
    """What the model adds to each prompt; `logits_of` calls one that has no `generate`. Collective."""
    if generates(model):
        return generated(model, prompts, how, ends=ends, device=device)
    # the data's: a model's embedding may be larger, with tokens that training never used
    size = int(info.facts.get("vocab_size", 1 << 62))
    window = int(info.facts.get("seq_len", max(map(len, prompts)) + how.tokens))
    return [continued_by(logits_of, p, how, ends=ends, vocab_size=size, window=window) for p in prompts]


def template_of(tokenizer: Tokenizer, template: str) -> ChatTemplate:
    """That of the data, or the tokenizer's own."""
    return ChatTemplate(tokenizer, DocumentOptions(chat_template=template))


def encoded(
    prompt: str, info: DataInfo, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> list[int]:
    """Tokens of a prompt, as a chat template writes a question; without a tokenizer, numbers separated by
    spaces.
    """
    numbers, size = prompt.replace(",", " ").split(), int(info.facts.get("vocab_size", 1 << 62))
    if tokenizer is not None and template is not None:
        text, _ = template.render(_messages(prompt), "--prompt", {}, prompt=True)
        tokens = [int(token) for token in tokenizer.encode_with_spans(text, special=False)[0]]
    elif tokenizer is not None:
        tokens = [int(token) for token in tokenizer.encode_all([prompt])[0]]
        if len(tokens) > 1 and tokens[-1] == tokenizer.end:
            tokens.pop()
    elif not all(number.isdecimal() for number in numbers):
        reason = f"--prompt {prompt!r} is not a list of token numbers, on which this run was trained."
        raise ConfigError(reason, "--prompt '17 4 256'")
    else:
        tokens = list(map(int, numbers))
    if not tokens:
        raise ConfigError("--prompt is empty.", "--prompt TEXT")
    if max(tokens) >= size:
        reason = f"--prompt has token {max(tokens)}, beyond the vocabulary of {size}."
        raise ConfigError(reason, "smaller numbers")
    return tokens


def _messages(prompt: str) -> list[Message]:
    """Of a question, or a conversation as JSON, with what is to come before it."""
    if prompt.lstrip().startswith("[{"):
        with suppress(ValueError):
            return check_messages(json.loads(prompt), "--prompt")
    return [{"role": "user", "content": prompt}]


def tokenizer_of(info: DataInfo) -> Tokenizer:
    return load_tokenizer(str(info.preprocess["tokenizer"]), ends=False)


def ends_of(info: DataInfo, tokenizer: Tokenizer, questions: Sequence[Question] = ()) -> set[int]:
    """The tokens after which a text ends: of documents, and the special ones that end the references."""
    special = tokenizer.made.all_special_ids if isinstance(tokenizer, HubTokenizer) else ()
    last = {question.reference[-1] for question in questions} & {*special}
    return last | {int(end) for end in (info.preprocess.get("end"), tokenizer.end) if end is not None}


def shown(tokenizer: Tokenizer, question: Question, answer: Sequence[int]) -> dict[str, str]:
    """As text, without the special tokens of the tokenizer."""
    parts = {"question": question.prompt, "reference": question.reference, "answer": answer}
    return {name: text_of(tokenizer, tokens) for name, tokens in parts.items()}


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    if isinstance(tokenizer, HubTokenizer):
        return str(tokenizer.made.decode(list(tokens), skip_special_tokens=True)).strip()
    return tokenizer.decode(tokens).replace("\0", "").strip()
