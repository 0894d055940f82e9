"""What 64 ranks read of a folder with Llama 3 8B's shape: sparse files, of which no byte is materialised."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdp.checkpoint.full_state import StoredTensor
from fsdp.checkpoint.pretrained import PretrainedWeights
from fsdp.config import Config, ModelSection
from fsdp.dist.mesh import MeshSizes
from fsdp.models import ModelSpec, resolve
from fsdp.parallel.materialize import _fill_rows
from fsdp.parallel.shard import Sharded, shard_model
from fsdp.plan.fake_step import fake_world

pytestmark = pytest.mark.needs("transformers")
RANKS = 64
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
FACTS = {"vocab_size": 128_256, "seq_len": 512}


def spec_of(folder: Path) -> ModelSpec:
    return resolve(ModelSection(name=f"hf:{folder}"), FACTS)


def write_sparse(folder: Path) -> int:
    """Four files of holes with whole headers; returns the bytes of all tensors."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in spec_of(folder).build().named_parameters()}
    names, where, total = list(shapes), {}, 0
    for part in range(4):
        at, header, file = 0, {}, folder / f"model-{part}.safetensors"
        for name in names[part::4]:
            end = at + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, end]}
            where[name], at = file.name, end
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return total


@dataclass
class Reads:
    """Counts reads in the place of StoredTensor.rows."""

    largest: int = 0
    total: int = 0

    def rows(self, stored: StoredTensor, first: int, last: int) -> Tensor:
        found = torch.empty((last - first, *stored.size[1:]), dtype=stored.dtype, device="meta")
        self.largest = max(self.largest, found.nbytes)
        self.total += found.nbytes
        return found


@contextmanager
def sharded_on_meta(spec: ModelSpec, sizes: MeshSizes, rank: int) -> Iterator[Sharded]:
    with torch.device("meta"):
        model = spec.build()
    with fake_world(sizes, rank) as mesh:
        yield shard_model(
            model,
            Config(),
            sizes=sizes,
            mesh=mesh,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        (MeshSizes("fsdp", 1, RANKS), (0, 1, 31, 63)),
        (MeshSizes("hsdp", 8, 8), (0, 7, 8, 63)),
    ],
)
def test_each_rank_reads_its_share_once(
    sizes: MeshSizes, ranks: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = write_sparse(tmp_path)
    assert total == 2 * 8_030_261_248
    spec, counted = spec_of(tmp_path), []
    assert spec.pretrained is not None
    for rank in ranks:
        reads = Reads()
        monkeypatch.setattr(StoredTensor, "rows", lambda stored, a, b, reads=reads: reads.rows(stored, a, b))
        with sharded_on_meta(spec, sizes, rank) as sharded:
            _fill_rows(sharded.root, PretrainedWeights(spec.pretrained, 0), {}, rank)
        counted.append(reads)
    share = total // sizes.shard
    assert all(reads.total == share for reads in counted)  # all dimensions are multiples of 64
    assert all(reads.largest == 2 * 128_256 * 4096 // sizes.shard for reads in counted)
