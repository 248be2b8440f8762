"""Measure one training step of a pretraining config: `python -m jaxlm.bench pretrain/gpt1 --batch-size 4`.

The step is the one that `jaxlm.pretrain` runs: forward, backward, global-norm clip, optimizer. For BERT it includes
the masks and the next-sentence loss. The learning rate is constant, and all rows have the config's full length.
Without `--data.store` the rows are full rows of random ids (one pair per row for BERT). With it they are the rows that
a run on that store reads, and the tokens that are not padding are reported too.

`--model NAME` in place of a config measures a published model without dropout, in batches of 8 x 512 tokens: gpt1 (the
default), gpt2-xl, bert-large, t5-base, lstm and others, which an unknown name lists. Short spellings: `--batch`,
`--layers`, `--width`, `--heads`, `--dropout`, `--dtype f32|bf16|f16`, `--remat`, `--unroll`, `--loss-chunks`,
`--store`, `--pairs-per-row`.

FLOPs are 6 x (non-embedding and output-projection parameters used per token) + 12 x layers x width x length per
position of a row, the second term halved for causal attention. The last line of standard output is one JSON object.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxlm.config import command_line, load_config
from jaxlm.data.config import MEMBERS
from jaxlm.errors import InputError, run_command
from jaxlm.evaluation.arguments import BenchArguments
from jaxlm.models import SIZES, dropout_rates, family_of, with_length, with_wide_feed_forward, without_dropout
from jaxlm.objectives.config import OBJECTIVES
from jaxlm.training.config import PretrainConfig


def config_of_size(model: Any) -> PretrainConfig:
    """Return a pretraining of a published size, with the first objective and the first layout of its family."""
    family = family_of(model)
    objective, layout = OBJECTIVES[family.objectives(model)[0]](), MEMBERS[family.layouts[0]]()
    return PretrainConfig(model, objective=objective, data=layout, batch_size=8)


MODELS = {name: config_of_size(model) for name, model in SIZES.items() if family_of(model).layouts}
SHORT_SPELLINGS = {
    "--batch": ["batch-size"],
    "--layers": ["model.num-layers"],
    "--width": ["model.width"],
    "--heads": ["model.num-heads"],
    "--dtype": ["execution.dtype"],
    "--remat": ["execution.remat"],
    "--unroll": ["execution.unroll"],
    "--loss-chunks": ["execution.loss-chunks"],
    "--store": ["data.store"],
    "--pairs-per-row": ["data.pairs-per-row"],
}
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


ARGUMENTS = (BenchArguments,)


def parse(argv: Sequence[str]) -> BenchArguments:
    """Return the arguments of a command line: CONFIG or `--model NAME`, and its fields, short spellings replaced."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if words and not words[0].startswith("-"):
        arguments, _ = _parsed(words, load_config(words[0], PretrainConfig))
        return arguments
    name = "gpt1"
    while "--model" in words[:-1]:  # as with other flags, the last one counts
        at = words.index("--model")
        name = words[at + 1]
        del words[at : at + 2]
    if name not in MODELS:
        raise InputError(f"--model must be one of {', '.join(MODELS)}, got {name}; or give a config file in its place")
    published = MODELS[name]
    arguments, given = _parsed([name, *words], replace(published, model=without_dropout(published.model)))
    settings = arguments.settings
    model = with_length(settings.model, settings.length)
    widens = "model.width" in given and "model.feed_forward_width" not in given
    if widens:
        model = with_wide_feed_forward(model)
    return replace(arguments, settings=replace(settings, model=model))


def _parsed(words: Sequence[str], loaded: PretrainConfig) -> tuple[BenchArguments, set[str]]:
    spelled: list[str] = []
    rest = iter(words)
    rates = dropout_rates(loaded.model)
    spellings = SHORT_SPELLINGS | {"--dropout": [f"model.{name.replace('_', '-')}" for name in rates]}
    for word in rest:
        fields = spellings.get(word.replace("_", "-")) or None
        value = None if fields is None else next(rest, None)
        if fields is None or value is None:
            spelled.append(word)
        else:
            spelled += [f"--{name}={DTYPES.get(value, value) if word == '--dtype' else value}" for name in fields]
    return command_line(
        BenchArguments, PretrainConfig, program="bench", description=__doc__, argv=spelled, loaded=loaded
    )


def measure(arguments: BenchArguments) -> dict[str, Any]:
    """Return the measurements. JAX is imported here, when the command line is known to be right."""
    from jaxlm.evaluation.step_time import measure_step

    return measure_step(arguments)


def main() -> None:
    """Measure and print the result as one line of JSON."""
    arguments = parse(sys.argv[1:])
    from jaxlm.distributed.devices import prepare_process

    prepare_process()
    print(json.dumps(measure(arguments)), flush=True)


if __name__ == "__main__":
    run_command(main)
