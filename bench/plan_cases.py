"""The runs of bench.plan: models, meshes and options drawn from a seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.models.transformer import Transformer, TransformerSizes


@dataclass(frozen=True)
class Case:
    ranks: int
    flags: tuple[str, ...]

    def __str__(self) -> str:
        pairs = zip(self.flags[::2], self.flags[1::2], strict=True)
        return f"{self.ranks} ranks: " + " ".join(
            f"{name.rpartition('.')[2]}={value}" for name, value in pairs
        )


def half_frozen(vocab_size: int = 256, width: int = 64, layers: int = 4) -> nn.Module:
    """A decoder whose embedding and every other block are frozen."""
    model = Transformer(TransformerSizes(vocab_size=vocab_size, width=width, layers=layers))
    for part in [model.embedding, *model.blocks[::2]]:
        part.requires_grad_(False)
    return model


def draw(dice: random.Random, count: int) -> list[Case]:
    """Draws again what train.py would refuse."""
    return _allowed(lambda: _one(dice), count)


def draw_more(dice: random.Random, count: int) -> list[Case]:
    """Transformers on several ranks with two more options."""

    def one() -> Case:
        case = _one(dice)
        while case.ranks == 1 or case.flags[1] != "transformer":
            case = _one(dice)
        return Case(case.ranks, (*case.flags, *(word for knob in dice.sample(_MORE, 2) for word in knob)))

    return _allowed(one, count)


def _allowed(one: Callable[[], Case], count: int) -> list[Case]:
    cases: list[Case] = []
    while len(cases) < count:
        case = one()
        with contextlib.suppress(ConfigError):
            load(case.flags)
            cases.append(case)
    return cases


def _one(dice: random.Random) -> Case:
    ranks = dice.choice([1, 2, 2, 4, 4])
    model = _model(dice)
    flags = [*model, *_mesh(dice, ranks), *_knobs(dice, ranks, units=model[1] != "mlp")]
    return Case(ranks, tuple(flags))


def _model(dice: random.Random) -> list[str]:
    kind = dice.choice(["transformer", "transformer", "transformer", "tied", "frozen", "vit", "mlp"])
    layers = dice.randint(2, 9)
    if kind == "vit":
        width = dice.choice([64, 96, 128])
        words = f"--model.name vit --model.args.layers {layers} --model.args.width {width}"
        return f"{words} --model.args.ffn 256".split()
    if kind == "mlp":
        width = dice.choice([128, 200, 512])
        words = f"--data.name digits --model.name mlp --model.args.hidden {width}"
        return f"{words} --model.args.in_features 784".split()
    words = (
        f"--data.name synthetic --data.args.kind tokens --data.seq_len {dice.choice([32, 64, 96])} "
        f"--data.args.vocab_size {dice.choice([250, 512, 1003, 4096])} --model.args.layers {layers} "
        f"--model.args.width {dice.choice([64, 128, 192, 256])}"
    )
    if kind == "frozen":
        return ["--model.name", "bench.plan_cases:half_frozen", *words.split()]
    words += " --model.args.tied true" if kind == "tied" else ""
    words += " --model.args.kv_heads 2" if dice.random() < 0.3 else ""
    return ["--model.name", "transformer", *words.split()]


def _mesh(dice: random.Random, ranks: int) -> list[str]:
    kind = dice.choice(["fsdp", "fsdp", "fsdp", "hsdp", "ddp"])
    reshard = "--mesh.reshard_after_forward"
    if kind == "hsdp" and ranks == 4:
        policy = dice.choice(["true", "false"])
        return f"--mesh.strategy hsdp --mesh.replicate 2 {reshard} {policy}".split()
    if kind == "ddp" and ranks > 1:
        return ["--mesh.strategy", "ddp"]
    policy = dice.choice(["true", "true", "false", "step", *(["2"] if ranks == 4 else [])])
    return ["--mesh.strategy", "fsdp", reshard, policy]


_MORE = [
    ["--lora.rank", "4"], ["--optim.state", "bf16"], ["--optim.state", "8bit"],
    ["--precision.reduce", "bf16"],
]  # fmt: skip


def _knobs(dice: random.Random, ranks: int, *, units: bool) -> list[str]:
    micro, times = dice.choice([1, 2, 4]), dice.choice([1, 1, 2, 3])
    flags = ["--train.global_batch", str(micro * times * ranks), "--train.micro_batch", str(micro)]
    recomputes = dice.choice(["none", "none", "full", "ops"])
    flags += ["--memory.activation_checkpointing", recomputes if units else "none"]
    flags += ["--precision.param", dice.choice(["fp32", "fp32", "bf16"])]
    flags += ["--mesh.accumulate", dice.choice(["last", "shard", "every"])] if times > 1 else []
    flags += ["--optim.name", dice.choice(["adamw", "adamw", "sgd"])]
    flags += ["--train.clip_grad_norm", "0"] if dice.random() < 0.2 else []
    return flags
