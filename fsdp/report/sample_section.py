"""Predictions of the trained model: held-out images with predicted classes, or generated text.

The run's export is loaded in this process and fsdp/predict computes. Any failure becomes a sentence on the
page.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fsdp.base.errors import first_line
from fsdp.base.html import render
from fsdp.config import CodeRefused

if TYPE_CHECKING:
    import numpy as np

    from fsdp.predict.images import Prediction
    from fsdp.predict.trained import TrainedModel

PICTURES, TOKENS = 24, 240
LARGEST_EXPORT = 2 << 30
"""A larger export is not loaded for a page; the page names the command instead."""
SMALL, SIDE = 64, 96
"""Images above SMALL pixels are reduced to SIDE."""


@dataclass(frozen=True)
class SampleSection:
    """HTML, or the reason why there is none."""

    body: Markup = Markup("")
    why_not: str = ""
    refused: str = ""
    """The whole error line, if the run's code must be named by --trust-code before it is imported."""


def read_samples(run: Path, trusted: Collection[str] = ()) -> SampleSection:
    """Code that the run's configuration names is imported only if it is in `trusted`."""
    try:
        why_not = _missing(run / "full_model")
        return SampleSection(why_not=why_not) if why_not else _predicted(run, trusted)
    except CodeRefused as error:
        return SampleSection(why_not=str(error), refused=str(error))
    except Exception as error:
        # A model, a data set or a damaged file can fail in any way; the rest of the page is still useful.
        first = first_line(error).partition(" HINT: ")[0]
        return SampleSection(why_not=f"the model could not be run ({type(error).__name__}: {first})")


def _missing(export: Path) -> str:
    """Why no export can be loaded; empty if one can."""
    files = [file for file in export.iterdir() if file.is_file()] if export.is_dir() else []
    total = sum(file.stat().st_size for file in files)
    if not files:
        return "no export in full_model/ yet: it is written at the end of a run"
    if total > LARGEST_EXPORT:
        return f"the export has {total / 2**30:.1f} GiB; use python -m fsdp.predict RUN"
    return ""


def _predicted(run: Path, trusted: Collection[str]) -> SampleSection:
    from fsdp.predict.trained import open_run

    trained = open_run(run, (), trusted)
    return SampleSection(body=_text(trained) if trained.data.info.kind == "text" else _pictures(trained))


# ---------------------------------------------------------------- images


def _pictures(trained: TrainedModel) -> Markup:
    from fsdp.predict import images

    samples = trained.data.heldout or trained.data.train
    predictions = images.of_samples(trained, samples, PICTURES)
    if any(one.inputs.ndim != 3 for one in predictions):
        return Markup("")
    names = images.classes_of(trained)
    which = "held-out" if trained.data.heldout is not None else "training"
    wrong = sum(one.truth not in (None, one.best) for one in predictions)
    return render(
        "report/templates/samples.html",
        about=f"{len(predictions)} {which} samples, evenly spread over the data set; "
        f"{wrong} misclassified, with a red border.",
        pictures=[_picture(trained, one, names) for one in predictions],
        texts=[],
    )


def _picture(trained: TrainedModel, one: Prediction, names: tuple[str, ...]) -> dict[str, object]:
    best, truth = _class(names, one.best), "" if one.truth is None else _class(names, one.truth)
    right = one.truth in (None, one.best)
    return {
        "right": right,
        "best": best,
        "verdict": f"{float(one.probabilities.max()):.0%}" if right else f"is {truth}",
        "alt": f"{one.name}: predicted {best}, is {truth}",
        "source": _png(trained, one.inputs),
    }


def _class(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"class {number}"


def _png(trained: TrainedModel, inputs: np.ndarray) -> str:
    import numpy as np
    from PIL import Image

    from fsdp.predict.picture import pixels_of

    pixels = pixels_of(inputs, trained.data.info.preprocess)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] != 3 else np.ascontiguousarray(pixels))
    if max(image.size) > SMALL:
        image.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


# ---------------------------------------------------------------- text


def _text(trained: TrainedModel) -> Markup:
    from fsdp.predict import language

    prompt = language.default_prompt(trained)
    texts = []
    for temperature, about in ((0.0, "greedy"), (0.8, "sampled at temperature 0.8")):
        sampling = language.Sampling(tokens=TOKENS, temperature=temperature, top_k=40, seed=0)
        tokens = language.encode(trained, prompt)
        text = language.decode(trained, language.generate(trained, tokens, sampling))
        texts.append({"about": about, "prompt": text[: len(prompt)], "rest": text[len(prompt) :]})
    return render(
        "report/templates/samples.html",
        about=f"The prompt is bold; {TOKENS} tokens follow it.",
        pictures=[],
        texts=texts,
    )
