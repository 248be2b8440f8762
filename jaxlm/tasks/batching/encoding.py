"""Token sequences of examples, in a decoder's or an encoder's input form. `encode_split` serves every kind of task."""

from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.batching import FORMATS
from jaxlm.tasks.batching.encoded_split import Encoded, EncodedSplit
from jaxlm.tasks.examples import Example, TaskData
from jaxlm.tasks.task import Task

if TYPE_CHECKING:
    from jaxlm.tasks.kinds.texts import TextTask
    from jaxlm.text import Tokenizer

_CHUNK = 4096  # examples tokenized at a time


def encode_split(
    task: Task, data: TaskData, part: str, tokenizer: "Tokenizer", length: int, input_format: str = "gpt1"
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
    input_format: str = "gpt1",
    *,
    part: str = "",
) -> Encoded:
    """Return examples, labelled or not, as token sequences of at most `length`; see `encode_split`."""
    if task.of_tokens and not FORMATS[input_format].every_token:
        raise InputError(
            f"task {task.name} needs an encoder, which attends to the tokens on both sides; start from a BERT"
        )
    return task.encode(tuple(examples), tokenizer, length, input_format, part)


def encode_texts(
    task: "TextTask",
    examples: Sequence[Example],
    tokenizer: "Tokenizer",
    length: int,
    input_format: str,
    part: str,
) -> EncodedSplit:
    """Return `encode_examples` for rows of texts."""
    inputs, specials = FORMATS[input_format], tokenizer.specials
    count = inputs.num_sequences(task)
    pieces: list[np.ndarray] = []
    lengths = np.zeros((len(examples), count), np.int64)
    second = np.zeros((len(examples), count), np.int32)
    truncated, row, source = 0, 0, iter(examples)
    question = task.has_choices and task.second != "beginning"
    while chunk := list(islice(source, _CHUNK)):
        texts = [inputs.read(example, task) for example in chunk]
        encoded = iter(tokenizer.encode_batch([text for parts, choices in texts for text in (*parts, *choices)]))
        for example, (read_texts, read_choices) in zip(chunk, texts, strict=True):
            parts = list(islice(encoded, len(read_texts)))
            choices = list(islice(encoded, len(read_choices)))
            keep = question and len(example.texts) > 1
            sequences, second[row], is_truncated = inputs.arrange(
                parts, choices, task.form, specials, length, special_tokens=task.special_tokens, keep_second=keep
            )
            truncated += is_truncated
            lengths[row] = [len(sequence) for sequence in sequences]
            pieces.append(np.fromiter(chain.from_iterable(sequences), np.int32, int(lengths[row].sum())))
            row += 1
    labelled = bool(examples) and all(example.label is not None for example in examples)
    labels = task.no_targets(len(examples))
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
        second=second.reshape(-1),
        reads_last=inputs.reads_last,
        groups=groups if any(groups) else (),
        part=part,
    )
