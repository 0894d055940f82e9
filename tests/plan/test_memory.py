"""Bytes: which knob changes them and by how much, on which rank, and that few blocks stand for all of
them.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fsdp.config import load
from fsdp.memory.storages import MIB, packing
from fsdp.models.transformer import Block, Rotary, TransformerSizes
from fsdp.plan import fake_step
from fsdp.plan.estimate import Memory, notes
from fsdp.plan.fake_step import subject_of
from fsdp.plan.trace import COLUMN, Tracker
from tests.plan.asked import GIB, SMALL, plan
from tests.support.marks import quick_are


def peak(*flags: str, gpus: int = 4) -> float:
    return plan(*flags, gpus=gpus).memory.peak


def kinds(*flags: str, gpus: int = 4) -> dict[str, float]:
    return dict(plan(*flags, gpus=gpus).memory.kinds)


# ---------------------------------------------------------------- strategies


def test_replicas_hold_what_their_shards_hold() -> None:
    hsdp = plan("--mesh.strategy", "hsdp", "--mesh.replicate", "2", "--mesh.shard", "2")
    assert hsdp.memory.state == plan("--mesh.strategy", "fsdp", gpus=2).memory.state
    ddp = plan("--mesh.strategy", "ddp")
    assert ddp.memory.state == pytest.approx(plan("--mesh.strategy", "fsdp", gpus=1).memory.state, rel=0.02)
    assert ddp.memory.kinds["gradients"] > 0


def test_ddp_keeps_gradients_beside_its_buckets_until_it_synchronises() -> None:
    many = ("--mesh.strategy", "ddp", "--train.global_batch", "8", "--train.micro_batch", "1", *WIDE[:4])
    last, every = (plan(*many, "--mesh.accumulate", how).memory.peak for how in ("last", "every"))
    assert last - every > 0.5 * plan(*many).memory.kinds["parameters"]


# ---------------------------------------------------------------- knobs

LONG = ("--data.seq_len", "128", "--precision.param", "bf16")
WORDS = "--data.seq_len 8 --model.args.width 256 --train.micro_batch 1 --train.global_batch 4"
WIDE = tuple(WORDS.split())
LESS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "--memory.activation_checkpointing full": (LONG, ()),
    "--memory.activation_checkpointing ops": (LONG, ()),
    "--train.micro_batch 1": (LONG, ("--train.micro_batch", "2")),
    "--memory.cpu_offload true": (WIDE, ()),
    "--optim.state bf16": (WIDE, ()),
    "--optim.state 8bit": (WIDE, ("--optim.state", "bf16")),
    "--precision.master bf16": (WIDE, ()),
    "--optim.name sgd": (WIDE, ()),
    "--model.frozen blocks.*": (WIDE, ()),
    "--lora.rank 4": (WIDE, ()),
}


SAMPLE = ("--optim.state bf16",)


@pytest.mark.parametrize("knob", quick_are(["--memory.cpu_offload true"], LESS, SAMPLE))
def test_a_knob_that_saves_memory_lowers_the_plan(knob: str) -> None:
    common, without = LESS[knob]
    assert plan(*common, *knob.split()).memory.peak < plan(*common, *without).memory.peak


def test_offload_moves_resting_bytes_to_the_host() -> None:
    there, here = plan("--memory.cpu_offload", "true").memory, plan().memory
    assert there.kinds["optimizer"] == there.kinds["parameters"] == 0
    assert there.host >= here.state
    assert here.host == 0


def test_a_save_copies_the_state_to_the_host() -> None:
    saving = plan("--mesh.strategy", "hsdp", "--mesh.replicate", "2", "--mesh.shard", "2")
    assert saving.staged == saving.memory.state / 2


def test_flags_outside_the_model_are_named() -> None:
    flags = ("--memory.activation_offload", "true", "--speed.float8", "tensorwise")
    assert [note.split()[0] for note in notes(load([*SMALL, *flags]))] == list(flags[::2])


@pytest.mark.parametrize("name", ["/cluster/tokens", "chats.jsonl", "hf:ORG/NAME"])
def test_data_that_lie_elsewhere_are_not_needed(name: str) -> None:
    config = load(["--model.name", "transformer", "--model.args.vocab_size", "50257", "--data.name", name])
    note = subject_of(config.model, config.data).note
    assert note.startswith(f"{name} is not here (")
    assert note.endswith("); planned with kind tokens, vocab_size 50257")


@pytest.mark.long
def test_a_cpus_ranks_share_its_memory() -> None:
    cpu = ("--plan.gpu", "cpu", "--plan.gpus_per_node", "4")
    one, four, eight = (plan(*cpu, gpus=gpus).rates.memory for gpus in (1, 4, 8))
    assert one == 4 * four == 4 * eight
    assert plan(*cpu, "--plan.memory_gib", "3", gpus=4).rates.memory == 3 * GIB


# ---------------------------------------------------------------- the allocator


def reserved(*events: tuple[float, ...]) -> float:
    """MiB after events of (storage, MiB, stream) whose streams have their peak at the end or together."""
    whole = [(int(event[0]), int(event[1] * MIB), int((*event, 0)[2])) for event in events]
    alive, peaks = dict[int, int](), dict[int, int]()
    for _, size, stream in whole:
        alive[stream] = alive.get(stream, 0) + size
        peaks[stream] = max(peaks.get(stream, 0), alive[stream])
    return packing(whole) * sum(peaks.values()) / MIB


def test_segments_of_each_stream_grow_by_their_grain() -> None:
    assert reserved((1, 1 / 2048)) == pytest.approx(2)
    assert reserved((1, 2)) == pytest.approx(20)
    assert reserved((1, 2), (2, 30)) == pytest.approx(40)
    assert reserved((1, 1 / 2048), (2, 11)) == pytest.approx(22)
    assert reserved((1, 11, 0), (2, 11, 2)) == pytest.approx(40), "streams share nothing"


def test_free_neighbours_are_one_block_and_the_last_one_grows() -> None:
    assert reserved((1, 14), (2, 14), (1, -14), (3, 28)) == pytest.approx(60), "a hole that is too small"
    assert reserved((1, 14), (2, 14), (1, -14), (2, -14), (3, 36)) == pytest.approx(40)
    assert reserved((1, 20), (2, 10), (3, 10), (1, -20), (4, 8)) == pytest.approx(40), (
        "best fit, not the last"
    )


def on_one_gpu(*flags: str) -> Memory:
    return plan.__wrapped__(*flags, "--data.workers", "0", "--train.global_batch", "4", gpus=1).memory


def test_the_reduced_gradients_are_reserved_beside_the_rest() -> None:
    """FSDP makes them on a stream of its own, whose memory nothing else gets."""
    with_clip = on_one_gpu("--speed.compile", "false", "--data.seq_len", "96")
    assert with_clip.reserved - with_clip.peak >= with_clip.kinds["parameters"] * 0.9
    assert with_clip.kinds["gradients"] == 0, "the peak is before them"


def test_cudas_formulas_keep_less_than_a_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms a block kept two fp32 copies of their input; a compiled loss keeps the logits alone."""
    eager, compiled = (
        on_one_gpu("--speed.compile", how, "--data.seq_len", "96") for how in ("false", "true")
    )
    monkeypatch.setattr(fake_step, "STAND_INS", {})
    as_on_a_cpu = on_one_gpu("--speed.compile", "false", "--data.seq_len", "96")
    assert compiled.kinds["activations"] < eager.kinds["activations"] < as_on_a_cpu.kinds["activations"]


