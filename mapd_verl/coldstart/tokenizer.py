"""The tiny student's tokenizer: byte-level BPE in which copying is easy.

Three choices serve copying, the skill that a tiny model finds hardest:

- a name is cut the same way wherever it stands behind a space (passage bodies, questions, queries and
  answers all put one there), so copying text is copying tokens;
- numbers are cut into groups of up to three digits and every group is one token (as in Llama 3), so a
  population is three or five tokens, none of which repeats inside it by chance very often;
- the search tags are single added tokens that survive decoding (``special=False``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TAGS = (
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

#: ChatML as Qwen3 has it with thinking off, less the empty think block: the student writes its own.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

_SPLIT = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+"


def corpus_lines(corpus: Path) -> list[str]:
    """The passages of a corpus file, as the BPE sees them."""
    with corpus.open(encoding="utf-8") as lines:
        return [json.loads(line)["contents"] for line in lines]


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the BPE on passages and question templates; ``len(tokenizer) == vocab_size`` exactly.

    Raises ValueError when the text is too small for that many merges.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*lines, *_every_number(), *_templates()], trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def _every_number() -> list[str]:
    """Each group of one to three digits, often enough that the BPE makes a token of every one."""
    groups = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
    return groups * 60


def _templates() -> list[str]:
    """The fixed words of questions, plans and queries, often enough to become single tokens."""
    from mapd_verl.data.geonames import text

    lines = [w.format(city="", other="") for ws in text.QUESTIONS.values() for w in ws]
    for relation in text.RELATION_NAMES:
        lines += [
            f"{text.RELATION_NAMES[relation]} of ",
            *text.plan(relation if relation in text.TASK_TYPES else "comparison", "", ""),
        ]
    lines += [
        "user assistant Task: single_hop multi_hop comparison Plan: 1. 2. 3. Facts: Findings: Answer:",
        'Doc 1(Title: "A") The city',
        'Doc 2(Title: "A") The country',
        " I know this. I have the answer.",
    ]
    return lines * 300
