"""A small tokenizer with three chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<|s|>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
"""Without a generation prompt."""
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{{ m.content }}{% else %}"
    "{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
)
"""Drops the reasoning of turns that others follow."""


SPECIAL = ("<|im_start|>", "<|im_end|>", "<|s|>")


@dataclass(frozen=True)
class ChatStyle:
    """A marked template in the style of a family of models, with the tokens that it writes."""

    marked: str
    special: tuple[str, ...]
    eos: str
    systems: bool = True
    """Whether a conversation may begin with a system message."""

    @property
    def plain(self) -> str:
        """The template as models publish it, without marks."""
        return self.marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")


STYLES = {
    "chatml": ChatStyle(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        SPECIAL,
        "<|im_end|>",
    ),
    "llama3": ChatStyle(
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "mistral": ChatStyle(
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {% generation %}{{ m.content }}</s>{% endgeneration %}"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
        systems=False,
    ),
    "gemma": ChatStyle(
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}{{ '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<end_of_turn>{% endgeneration %}"
        "{% else %}{{ m.content | trim }}<end_of_turn>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        systems=False,
    ),
    "tools": ChatStyle(
        "{%- set begin = messages[0].content if messages[0].role == 'system' else 'You have tools.' %}"
        "{{- '<|im_start|>system\n' + begin }}"
        "{%- if tools %}{{ '\n# Tools' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{% endif %}"
        "{{- '<|im_end|>\n' }}"
        "{%- for m in messages %}{%- if m.role == 'assistant' %}"
        "{{- '<|im_start|>assistant\n' }}{% generation %}{{ m.content }}"
        "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
        "{%- elif m.role == 'tool' %}"
        "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
        "{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        SPECIAL,
        "<|im_end|>",
    ),
    "phi3": ChatStyle(
        "{% for m in messages %}<|{{ m.role }}|>{{ '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
        "{% elif messages[-1].role == 'user' %}<|endoftext|>{% endif %}",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
        "<|end|>",
    ),
}


def save_tokenizer(
    folder: Path, template: str | None, eos: str = "<|im_end|>", special: Sequence[str] = SPECIAL
) -> Path:
    """A byte-level BPE with merges of its own."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    text = ["the capital of France is Paris", "Hello there, how are you? user assistant system"] * 5
    made.train_from_iterator(text, 340, min_frequency=2, show_progress=False)
    made.add_special_tokens(list(special))
    whole: Any = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token=eos)
    whole.add_special_tokens({"additional_special_tokens": list(special)})
    whole.chat_template = template
    whole.save_pretrained(folder)
    return folder


def said(*contents: str, system: str = "") -> list[dict[str, Any]]:
    """User and assistant in turn."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns
