"""Predict with a trained run:

    python -m fsdp.predict RUN                        classes and accuracy of held-out data, or generated text
    python -m fsdp.predict RUN --image digit.png      your own image; --invert if it is dark on light
    python -m fsdp.predict RUN --prompt "import "     for a language model; may be repeated

A model that was trained on conversations gets the prompt in its chat template (--prompt '[{"role": …}]' is a
whole conversation); without --prompt it answers held-out questions. RUN is the --run.dir of a run, whose
RUN/full_model is used, or the path of a checkpoint, as RUN/checkpoints/step-00000010. Flags --data.NAME
override the run's own, if its data has moved. Code that RUN/config.toml names is imported only if
--trust-code names it too (docs/security.md). Exit code 0, or 2 for a wrong command.

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
from fsdp.distributed.env import DistEnv, from_environment, prints_shared_errors, wait_for_rank_0
from fsdp.predict.trained import Classes, Text, TrainedModel, answers, classify, is_text, open_run, run_of
from fsdp.watch.status_page import ProcessExit

FLAGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "split": (Classes, {"type": one_of("heldout", "train")}, "heldout or train"),
    "samples": (Classes | Text, {"type": whole_number()}, "how many samples, or held-out questions, to show"),
    "image": (Classes, {"action": "append", "metavar": "FILE"}, "a picture of yours; may be repeated"),
    "invert": (
        Classes,
        {"action": "store_true", "default": None},
        "yours is dark on light, training's is not",
    ),
    "prompt": (
        Text,
        {"action": "append", "metavar": "TEXT"},
        "what to answer or continue; may be repeated; token numbers where training read those",
    ),
    "raw": (Text, {"action": "store_true", "default": None}, "continue it, without the chat template"),
    "tokens": (Text, {"type": whole_number()}, "how many to add"),
    "temperature": (Text, {"type": number(0)}, "0 always takes the likeliest"),
    "top-k": (Text, {"type": whole_number()}, "draw from the k likeliest; 0 from all"),
    "top-p": (
        Text,
        {"type": number(0)},
        "draw from the likeliest with this probability together; 1 from all",
    ),
    "seed": (Text, {"type": whole_number()}, "another seed, another text"),
}
"""The kind of model that a flag is for, options of argparse, help."""
KINDS: dict[Any, str] = {Classes: "a classifier", Text: "a language model", Classes | Text: "either"}


@prints_errors("fsdp.predict")
def main(argv: Sequence[str]) -> int:
    try:
        answer_as_rank(argv, from_environment())
    except ShardrunError as error:
        if prints_shared_errors() or error.scope != "all":
            print_line(f"fsdp.predict: {error}")
        else:
            wait_for_rank_0()
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
    run, checkpoint = run_of(options.run)
    with open_run(run, env, flags, options.trust_code, checkpoint) as trained:
        text = _answer(trained, options)
        if env.is_main:
            print_line(text, sys.stdout)
            if options.out:
                options.out.write_text(text + "\n", encoding="utf-8")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser("fsdp.predict", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory, or a checkpoint in one")
    for name, (kind, options, text) in FLAGS.items():
        default = getattr(kind, name.replace("-", "_"), None)
        shown = f" (default: {default})" if default else ""
        parser.add_argument(f"--{name}", **options, help=f"{KINDS[kind]}: {text}{shown}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of the printed text")
    parser.add_argument("--trust-code", action="append", default=[], metavar="NAME", help=TRUST_HELP)
    return parser.parse_with_run_flags(argv, sections=["data"])


def _answer(trained: TrainedModel, options: argparse.Namespace) -> str:
    """The text that rank 0 prints. Collective."""
    kind: type = Text if is_text(trained, options.prompt) else Classes
    values = {name: getattr(options, name.replace("-", "_")) for name in FLAGS}
    values = {name: value for name, value in values.items() if value is not None}
    if other := [name for name in values if not issubclass(kind, FLAGS[name][0])]:
        reason = f"--{other[0]} does not apply to {options.run}: it is {KINDS[kind]}."
        raise ConfigError(reason, "leave it out")
    flags = kind(**{name.replace("-", "_"): value for name, value in values.items()})
    return answers(trained, flags) if isinstance(flags, Text) else classify(trained, flags)


if __name__ == "__main__":
    exiting = ProcessExit()
    sys.exit(exiting.leave(main(sys.argv[1:])))
