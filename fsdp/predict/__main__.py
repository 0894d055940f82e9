"""Predict with a trained run:

    python -m fsdp.predict RUN                        classes and accuracy of held-out data, or generated text
    python -m fsdp.predict RUN --image digit.png      your own image; --invert if it is dark on light
    python -m fsdp.predict RUN --prompt "import "     for a language model

RUN is the --run.dir of a run with an export in RUN/full_model. Flags --data.NAME override the run's own, if
its data has moved. Code that RUN/config.toml names is imported only if --trust-code names it too
(docs/security.md). Exit code 0, or 2 for a wrong command.

Under torchrun or srun the model is sharded over the ranks, with the same answer, which rank 0 prints. Each
rank reads its own rows, or those of the newest checkpoint if there is no export:

    torchrun --nproc_per_node=2 -m fsdp.predict RUN --prompt "text"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.base.streams import is_of_output, print_line
from fsdp.checkpoint.run_source import NO_LIMIT, opened, output_of
from fsdp.config import TRUST_HELP
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.dist.env import (
    DistEnv,
    from_environment,
    prints_shared_errors,
    started_by,
    wait_for_rank_0_to_print,
)
from fsdp.predict import images, language, picture
from fsdp.predict.images import Prediction
from fsdp.predict.sharded import sharded_run
from fsdp.predict.trained import TrainedModel, open_run
from fsdp.rundir.history import trained_classes
from fsdp.rundir.paths import RunDir
from fsdp.watch.last_process import ProcessExit

FOR_IMAGES, FOR_LANGUAGE = (
    ("image", "invert", "split", "samples"),
    ("prompt", "tokens", "temperature", "top_k", "seed"),
)


@prints_errors("fsdp.predict")
def main(argv: Sequence[str]) -> int:
    try:
        if started_by():
            answer_as_rank(argv, from_environment())
        else:
            options, flags = parse(argv)
            with opened(options.run, export_bytes=NO_LIMIT) as source:
                _answer(open_run(source.path, flags, options.trust_code), options)
    except ShardrunError as error:
        if prints_shared_errors() or error.scope != "all":
            print_line(f"fsdp.predict: {error}")
        else:
            wait_for_rank_0_to_print()
        return error.exit_code
    except OSError as error:  # of the run directory or of its data, on this rank
        if is_of_output(error):
            raise
        print_line(f"fsdp.predict: {error}. HINT: the file must be readable here")
        return ConfigError.exit_code
    return 0


def answer_as_rank(argv: Sequence[str], env: DistEnv) -> None:
    """One rank's part of a prediction from shards, under any launcher; rank 0 prints. Of a run in an object
    store each rank reads its rows of the newest checkpoint, not the export.
    """
    options, flags = parse(argv)
    with opened(options.run) as source, sharded_run(source, flags, options.trust_code, env) as trained:
        _answer(trained, options, shows=env.is_main)


def _answer(trained: TrainedModel, options: argparse.Namespace, *, shows: bool = True) -> None:
    """Computes on every rank; the one that `shows` prints and writes."""
    if trained.data.info.kind == "text" or language.has_tokenizer(trained, options.prompt):
        _check_fits(options, "a language model", FOR_IMAGES)
        _generate(trained, options, shows)
    else:
        _check_fits(options, "a classifier", FOR_LANGUAGE)
        _classify(trained, options, shows)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser("fsdp.predict", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory, a folder or s3://bucket/prefix")
    parser.add_argument(
        "--split", type=one_of("heldout", "train"), help="images: heldout or train (default: heldout)"
    )
    parser.add_argument("--samples", type=whole_number(), help="images: how many to show (default: 16)")
    parser.add_argument(
        "--image", action="append", metavar="FILE", help="images: a picture of yours; may be repeated"
    )
    parser.add_argument(
        "--invert",
        action="store_true",
        default=None,
        help="images: yours is dark on light, training's were not",
    )
    parser.add_argument("--prompt", help="text: what to go on from; token numbers where training read those")
    parser.add_argument("--tokens", type=whole_number(), help="text: how many to add (default: 200)")
    parser.add_argument(
        "--temperature", type=number(0), help="text: 0 always takes the likeliest (default: 0.8)"
    )
    parser.add_argument(
        "--top-k", type=whole_number(), help="text: draw from the k likeliest; 0 from all (default: 40)"
    )
    parser.add_argument("--seed", type=whole_number(), help="text: another seed, another text (default: 0)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the picture (default: RUN/predictions.png; of a URL, NAME-predictions.png here), or the text",
    )
    parser.add_argument("--trust-code", action="append", default=[], metavar="NAME", help=TRUST_HELP)
    return parser.parse_with_run_flags(argv, sections=["data"])


def _check_fits(options: argparse.Namespace, what: str, names: Sequence[str]) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not apply to {options.run}: it is {what}.", "leave it out"
            )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


# ---------------------------------------------------------------- images


def _classify(trained: TrainedModel, options: argparse.Namespace, shows: bool) -> None:
    split = options.split or "heldout"
    samples = trained.data.train if split == "train" else trained.data.heldout
    file = options.out or output_of(options.run, "predictions.png")
    picture.check_name(file)
    if options.image:
        predictions = images.of_files(trained, options.image, bool(options.invert))
    elif options.invert:
        raise ConfigError("--invert applies to --image alone.", "--image FILE --invert")
    elif samples is None or (split == "train" and trained.data.stream is not None):
        has = "no held-out data" if samples is None else "a stream, which has no number of samples"
        other = "" if trained.data.stream is not None else "--split train, or "
        raise ConfigError(f"{options.run} has {has}.", f"{other}--image FILE")
    else:
        predictions = images.of_samples(trained, samples, int(_or(options.samples, 16)))
    counted = images.accuracy(trained, samples) if samples is not None and not options.image else None
    if not shows:
        return
    known, now = trained_classes(RunDir(trained.run)), trained.data.info.classes
    if known and now and known != now:
        print_line(
            f"fsdp.predict: the classes of {trained.config.data.dir or trained.config.data.name} have other "
            "names or another order than those of the run: names and accuracy are those of today's folders. "
            "HINT: --data.dir FOLDER, as it was at the run"
        )
    classes = _named(images.classes_of(trained), predictions)
    _print_table(predictions, classes)
    if predictions and predictions[0].inputs.ndim == 3:
        sheet = picture.draw(predictions, classes, trained.data.info.preprocess)
        picture.save(sheet, file, replace=options.out is None)
        print_line(f"picture   {file}", sys.stdout)
    if counted is not None:
        right, count = counted
        which = split.replace("heldout", "held-out")
        print_line(f"accuracy  {right / count:.2%} of the {which} samples, {right} of {count}", sys.stdout)


def _named(classes: tuple[str, ...], predictions: list[Prediction]) -> tuple[str, ...]:
    """A name for every class of the model, which may have more classes than the data."""
    width = len(predictions[0].probabilities) if predictions else 0
    return classes + tuple(f"class {n}" for n in range(len(classes), width))


def _print_table(predictions: list[Prediction], classes: Sequence[str]) -> None:
    for one in predictions:
        top = one.probabilities.topk(min(3, len(one.probabilities)))
        likely = "  ".join(
            f"{classes[c]} {p:.1%}" for p, c in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        )
        truth = "" if one.truth is None else f"is {classes[one.truth]:<12}  "
        wrong = "  WRONG" if one.truth not in (None, one.best) else ""
        print_line(f"{one.name:<14}  {truth}{likely}{wrong}", sys.stdout)


# ---------------------------------------------------------------- language


def _generate(trained: TrainedModel, options: argparse.Namespace, shows: bool) -> None:
    prompt = options.prompt if options.prompt is not None else language.default_prompt(trained)
    sampling = language.Sampling(
        tokens=int(_or(options.tokens, 200)),
        temperature=_or(options.temperature, 0.8),
        top_k=int(_or(options.top_k, 40)),
        seed=int(_or(options.seed, 0)),
    )
    text = language.decode(trained, language.generate(trained, language.encode(trained, prompt), sampling))
    if not shows:
        return
    print_line(text, sys.stdout)
    if options.out:
        try:
            options.out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--out {options.out} cannot be written ({error.strerror}).", "--out text.txt"
            ) from None


if __name__ == "__main__":
    exiting = ProcessExit()
    sys.exit(exiting.leave(main(sys.argv[1:])))
