"""Token sequences of examples, in a decoder's or an encoder's input form. `encode_split` serves every kind of task."""

from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.batching.bert_inputs import arrange_segments
from jaxlm.tasks.batching.encoded_split import Encoded, EncodedSplit
from jaxlm.tasks.batching.gpt1_inputs import arrange
from jaxlm.tasks.batching.span_windows import encode_questions
from jaxlm.tasks.batching.tagged_rows import encode_sentences
from jaxlm.tasks.examples import Example, TaskData
from jaxlm.tasks.task import InputFormat, Task

if TYPE_CHECKING:
    from jaxlm.text import Tokenizer

_CHUNK = 4096  # examples tokenized at a time


def encode_split(
    task: Task, data: TaskData, part: str, tokenizer: "Tokenizer", length: int, input_format: InputFormat = "gpt1"
) -> Encoded:
    """Return one split of a task as token sequences of at most `length`, for a decoder (`gpt1`) or an encoder (`bert`).

    Raises:
      InputError: a span or tagging task for a decoder; a length without room; a vocabulary without CLS or SEP.
    """
    return encode_examples(task, data.splits[part].examples, tokenizer, length, input_format, part=part)


def encode_examples(
    task: Task,
    examples: Sequence,
    tokenizer: "Tokenizer",
    length: int,
    input_format: InputFormat = "gpt1",
    *,
    part: str = "",
) -> Encoded:
    """Return examples, labelled or not, as token sequences of at most `length`; see `encode_split`."""
    if task.kind in ("span", "tagging"):
        if input_format != "bert":
            raise InputError(
                f"task {task.name} needs an encoder, which attends to the tokens on both sides; start from a BERT"
            )
        encode = encode_questions if task.kind == "span" else encode_sentences
        return encode(task, tuple(examples), tokenizer, length, part=part)
    return encode_texts(task, examples, tokenizer, length, input_format, part=part)


def encode_texts(
    task: Task,
    examples: Sequence[Example],
    tokenizer: "Tokenizer",
    length: int,
    input_format: InputFormat = "gpt1",
    *,
    part: str = "",
) -> EncodedSplit:
    """Return `encode_examples` for classification, regression and choices."""
    specials, count = tokenizer.specials, task.sequences_for(input_format)
    pieces: list[np.ndarray] = []
    lengths = np.zeros((len(examples), count), np.int64)
    second = np.zeros((len(examples), count), np.int32)
    truncated, row, source = 0, 0, iter(examples)
    question = task.form == "choice" and task.second != "beginning"
    while chunk := list(islice(source, _CHUNK)):
        texts = [read_as(example, task, input_format) for example in chunk]
        encoded = iter(tokenizer.encode_batch([text for parts, choices in texts for text in (*parts, *choices)]))
        for example, (read_texts, read_choices) in zip(chunk, texts, strict=True):
            parts = list(islice(encoded, len(read_texts)))
            choices = list(islice(encoded, len(read_choices)))
            if input_format == "bert":
                keep = question and len(example.texts) > 1
                sequences, second[row], cut = arrange_segments(
                    parts, choices, task.form, specials, length, keep_second=keep
                )
            else:
                sequences, cut = arrange(parts, choices, task.form, specials, length, task.special_tokens)
            truncated += cut
            lengths[row] = [len(sequence) for sequence in sequences]
            pieces.append(np.fromiter(chain.from_iterable(sequences), np.int32, int(lengths[row].sum())))
            row += 1
    labelled = bool(examples) and all(example.label is not None for example in examples)
    shape = (len(examples), len(task.labels)) if task.kind == "multilabel" else (len(examples),)
    labels = np.zeros(shape, np.float32 if task.kind in ("regression", "multilabel") else np.int32)
    if labelled:
        labels[:] = [task.label_number(example.label) for example in examples]  # type: ignore[arg-type]
    groups = tuple(example.group for example in examples)
    return EncodedSplit(
        ids=np.concatenate(pieces) if pieces else np.zeros(0, np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int64),
        labels=labels,
        labelled=labelled,
        truncated=truncated,
        num_sequences=count,
        longest=lengths.max(axis=1, initial=0).astype(np.int32),
        length=length,
        pad=specials.get("pad", 0),  # GPT-1's vocabulary has none and pads with id 0; causal attention ignores it
        second=second.reshape(-1) if input_format == "bert" else None,
        groups=groups if any(groups) else (),
        part=part,
    )


def read_as(example: Example, task: Task, input_format: InputFormat) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return texts and choices as a model reads them, with a choice task's second text placed by its role.

    A beginning is prepended to each choice. A question stays with the article for a decoder (Radford et al. 2018,
    section 3.3); for an encoder it is prepended to each choice, or the choice replaces the question's blank, as is
    usual.
    """
    if task.form != "choice" or len(example.texts) < 2:
        return example.texts, example.choices
    context, second = example.texts
    if task.second == "cloze" and input_format == "bert" and "_" in second:
        return (context,), tuple(second.replace("_", choice) for choice in example.choices)
    if task.second == "beginning" or input_format == "bert":
        return (context,), tuple(f"{second} {choice}" for choice in example.choices)
    return example.texts, example.choices
