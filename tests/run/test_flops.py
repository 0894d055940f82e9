"""Operations of one sample, and the table of device peaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdp.config import load
from fsdp.run.job import flops_per_sample, meta_model, prepare
from tests.models import small_hf


def counted(*flags: str) -> tuple[float, nn.Module, int]:
    job = prepare(load(list(flags)), world_size=1, num_nodes=1, device=torch.device("cpu"))
    model = meta_model(job.spec)
    return flops_per_sample(model, job.data), model, job.data.info.tokens_per_sample


def test_a_transformer_costs_six_a_weight_and_token_and_its_attention() -> None:
    flops, model, tokens = counted(
        "--model.name", "transformer", "--data.name", "text", "--data.seq_len", "128"
    )
    embedding = max((p for name, p in model.named_parameters() if "emb" in name), key=lambda p: p.numel())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    dense = 6 * tokens * matrices
    looked_up = 6 * tokens * embedding.numel()
    assert dense - looked_up < flops < dense * 1.5


@pytest.mark.needs("transformers")
def test_models_of_transformers_are_counted_with_attention(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their masks read values of positions, on meta; of experts only those that a token takes count."""
    data = ("--data.name", "synthetic", "--data.args.kind", "tokens", "--data.args.vocab_size", "31")
    llama, mixtral = small_hf.llama(), small_hf.mixtral()
    found = []
    for name, model in (("llama", llama), ("mixtral", mixtral)):
        model.save_pretrained(tmp_path / name)  # type: ignore[operator]
        with caplog.at_level("INFO"):
            flops, meta, tokens = counted(
                "--model.name", f"hf:{tmp_path / name}", *data, "--data.seq_len", "64"
            )
        assert f"MFU of {flops:.4g} operations a sample, by 3 × the products of a forward" in caplog.text
        embedding = meta.get_input_embeddings().weight  # type: ignore[operator]
        used = sum(p.numel() for p in meta.parameters() if p.dim() == 2 and p is not embedding)
        used += sum(p.numel() * 2 // p.shape[0] for p in meta.parameters() if p.dim() == 3)
        found.append(flops / (6 * used * tokens + 12 * 2 * 24 * tokens**2))
    assert found == pytest.approx([1.0, 1.0], rel=0.02)


class LooksAtItsNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1)) * (1.0 if float(inputs.sum()) > 0 else 2.0)


def test_a_model_that_reads_values_counts_its_parameters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        words = ("--model.name", f"{__name__}:LooksAtItsNumbers", "--data.name", "digits")
        flops, model, tokens = counted(*words)
    assert "by 6 × parameters × tokens: products cannot be counted" in caplog.text
    assert flops == 6.0 * sum(p.numel() for p in model.parameters()) * max(1, tokens)