def test_attention_keeps_no_probabilities_for_dropout() -> None:
    """CUDA's kernels keep a seed. A CPU takes the formula, and keeps length × length for each head."""
    words = (
        *(
            "--model.name",
            "tests.plan.own:Attending",
            "--data.args.vocab_size",
            "64",
            "--data.seq_len",
            "256",
        ),
        *("--speed.compile", "false", "--model.args.dropout"),
    )
    without, dropping = (kinds(*words, p)["activations"] for p in ("0", "0.1"))
    assert dropping == without
    assert kinds(*words, "0.1", "--plan.gpu", "cpu")["activations"] > without + 2 * 4 * 256 * 256 * 4


@pytest.mark.parametrize("how", ["true", "false"])
def test_packed_rows_have_no_mask(how: str) -> None:
    """In half precision attention gets the documents one by one: nothing grows with the length's square."""
    common = ("--speed.compile", how, "--model.args.vocab_size", "256", "--model.args.max_seq_len", "8192")
    rows = ("--data.name", "documents", "--data.dir", "/nowhere", "--data.args.rows", "packed")
    long, short = (
        on_one_gpu(*common, *rows, "--data.seq_len", n).kinds["activations"] for n in ("8192", "4096")
    )
    assert long == pytest.approx(2 * short, rel=0.01)
    config = load([*SMALL, *rows])
    assert "position_ids" in subject_of(config.model, config.data).sample


@pytest.mark.long
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_compiled_block_keeps_what_torchs_partitioner_keeps(autocast: bool, dropout: float) -> None:
    """With autocast, as in DDP, the residual stream is fp32, and each product casts its operand."""

    def kept(compiled: bool) -> int:
        torch.manual_seed(0)
        block = Block(TransformerSizes(width=64, heads=4, ffn=128, dropout=dropout))
        x, rotary = torch.randn(4, 32, 64), Rotary(torch.randn(32, 8), torch.randn(32, 8))
        if not autocast:
            block, x = block.bfloat16(), x.bfloat16()
        tracker, saved = Tracker(), list[torch.Tensor]()
        own = [*block.parameters(), x.requires_grad_(), rotary.cos, rotary.sin]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
            if compiled:
                block.compile(backend="aot_eager_decomp_partition")
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
                block(x, rotary)
                sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
                return sum(sizes.values()) - sum(sizes.get(t.untyped_storage().data_ptr(), 0) for t in own)
            stack.enter_context(mock.patch.dict(vars(F), fake_step.STAND_INS))
            stack.enter_context(tracker)
            for tensor in own:
                tracker.hold(tensor.detach(), "buffers")
            with tracker.compiled([x]):
                y = block(x, rotary)
        torch.clear_autocast_cache()
        return tracker._alive[COLUMN["activations"]] - y.nbytes

    assert kept(compiled=False) == pytest.approx(kept(compiled=True), rel=0.01)
