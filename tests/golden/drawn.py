"""Draw flags that no test names together, and check that a run which is stopped three times is the run that
nothing happens to, bit for bit:

    python -m tests.golden.drawn --seconds 600            seeds from a random one on
    python -m tests.golden.drawn --runs 1 --seed 120      that draw again

A draw takes one choice of each list; many are refused, as flags that do not go together are. What differs, or
fails otherwise than by a refusal, is printed with its seed and its flags; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.golden.__main__ import forked
from tests.golden.configurations import write_data
from tests.golden.values import difference
from tests.support.world import end_pool

STEPS = 12
ALWAYS = f"--train.steps {STEPS} --train.global_batch 12 --checkpoint.every_steps 1000"
SAME, REFUSED, BROKEN = "same", "refused", "broken"
OWN = "tests.support.user_code"
RANKS = {
    1: ["--mesh.strategy fsdp"],
    2: [
        "--mesh.strategy fsdp",
        "--mesh.strategy ddp",
        "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1",
    ],
    3: [
        "--mesh.strategy fsdp",
        "--mesh.strategy ddp",
        "--mesh.strategy hsdp --mesh.replicate 3 --mesh.shard 1",
    ],
    4: ["--mesh.strategy ddp", "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"],
}
VECTORS = [
    "--model.name mlp --data.name digits --model.args.hidden 96",
    "--model.name vit --data.name digits",
    f"--model.name {OWN}:Sixteens --data.name {OWN}:vectors_with_heldout",
    f"--model.name {OWN}:Scalar --data.name {OWN}:vectors_with_heldout",
]
TEXT = [
    "--data.sources {data}/mixture.toml --data.seq_len 48",
    "--data.name {data}/stories.jsonl --data.seq_len 48",
    "--data.name {data}/stories.jsonl --data.args.rows packed --data.seq_len 48",
    "--data.name synthetic --data.args.kind tokens --data.seq_len 16 --data.args.vocab_size 256",
]
OF_TEXT = [
    ["", "", "--model.args.dropout 0.1"],
    ["", "", "", "--train.z_loss 1e-4", "--memory.loss_chunk 32"],
    ["", "", "", "--lora.rank 2", "--lora.rank 4 --lora.dropout 0.1"],
]
ADAM_STATES = ["", "", "--optim.state bf16", "--optim.state 8bit"]
OF_ALL = [
    ["", "", "--optim.ema 0.9"],
    ["", "", "", "--precision.master bf16", "--precision.param bf16", "--precision.master fp64",
     "--precision.param fp16 --precision.loss_scale 1e9"],
    ["", "", "", "--memory.nvme all --memory.nvme_dir {run}/nvme", "--memory.activation_checkpointing full",
     "--memory.nvme optimizer --memory.nvme_dir {run}/nvme", "--memory.cpu_offload true"],
    ["", "", "--train.micro_batch 1", "--train.micro_batch 2",
     "--train.micro_batch 1 --mesh.accumulate shard", "--train.micro_batch 2 --mesh.accumulate every"],
    ["", "", "--data.workers 0", "--data.workers 3"],
    ["", "", "--mesh.wrap root", "--mesh.wrap every:2", "--mesh.unsharded *.norm.*",
     "--mesh.reshard_after_forward step", "--mesh.reshard_after_forward false"],
    ["", "", "--optim.schedule wsd --optim.warmup_steps 2", "--optim.schedule linear",
     "--optim.warmup_steps 3"],
    ["", "", "", "--train.eval_every_steps 3", "--train.nonfinite skip", "--train.clip_grad_norm 0",
     "--comm.divide_by 1"],
    ["", "", "--checkpoint.every_steps 2", "--checkpoint.every_steps 3 --checkpoint.local_dir {run}/local"],
    ["", "--run.seed 3"],
]  # fmt: skip
OPTIMIZERS = [
    "adamw", "adamw", "adamw", "adam --optim.weight_decay 0", "sgd --optim.weight_decay 0", "muon",
    "torch.optim:NAdam", "torch.optim:RMSprop", "torch.optim:Adagrad",
]  # fmt: skip


def draw(seed: int) -> tuple[int, str, Sequence[int]]:
    """Ranks, flags ({run} is the folder of one run, {data} that of the text), and the steps of the stops."""
    dice = random.Random(seed)
    ranks = dice.choice(list(RANKS))
    chosen = [dice.choice(RANKS[ranks])]
    if dice.random() < 0.5:
        chosen += ["--model.name transformer --model.args.width 32", dice.choice(TEXT)]
        chosen += [dice.choice(choices) for choices in OF_TEXT]
    else:
        chosen.append(dice.choice(VECTORS))
    optimizer = dice.choice(OPTIMIZERS)
    chosen.append(f"--optim.name {optimizer}")
    if optimizer.startswith("adam"):
        chosen.append(dice.choice(ADAM_STATES))
    chosen += [dice.choice(choices) for choices in OF_ALL]
    return ranks, " ".join(filter(None, chosen)), sorted(dice.sample(range(1, STEPS), 3))


def check(ranks: int, flags: str, stops: Sequence[int], folder: Path) -> tuple[str, str]:
    """One of SAME, REFUSED and BROKEN, and the reason."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        try:
            whole, parts = (
                forked(
                    f"{ALWAYS} {flags.format(run=f'{place}/{name}', data=folder / 'data')}".split(),
                    ranks,
                    folder,
                    f"{place}/{name}",
                    legs,
                )
                for name, legs in (("whole", [0]), ("parts", [*stops, 0]))
            )
        except Exception as error:  # of any kind: that is what is searched
            refused = (
                isinstance(error, RuntimeError) and "whole" in str(error) and "ConfigError" in str(error)
            )
            if not refused:
                end_pool()
            return (REFUSED if refused else BROKEN), traceback.format_exc()
        text = difference(parts, whole, 0)
    return (BROKEN if text else SAME), text


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.drawn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runs", type=int, default=0, help="so many that are not refused; 0: --seconds")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30), help="of the first draw")
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    counts, began, seed = Counter[str](), time.monotonic(), options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="drawn-") as name:
        write_data(Path(name, "data"))
        while counts[SAME] + counts[BROKEN] < (options.runs or 1 << 30) and (
            options.runs or time.monotonic() - began < options.seconds
        ):
            ranks, flags, stops = draw(seed)
            verdict, text = check(ranks, flags, stops, Path(name))
            counts[verdict] += 1
            if verdict == BROKEN:
                print(f"BROKEN, seed {seed}, {ranks} ranks, stopped after {stops}: {flags}\n  {text}")
            seed += 1
    print(f"{counts[SAME]} runs the same, {counts[REFUSED]} refused, {counts[BROKEN]} broken")
    return 1 if counts[BROKEN] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
