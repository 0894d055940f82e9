"""Conversations: the assistant's tokens, as the template marks them or as longer renderings show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset
from fsdp.tokenize import conversations
from fsdp.tokenize.conversations import (
    Document,
    DocumentOptions,
    DocumentReader,
    form_of,
    load_tokenizer,
)
from fsdp.tokenize.rows import Source, SourceRow
from tests.tokenize import chat
from tests.tokenize.chat import said, save_tokenizer
from tests.tokenize.rows import in_this_process as in_this_process
from tests.tokenize.rows import rows_in, write_lines

pytestmark = pytest.mark.needs("transformers")

CONVERSATIONS = [
    said("the capital of France?", "the capital is Paris."),
    said("Hello", "Hello there, hów are you?", "  well ", "是的 🙂", system="be the assistant"),
    said("a", "b", "c", "b", "e"),
    said("assistant\n", "user\nthe user", "x", " "),
]


def reader(folder: Path, form: Any = "messages", **options: Any) -> DocumentReader:
    return DocumentReader(DocumentOptions(tokenizer=str(folder), **options), form)


def trained_texts(read: DocumentReader, document: Document) -> list[str]:
    """The text of each run of tokens that are trained on."""
    assert document.trained is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.trained.astype(np.int8), [0]])))
    runs = edges.reshape(-1, 2)
    made: Any = read.tokenizer
    return [made.made.decode(document.tokens[first:last], skip_special_tokens=False) for first, last in runs]


def test_texts_encoded_together_are_as_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reader(save_tokenizer(tmp_path, chat.PLAIN), "text")
    rows = [SourceRow(f"row {n}", {"text": f"upön a time {n}<|im_end|> " * (n % 5)}) for n in range(40)]
    monkeypatch.setattr(conversations, "ENCODED_AT_ONCE", 7)
    together = [document.tokens.tolist() for document in checked(read, rows)]
    assert together == [of(read, **row.values).tokens.tolist() for row in rows]


def of(read: DocumentReader, **values: Any) -> Document:
    return checked(read, [SourceRow("rows.jsonl line 7", values)])[0]


def checked(read: DocumentReader, rows: list[SourceRow]) -> list[Document]:
    documents = []
    for _, document in read.read_all(rows):
        if isinstance(document, ConfigError):
            raise document
        documents.append(document)
    return documents


def test_conversations_in_the_form_of_sharegpt_are_messages(tmp_path: Path) -> None:
    read = reader(save_tokenizer(tmp_path, chat.MARKED))
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CONVERSATIONS[1]]
    row = SourceRow("row 1", {"conversations": turns})
    assert form_of(row, DocumentOptions()) == "messages"
    ours, theirs = checked(read, [row])[0], of(read, messages=CONVERSATIONS[1])
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert trained_texts(read, ours) == trained_texts(read, theirs)
    with pytest.raises(ConfigError, match="row 1: message 2 has no role"):
        checked(read, [SourceRow("row 1", {"conversations": [*turns[:1], {"value": "Hi"}]})])


@pytest.mark.parametrize("template", [chat.MARKED, chat.INST])
def test_which_turns_are_trained_on(template: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template)
    messages = said("Hello", "first", "again", "second", "more")
    for loss, expected in (
        ("assistant", ["first<|im_end|>", "second<|im_end|>"]),
        ("last", ["second<|im_end|>"]),
    ):
        read = reader(tmp_path, loss=loss)
        found = trained_texts(read, of(read, messages=messages))
        assert [text.strip() for text in found] == expected
    whole = of(reader(tmp_path, loss="all"), messages=messages)
    assert whole.trained is None


@pytest.mark.parametrize("template", [chat.PLAIN, chat.MARKED])
@pytest.mark.parametrize(("key", "off", "on"), [("weight", 0, 1), ("train", False, True)])
def test_a_message_of_weight_0_is_not_trained_on(
    template: str, key: str, off: Any, on: Any, tmp_path: Path
) -> None:
    """As in files for OpenAI's fine-tuning. It was trained on like the others."""
    save_tokenizer(tmp_path, template)
    messages = said("Hello", "first", "again", "second", "more", "third")
    plain = of(reader(tmp_path), messages=messages)
    messages[0][key], messages[1][key], messages[3][key], messages[5][key] = None, off, on, off
    for loss, expected in (("assistant", ["second<|im_end|>"]), ("last", [])):
        read = reader(tmp_path, loss=loss)
        document = of(read, messages=messages)
        assert document.tokens.tolist() == plain.tokens.tolist()
        assert [text.strip() for text in trained_texts(read, document)] == expected


