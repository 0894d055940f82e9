"""What the trained model says: held-out pictures with its answers, or text that it goes on with.

The run's export is loaded in this process. Answering is fsdp/predict's; here it is asked for a little, within
bounds, and whatever stands in the way becomes a sentence.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.config import CodeRefused

if TYPE_CHECKING:
    import numpy as np

    from fsdp.predict.trained import TrainedModel

PICTURES, TOKENS = 24, 240
LARGEST_EXPORT = 2 << 30
"""An export above this is not loaded for a page; the person is told what to type."""
SMALL, SIDE = 64, 96


@dataclass(frozen=True)
class SampleSection:
    """HTML, or why there is none."""

    body: str = ""
    why_not: str = ""
    refused: str = ""
    """The whole line, where the person must name the run's code before it is imported."""


def read_samples(run: Path, trusted: Collection[str] = ()) -> SampleSection:
    """Of the code that the run's configuration names only what is in `trusted` is imported."""
    try:
        why_not = _missing(run / "full_model")
        return SampleSection(why_not=why_not) if why_not else _asked(run, trusted)
    except CodeRefused as error:
        return SampleSection(why_not=str(error), refused=str(error))
    except Exception as error:
        # A model or data set can fail in any way, and so can files that are damaged; the rest of the page is
        # worth having.
        first = (str(error).splitlines() or [""])[0].partition(" HINT:")[0]
        return SampleSection(why_not=f"the model could not be asked ({type(error).__name__}: {first[:200]})")


def _missing(export: Path) -> str:
    """Why there is nothing to ask; empty where there is an export of a size to load."""
    files = [file for file in export.iterdir() if file.is_file()] if export.is_dir() else []
    total = sum(file.stat().st_size for file in files)
    if not files:
        return "no export in full_model/ yet: it is written at the end of a run"
    return (
        f"the export has {total / 2**30:.1f} GiB; python -m fsdp.predict RUN asks it"
        if total > LARGEST_EXPORT
        else ""
    )


def _asked(run: Path, trusted: Collection[str]) -> SampleSection:
    from fsdp.predict.trained import open_run

    trained = open_run(run, (), trusted)
    return SampleSection(body=_text(trained) if trained.data.info.kind == "text" else _pictures(trained))


# ---------------------------------------------------------------- pictures


def _pictures(trained: TrainedModel) -> str:
    from fsdp.predict import images

    samples = trained.data.heldout or trained.data.train
    said = images.of_samples(trained, samples, PICTURES)
    names = images.classes_of(trained)
    tiles = []
    for one in said:
        if one.inputs.ndim != 3:
            return ""
        best, truth = _class(names, one.best), "" if one.truth is None else _class(names, one.truth)
        right = one.truth in (None, one.best)
        verdict = f"{float(one.probabilities.max()):.0%}" if right else f"is {html.escape(truth)}"
        alt = html.escape(f"{one.name}: said {best}, is {truth}")
        tiles.append(
            f'<figure class="{"right" if right else "wrong"}"><img alt="{alt}" src="{_png(trained, one.inputs)}">'
            f"<figcaption><b>{html.escape(best)}</b> <span>{verdict}</span></figcaption></figure>"
        )
    which = "held-out" if trained.data.heldout is not None else "training"
    wrong = sum(one.truth not in (None, one.best) for one in said)
    words = f"{len(said)} {which} samples, evenly spread over all of them; {wrong} of these wrong, marked by a red edge."
    return f'<p class="about">{words}</p><div class="samples">{"".join(tiles)}</div>'


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


def _text(trained: TrainedModel) -> str:
    from fsdp.predict import language

    prompt = language.default_prompt(trained)
    blocks = []
    for temperature, words in ((0.0, "the likeliest each time"), (0.8, "drawn at temperature 0.8")):
        sampling = language.Sampling(tokens=TOKENS, temperature=temperature, top_k=40, seed=0)
        tokens = language.encode(trained, prompt)
        text = language.decode(trained, language.go_on(trained, tokens, sampling))
        head, rest = text[: len(prompt)], text[len(prompt) :]
        said = f"<pre><b>{html.escape(head)}</b>{html.escape(rest)}</pre>"
        blocks.append(f'<figure class="text"><figcaption>{words}</figcaption>{said}</figure>')
    return f'<p class="about">The prompt is bold; {TOKENS} tokens follow it.</p><div class="texts">{"".join(blocks)}</div>'
