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
from typing import Any

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.base.text import is_of_output, print_line
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.config.trust import TRUST_HELP
from fsdp.dist.env import (
    DistEnv,
    from_environment,
    prints_shared_errors,
    wait_for_rank_0_to_print,
)
from fsdp.predict import images, language
from fsdp.predict.trained import TrainedModel, open_run
from fsdp.rundir import paths
from fsdp.rundir.history import trained_classes
from fsdp.rundir.paths import RunDir
from fsdp.watch.failure import ProcessExit

FLAGS: tuple[tuple[str, str, Any, Any, str], ...] = (
    # flag, kind of model, type, default, help
    ("split", "images", one_of("heldout", "train"), "heldout", "heldout or train"),
    ("samples", "images", whole_number(), 16, "how many to show"),
    ("prompt", "text", str, "", "what to continue; token numbers where training read those"),
    ("tokens", "text", whole_number(), 200, "how many to add"),
    ("temperature", "text", number(0), 0.8, "0 always takes the likeliest"),
    ("top-k", "text", whole_number(), 40, "draw from the k likeliest; 0 from all"),
    ("seed", "text", whole_number(), 0, "another seed, another text"),
)


@prints_errors("fsdp.predict")
def main(argv: Sequence[str]) -> int:
    try:
        answer_as_rank(argv, from_environment())
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
    """One rank's part of a prediction from shards, under any launcher; rank 0 prints."""
    options, flags = parse(argv)
    with open_run(paths.open_run(options.run).path, env, flags, options.trust_code) as trained:
        text = _answer(trained, options)
        if env.is_main:
            print_line(text, sys.stdout)
            if options.out:
                options.out.write_text(text + "\n", encoding="utf-8")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser("fsdp.predict", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    for name, kind, convert, default, text in FLAGS:
        shown = f" (default: {default})" if default != "" else ""
        parser.add_argument(f"--{name}", type=convert, help=f"{kind}: {text}{shown}")
    own = "images: a picture of yours; may be repeated"
    parser.add_argument("--image", action="append", metavar="FILE", help=own)
    inverted = "images: yours is dark on light, training's were not"
    parser.add_argument("--invert", action="store_true", default=None, help=inverted)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of the printed text")
    parser.add_argument("--trust-code", action="append", default=[], metavar="NAME", help=TRUST_HELP)
    return parser.parse_with_run_flags(argv, sections=["data"])


def _answer(trained: TrainedModel, options: argparse.Namespace) -> str:
    """The text that rank 0 prints. Collective."""
    is_text = trained.data.info.kind == "text" or language.has_tokenizer(trained, options.prompt)
    flags = [*FLAGS, ("image", "images", None, [], ""), ("invert", "images", None, False, "")]
    for name, kind, _, default, _ in flags:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and (kind == "text") != is_text:
            model = "a language model" if is_text else "a classifier"
            raise ConfigError(f"--{name} does not apply to {options.run}: it is {model}.", "leave it out")
        if value is None and name != "prompt":
            setattr(options, name.replace("-", "_"), default)
    return (_generate if is_text else _classify)(trained, options)


def _classify(trained: TrainedModel, options: argparse.Namespace) -> str:
    samples = trained.data.train if options.split == "train" else trained.data.heldout
    accuracy = []
    if options.image:
        predictions = images.of_files(trained, options.image, options.invert)
    elif options.invert:
        raise ConfigError("--invert applies to --image alone.", "--image FILE --invert")
    elif samples is None or (options.split == "train" and trained.data.stream is not None):
        reason = "no held-out data" if samples is None else "a stream, which has no number of samples"
        other = "" if trained.data.stream is not None else "--split train, or "
        raise ConfigError(f"{options.run} has {reason}.", f"{other}--image FILE")
    else:
        predictions = images.of_samples(trained, samples, options.samples)
        right, count = images.correct(trained, samples), len(samples)
        shown = options.split.replace("heldout", "held-out")
        accuracy = [f"accuracy  {right / count:.2%} of the {shown} samples, {right} of {count}"]
    known, now = trained_classes(RunDir(trained.run)), trained.data.info.classes
    if known and now and known != now:
        print_line(
            f"fsdp.predict: the classes of {trained.config.data.dir or trained.config.data.name} have other "
            "names or another order than those of the run: names and accuracy are those of today's folders. "
            "HINT: --data.dir FOLDER, as it was at the run"
        )
    classes = images.classes_of(trained, predictions)
    return "\n".join([*(prediction.line(classes) for prediction in predictions), *accuracy])


def _generate(trained: TrainedModel, options: argparse.Namespace) -> str:
    prompt = options.prompt if options.prompt is not None else language.default_prompt(trained)
    sampling = {name: getattr(options, name) for name in ("tokens", "temperature", "top_k", "seed")}
    return language.continued(trained, prompt, **sampling)


if __name__ == "__main__":
    exiting = ProcessExit()
    sys.exit(exiting.leave(main(sys.argv[1:])))
