"""Before a run: what `python -m fsdp.tokenize --check FILE` finds in rows, and what --help says of data.

The tokens are those of the run, in the cache where it finds them. Not here: how a row becomes tokens
(fsdp/tokenize).
"""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path

import numpy as np

from fsdp.base.errors import ConfigError
from fsdp.base.text import columns, counted, printable, quoted
from fsdp.config import Config, DataSection
from fsdp.config.sections import shown_value
from fsdp.data.documents import Lengths, TokenStore, build, documents_in, lengths_of, loss_file, open_store
from fsdp.data.registry import BUILT_INS, built_in, check_args, selected, with_model_tokenizer
from fsdp.models.registry import PREFIX, check_name, load_attribute, parameters_of, resolve
from fsdp.tokenize.conversations import DocumentOptions, load_tokenizer, template_text
from fsdp.tokenize.rows import held_out_line
from fsdp.tokenize.shards import TokenizeJob, left_out_lines

QUANTILES = {"least": 0, "10%": 10, "median": 50, "90%": 90, "99%": 99, "most": 100}
MOST_CHARACTERS = 2000
"""Of the row that is shown."""
UNITS = {"messages": "conversation", "pairs": "pair", "text": "text"}


def check_rows(config: Config) -> tuple[str, bool]:
    """What is printed, and whether a run with these flags would stop at a row."""
    check_name(config.model.name)
    if config.model.name.startswith(PREFIX):
        resolve(config.model, {})
    section = with_model_tokenizer(config.data, config.model)
    name, where = selected(section)
    if name not in BUILT_INS and ":" not in name:
        raise ConfigError(
            f"--check {name} is no file, folder or pattern here.", f"ls {quoted(Path(name).parent)}"
        )
    if name != "documents":
        reason = f"--check {section.name} is read as {name}, and rows of documents are checked."
        raise ConfigError(reason, "a file of rows, such as .jsonl; or --data.tokenizer DIR for .txt")
    args = {"heldout": 0.01, "rows": "auto", **check_args(build, section.args, f"--check {section.name}")}
    form = args.pop("rows")
    options = DocumentOptions(
        where.tokenizer,
        args.pop("text", ""),
        args.pop("loss", "assistant"),
        template_text(args.pop("chat_template", "")),
    )
    stops = args.pop("bad_rows", "stop") == "stop"
    store = open_store(TokenizeJob(where.dir, options, **args, bad_rows="skip"))
    stops = stops and store.folder != Path(where.dir)  # what is tokenized has none of them
    if config.model.name.startswith(PREFIX):
        resolve(config.model, {"vocab_size": store.vocab_size})
    bad = int(store.left_out.get("bad", {}).get("count", 0))
    lines = [*_counts(store, section.name), *_cut(store, where.seq_len, str(form))]
    if held_out := store.key.get("held_out"):
        lines.append(held_out_line(held_out))
    lines += [*left_out_lines(store.left_out), *_first_row(store)]
    if bad and stops:
        lines.append(
            f"a run stops at {counted(bad, 'bad row')}. HINT: mend them, or --data.args.bad_rows skip"
        )
    return "\n".join(lines), bool(bad and stops)


def _counts(store: TokenStore, source: str) -> list[str]:
    lengths = lengths_of(store, 0).tokens
    trained = sum(int(loss_file(file).open().sum(dtype=np.int64)) for file in store.files if store.masked)
    trained = trained if store.masked else int((lengths - 1).sum())
    rows = len(lengths) + sum(int(facts["count"]) for facts in store.left_out.values())
    figures = np.percentile(lengths, list(QUANTILES.values()), method="nearest").tolist()
    held = sum(len(documents_in(file)[1]) for file in store.rows["val"].files)
    named = ", ".join(f"{name} {int(figure):,}" for name, figure in zip(QUANTILES, figures, strict=True))
    unit = UNITS[store.form]
    return [
        f"{source}: {counted(rows, 'row')}, {counted(len(lengths), unit)}, {held:,} of them held out",
        f"{int(lengths.sum()):,} tokens, {trained:,} trained on; tokenizer {store.tokenizer}",
        f"tokens of a {unit}: {named}",
    ]


def _cut(store: TokenStore, seq_len: int, form: str) -> list[str]:
    """What of the documents is beyond a sample."""
    lengths: Lengths = lengths_of(store, seq_len)
    if store.form == "text" and form != "document":
        how = "longer ones are split" if form == "packed" else "one row of tokens, in windows of so many"
        return [f"--data.seq_len {seq_len}: nothing is cut: {how}"]
    if not (cut := lengths.cut(seq_len)):
        return [f"--data.seq_len {seq_len}: nothing is cut"]
    lost = int(np.maximum(lengths.tokens - seq_len - 1, 0).sum())
    untrained = f", {lengths.untrained:,} of them without a token to train on before it" * bool(
        lengths.untrained
    )
    return [
        f"--data.seq_len {seq_len}: cut are {cut:,} of {len(lengths.tokens):,}, {lost:,} tokens{untrained}. "
        f"HINT: --data.seq_len {int(lengths.tokens.max()) - 1} holds the longest"
    ]


def _first_row(store: TokenStore) -> list[str]:
    """The text of the first document, in ⟦ ⟧ where it is trained on."""
    file = store.files[0]
    starts, lengths = documents_in(file)
    place = slice(int(starts[0]), int(starts[0] + lengths[0]))
    tokens = file.open()[place].tolist()
    trained = loss_file(file).open()[place].tolist() if store.masked else [1] * len(tokens)
    tokenizer, text = load_tokenizer(store.tokenizer, ends=False), ""
    for is_trained, pairs in itertools.groupby(zip(trained, tokens, strict=True), lambda pair: bool(pair[0])):
        part = tokenizer.decode([token for _, token in pairs])
        text += f"⟦{part}⟧" if is_trained else part
    shown = printable(text[:MOST_CHARACTERS]) + ("…" if len(text) > MOST_CHARACTERS else "")
    return [
        f"the first {UNITS[store.form]}, trained on in ⟦ ⟧:",
        *(f"  {line}" for line in shown.splitlines()),
    ]


def args_help(section: DataSection) -> str:
    """--data.args of the data set, with what its docstring has as `NAME: meaning`, for --help."""
    name, _ = selected(section)
    if section.sources or not (name in BUILT_INS or ":" in name):
        return ""
    function = built_in(name) if name in BUILT_INS else load_attribute(name, "--data.name")
    meanings = dict(re.findall(r"^ *(\w+): +(.+)$", inspect.getdoc(function) or "", re.MULTILINE))
    takes = parameters_of(function)
    rows = [
        (
            f"  --data.args.{key}",
            "" if p.default is p.empty else shown_value(p.default),
            meanings.get(key, ""),
        )
        for key, p in (takes.named if takes else {}).items()
        if key not in ("where", "dir", "seq_len")
    ]
    title = f"\n\n--data.args of --data.name {section.name}{f', {name}' if name != section.name else ''}"
    return "\n".join([f"{title}:", *columns(rows)]) if rows else f"{title}: none"
