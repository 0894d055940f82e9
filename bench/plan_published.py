"""Published training speeds beside the planner's for the same jobs. Nothing in the planner is fitted to them.

Each row names its source, and where the job differs from the planned one: a model of other parts with the
same sizes, FSDP1, another choice of what is recomputed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TITAN = "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "github.com/pytorch/torchtitan docs/performance.md, 2024"
TRAINY = "github.com/pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
IBM = "pytorch.org/blog/maximizing-training"
FOUNDRY = "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md"

# Their H100 has HBM2e at 2.4 TB/s and a limit of 500 W of 700. Dynamic power grows with the cube of the
# clock; 100 W are idle.
_H100_500W = ("--plan.gpu", "h100", "--plan.memory_gb_s", "2400",
              "--plan.tflops", str(round(794.5 * (400 / 600) ** (1 / 3))),
              "--plan.memory_gib", "94")  # fmt: skip
_FSDP = ("--mesh.strategy", "fsdp")
_LLAMA_8B = ("--model.name", "transformer", "--model.preset", "llama-8b", "--data.seq_len", "8192", *_FSDP)


def _decoder(
    width: int, layers: int, heads: int, ffn: int, vocab: int, length: int, kv_heads: int = 0
) -> tuple[str, ...]:
    names = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "ffn": ffn,
        "vocab_size": vocab,
        "kv_heads": kv_heads or heads,
    }
    args = [word for name, value in names.items() for word in (f"--model.args.{name}", str(value))]
    return (
        "--model.name",
        "transformer",
        *args,
        "--model.args.max_seq_len",
        str(length),
        "--data.seq_len",
        str(length),
    )


_7B = _decoder(4096, 32, 32, 11008, 32000, 4096)
_13B = _decoder(5120, 40, 40, 13824, 32000, 4096)
_70B = _decoder(8192, 80, 64, 28672, 32000, 4096, 8)
_LLAMA_70B = _decoder(8192, 80, 64, 28672, 128256, 8192, 8)
_MPT_7B = _decoder(4096, 32, 32, 10922, 50368, 2048)
_MPT_13B = _decoder(5120, 40, 40, 13653, 50368, 2048)
_MPT_3B = _decoder(2560, 32, 20, 6826, 50368, 2048)
_A100 = ("--plan.gpu", "a100")
_H100 = ("--plan.gpu", "h100")
_OPS = ("--memory.activation_checkpointing", "ops")
_FULL = ("--memory.activation_checkpointing", "full")
_EVERY_OTHER = ("--memory.activation_checkpointing", "full", "--memory.activation_checkpointing_every", "2")
_COMPILED, _EAGER = ("--speed.compile", "true"), ("--speed.compile", "false")


_FLOAT8 = ("--speed.float8", "tensorwise")


@dataclass(frozen=True)
class Published:
    name: str
    gpus: int
    micro_batch: int
    tokens_s: float
    source: str
    flags: tuple[str, ...]
    accumulation: int = 1
    gib: float = 0.0
    note: str = ""
    recomputed: float = 0.0
    """The part of the blocks' forward products that the job computes again and `ops` does not."""


def _titan(name: str, gpus: int, tokens_s: float, gib: float, *how: str) -> Published:
    flags = (*_LLAMA_8B, *_H100_500W, *_OPS, *how)
    return Published(
        f"Llama 3 8B, {gpus} H100 (500 W){name}", gpus, 2, tokens_s, TITAN, flags, gib=gib, recomputed=0.5
    )


def _h200(gpus: int, tokens_s: float, gib: float) -> Published:
    flags = (*_LLAMA_8B, "--plan.gpu", "h200", *_OPS, *_COMPILED, *_FLOAT8)
    name = f"Llama 3 8B, {gpus} H200, compile, float8"
    return Published(name, gpus, 2, tokens_s, TRAINY, flags, gib=gib, recomputed=0.5)


def _a100(
    name: str, micro_batch: int, tokens_s: float, model: tuple[str, ...], *how: str, again: float = 0.0
) -> Published:
    return Published(
        f"{name}, 64 A100",
        64,
        micro_batch,
        tokens_s,
        TITAN_A100,
        (*model, *_A100, *_EAGER, *_FSDP, *how),
        recomputed=again,
    )


