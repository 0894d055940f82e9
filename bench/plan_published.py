"""Published training speeds beside the planner's for the same jobs. Nothing in the planner is fitted to them.

Each row names its source, and where the job differs from the planned one: a model of other parts with the
same sizes, FSDP1, another choice of what is recomputed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SOURCES = {
    "titan": "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
    "titan a100": "github.com/pytorch/torchtitan docs/performance.md, 2024",
    "trainy": "github.com/pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "ibm": "pytorch.org/blog/maximizing-training",
    "foundry": "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md",
}


def _decoder(
    width: int, layers: int, heads: int, ffn: int, vocab: int, length: int, kv_heads: int = 0
) -> str:
    return (
        f"--model.name transformer --model.args.width {width} --model.args.layers {layers} "
        f"--model.args.heads {heads} --model.args.ffn {ffn} --model.args.vocab_size {vocab} "
        f"--model.args.kv_heads {kv_heads or heads} --model.args.max_seq_len {length} --data.seq_len {length}"
    )


MODELS = {
    "Llama 3 8B": "--model.name transformer --model.preset llama-8b --data.seq_len 8192",
    "Llama 3 70B": _decoder(8192, 80, 64, 28672, 128256, 8192, 8),
    "Llama 2 7B": _decoder(4096, 32, 32, 11008, 32000, 4096),
    "Llama 2 13B": _decoder(5120, 40, 40, 13824, 32000, 4096),
    "Llama 2 70B": _decoder(8192, 80, 64, 28672, 32000, 4096, 8),
    "MPT 3B": _decoder(2560, 32, 20, 6826, 50368, 2048),
    "MPT 7B": _decoder(4096, 32, 32, 10922, 50368, 2048),
    "MPT 13B": _decoder(5120, 40, 40, 13653, 50368, 2048),
}
_CHECKPOINTING = "--memory.activation_checkpointing"
OPTIONS = {
    # Their H100 has HBM2e at 2.4 TB/s and a limit of 500 W of 700. Dynamic power grows with the cube of the
    # clock; 100 W are idle.
    "H100 (500 W)": "--plan.gpu h100 --plan.memory_gb_s 2400 --plan.memory_gib 94 "
    f"--plan.tflops {round(794.5 * (400 / 600) ** (1 / 3))}",
    "H100": "--plan.gpu h100",
    "H200": "--plan.gpu h200",
    "A100": "--plan.gpu a100",
    "compile": "--speed.compile true",
    "float8": "--speed.float8 tensorwise",
    "recomputed by operation": f"{_CHECKPOINTING} ops",
    "all recomputed": f"{_CHECKPOINTING} full",
    "each other layer recomputed": f"{_CHECKPOINTING} full --memory.activation_checkpointing_every 2",
    "HSDP": "--mesh.strategy hsdp --mesh.shard 8",
    "50 GB/s": "--plan.node_link_gb_s 50",
    "100 GB/s": "--plan.node_link_gb_s 100",
    "GELU": "",
}
"""What a job's name may list after its GPUs; eager and FSDP where it says nothing else."""


@dataclass(frozen=True)
class Published:
    """A job in words of MODELS and OPTIONS. What recomputes by operation saves each other product of two;
    here all are saved, and the others' time is added.
    """

    name: str
    micro_batch: int
    tokens_s: float
    source: str
    accumulation: int = 1
    gib: float = 0.0

    @property
    def gpus(self) -> int:
        return int(self.name.split(", ")[1].split()[0])

    @property
    def flags(self) -> list[str]:
        model, device, *options = self.name.split(", ")
        words = [MODELS[model], *(OPTIONS[name] for name in (device.partition(" ")[2], *options))]
        words += [] if "compile" in options else ["--speed.compile false"]
        words += [f"--mesh.replicate {self.gpus // 8}" if "HSDP" in options else "--mesh.strategy fsdp"]
        return " ".join(words).split()


