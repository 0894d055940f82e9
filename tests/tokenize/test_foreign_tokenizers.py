"""Tokenizers in the style of SentencePiece: pieces with a leading space, bytes for what they lack, added
tokens; and tokenizers without an end token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.tokenize.conversations import Document, DocumentOptions, DocumentReader
from fsdp.tokenize.rows import SourceRow
from fsdp.tokenize.tokenizer import load_tokenizer
from tests.tokenize.chat import STYLES, said

pytestmark = pytest.mark.needs("transformers")

TEXTS = ["Hello there", "hów 🙂 是 fünf <tool> x", "", " ", "\n\n lead", "a</s>b"]


def save_pieces(folder: Path, template: str | None = None, **named: str) -> Path:
    """BPE over ▁-marked pieces with byte fallback, and two added tokens; a text begins with <s>."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made: Any = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer: Any = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator(["▁Hello▁there", "▁the▁rain▁in▁Bonn"] * 5, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    whole: Any = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", **named)
    whole.add_tokens([AddedToken("<tool>", special=False), AddedToken("fünf", special=False)])
    whole.chat_template = template
    whole.save_pretrained(folder)
    return folder


def read(folder: Path, form: Any, **values: Any) -> Document:
    reader = DocumentReader(DocumentOptions(tokenizer=str(folder)), form)
    return reader.read(SourceRow("rows.jsonl line 7", values))


def assert_same(ours: Document, theirs: dict[str, list[int]]) -> None:
    assert ours.tokens.tolist() == theirs["input_ids"]
    assert ours.trained is not None
    assert ours.trained.tolist() == theirs["assistant_masks"]
    assert 0 < sum(theirs["assistant_masks"]) < len(ours.tokens)


def test_texts_are_as_transformers_tokenizes_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(save_pieces(tmp_path, eos_token="</s>"))
    for text in TEXTS:
        expected = [*theirs(text)["input_ids"], theirs.eos_token_id]
        assert read(tmp_path, "text", text=text).tokens.tolist() == expected


@pytest.mark.parametrize("published", [False, True], ids=["marked", "as published"])
@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_conversations_of_bytes_and_added_tokens(name: str, published: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    style = STYLES[name]
    save_pieces(tmp_path, style.plain if published else style.marked, eos_token="</s>")
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    for messages in (said("Hello", "hów 🙂 是的 fünf"), said("a", "b", "c", "d <tool>\n\nf")):
        made = theirs.apply_chat_template(
            messages, chat_template=style.marked, return_assistant_tokens_mask=True, return_dict=True
        )
        assert_same(read(tmp_path, "messages", messages=messages), made)


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


@pytest.mark.parametrize("published", [False, True], ids=["marked", "as published"])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None], ids=["list", "JSON", "none"])
def test_a_rows_tools_and_variables_reach_its_template(
    tools: list[Any] | str | None, published: bool, tmp_path: Path
) -> None:
    """A turn of tool calls alone has no text by which its header would be found."""
    from transformers import AutoTokenizer

    plain = WITH_TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    save_pieces(tmp_path, plain if published else WITH_TOOLS, eos_token="</s>")
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    made = theirs.apply_chat_template(
        CALLING,
        tools=TOOLS if tools else None,
        thinking=True,
        chat_template=WITH_TOOLS,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    given = {"tools": tools, "chat_template_kwargs": {"thinking": True}}
    assert_same(read(tmp_path, "messages", messages=CALLING, **given), made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": "[{"}, "tools are not JSON, or "),
        ({"chat_template_kwargs": [1]}, "tools are not JSON, or chat_template_kwargs no object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "the chat template refuses the conversation: "),
    ],
)
def test_wrong_tools_are_named_with_their_row(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_pieces(tmp_path, WITH_TOOLS, eos_token="</s>")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "messages", messages=CALLING, **given)
    assert str(caught.value).startswith(f"rows.jsonl line 7: {message}")
    assert " HINT: " in str(caught.value)


def test_a_tokenizer_without_an_end_token_names_the_file_that_sets_one(tmp_path: Path) -> None:
    folder = save_pieces(tmp_path / "no end")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    with pytest.raises(ConfigError, match=rf'HINT: "eos_token": "TOKEN", .* in {folder}/tokenizer_config'):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "</s>"}))
    assert load_tokenizer(str(folder)).end == 2
    alone = tmp_path / "alone" / "tokenizer.json"
    alone.parent.mkdir()
    alone.write_text((folder / "tokenizer.json").read_text(encoding="utf-8").replace("</s>", "<END>"))
    with pytest.raises(ConfigError, match=rf"tokenizer_config.json; then --data.tokenizer {alone.parent}$"):
        load_tokenizer(str(alone))
    (alone.parent / "tokenizer_config.json").write_text('{"eos_token": "<END>"}')
    assert load_tokenizer(str(alone.parent)).end == 2


@pytest.mark.parametrize("form", ["text", "pairs"])
def test_a_text_that_the_tokenizer_cannot_encode_is_one_line(tmp_path: Path, form: Any) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"</s>": 0, "a": 1})).save(str(tmp_path / "tokenizer.json"))
    reader = DocumentReader(DocumentOptions(tokenizer=str(tmp_path)), form)
    rows = [SourceRow(f"line {n}", {"text": "zz", "prompt": "z", "completion": "z"}) for n in (1, 2)]
    with pytest.raises(
        ConfigError, match=r"cannot encode .* from 'zz' on: WordLevel error.* HINT: --data.tok"
    ):
        list(reader.read_all(rows))
