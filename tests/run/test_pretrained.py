"""--model.name hf:FOLDER: weights of transformers in, and a folder for from_pretrained out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp.base.errors import ConfigError
from fsdp.checkpoint.pretrained import PretrainedWeights
from fsdp.models.hf import resolve_folder
from fsdp.predict.__main__ import main as predict
from tests.run.hf_folders import DATA, LoadedRank, load_on_a_rank, logits_of, reference, write_folder
from tests.support.runs import on_a_rank
from tests.support.world import run_world

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

NAMES = ("llama", "tied", "qwen3", "gpt2", "bert", "t5", "vit", "mixtral")
QUIET = "--train.global_batch 12 --checkpoint.every_steps 1000 --watch.enabled false --optim.lr 1e-2"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """Name, folder and class of each small model."""
    found = {}
    for name in NAMES:
        folder = write_folder(name, tmp_path_factory.mktemp(name))
        cls = json.loads((folder / "config.json").read_text())["architectures"][0]
        found[name] = (name, str(folder), cls)
    return found


def check_loaded(case: tuple[str, str, str], ranks: list[LoadedRank]) -> None:
    name, folder, cls = case
    wanted = reference(Path(folder), cls)
    values = dict(wanted.named_parameters())
    assert values.keys() == ranks[0].parameters.keys()
    for one in ranks:
        assert all(torch.equal(values[n], p) for n, p in one.parameters.items()), name
        assert one.nbytes == one.shard_nbytes, name
    if name == "mixtral":
        wanted.config._experts_implementation = "eager"
    expected = logits_of(name, wanted)
    for one in ranks:
        assert torch.allclose(one.logits, expected, rtol=0, atol=1e-12), name


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ""),
        (1, ""),
        (3, ""),
        (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"),
        (2, "--mesh.strategy ddp"),
    ],
)
@pytest.mark.long
def test_each_rank_reads_its_own_rows(
    folders: dict[str, tuple[str, str, str]], ranks: int, words: str
) -> None:
    cases = list(folders.values())
    found = run_world(ranks, load_on_a_rank, cases, words)
    for at, case in enumerate(cases):
        check_loaded(case, [one[at] for one in found])


# ---------------------------------------------------------------- out


def train(ranks: int, case: tuple[str, str, str], run: Path, words: str) -> None:
    name, folder, _ = case
    kernels = "--model.args.experts_implementation eager" if name == "mixtral" else ""
    flags = f"--run.dir {run} --model.name hf:{folder} {DATA[name]} {QUIET} {kernels} {words}"
    said = run_world(ranks, on_a_rank, flags.split())
    assert said == [None] * ranks, said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("tied", "t5") else pytest.mark.long) for name in NAMES]
)
def test_a_trained_model_returns_to_transformers(
    name: str, folders: dict[str, tuple[str, str, str]], tmp_path: Path
) -> None:
    case = folders[name]
    train(2, case, tmp_path / "run", "--train.steps 3 --checkpoint.export_format both")
    full = tmp_path / "run" / "full_model"
    state = torch.load(full / "full-model.pt", weights_only=True)
    trained, read = reference(Path(case[1]), case[2]), reference(full, case[2])
    for model in (trained, read):
        if name == "mixtral":
            model.config._experts_implementation = "eager"
    before = logits_of(name, trained)
    trained.float().load_state_dict(state)
    assert torch.equal(logits_of(name, read), logits_of(name, trained))
    assert not torch.allclose(before, logits_of(name, read), atol=1e-4)
    read.float().save_pretrained(tmp_path / "again")
    saved, again = (load_file(place / "model.safetensors") for place in (full, tmp_path / "again"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[key], again[key]) for key in saved)


def test_a_run_continues_on_other_ranks_and_is_exported(
    folders: dict[str, tuple[str, str, str]], tmp_path: Path
) -> None:
    case, exact = folders["tied"], "--train.steps 4 --precision.master fp64"
    train(2, case, tmp_path / "straight", exact)
    train(2, case, tmp_path / "parts", f"{exact} --train.stop_after 2")
    train(3, case, tmp_path / "parts", exact)
    found = []
    for place in (tmp_path / "straight", tmp_path / "parts"):
        assert json.loads((place / "full_model" / "config.json").read_text())["dtype"] == "float32"
        found.append(reference(place / "full_model", case[2]))
    for one, other in zip(*(model.parameters() for model in found), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_a_prompt_is_read_by_the_tokenizer_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder("llama", tmp_path / "source")
    write_tokenizer(folder)
    train(1, ("llama", str(folder), ""), tmp_path / "run", "--train.steps 1")
    assert (tmp_path / "run" / "full_model" / "tokenizer.json").is_file()
    for file in folder.iterdir():
        file.unlink()  # the export alone is read
    arguments = [str(tmp_path / "run"), "--prompt", "w3 w7", "--tokens", "4", "--temperature", "0"]
    assert predict([*arguments, "--trust-code", "tests.models.small_hf:texts"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:2] == ["w3", "w7"]
    assert len(words) == 6


def write_tokenizer(folder: Path, **special: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(31)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


# ---------------------------------------------------------------- what does not fit


def refusal(folder: Path, **args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        PretrainedWeights(resolve_folder(f"hf:{folder}", args, {}), 0)
    return str(caught.value)


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write_folder("bert", tmp_path / "bert")
    assert "no_such does not exist" in refusal(tmp_path / "no_such")
    assert "--model.args.hiden_size is not an argument" in refusal(folder, hiden_size=3)
    assert "--model.args.hidden_size" in refusal(folder, hiden_size=3)
    assert "somebody/kernels is not one of eager, sdpa" in refusal(
        folder, attn_implementation="somebody/kernels"
    )
    assert "has no head causual, but " in refusal(folder, head="causual")
    assert "a bert has no head image-classification" in refusal(folder, head="image-classification")
    wider = refusal(folder, intermediate_size=48)
    assert "has other shapes: bert.encoder.layer.0.intermediate.dense" in wider
    edit(folder, architectures=["BertForSequenceClassification"])
    assert "lacks bert.pooler.dense.weight, bert.pooler.dense.bias, classifier.weight and 1 more" in refusal(
        folder
    )
    edit(folder, architectures=["BertModel"])
    assert (
        "'BertModel', no class of transformers that returns logits or a loss. HINT: --model.args.head"
        in refusal(folder)
    )
    edit(folder, quantization_config={"quant_method": "gptq"})
    assert "its weights are quantized" in refusal(folder)
    edit(folder, quantization_config=None)  # as some programs write it
    assert "'BertModel', no class" in refusal(folder)
    edit(folder, model_type=["bert"])
    assert "has no model_type ['bert']" in refusal(folder)


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = write_folder("bert", tmp_path / "bert")
    (folder / "own.py").write_text("raise SystemExit('run')")
    edit(folder, auto_map={"AutoConfig": "own.Config", "AutoModelForMaskedLM": "own.Model"})
    assert resolve_folder(f"hf:{folder}", {}, {}).cls.__name__ == "BertForMaskedLM"
    edit(folder, model_type="own")
    assert "which is not run" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_whose_configuration_does_not_say_so_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """They were trained without their scales."""
    folder = write_folder("bert", tmp_path / "bert")
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("query.weight"))
    state |= {name: state[name].to(dtype), f"{name}_scale": torch.ones(1)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"its weights are quantized ({name} is {dtype}). HINT: " in refusal(folder)


def test_a_tied_model_whose_configuration_lost_it_is_answered_with_the_argument(tmp_path: Path) -> None:
    """A new head, as the other hint has it, would be random."""
    folder = write_folder("tied", tmp_path / "tied")
    edit(folder, tie_word_embeddings=False)
    said = refusal(folder)
    assert "lacks lm_head.weight" in said
    assert PretrainedWeights(resolve_folder(f"hf:{folder}", {"tie_word_embeddings": True}, {}), 0).dtype