FSDP2 = (
    Published("Llama 3 8B, 8 H100 (500 W), recomputed by operation", 2, 5762, "titan", gib=82.4),
    Published("Llama 3 8B, 8 H100 (500 W), recomputed by operation, compile", 2, 6667, "titan", gib=77.0),
    Published(
        "Llama 3 8B, 8 H100 (500 W), recomputed by operation, compile, float8", 2, 8532, "titan", gib=76.8
    ),
    Published("Llama 3 8B, 128 H100 (500 W), recomputed by operation", 2, 5605, "titan", gib=67.0),
    Published("Llama 3 8B, 128 H100 (500 W), recomputed by operation, compile", 2, 6514, "titan", gib=62.0),
    Published(
        "Llama 3 8B, 128 H100 (500 W), recomputed by operation, compile, float8", 2, 8380, "titan", gib=61.8
    ),
    Published("Llama 3 8B, 32 H200, recomputed by operation, compile, float8", 2, 10938, "trainy", gib=47.96),
    Published("Llama 3 8B, 64 H200, recomputed by operation, compile, float8", 2, 10753, "trainy", gib=46.97),
    Published("Llama 3 8B, 64 A100, each other layer recomputed", 1, 2904, "titan a100"),
    Published("Llama 3 8B, 64 A100, recomputed by operation", 1, 2973, "titan a100"),
    Published("Llama 3 70B, 64 A100, all recomputed", 1, 331, "titan a100"),
    Published("Llama 2 13B, 64 A100", 2, 2162, "titan a100"),
    Published("Llama 2 13B, 64 A100, each other layer recomputed", 2, 1914, "titan a100"),
    Published("Llama 2 13B, 64 A100, recomputed by operation", 2, 1904, "titan a100"),
    Published("Llama 2 70B, 64 A100, recomputed by operation", 1, 355, "titan a100"),
    Published("Llama 2 70B, 64 A100, all recomputed", 2, 353, "titan a100"),
)
FSDP1 = (
    Published("Llama 2 7B, 128 A100, HSDP, 50 GB/s", 2, 3700, "ibm"),
    Published("Llama 2 7B, 96 H100, HSDP, 100 GB/s", 2, 7500, "ibm"),
    Published("Llama 2 13B, 128 A100, each other layer recomputed, 50 GB/s", 2, 1800, "ibm"),
    Published("Llama 2 13B, 96 H100, each other layer recomputed, 100 GB/s", 2, 3800, "ibm"),
    Published("MPT 7B, 8 H100, GELU", 6, 10643, "foundry"),
    Published("MPT 7B, 8 A100, GELU", 6, 4641, "foundry", 2),
    Published("MPT 13B, 64 H100, GELU", 2, 4800, "foundry"),
    Published("MPT 3B, 8 A100, GELU", 10, 10811, "foundry", 2),
    Published("MPT 3B, 64 H100, GELU", 6, 22525, "foundry", 3),
)
"""FSDP2's elder: the same communication, other memory."""


def predict(row: Published) -> tuple[float, float]:
    """Tokens a second on a GPU, and the peak in GiB."""
    from fsdp.config import load
    from fsdp.plan.estimate import plan_one

    batch = row.micro_batch * row.accumulation * row.gpus
    sizes = f"--plan.gpus {row.gpus} --train.global_batch {batch} --train.micro_batch {row.micro_batch}"
    config = load([*row.flags, *sizes.split()])
    plan = plan_one(config)
    # Of three products, one forward and two backward, the forward one comes again.
    share = 0.5 if "recomputed by operation" in row.name else 0
    again = share * plan.step.parts["matmul"] / 3
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
        shown = f"{row.gib} | {gib:.1f}" if row.gib else " | "
        off = speed / row.tokens_s - 1
        lines.append(
            f"| {row.name} | {row.tokens_s:,.0f} | {speed:,.0f} | {off:+.1%} | {shown} | "
            f"{SOURCES[row.source]} |"
        )
    return [
        *lines,
        "",
        f"{len(rows)} rows: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
    ]
