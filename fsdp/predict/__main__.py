"""Ask a trained run, in one process:

    python -m fsdp.predict RUN                          samples and accuracy on held-out data; text that goes on
    python -m fsdp.predict RUN --image digit.png        your own picture; --invert where it is dark on light
    python -m fsdp.predict RUN --prompt "import "       for a language model

RUN is the --run.dir of a run with an export in RUN/full_model. Flags --data.NAME go over the run's own, where
its data has moved. Code that RUN/config.toml names is imported only where --trust-code names it too
(docs/security.md). Exit code 0, 2 for what the command got wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.config import TRUST_HELP
from fsdp.config.command_line import CommandParser, number, one_of, whole_number
from fsdp.predict import images, language, picture
from fsdp.predict.images import Said
from fsdp.predict.trained import TrainedModel, open_run

FOR_IMAGES, FOR_LANGUAGE = (
    ("image", "invert", "split", "samples"),
    ("prompt", "tokens", "temperature", "top_k", "seed"),
)


def main(argv: Sequence[str]) -> int:
    try:
        options, flags = _parse(argv)
        trained = open_run(Path(options.run), flags, options.trust_code)
        speaks = trained.data.info.kind == "text"
        _check_fits(
            options, "a language model" if speaks else "a classifier", FOR_IMAGES if speaks else FOR_LANGUAGE
        )
        if speaks:
            _go_on(trained, options)
        else:
            _classify(trained, options)
    except ShardrunError as error:
        print(f"fsdp.predict: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser("fsdp.predict", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory")
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
        "--out", type=Path, metavar="FILE", help="the picture (default: RUN/predictions.png), or the text"
    )
    parser.add_argument("--trust-code", action="append", default=[], metavar="NAME", help=TRUST_HELP)
    return parser.parse_with_run_flags(argv, sections=["data"])


def _check_fits(options: argparse.Namespace, what: str, names: Sequence[str]) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} says nothing to {options.run}: it is {what}.", "leave it out"
            )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


# ---------------------------------------------------------------- images


def _classify(trained: TrainedModel, options: argparse.Namespace) -> None:
    split = options.split or "heldout"
    samples = trained.data.train if split == "train" else trained.data.heldout
    file = options.out or trained.run / "predictions.png"
    picture.check_name(file)
    if options.image:
        said = images.of_files(trained, options.image, bool(options.invert))
    elif options.invert:
        raise ConfigError("--invert is for a picture of yours.", "--image FILE --invert")
    elif samples is None:
        raise ConfigError(f"{options.run} holds no data out.", "--split train, or --image FILE")
    else:
        said = images.of_samples(trained, samples, int(_or(options.samples, 16)))
    classes = _named(images.classes_of(trained), said)
    _print_table(said, classes)
    if said and said[0].inputs.ndim == 3:
        picture.save(
            picture.draw(said, classes, trained.data.info.preprocess), file, replace=options.out is None
        )
        print(f"picture   {file}")
    if samples is not None and not options.image:
        right, count = images.accuracy(trained, samples)
        print(
            f"accuracy  {right / count:.2%} of the {split.replace('heldout', 'held-out')} samples, {right} of {count}"
        )


def _named(classes: tuple[str, ...], said: list[Said]) -> tuple[str, ...]:
    """A name for every class that the model can give, also where it has room for more than the data has."""
    width = len(said[0].probabilities) if said else 0
    return classes + tuple(f"class {n}" for n in range(len(classes), width))


def _print_table(said: list[Said], classes: Sequence[str]) -> None:
    for one in said:
        top = one.probabilities.topk(min(3, len(one.probabilities)))
        likely = "  ".join(
            f"{classes[c]} {p:.1%}" for p, c in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        )
        truth = "" if one.truth is None else f"is {classes[one.truth]:<12}  "
        print(f"{one.name:<14}  {truth}{likely}{'  WRONG' if one.truth not in (None, one.best) else ''}")


# ---------------------------------------------------------------- language


def _go_on(trained: TrainedModel, options: argparse.Namespace) -> None:
    prompt = options.prompt if options.prompt is not None else language.default_prompt(trained)
    sampling = language.Sampling(
        tokens=int(_or(options.tokens, 200)),
        temperature=_or(options.temperature, 0.8),
        top_k=int(_or(options.top_k, 40)),
        seed=int(_or(options.seed, 0)),
    )
    text = language.decode(trained, language.go_on(trained, language.encode(trained, prompt), sampling))
    print(text)
    if options.out:
        try:
            options.out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--out {options.out} cannot be written ({error.strerror}).", "--out text.txt"
            ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