def test_prompts_and_completions_of_text_end_with_the_end_token(tmp_path: Path) -> None:
    read = reader(save_tokenizer(tmp_path, None), "pairs")
    document = of(read, prompt="the capital of France is", completion=" Paris")
    assert trained_texts(read, document) == [" Paris<|im_end|>"]
    made: Any = read.tokenizer
    assert made.made.decode(document.tokens) == "the capital of France is Paris<|im_end|>"


USER = {"role": "user", "content": "a"}
TEXT = {"type": "text", "text": "the capital"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"from": "human", "value": "Hi"}]}, "message 1 has no role"),
    ({"messages": [USER, {"role": "assistant"}]}, "message 2 has no role, no content"),
    ({"messages": []}, "messages is not a list of messages"),
    ({"messages": [{"role": "user", "content": [TEXT, {"type": "image_url"}]}]}, "part of type 'image_url'"),
    ({"messages": [USER, {"role": "assistant", "content": ["b"]}]}, "message 2 has a part of type 'str'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1 has a part of type 'text'"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "does not write tool_calls"),
    ({"messages": [USER, {"role": "assistant", "content": "b", "weight": 0.5}]}, "a weight that is not 0"),
    ({"messages": [{**USER, "train": True}]}, "a weight that is not 0 or the assistant's 1"),
    ({"text": "Hi"}, "has no column messages; its columns are text"),
    (
        {"question": "Hi", "answer": "b"},
        "rename a question to prompt and its answer to completion; or --data.a",
    ),
    ({"messages": said("a", system="b")}, "the chat template refuses the conversation: only user and"),
    ({"messages": said("a"), "tools": "[{"}, "tools are not JSON, or "),
    ({"messages": said("a"), "chat_template_kwargs": [1]}, "tools are not JSON, or chat_template_kwargs"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_conversations_are_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    read = reader(save_tokenizer(tmp_path, chat.INST))
    with pytest.raises(ConfigError) as caught:
        of(read, **values)
    assert str(caught.value).startswith("rows.jsonl line 7")
    assert message in str(caught.value)
    assert " HINT: " in str(caught.value)
    assert "\n" not in str(caught.value)


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of a model that sees pictures: content that is a text has no parts, and would be left out."""


@pytest.mark.parametrize("template", [chat.PLAIN, PARTS])
def test_parts_of_text_are_joined_and_a_template_gets_the_form_that_it_reads(
    template: str, tmp_path: Path
) -> None:
    read = reader(save_tokenizer(tmp_path, template))
    answer = [{"type": "text", "text": " of France is"}, {"type": "text", "text": " Paris"}]
    turns = [{"role": "user", "content": [TEXT, TEXT]}, {"role": "assistant", "content": answer}]
    in_parts = of(read, messages=turns)
    as_text = of(read, messages=said("the capitalthe capital", " of France is Paris"))
    assert trained_texts(read, in_parts) == [" of France is Paris<|im_end|>"] == trained_texts(read, as_text)
    assert in_parts.tokens.tolist() == as_text.tokens.tolist()
    assert "the capitalthe capital<|im_end|>" in read.tokenizer.decode(in_parts.tokens.tolist())


@pytest.mark.needs("datasets")
def test_tools_of_a_table_are_those_of_json_lines(tmp_path: Path, own_cache: Path) -> None:
    """A column of a table gives each object the keys of all others, as null."""

    def row(tool: str, argument: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": tool, "arguments": {argument: 1}}}
        parameters = {"type": "object", "properties": {argument: {"type": "integer"}}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": turns, "tools": [{"type": "function", "function": {"parameters": parameters}}]}

    import pyarrow
    import pyarrow.parquet

    rows = [row("f", "city"), row("g", "zip")]
    lines, table = write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    read = reader(save_tokenizer(tmp_path / "tokenizer", chat.STYLES["tools"].marked))

    def texts(source: Path) -> list[str]:
        made: Any = read.tokenizer
        values = rows_in(Source(str(source)).open())
        return [made.decode(of(read, **row).tokens.tolist()) for row in values]

    assert texts(table) == texts(lines)
    assert '"arguments": {"zip": 1}' in texts(table)[1]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat.FORGETS)
    messages = said("a", "<think>b</think>c", "d", "e")
    with pytest.raises(
        ConfigError, match=r"writes message 2 in another way .* HINT: --data.args.chat_template"
    ):
        of(reader(tmp_path), messages=messages)
    assert of(reader(tmp_path, loss="all"), messages=messages).trained is None
    mended = reader(tmp_path, chat_template=chat.MARKED)
    assert trained_texts(mended, of(mended, messages=said("a", "b"))) == ["b<|im_end|>"]


ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "refused"),
    [(ENDLESS, "computes for more than 0.2 s"), ("{{ 'a' * 9000000000 }}", "takes more than 256 MiB")],
)
def test_a_template_that_takes_too_long_or_too_much_is_refused(
    template: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "TEMPLATE_S", 0.2)
    read = reader(save_tokenizer(tmp_path, template))
    with pytest.raises(ConfigError, match=f"line 7: the chat template .*: it {refused}.* HINT: ") as caught:
        of(read, messages=CONVERSATIONS[0])
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert trained_texts(*parts(tmp_path)) == ["the capital is Paris.<|im_end|>"]  # no limit is left behind


def parts(folder: Path) -> tuple[DocumentReader, Document]:
    read = reader(save_tokenizer(folder, chat.PLAIN))
    return read, of(read, messages=CONVERSATIONS[0])


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template, .* HINT: --data.tokenizer DIR of an"):
        reader(save_tokenizer(tmp_path, None))
    with pytest.raises(ConfigError, match=r"--data.tokenizer bytes has no chat template, "):
        DocumentReader(DocumentOptions(), "messages")


def test_code_that_a_tokenizer_brings_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}', encoding="utf-8"
    )
    (tmp_path / "own.py").write_text("open('ran', 'w')\nclass Own: ...\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be loaded: .* HINT: ls ") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


def data(path: Path, tokenizer: Path, seq_len: int = 24, **args: Any) -> DataSet:
    return build_dataset(
        DataSection(name=str(path), tokenizer=str(tokenizer), seq_len=seq_len, args={"heldout": 0, **args})
    )


# ---------------------------------------------------------------- tools


def assert_same(ours: Document, theirs: dict[str, list[int]]) -> None:
    assert ours.tokens.tolist() == theirs["input_ids"]
    assert ours.trained is not None
    assert ours.trained.tolist() == theirs["assistant_masks"]
    assert 0 < sum(theirs["assistant_masks"]) < len(ours.tokens)


WITH_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}{% if thinking %}think{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool>{{ call.function | tojson }}{% endfor %}</s>"
    "{% endgeneration %}"
    "{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
CALLING = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "wet"},
    {"role": "assistant", "content": "yes"},
]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON"])
def test_a_rows_tools_and_variables_reach_its_template(tools: list[Any] | str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, WITH_TOOLS)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    made = theirs.apply_chat_template(
        CALLING,
        tools=TOOLS,
        thinking=True,
        chat_template=WITH_TOOLS,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    given = {"tools": tools, "chat_template_kwargs": {"thinking": True}}
    assert_same(of(reader(tmp_path), messages=CALLING, **given), made)
    plain = WITH_TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ConfigError, match=r"has no prompt before message 3, which has no text, .* HINT: "):
        of(reader(tmp_path, chat_template=plain), messages=CALLING, **given)
