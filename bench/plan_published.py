"""Published training speeds beside what the planner says of the same jobs. Nothing in the planner was fitted to them.

Each row names its source. Where a source's job differs from what is planned (a model of other parts with the same sizes, FSDP1,
another choice of what is recomputed), the row says so.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

TITAN = "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
IBM = "pytorch.org/blog/maximizing-training; github.com/foundation-model-stack/fms-fsdp README"
FOUNDRY = "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md (FSDP1)"
TRAINY = "github.com/pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"

# Their H100 has HBM2e at 2.4 TB/s and a limit of 500 W of 700. Dynamic power grows with the cube of the clock; 100 W are idle.
_H100_500W = ("--plan.gpu", "h100", "--plan.memory_gb_s", "2400", "--plan.tflops", str(round(794.5 * (400 / 600) ** (1 / 3))),
              "--plan.memory_gib", "94")  # fmt: skip
_FSDP = ("--mesh.strategy", "fsdp")
_LLAMA_8B = ("--model.name", "transformer", "--model.preset", "llama-8b", "--data.seq_len", "8192", *_FSDP)


def _decoder(width: int, layers: int, heads: int, ffn: int, vocab: int, length: int, kv_heads: int = 0) -> tuple[str, ...]:
    names = {"width": width, "layers": layers, "heads": heads, "ffn": ffn, "vocab_size": vocab, "kv_heads": kv_heads or heads}
    args = [word for name, value in names.items() for word in (f"--model.args.{name}", str(value))]
    return ("--model.name", "transformer", *args, "--model.args.max_seq_len", str(length), "--data.seq_len", str(length))


_7B = _decoder(4096, 32, 32, 11008, 32000, 4096)
_13B = _decoder(5120, 40, 40, 13824, 32000, 4096)
_MPT_7B = _decoder(4096, 32, 32, 10922, 50368, 2048)
_MPT_13B = _decoder(5120, 40, 40, 13653, 50368, 2048)
_MPT_3B = _decoder(2560, 32, 20, 6826, 50368, 2048)
_A100 = ("--plan.gpu", "a100")
_H100 = ("--plan.gpu", "h100")
_OPS = ("--memory.activation_checkpointing", "ops")
_EVERY_OTHER = ("--memory.activation_checkpointing", "full", "--memory.activation_checkpointing_every", "2")
_COMPILED, _EAGER = ("--speed.compile", "true"), ("--speed.compile", "false")


_SAC = "recomputes every other product, counted in the time"


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
    float8: bool = False
    recomputed: float = 0.0
    """The part of the blocks' forward products that the job computes again and `ops` does not."""


def _hsdp(gpus: int) -> tuple[str, ...]:
    return ("--mesh.strategy", "hsdp", "--mesh.replicate", str(gpus // 8), "--mesh.shard", "8")


ROWS = (
    Published("Llama 3 8B, 8 H100 (500 W)", 8, 2, 5762, TITAN, (*_LLAMA_8B, *_H100_500W, *_OPS, *_EAGER), gib=82.4,
              recomputed=0.5,
              note=_SAC),
    Published("Llama 3 8B, 8 H100 (500 W), compile", 8, 2, 6667, TITAN, (*_LLAMA_8B, *_H100_500W, *_OPS, *_COMPILED), gib=77.0,
              recomputed=0.5, note=_SAC),
    Published("Llama 3 8B, 128 H100 (500 W)", 128, 2, 5605, TITAN, (*_LLAMA_8B, *_H100_500W, *_OPS, *_EAGER),
              gib=67.0, recomputed=0.5, note=_SAC),
    Published("Llama 3 8B, 128 H100 (500 W), compile", 128, 2, 6514, TITAN,
              (*_LLAMA_8B, *_H100_500W, *_OPS, *_COMPILED), gib=62.0, recomputed=0.5, note=_SAC),
    Published("Llama 3 8B, 32 H200, compile, float8", 32, 2, 10938, TRAINY,
              (*_LLAMA_8B, "--plan.gpu", "h200", *_OPS, *_COMPILED), float8=True,
              recomputed=0.5, note="float8 products; " + _SAC),
    Published("Llama 2 7B, 128 A100, HSDP", 128, 2, 3700, IBM,
              (*_7B, *_A100, *_EAGER, *_hsdp(128), "--plan.node_link_gb_s", "50"), note="FSDP1"),
    Published("Llama 2 7B, 96 H100, HSDP", 96, 2, 7500, IBM,
              (*_7B, *_H100, *_EAGER, *_hsdp(96), "--plan.node_link_gb_s", "100"), note="FSDP1"),
    Published("Llama 2 13B, 128 A100", 128, 2, 1800, IBM,
              (*_13B, *_A100, *_EAGER, *_EVERY_OTHER, *_FSDP, "--plan.node_link_gb_s", "50"),
              note="FSDP1; every other block recomputed"),
    Published("Llama 2 13B, 96 H100", 96, 2, 3800, IBM,
              (*_13B, *_H100, *_EAGER, *_EVERY_OTHER, *_FSDP, "--plan.node_link_gb_s", "100"),
              note="FSDP1; every other block recomputed"),
    Published("MPT 7B, 8 H100", 8, 6, 10643, FOUNDRY, (*_MPT_7B, *_H100, *_EAGER, *_FSDP), note="FSDP1, GELU"),
    Published("MPT 7B, 8 A100", 8, 6, 4641, FOUNDRY, (*_MPT_7B, *_A100, *_EAGER, *_FSDP), 2, note="FSDP1, GELU"),
    Published("MPT 13B, 64 H100", 64, 2, 4800, FOUNDRY, (*_MPT_13B, *_H100, *_EAGER, *_FSDP), note="FSDP1, GELU"),
    Published("MPT 3B, 8 A100", 8, 10, 10811, FOUNDRY, (*_MPT_3B, *_A100, *_EAGER, *_FSDP), 2, note="FSDP1, GELU"),
    Published("MPT 3B, 64 H100", 64, 6, 22525, FOUNDRY, (*_MPT_3B, *_H100, *_EAGER, *_FSDP), 3, note="FSDP1, GELU"),
)  # fmt: skip


def predict(row: Published) -> tuple[float, float]:
    """Tokens a second on a GPU, and the peak in GiB."""
    from fsdp.config import load
    from fsdp.plan.predict import plan_one

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
    plan = plan_one(config, float8=row.float8)
    # Of three products, one forward and two backward, the forward one comes again.
    again = row.recomputed * plan.step.parts["matmul"] / 3
    return plan.tokens_s * plan.step.seconds / (plan.step.seconds + again), plan.memory.reserved / 2**30


def published_table() -> list[str]:
    lines = [
        "## Speed: published rows, none of them fitted to", "",
        "| job | tokens/s/GPU | planned | error | GiB | planned | source | |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    errors = []
    for row in ROWS:
        speed, gib = predict(row)
        errors.append(abs(speed / row.tokens_s - 1))
        shown = f"{row.gib}" if row.gib else ""
        lines.append(
            f"| {row.name} | {row.tokens_s:,.0f} | {speed:,.0f} | {speed / row.tokens_s - 1:+.1%} | {shown} | {gib:.1f} | "
            f"{row.source} | {row.note} |"
        )
    lines += ["", f"{len(ROWS)} rows: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}."]
    return lines
