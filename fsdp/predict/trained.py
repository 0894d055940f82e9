"""A run directory's model on one rank or sharded over several, and its answers: classes, or generated text.
A sample or an image file has a class; a prompt has its continuation.

The model has training's dtypes. Its tensors are those of RUN/full_model, of which each rank reads its own
rows; without an export those of the newest whole checkpoint. Preprocessing and tokenizer are those of
training: they come from the data's DataInfo. Text has one token at a time, with the context length of
training, by training's tokenizer, else that of RUN/full_model; without one, prompts are token numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp import config as configuration
from fsdp.base.devices import widest_floating
from fsdp.base.errors import CheckpointError, ConfigError, TrainingError, message_line
from fsdp.base.text import print_line
from fsdp.checkpoint import inspect
from fsdp.checkpoint.pretrained import (
    TORCH_FILE,
    PretrainedWeights,
    newest_export,
    open_full_state,
)
from fsdp.checkpoint.restore import load_weights
from fsdp.checkpoint.store import open_store
from fsdp.config import Config, MeshSection
from fsdp.config.trust import check_store, load_run_config
from fsdp.data import DataSet, Samples, build_dataset, heldout_batches
from fsdp.data.images import prepare, upright
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.types import matched
from fsdp.distributed.collectives import ObjectGroup, broadcast_object
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import DataRank, MeshSizes, build_mesh
from fsdp.distributed.process_group import process_group
from fsdp.models import ModelSpec, resolve
from fsdp.models.hf import KERNELS
from fsdp.models.loss import read_output
from fsdp.models.registry import PREFIX
from fsdp.models.units import all_names
from fsdp.run.job import model_of
from fsdp.rundir.history import RunDir, trained_classes
from fsdp.shard.materialize import check_state_fits, materialize
from fsdp.shard.shard import Sharded, shard_model, sharding_of
from fsdp.tokenize.conversations import Tokenizer, load_tokenizer

WEIGHT_FILES = (".pt", ".pth", ".bin", ".safetensors")
NOT_USED = ("checkpoint.resume", "ray.", "mesh.")
"""Fields that predictions do not use, and whose files may no longer exist."""


@dataclass(frozen=True)
class TrainedModel:
    run: Path
    config: Config
    model: nn.Module
    data: DataSet
    env: DistEnv

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """The model's logits, on its device. Collective."""
        dtype = widest_floating(p.dtype for p in self.model.parameters())
        output = read_output(
            self.model(inputs.to(self.env.device, dtype if inputs.is_floating_point() else None))
        )
        logits = output.logits
        if logits is None or output.loss is not None:
            reason = f"--model.name {self.config.model.name} returns a loss and no logits."
            raise ConfigError(reason, "return logits if no targets are given")
        if logits.isnan().any():
            reason = f"{self.run}: the model's logits are not numbers (nan)."
            raise TrainingError(reason, f"python -m fsdp.report {self.run} shows where training diverged")
        return logits


@contextmanager
def open_run(
    run: Path, env: DistEnv, flags: Sequence[str] = (), trusted: Collection[str] = ()
) -> Iterator[TrainedModel]:
    """`flags` override the run's configuration, such as the folder of its data. Code that it names is
    imported only if it is in `trusted`. Collective.
    """
    config = read_config(run, flags, trusted)
    data = _data_of(run, config)
    if newest_export(run / "full_model") is not None:
        spec, state = _open_export(run, config, data.info.facts)
    elif config.lora.rank:
        reason = f"{run} has no exported model, and its checkpoints hold adapters alone."
        raise ConfigError(reason, f"python -m fsdp.checkpoint {run} export")
    else:
        spec, state = resolve(config.model, data.info.facts), None
    data = matched(data, spec, own_loss=bool(config.train.loss))
    timeout_s = config.run.process_group_timeout_s
    # One rank needs no units: any module predicts there.
    sizes = MeshSizes("fsdp" if env.world_size > 1 else "ddp", 1, env.world_size)
    plain = Config(mesh=MeshSection(strategy=sizes.strategy), precision=config.precision)
    # Compilation, recomputation and offload of the training run do not apply.
    sharding = sharding_of(plain, sizes, env.device)
    with process_group(env, timeout_s):
        model = model_of(Config(model=config.model, run=config.run), spec, sharding.dtypes)
        if state is not None and not isinstance(state, PretrainedWeights):  # which has compared them
            check_state_fits(state, all_names(model), model, f"{run}/full_model")
        sharded = shard_model(model, sharding, build_mesh(sizes, env.device, timeout_s))
        if state is None:
            _load_checkpoint(run, config, spec, sharded)
        else:
            _load_export(config, spec, state, sharded, env.rank)
        if env.world_size == 1:
            for parameter in model.parameters():  # buffers keep their dtype, as in FSDP's mixed precision
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(sharding.dtypes.param)
        yield TrainedModel(run, config, model.eval(), data, env)


