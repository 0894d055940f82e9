"""Parts of bench.gpu: packed rows by documents beside a mask, two ranks of each axis beside one process."""

from __future__ import annotations

import json
import random
from itertools import accumulate, cycle, takewhile
from typing import Any

import torch

from bench.gpu_attention import milliseconds
from bench.gpu_runs import QUIET, ROOT, Bench, Figures, apart, need
from bench.gpu_two_ranks import both

LLAMA = ROOT / "bench/peers/llama-1.1b"
LENGTHS = (8192, 32768)
DOCUMENTS = (3000, 700, 5200, 1500, 90)
"""Tokens of the documents in a row, over and over."""
ROUNDED = {"loss": 1e-2, "grad_norm": 5e-2}
"""Bounds of bf16's rounding; a wrong sum or mask is off by far more."""


def packed(bench: Bench) -> Figures:
    """The attention of packed rows in a model of transformers by varlen, and by the mask that stands for it
    where a flag names another kernel.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from fsdp.models.hf import attend_documents

    config = AutoConfig.from_pretrained(LLAMA, num_hidden_layers=4, vocab_size=4096)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(bench.device)
    fault = attend_documents(model, torch.bfloat16)
    need(not fault, f"the model keeps its own attention: {fault}")
    figures: dict[str, str] = {}
    for length in LENGTHS if bench.cuda else (128,):
        found = {}
        for name in ("varlen", "mask"):
            found[name], ms, gib = _packed(bench, model, length, flash=name == "varlen")
            figures[f"{length} tokens by {name}"] = f"{ms:.3g} ms, {gib:.3g} GiB"
        for of, ours, theirs in zip(ROUNDED, found["varlen"], found["mask"], strict=True):
            off = apart([ours], [theirs])
            figures[f"{length} tokens, {of} apart"] = f"{off:.1e}"
            need(off < ROUNDED[of], f"varlen is not the mask: {figures}")
    bench.need_cuda(f"no varlen kernel, masks twice {figures}")
    return figures


def _packed(bench: Bench, model: Any, length: int, *, flash: bool) -> tuple[list[float], float, float]:
    """Loss and norm of the gradients; milliseconds of a forward and a backward, and their GiB."""
    ends = [*takewhile(lambda end: end < length, accumulate(cycle(DOCUMENTS))), length]
    positions = torch.cat([torch.arange(b - a) for a, b in zip([0, *ends[:-1]], ends, strict=True)])
    tokens = torch.randint(64, (1, length), generator=torch.Generator().manual_seed(0)).to(bench.device)
    positions, losses = positions[None].to(bench.device), list[float]()

    def call() -> None:
        model.zero_grad()
        loss = model(tokens, position_ids=positions, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))

    model.zero_grad()  # else gradients of the call before would count as there
    before = torch.cuda.memory_allocated() if bench.cuda else 0
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    torch.backends.cuda.enable_flash_sdp(flash)
    try:
        ms = milliseconds(call, torch.device(bench.device), times=3)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    peak = torch.cuda.max_memory_allocated() - before if bench.cuda else 0
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return [losses[-1], float(norm)], ms, peak / 2**30


# ---------------------------------------------------------------- two ranks

SMALL = (
    "--model.weights none --model.args.hidden_size 256 --model.args.num_hidden_layers 2 "
    "--model.args.num_attention_heads 4 --model.args.num_key_value_heads 2 --model.args.vocab_size 512 "
    "--model.args.intermediate_size 256 --data.seq_len 256 --train.global_batch 8 "
    "--train.steps 8 --optim.warmup_steps 0 --precision.param bf16 --speed.compile false"
)
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
           "num_experts_per_tok": 2, "output_router_logits": True, "use_cache": False}  # fmt: skip


def axes(bench: Bench) -> Figures:
    """Losses and norms of packed rows at context, tensor and expert 2, and of one process."""
    words, texts, mixture = random.Random(0), bench.folder / "texts.jsonl", bench.folder / "mixture"
    documents = [words.choices(("one", "two", "three"), k=words.randint(9, 90)) for _ in range(300)]
    texts.write_text("".join(json.dumps({"text": " ".join(each)}) + "\n" for each in documents))
    mixture.mkdir()
    (mixture / "config.json").write_text(json.dumps(MIXTURE))
    found: dict[str, float] = {}
    for folder, names in ((LLAMA, ("context", "tensor")), (mixture, ("expert",))):
        flags = (*QUIET, *SMALL.split(), "--model.name", f"hf:{folder}", "--data.name", str(texts))
        alone = bench.trained(f"alone-{folder.name}", *flags).records()
        for name in names:
            ran = both(bench, name, *flags, f"--mesh.{name}", "2").records()
            for field, bound in ROUNDED.items():
                off = apart(*([one[field] for one in records] for records in (ran, alone)))
                found[f"{name}, {field} apart"] = off
                need(off < bound, f"{name} 2: {field} is not that of one process: {found}")
    return found
