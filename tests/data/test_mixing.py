"""The order of a mixture: proportions at every position, epochs, changes at a resume; and wrong recipes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection, config_hash, load, to_toml
from fsdp.data import build_dataset
from fsdp.data.mixture import MixCursor, MixSegment, divide, whole_shares
from fsdp.tokenize.conversations import load_tokenizer
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.chat import SPECIAL, save_tokenizer
from tests.tokenize.rows import in_this_process as in_this_process
from tests.tokenize.rows import write_lines

SIZES = {"a": 10, "b": 33, "c": 5}


Amounts = dict[str, tuple[str, float]]


def cursor(amounts: Amounts, batch: int = 7) -> MixCursor:
    first = MixSegment(0, batch, {label: SIZES[label] for label in amounts}, amounts, {})
    return MixCursor(seed=3, segments=[first])


BY_WEIGHT: Amounts = {"a": ("weight", 0.5), "b": ("weight", 0.3), "c": ("weight", 0.2)}
BY_EPOCHS: Amounts = {"a": ("epochs", 2.0), "b": ("epochs", 1.0), "c": ("epochs", 0.4)}


@pytest.mark.parametrize("shares", [(5, 3, 2), (123457, 7, 99991, 1, 0)])
def test_every_source_is_near_its_share_at_every_position(shares: tuple[int, ...]) -> None:
    owner, before = divide(shares, 0, 2000)
    assert before == [0] * len(shares)
    for source, share in enumerate(shares):
        drawn = np.cumsum(owner == source)
        exact = np.arange(1, 2001) * share / sum(shares)
        assert np.abs(drawn - exact).max() <= 0.5 * np.ceil(np.log2(len(shares)))
    later, before = divide(shares, 777, 100)
    assert later.tolist() == owner[777:877].tolist()
    assert before == [int((owner[:777] == source).sum()) for source in range(len(shares))]
    assert divide(shares, sum(shares) * 10**9, 1)[1] == [share * 10**9 for share in shares]


def test_decimal_weights_are_exact() -> None:
    assert whole_shares([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_shares([3, 1.5]) == (2, 1)
    assert whole_shares([1e-30, 1]) == (1, 2**39 - 1)


def test_epochs_set_the_length_and_the_last_batch_is_short() -> None:
    mixed = cursor(BY_EPOCHS)
    assert mixed.end == 8
    batches = [mixed.indices(step) for step in range(8)]
    assert [len(batch) for batch in batches] == [7] * 7 + [6]
    counts = np.bincount(np.concatenate(batches), minlength=48)
    assert counts[:43].tolist() == [2] * 10 + [1] * 33
    assert sorted(counts[43:].tolist()) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("batch", [1, 5, 48])
def test_another_global_batch_at_a_resume_repeats_and_loses_nothing(batch: int) -> None:
    before = cursor(BY_EPOCHS)
    saved = json.loads(json.dumps(before.saved(3), sort_keys=True))
    after = cursor(BY_EPOCHS, batch).resumed(saved, 3)
    assert after.end is not None
    steps = [before.indices(n) for n in range(3)] + [after.indices(n) for n in range(3, after.end)]
    whole = [before.indices(n) for n in range(8)]
    assert np.bincount(np.concatenate(steps)).tolist() == np.bincount(np.concatenate(whole)).tolist()
    assert all(np.array_equal(after.indices(n), before.indices(n)) for n in range(3))


ONCE: Amounts = dict.fromkeys(SIZES, ("epochs", 1.0))


@pytest.mark.parametrize("step", [3, 7, 8])
def test_further_epochs_after_a_change_hold_each_source_whole(step: int) -> None:
    """Resumed with other epochs before and at their end, as `--train.steps N --train.epochs 0` does."""
    before = cursor(BY_EPOCHS)
    after = cursor(ONCE, 4).resumed(before.saved(step), step)
    assert after.end is not None
    drawn = np.concatenate([after.indices(n) for n in range(after.end, after.end + 2 * 12)])
    assert [((drawn >= low) & (drawn < high)).sum() for low, high in ((0, 10), (10, 43), (43, 48))] == [
        2 * size for size in SIZES.values()
    ]
    assert len(set(drawn.tolist())) == 48
    assert after.epoch(after.end + 12) - after.epoch(after.end) == 1
    twice = {label: number + SIZES[label] for label, number in after.drawn(after.end).items()}
    assert after.drawn(after.end + 12) == twice


def test_an_unchanged_mixture_keeps_its_segment_and_an_older_checkpoint_drops_later_ones() -> None:
    first = cursor(BY_WEIGHT)
    same = cursor(BY_WEIGHT).resumed(first.saved(9), 9)
    assert same.segments == first.segments
    changed = cursor({**BY_WEIGHT, "a": ("weight", 1.0)}).resumed(first.saved(9), 9)
    assert [one.step for one in changed.segments] == [0, 9]
    assert changed.segments[1].drawn == first.drawn(9) == {"a": 32, "b": 19, "c": 12}
    again = cursor(BY_WEIGHT).resumed(changed.saved(20), 5)
    assert again.segments == first.segments


# ---------------------------------------------------------------- recipes

ONE = '[[data.sources]]\nname = "synthetic"\nlabel = "one"\nargs = {kind = "tokens", samples = 9}\n'


def recipe(tmp_path: Path, text: str) -> str:
    (tmp_path / "mix.toml").write_text(text)
    return str(tmp_path / "mix.toml")


def test_a_recipe_and_the_file_of_a_flag_are_the_same_and_survive_config_toml(tmp_path: Path) -> None:
    path = recipe(tmp_path, ONE + "weight = 2\n" + ONE.replace("one", "two") + "weight = 1\n")
    config = load(["--config", path])
    assert [(one.label, one.weight) for one in config.data.sources] == [("one", 2), ("two", 1)]
    assert load(["--data.sources", path]) == config
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load(["--config", str(tmp_path / "again.toml")]) == config
    assert load(["--config", path, "--data.sources", "none"]).data == DataSection(name="digits")
    other = load(["--config", recipe(tmp_path, ONE.replace("9", "8") + "weight = 2\n")])
    assert len({config_hash(config), config_hash(other), config_hash(load([]))}) == 3
    data = build_dataset(config.data)
    assert len(data.train) == 18
    assert data.heldout is not None
    assert len(data.heldout) == 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE + "weigth = 2", r"1: weigth is not a field of a source. HINT: weight = VALUE"),
        (ONE + "weight = 1\nepochs = 2", r"both set how often synthetic is.* HINT: leave one"),
        (ONE + ONE, r"\[\[data.sources\]\] .*label .*one.* HINT: label = "),
    ],
)
def test_each_wrong_recipe_has_a_line_that_mends_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(["--config", recipe(tmp_path, text)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            'args = {kind = "tokens", vocab_size = 77}',
            r"one and two differ in vocab_size: \d+ and 77. HINT: one --data",
        ),
        ('args = {kind = "images"}', r"one and two differ in kind: text and images. HINT: "),
        ('args = {samples = "x"}', r"\[\[data.sources\]\] two: --data.args.samples x is not int. HINT"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(tmp_path: Path, other: str, message: str) -> None:
    path = recipe(tmp_path, ONE + f'[[data.sources]]\nname = "synthetic"\nlabel = "two"\n{other}')
    with pytest.raises(ConfigError, match=message) as caught:
        build_dataset(load(["--config", path]).data)
    assert "\n" not in str(caught.value)


@pytest.mark.needs("transformers")
@pytest.mark.usefixtures("in_this_process")
def test_the_tokenizer_of_the_section_goes_to_sources_that_are_tokenized(
    tmp_path: Path, own_cache: Path
) -> None:
    """A source's own goes first; data sets without a tokenizer are built as without it."""
    shared, own = (
        save_tokenizer(tmp_path / name, None, eos) for name, eos in (("a", SPECIAL[0]), ("b", SPECIAL[1]))
    )
    size = load_tokenizer(str(shared)).vocab_size
    lines = write_lines(tmp_path / "rows.jsonl", [{"text": "the capital of France is Paris"}] * 99)
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "made.bin")
    tables = (
        f'name = "{lines}"\nlabel = "shared"',
        f'name = "{lines}"\nlabel = "own"\ntokenizer = "{own}"',
        f'name = "{tmp_path / "made.bin"}"\nargs = {{vocab_size = {size}}}',
        f'name = "synthetic"\nargs = {{kind = "tokens", vocab_size = {size}}}',
    )
    path = recipe(tmp_path, "".join(f"[[data.sources]]\n{table}\n" for table in tables))
    config = load(["--config", path, "--data.seq_len", "8", "--data.tokenizer", str(shared)])
    made = build_dataset(config.data)
    assert made.sources is not None
    assert made.sources.labels == ("shared", "own", "made.bin", "synthetic")
    ends = [
        int(made.train.batch(np.arange(first, first + 3))["inputs"].max())
        for first in (0, made.sources.train_ends[0])
    ]
    assert ends[0] + 1 == ends[1]  # the tokens that end a document