def _hsdp(gpus: int) -> tuple[str, ...]:
    return ("--mesh.strategy", "hsdp", "--mesh.replicate", str(gpus // 8), "--mesh.shard", "8")


FSDP2 = (
    _titan("", 8, 5762, 82.4, *_EAGER),
    _titan(", compile", 8, 6667, 77.0, *_COMPILED),
    _titan(", compile, float8", 8, 8532, 76.8, *_COMPILED, *_FLOAT8),
    _titan("", 128, 5605, 67.0, *_EAGER),
    _titan(", compile", 128, 6514, 62.0, *_COMPILED),
    _titan(", compile, float8", 128, 8380, 61.8, *_COMPILED, *_FLOAT8),
    _h200(32, 10938, 47.96),
    _h200(64, 10753, 46.97),
    _a100("Llama 3 8B, each other layer recomputed", 1, 2904, _LLAMA_8B, *_EVERY_OTHER),
    _a100("Llama 3 8B, recomputed by operation", 1, 2973, _LLAMA_8B, *_OPS, again=0.5),
    _a100("Llama 3 70B, all recomputed", 1, 331, _LLAMA_70B, *_FULL),
    _a100("Llama 2 13B", 2, 2162, _13B),
    _a100("Llama 2 13B, each other layer recomputed", 2, 1914, _13B, *_EVERY_OTHER),
    _a100("Llama 2 13B, recomputed by operation", 2, 1904, _13B, *_OPS, again=0.5),
    _a100("Llama 2 70B, recomputed by operation", 1, 355, _70B, *_OPS, again=0.5),
    _a100("Llama 2 70B, all recomputed", 2, 353, _70B, *_FULL),
)
"""Where a job recomputes by operation it saves each other product of two; here all are saved, and the others'
time is added.
"""

FSDP1 = (
    Published("Llama 2 7B, 128 A100, HSDP", 128, 2, 3700, IBM,
              (*_7B, *_A100, *_EAGER, *_hsdp(128), "--plan.node_link_gb_s", "50")),
    Published("Llama 2 7B, 96 H100, HSDP", 96, 2, 7500, IBM,
              (*_7B, *_H100, *_EAGER, *_hsdp(96), "--plan.node_link_gb_s", "100")),
    Published("Llama 2 13B, 128 A100", 128, 2, 1800, IBM,
              (*_13B, *_A100, *_EAGER, *_EVERY_OTHER, *_FSDP, "--plan.node_link_gb_s", "50"),
              note="each other layer recomputed"),
    Published("Llama 2 13B, 96 H100", 96, 2, 3800, IBM,
              (*_13B, *_H100, *_EAGER, *_EVERY_OTHER, *_FSDP, "--plan.node_link_gb_s", "100"),
              note="each other layer recomputed"),
    Published("MPT 7B, 8 H100", 8, 6, 10643, FOUNDRY, (*_MPT_7B, *_H100, *_EAGER, *_FSDP), note="GELU"),
    Published("MPT 7B, 8 A100", 8, 6, 4641, FOUNDRY, (*_MPT_7B, *_A100, *_EAGER, *_FSDP), 2, note="GELU"),
    Published("MPT 13B, 64 H100", 64, 2, 4800, FOUNDRY, (*_MPT_13B, *_H100, *_EAGER, *_FSDP), note="GELU"),
    Published("MPT 3B, 8 A100", 8, 10, 10811, FOUNDRY, (*_MPT_3B, *_A100, *_EAGER, *_FSDP), 2, note="GELU"),
    Published("MPT 3B, 64 H100", 64, 6, 22525, FOUNDRY, (*_MPT_3B, *_H100, *_EAGER, *_FSDP), 3, note="GELU"),
)  # fmt: skip
"""FSDP2's elder: the same communication, other memory."""


def predict(row: Published) -> tuple[float, float]:
    """Tokens a second on a GPU, and the peak in GiB."""
    from fsdp.config import load
    from fsdp.plan.estimate import plan_one

    batch = row.micro_batch * row.accumulation * row.gpus
    config = load(
        [
            *row.flags,
            "--plan.gpus",
            str(row.gpus),
            "--train.global_batch",
            str(batch),
            "--train.micro_batch",
            str(row.micro_batch),
        ]
    )
    plan = plan_one(config)
    # Of three products, one forward and two backward, the forward one comes again.
    again = row.recomputed * plan.step.parts["matmul"] / 3
    return plan.tokens_s * plan.step.seconds / (plan.step.seconds + again), plan.memory.reserved / 2**30


def published_table() -> list[str]:
    lines = [
        "# Speed: published rows, none of them fitted to", "",
        "`python -m bench.plan --published`: computed, nothing is run.", "",
        "Where a job recomputes by operation it saves each other product of two. Here all are saved: "
        "memory is more, and the "
        "time to compute the others again is added. float8's memory is bf16's.", "",
    ]  # fmt: skip
    for title, rows in (("FSDP2", FSDP2), ("FSDP1", FSDP1)):
        lines += [f"## {title}", "", *_rows(rows), ""]
    return lines


def _rows(rows: Sequence[Published]) -> list[str]:
    lines = [
        "| job | tokens/s/GPU | planned | error | GiB reserved | planned | source |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = []
    for row in rows:
        speed, gib = predict(row)
        errors.append(abs(speed / row.tokens_s - 1))
        name = f"{row.name} ({row.note})" if row.note else row.name
        shown = f"{row.gib} | {gib:.1f}" if row.gib else " | "
        lines.append(
            f"| {name} | {row.tokens_s:,.0f} | {speed:,.0f} | {speed / row.tokens_s - 1:+.1%} | {shown} | "
            f"{row.source} |"
        )
    return [
        *lines,
        "",
        f"{len(rows)} rows: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
    ]
