"""A run directory's model on one rank or sharded over several, and its answers: classes, or generated text.
A sample or an image file has a class; a prompt has its continuation.

The model has training's dtypes. Its tensors are those of RUN/full_model, of which each rank reads its own
rows; without an export those of the newest whole checkpoint. Preprocessing and tokenizer are those of
training: they come from the data's DataInfo. Text is written by training's tokenizer and chat template, else
those of RUN/full_model; without one, prompts are token numbers. Generation: fsdp/run/answers.py.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
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
from fsdp.checkpoint.manifest import step_of
from fsdp.checkpoint.pretrained import (
    TORCH_FILE,
    PretrainedWeights,
    check_base,
    newest_export,
    open_full_state,
)
from fsdp.checkpoint.restore import load_weights
from fsdp.checkpoint.store import open_store
from fsdp.config import Config, LoraSection, MeshSection
from fsdp.config.trust import check_store, load_run_config
from fsdp.data import DataSet, Samples, build_dataset, heldout_batches
from fsdp.data.images import prepare, upright
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.types import matched
from fsdp.distributed.collectives import ObjectGroup
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import DataRank, MeshSizes, build_mesh
from fsdp.distributed.process_group import process_group
from fsdp.models import ModelSpec, resolve
from fsdp.models.hf import KERNELS
from fsdp.models.loss import LABELS, read_output
from fsdp.models.registry import PREFIX
from fsdp.models.units import all_names
from fsdp.run.answers import (
    QUESTIONS,
    Sampling,
    answered,
    encoded,
    ends_of,
    held_out_questions,
    shown,
    template_of,
    text_of,
    tokenizer_of,
)
from fsdp.run.build import base_of, real_weights
from fsdp.run.job import model_of
from fsdp.rundir import history
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
    def logits(self, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
        """The model's logits, on its device, of inputs alone or of a batch, whose further fields its forward
        gets by their names. Collective.
        """
        named = {"inputs": batch} if isinstance(batch, Tensor) else batch
        takes = signature(self.model.forward).parameters.keys() - {*LABELS}
        dtype, device = widest_floating(p.dtype for p in self.model.parameters()), self.env.device
        moved = {n: v.to(device, dtype if v.is_floating_point() else None) for n, v in named.items()}
        output = read_output(self.model(moved.pop("inputs"), **{n: moved[n] for n in moved.keys() & takes}))
        logits = output.logits
        if logits is None or output.loss is not None:
            reason = f"--model.name {self.config.model.name} returns a loss and no logits."
            raise ConfigError(reason, "return logits if no targets are given")
        if logits.isnan().any():
            reason = f"{self.run}: the model's logits are not numbers (nan)."
            raise TrainingError(reason, f"python -m fsdp.report {self.run} shows where training diverged")
        return logits


def run_of(place: str) -> tuple[Path, Path | None]:
    """The run directory of a path, and the checkpoint that the path is, as RUN/checkpoints/step-00000010."""
    path = history.open_run(place).path
    checkpoint = path if step_of(path.name) >= 0 and not (path / "config.toml").is_file() else None
    above = path.parents[:2] if checkpoint else []
    return next((run for run in above if (run / "config.toml").is_file()), path), checkpoint


@contextmanager
def open_run(
    run: Path,
    env: DistEnv,
    flags: Sequence[str] = (),
    trusted: Collection[str] = (),
    checkpoint: Path | None = None,
) -> Iterator[TrainedModel]:
    """`flags` override the run's configuration, such as the folder of its data. Code that it names is
    imported only if it is in `trusted`. The weights are those of `checkpoint` if it is given. Collective.
    """
    config = read_config(run, flags, trusted, exported=checkpoint is None)
    data = _data_of(run, config)
    if checkpoint is None and newest_export(run / "full_model") is not None:
        spec, state = _open_export(run, config, data.info.facts)
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
        lora = config.lora if state is None else LoraSection()
        model = model_of(Config(model=config.model, run=config.run, lora=lora), spec, sharding.dtypes)
        if 2 * sharding.dtypes.param.itemsize * sum(p.numel() for p in model.parameters()) < sharding.room:
            mesh = replace(plain.mesh, reshard_after_forward="false")  # gathered once, not once a token
            sharding = replace(sharding, config=replace(plain, mesh=mesh))
        if state is not None and not isinstance(state, PretrainedWeights):  # which has compared them
            check_state_fits(state, all_names(model), model, f"{run}/full_model")
        sharded = shard_model(model, sharding, build_mesh(sizes, env.device, timeout_s))
        if state is None:
            _load_checkpoint(checkpoint or run, config, spec, sharded, env)
        else:
            _load_export(config, spec, state, sharded, env.rank)
        if env.world_size == 1:
            for parameter in model.parameters():  # buffers keep their dtype, as in FSDP's mixed precision
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(sharding.dtypes.param)
        yield TrainedModel(run, config, model.eval(), data, env)


def read_config(
    run: Path, flags: Sequence[str], trusted: Collection[str], *, exported: bool = True
) -> Config:
    """`exported`: the model is that of RUN/full_model, if there is one."""
    file = run / "config.toml"
    if not file.is_file():
        reason = f"{run} {'holds no config.toml' if run.is_dir() else 'is no folder'}."
        raise ConfigError(reason, "python -m fsdp.predict RUN, with the --run.dir of a run")
    # The export has the weights, and the sizes too if it is in the format of transformers or the run started
    # from a file: their source may no longer exist.
    source = str(configuration.read_recipe(str(file)).get("model.weights", ""))
    sized = (run / "full_model" / "config.json").is_file() or Path(source).suffix in WEIGHT_FILES
    sized = sized and exported and newest_export(run / "full_model") is not None
    forgotten = (*NOT_USED, "model.weights") if sized else NOT_USED
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


def _load_checkpoint(place: Path, config: Config, spec: ModelSpec, sharded: Sharded, env: DistEnv) -> None:
    """Reads the shards of this checkpoint, or of the newest whole one of this run directory, with checksums
    and digests. Adapters are over the weights that their run began with.
    """
    group, step = ObjectGroup(), step_of(place.name) if place.name.startswith("step-") else None
    run = place if step is None else place.parent
    where = str(run) if step is not None else check_store(run, config.checkpoint.dir or f"{run}/checkpoints")
    store = open_store(where)
    newest = group.on_main(lambda: inspect.newest_whole(store, step))
    if newest is None or newest.manifest is None:
        reason = f"{place} has neither an exported model nor a whole checkpoint."
        raise CheckpointError(reason, f"python -m fsdp.checkpoint {run} verify")
    if config.lora.rank:
        real_weights(config, env, sharded, spec)
        check_base(newest.manifest, base_of(config, spec, sharded), str(place))
    else:
        materialize(sharded, spec=spec, seed=0, init="shard", rank=group.rank, restored=True)
    checkpoint = inspect.open_source(store, newest.folder, newest.manifest)
    load_weights(checkpoint, sharded.root, group, verify=config.checkpoint.verify)


# ---------------------------------------------------------------- answers

BATCH = 64


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

    prompt: Sequence[str] = ()
    samples: int = 4
    raw: bool = False
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
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
            reason = f"--data.name {trained.config.data.name} has no class for a sample, and is no text."
            hint = "use the export with code of your own: this command predicts classes and generates text"
            raise ConfigError(reason, hint)
        rows = zip(indices, _probabilities(trained, batch), targets, strict=True)
        predictions += [Prediction(f"sample {n}", p, int(truth)) for n, p, truth in rows]
    return predictions


def _of_files(trained: TrainedModel, files: Sequence[str], invert: bool) -> list[Prediction]:
    inputs = torch.from_numpy(np.stack([_read(trained, Path(file), invert) for file in files]))
    rows = zip(files, _probabilities(trained, inputs), strict=True)
    return [Prediction(Path(file).name, probabilities, None) for file, probabilities in rows]


def _probabilities(trained: TrainedModel, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
    return trained.logits(batch).float().softmax(-1).cpu()


def _read(trained: TrainedModel, file: Path, invert: bool) -> np.ndarray:
    from PIL import Image, ImageOps

    preprocess = trained.data.info.preprocess
    if not {"mean", "std", "image_size", "channels"} <= preprocess.keys():
        reason = f"--image {file}: --data.name {trained.config.data.name} has no preprocessing of images."
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
        best = trained.logits(batch.data).argmax(-1).cpu()
        right += int(((best == batch.data["targets"]) & batch.valid).sum())
    return right


# ---------------------------------------------------------------- text


def answers(trained: TrainedModel, options: Text) -> str:
    """Each prompt's continuation; of a model trained on conversations its answer. Without a prompt, answers
    to held-out questions beside their references, or a held-out sample's continuation. Collective.
    """
    info, samples = trained.data.info, trained.data.heldout or trained.data.train
    if QUESTIONS in info.preprocess and not options.prompt and not options.raw:
        questions = held_out_questions(samples, options.samples)
        found = _added(trained, [question.prompt for question in questions], options)
        return _listed(shown(tokenizer_of(info), *pair) for pair in zip(questions, found, strict=True))
    chats = info.preprocess.get("form") == "messages" and bool(options.prompt) and not options.raw
    prompts = options.prompt or [default_prompt(trained)]
    template, tokenizer = str(info.preprocess.get("chat_template", "")), _tokenizer(trained)
    how = template_of(tokenizer, template) if tokenizer is not None and chats else None
    rows = [encoded(prompt, info, tokenizer, how) for prompt in prompts]
    found = _added(trained, rows, options)
    if not chats:
        return "\n".join(_decoded(trained, row + added) for row, added in zip(rows, found, strict=True))
    texts = [text_of(tokenizer_of(info), added) for added in found]
    named = ({"question": p, "answer": text} for p, text in zip(prompts, texts, strict=True))
    return texts[0] if len(texts) == 1 else _listed(named)


def _listed(rows: Iterable[Mapping[str, str]]) -> str:
    return "\n\n".join("\n".join(f"{name:<9}  {text}" for name, text in row.items()) for row in rows)


def _added(trained: TrainedModel, prompts: list[list[int]], options: Text) -> list[list[int]]:
    """What the model adds to each prompt. Deterministic for a seed."""
    info, tokenizer = trained.data.info, _tokenizer(trained)
    how = Sampling(options.tokens, options.temperature, options.top_k, options.top_p, options.seed)
    asked = trained.data.heldout or trained.data.train
    known = held_out_questions(asked, 1) if QUESTIONS in info.preprocess else []
    ends = set() if tokenizer is None else ends_of(info, tokenizer, known)
    trained.logits(torch.tensor(prompts[:1]))  # refuses NaN, which transformers' generate does not
    return answered(
        trained.model, trained.logits, prompts, how, info=info, ends=ends, device=trained.env.device
    )


def default_prompt(trained: TrainedModel) -> str:
    """The beginning of a held-out sample."""
    samples = trained.data.heldout or trained.data.train
    return _decoded(trained, samples.batch(np.zeros(1, np.int64))["inputs"][0, :16].tolist())


def _decoded(trained: TrainedModel, tokens: list[int]) -> str:
    tokenizer = _tokenizer(trained)
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def is_text(trained: TrainedModel, prompts: Sequence[str] | None) -> bool:
    """Data of a user's own has no kind: with a prompt, the export's tokenizer decides."""
    return trained.data.info.kind == "text" or (bool(prompts) and _has_tokenizer(trained))


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