def read_config(run: Path, flags: Sequence[str], trusted: Collection[str]) -> Config:
    file = run / "config.toml"
    if not file.is_file():
        reason = f"{run} {'holds no config.toml' if run.is_dir() else 'is no folder'}."
        raise ConfigError(reason, "python -m fsdp.predict RUN, with the --run.dir of a run")
    # The export has the weights, and the sizes too if it is in the format of transformers or the run started
    # from a file: their source may no longer exist.
    source = str(configuration.read_recipe(str(file)).get("model.weights", ""))
    sized = (run / "full_model" / "config.json").is_file() or Path(source).suffix in WEIGHT_FILES
    forgotten = (*NOT_USED, "model.weights") if newest_export(run / "full_model") and sized else NOT_USED
    return load_run_config(run, flags=flags, trusted=trusted, forgotten=forgotten)


def _data_of(run: Path, config: Config) -> DataSet:
    """The run's data with the tokenizer of its model: of the export if the model's folder is gone."""
    export = run / "full_model"
    data = with_model_tokenizer(config.data, config.model)
    if not data.tokenizer and (export / "tokenizer_config.json").is_file():
        data = with_model_tokenizer(data, replace(config.model, name=f"{PREFIX}{export}"))
    return build_dataset(data)


# ---------------------------------------------------------------- its weights


