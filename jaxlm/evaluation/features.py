"""Features of each token from chosen layers of an encoder (google-research/bert, `extract_features.py`).

One line per text, in the original's format: {"linex_index": n, "features": [{"token": PIECE, "layers": [{"index":
LAYER, "values": [...]}, ...]}, ...]}, values rounded to six decimals. Layer -1 is the last, 0 are the embeddings after
their norm (the original numbers its layers from 0 and has no embeddings).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import make_mesh
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import FeaturesOf
from jaxlm.evaluation.command import batch_size_for, output_file, progress_of, say
from jaxlm.inference.loaded_run import load_run
from jaxlm.inference.token_outputs import TokenRow, states_step, token_outputs
from jaxlm.models.family import Model
from jaxlm.tasks.batching.bert_inputs import arrange_segments
from jaxlm.tasks.reading.files import numbered_lines, open_input
from jaxlm.text import Tokenizer
from jaxlm.training.config import check_sizes
from jaxlm.training.trained_length import check_trained
from jaxlm.wording import counted

SEPARATOR = " ||| "  # of the two texts of a line; the last one counts, as in the original's greedy pattern
DECIMALS = 6


class TokenFeatures(NamedTuple):
    """Tokens of a text with CLS and SEP, and values, float32 (tokens, layers, D). cut: whether it was truncated."""

    pieces: list[str]
    values: np.ndarray
    cut: bool

    def to_json(self, index: int, layers: Sequence[int]) -> dict[str, Any]:
        """Return the line of the output."""
        rounded = np.round(self.values.astype(np.float64), DECIMALS).tolist()
        features = [
            {
                "token": piece,
                "layers": [{"index": k, "values": values} for k, values in zip(layers, of_token, strict=True)],
            }
            for piece, of_token in zip(self.pieces, rounded, strict=True)
        ]
        return {"linex_index": index, "features": features}


def check_layers(model: Model, layers: Sequence[int]) -> None:
    """Raise InputError for a layer that the model does not have."""
    most = model.config.num_layers
    for layer in layers:
        if not -most - 1 <= layer <= most:
            raise InputError(
                f"--layers must be from {-most - 1} to {most}, got {layer}; 0 are the embeddings, -1 is the last layer"
            )


def token_features(
    model: Model,
    params: Any,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    layers: Sequence[int],
    *,
    mesh: Mesh,
    batch_size: int,
    length: int,
) -> Iterator[TokenFeatures]:
    """Yield the features of each text, or pair of texts separated by ` ||| `, in order.

    Every process must call this with the same texts. Raises InputError for a layer that does not exist.
    """
    check_batch(batch_size, 1, mesh)
    check_layers(model, layers)
    step, values, source = states_step(model, tuple(layers), mesh), len(layers) * model.config.width, iter(texts)
    while some := list(islice(source, batch_size)):
        rows, cuts = zip(*(_arranged(tokenizer, text, length) for text in some), strict=True)
        found = token_outputs(step, params, rows, mesh=mesh, batch_size=batch_size, longest=length, values=values)
        for row, of_tokens, cut in zip(rows, found, cuts, strict=True):
            yield TokenFeatures(tokenizer.pieces(row.ids), of_tokens, cut)


def _arranged(tokenizer: Tokenizer, text: str, length: int) -> tuple[TokenRow, bool]:
    parts = [tokenizer.encode(part) for part in text.rsplit(SEPARATOR, 1)]
    form: Any = "single" if len(parts) == 1 else "entailment"
    (ids,), (second,), cut = arrange_segments(parts, [], form, tokenizer.specials, length)
    return TokenRow(list(ids), int(second)), cut


def evaluate_features(arguments: FeaturesOf) -> dict[str, Any]:
    """Write the features of each line of the input, and return counts."""
    if arguments.output is None:
        raise InputError("--output must be given for features; name a file")
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run, mesh=mesh)
    if run.model.family.context == "causal":
        raise InputError(f"--run must be an encoder (bert) for evaluate features, got the decoder {run.path}")
    length = arguments.length or run.positions(beyond=arguments.beyond_length)
    check_sizes(length, 1, run.model.config)
    check_trained("--length", length, run.trained_length, run.name, beyond=arguments.beyond_length)
    batch_size = batch_size_for(arguments, run, mesh)
    name = "standard input" if arguments.input == "-" else arguments.input
    count = tokens = cut = 0
    with open_input(arguments.input) as stream, output_file(arguments.output) as file, progress_of("rows") as progress:
        texts = (text for _, text in numbered_lines(stream, name, arguments.errors))
        for found in token_features(
            run.model,
            run.params,
            run.tokenizer,
            texts,
            arguments.layers,
            mesh=mesh,
            batch_size=batch_size,
            length=length,
        ):
            file.write(json.dumps(found.to_json(count, arguments.layers), ensure_ascii=False) + "\n")
            count, tokens, cut = count + 1, tokens + len(found.pieces), cut + found.cut
            progress.count(None)
    say(
        f"{run.name} on {name}: {counted(count, 'line')}, {counted(tokens, 'token')}, {cut} truncated to {length} "
        "tokens"
    )
    figures = {"lines": count, "tokens": tokens, "truncated": cut, "layers": list(arguments.layers)}
    return {"run": run.name, "input": arguments.input, "output": str(arguments.output)} | figures