def _open_export(
    run: Path, config: Config, facts: Mapping[str, Any]
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """The model and the tensors of RUN/full_model, read when they are accessed."""
    folder, model = run / "full_model", config.model
    if (folder / "config.json").is_file():  # in the format of transformers; its source may no longer exist
        if model.name.startswith(PREFIX):
            kernels = {name: value for name, value in model.args.items() if name in KERNELS}
            model = replace(model, name=f"{PREFIX}{folder}", args=kernels, weights="")
        elif model.name == "transformer":
            model = replace(model, weights=str(folder))
    spec, newest = resolve(model, facts), newest_export(folder)
    by_torch = newest is not None and newest.name == TORCH_FILE
    if spec.pretrained is None or spec.pretrained.folder != folder or by_torch:
        return replace(spec, pretrained=None), open_full_state(folder)
    return spec, PretrainedWeights(spec.pretrained, config.run.seed)


@dataclass(frozen=True)
class StateRows:
    """Rows of tensors in mapped files. A tied tensor may have any of its names there."""

    state: Mapping[str, Tensor]
    names: Mapping[str, list[str]]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        tensor = self.state[next(other for other in self.names[name] if other in self.state)]
        return tensor[first:last] if tensor.dim() else tensor


def _load_export(
    config: Config, spec: ModelSpec, state: Mapping[str, Tensor], sharded: Sharded, rank: int
) -> None:
    """Each rank reads its rows; a model with buffers that no file holds is built on rank 0 for those."""
    root = sharded.root
    rows: Any = state if hasattr(state, "rows") else StateRows(state, all_names(root))
    complete = hasattr(root, "init_buffers") or not set(dict(root.named_buffers())) - set(root.state_dict())
    materialize(
        sharded,
        spec=spec,
        seed=config.run.seed,
        init="shard",
        rank=rank,
        pretrained=(lambda: rows) if complete else None,
        weights=None if complete else lambda: state,
    )


def _load_checkpoint(run: Path, config: Config, spec: ModelSpec, sharded: Sharded) -> None:
    """Reads the newest whole checkpoint's shards, with checksums and digests."""
    store = open_store(check_store(run, config.checkpoint.dir or f"{run}/checkpoints"))
    group = ObjectGroup()
    newest = group.on_main(lambda: inspect.newest_whole(store))
    if newest is None:
        reason = f"{run} has neither an exported model nor a whole checkpoint."
        raise CheckpointError(reason, f"python -m fsdp.checkpoint {run} verify")
    materialize(sharded, spec=spec, seed=0, init="shard", rank=group.rank, restored=True)
    checkpoint = inspect.open_source(store, newest.folder, newest.manifest)
    load_weights(checkpoint, sharded.root, group, verify=config.checkpoint.verify)


# ---------------------------------------------------------------- answers

BATCH = 64
GREEDY = 1e-30
"""A temperature below it would make float32 logits infinite; the likeliest token has all probability."""


@dataclass(frozen=True)
class Classes:
    """The command's flags for a classifier, with their defaults."""

    split: str = "heldout"
    samples: int = 16
    image: Sequence[str] = ()
    invert: bool = False


@dataclass(frozen=True)
class Text:
    """The command's flags for a language model, with their defaults."""

    prompt: str | None = None
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """Class probabilities of one image; truth is None if it is unknown."""

    name: str
    probabilities: Tensor
    truth: int | None

    def line(self, names: Sequence[str]) -> str:
        top = self.probabilities.topk(min(3, len(self.probabilities)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        likely = "  ".join(f"{names[number]} {share:.1%}" for number, share in pairs)
        truth = "" if self.truth is None else f"is {names[self.truth]:<12}  "
        return f"{self.name:<14}  {truth}{likely}{'' if self.truth in (None, top.indices[0]) else '  WRONG'}"


# ---------------------------------------------------------------- classes


def classify(trained: TrainedModel, options: Classes) -> str:
    """A line for each image, and the accuracy over all samples of the split. Collective."""
    data, accuracy = trained.data, []
    samples = data.train if options.split == "train" else data.heldout
    if options.image:
        predictions = _of_files(trained, options.image, options.invert)
    elif options.invert:
        raise ConfigError("--invert applies to --image alone.", "--image FILE --invert")
    elif samples is None or (options.split == "train" and data.stream is not None):
        reason = "no held-out data" if samples is None else "a stream, which has no number of samples"
        other = "" if data.stream is not None else "--split train, or "
        raise ConfigError(f"{trained.run} has {reason}.", f"{other}--image FILE")
    else:
        predictions = _of_samples(trained, samples, options.samples)
        right, count = _correct(trained, samples), len(samples)
        shown = options.split.replace("heldout", "held-out")
        accuracy = [f"accuracy  {right / count:.2%} of the {shown} samples, {right} of {count}"]
    known = trained_classes(RunDir(trained.run))
    if known and data.info.classes and known != data.info.classes:
        print_line(
            "fsdp.predict: the names of the classes differ from those of the run: names and accuracy are "
            "those of today's folders. HINT: --data.dir FOLDER, as it was at the run"
        )
    names = data.info.class_names or tuple(map(str, range(int(data.info.facts.get("num_classes", 0)))))
    outputs = len(predictions[0].probabilities) if predictions else 0  # may be more than the data's classes
    names += tuple(f"class {number}" for number in range(len(names), outputs))
    return "\n".join([*(prediction.line(names) for prediction in predictions), *accuracy])


def _of_samples(trained: TrainedModel, samples: Samples, count: int) -> list[Prediction]:
    """`count` samples, evenly spread over all of them: the first ones alone may be of one class."""
    count = min(count, len(samples))
    predictions: list[Prediction] = []
    for first in range(0, count, BATCH):
        indices = np.arange(first, min(first + BATCH, count), dtype=np.int64) * len(samples) // count
        batch = samples.batch(indices)
        targets = batch.get("targets")
        if targets is None or targets.dim() != 1 or targets.is_floating_point():
            name = trained.config.data.name
            reason = f"--data.name {name} has no class for a sample, and its kind is not text."
            hint = "use the export with code of your own: this command predicts classes and generates text"
            raise ConfigError(reason, hint)
        rows = zip(indices, _probabilities(trained, batch["inputs"]), targets, strict=True)
        predictions += [Prediction(f"sample {n}", p, int(truth)) for n, p, truth in rows]
    return predictions


def _of_files(trained: TrainedModel, files: Sequence[str], invert: bool) -> list[Prediction]:
    inputs = torch.from_numpy(np.stack([_read(trained, Path(file), invert) for file in files]))
    rows = zip(files, _probabilities(trained, inputs), strict=True)
    return [Prediction(Path(file).name, probabilities, None) for file, probabilities in rows]


def _probabilities(trained: TrainedModel, inputs: Tensor) -> Tensor:
    return trained.logits(inputs).float().softmax(-1).cpu()


def _read(trained: TrainedModel, file: Path, invert: bool) -> np.ndarray:
    from PIL import Image, ImageOps

    preprocess = trained.data.info.preprocess
    if not {"mean", "std", "image_size", "channels"} <= preprocess.keys():
        name = trained.config.data.name
        reason = f"--image {file}: --data.name {name} has no preprocessing of image files."
        hint = "return a DataSet whose DataInfo.preprocess has image_size, channels, mean and std"
        raise ConfigError(reason, hint)
    try:
        with Image.open(file) as image:
            shown = upright(image)
            return prepare(ImageOps.invert(shown.convert("RGB")) if invert else shown, preprocess)
    except FileNotFoundError:
        reason = f"--image {file} does not exist."
    except Exception as error:  # Pillow's decoders raise what they like
        reason = f"--image {file} is not an image: {message_line(error)}."
    raise ConfigError(reason, "--image FILE, in any format that Pillow reads")


def _correct(trained: TrainedModel, samples: Samples) -> int:
    right = 0
    for batch in heldout_batches(samples, batch=BATCH, rank=DataRank(0, 1), limit=0):
        best = trained.logits(batch.data["inputs"]).argmax(-1).cpu()
        right += int(((best == batch.data["targets"]) & batch.valid).sum())
    return right


# ---------------------------------------------------------------- text


def continued(trained: TrainedModel, options: Text) -> str:
    """The prompt and the text after it. Collective."""
    prompt = default_prompt(trained) if options.prompt is None else options.prompt
    return _decoded(trained, _generated(trained, _encoded(trained, prompt), options))


def default_prompt(trained: TrainedModel) -> str:
    """The beginning of a held-out sample."""
    samples = trained.data.heldout or trained.data.train
    return _decoded(trained, samples.batch(np.zeros(1, np.int64))["inputs"][0, :16].tolist())


def _decoded(trained: TrainedModel, tokens: list[int]) -> str:
    tokenizer = _tokenizer(trained)
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def is_text(trained: TrainedModel, prompt: str | None) -> bool:
    """Data of a user's own has no kind: with a prompt, the export's tokenizer decides."""
    return trained.data.info.kind == "text" or (prompt is not None and _has_tokenizer(trained))


def _has_tokenizer(trained: TrainedModel) -> bool:
    files = ("tokenizer_config.json", "tokenizer.json")
    return any((trained.run / "full_model" / name).is_file() for name in files)


@functools.cache
def _loaded(name: str) -> Tokenizer:
    return load_tokenizer(name, ends=False)


def _tokenizer(trained: TrainedModel) -> Tokenizer | None:
    """Training's, else the export's; None if training read token files, which name no tokenizer."""
    name = trained.data.info.preprocess.get("tokenizer")
    exported = str(trained.run / "full_model") if _has_tokenizer(trained) else None
    return _loaded(name or exported) if name or exported else None


def _encoded(trained: TrainedModel, prompt: str) -> list[int]:
    """Tokens of the prompt; without a tokenizer, numbers separated by spaces."""
    tokenizer, numbers = _tokenizer(trained), prompt.replace(",", " ").split()
    if tokenizer is not None:
        tokens = [int(token) for token in tokenizer.encode_all([prompt])[0]]
        if len(tokens) > 1 and tokens[-1] == tokenizer.end:
            tokens.pop()
    elif not all(number.isdecimal() for number in numbers):
        reason = f"--prompt {prompt!r} is not a list of token numbers, on which this run was trained."
        raise ConfigError(reason, "--prompt '17 4 256'")
    else:
        tokens = list(map(int, numbers))
    if not tokens:
        raise ConfigError("--prompt is empty.", "--prompt TEXT")
    if max(tokens) >= _vocab_size(trained):
        reason = f"--prompt has token {max(tokens)}, beyond the vocabulary of {_vocab_size(trained)}."
        raise ConfigError(reason, "smaller numbers")
    return tokens


def _vocab_size(trained: TrainedModel) -> int:
    """The data's: a model's embedding may be larger, with tokens that training never used."""
    return int(trained.data.info.facts.get("vocab_size", 1 << 62))


def _generated(trained: TrainedModel, prompt: list[int], options: Text) -> list[int]:
    """The prompt and the tokens after it, up to one that ends a document; deterministic for a seed.

    temperature 0 is greedy; top_k 0 samples from all tokens. Each rank continues with rank 0's token.
    """
    generator = torch.Generator().manual_seed(options.seed)
    window = int(trained.data.info.facts.get("seq_len", len(prompt) + options.tokens))
    text, end = list(prompt), trained.data.info.preprocess.get("end")
    for _ in range(options.tokens):
        logits = trained.logits(torch.tensor([text[-window:]]))[0, -1, : _vocab_size(trained)].float().cpu()
        if 0 < options.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(options.top_k).values[-1], -torch.inf)
        if options.temperature < GREEDY:
            chosen = logits.argmax()
        else:
            chosen = torch.multinomial((logits / options.temperature).softmax(-1), 1, generator=generator)
        text.append(broadcast_object(int(chosen)))
        if text[-1] == end:
            break
    return text
