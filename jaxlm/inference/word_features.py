"""Features of words from the layers of other models, which a network over words reads beside the words.

Peters et al. (2018, section 3.2) and McCann et al. (2017, section 4) give a task network the states of a model that
stays fixed; those of a translation model are the states of its encoder. They are computed once and kept in a file of
float32 numbers. Its name has a hash of what they depend on, the parameters of the model, the layers and the words, and
a hash of the numbers, so that a damaged file is detected and computed again. A word's states are those of its first
token; a word without a token has zeros. The state of a recurrent model is empty before each sentence.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.distributed.processes import first_process_decides
from jaxlm.errors import InputError
from jaxlm.files import atomic_file, remove_left
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.inference.token_outputs import TokenRow, arranged, states_step, token_outputs, worded
from jaxlm.models import build, family_of
from jaxlm.tasks.encoding import SpelledRows
from jaxlm.tasks.token_rows import first_tokens
from jaxlm.training.start import Source, source_of

log = logging.getLogger(__name__)

BATCH_SIZE = 32
_SPEC = re.compile(r"(?P<name>.+?)(?::(?P<layers>all|-?\d+(,-?\d+)*))?")


@dataclass(frozen=True)
class WordFeatures:
    """The features of words from one model. spec: RUN[:LAYERS], as given. source: the model's files.

    layers: those that are read, 0 are the embeddings, -1 is the last one.
    """

    spec: str
    name: str
    layers: tuple[int, ...]
    source: Source

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The number of layers and their width."""
        model = build(self.source.model)

        def layers(key: jax.Array) -> Any:
            return model.read({"backbone": model.init(key)}, model.example_inputs(), layers=True).layers

        return len(self.layers), int(jax.eval_shape(layers, jax.random.key(0)).shape[-1])

    def of(self, encoded: SpelledRows, mesh: Mesh, kept: Path | None) -> np.ndarray:
        """Return the features of the tokens of a split, float32 (tokens, layers, D).

        kept: a directory from which they are read, or into which they are written; None: they are computed.
        """
        sentences = encoded.sentences()
        name, shape = self._digest(sentences), (sum(map(len, sentences)), *self.shape)
        if not shape[0]:
            return np.zeros(shape, np.float32)
        file = None if kept is None else first_process_decides(lambda: _kept_file(kept, name, shape))
        if kept is not None and file is not None:
            return np.memmap(kept / file, np.float32, "r", shape=shape)
        found = self._computed(sentences, mesh)
        if kept is not None and jax.process_index() == 0:
            _keep(kept / f"{name}-{_hash_of(found)}.bin", found)
        return found

    def _digest(self, sentences: Sequence[Sequence[str]]) -> str:
        text = "\n".join(" ".join(words) for words in sentences)
        parts = (self.source.fingerprint, " ".join(map(str, self.layers)), text)
        return hashlib.sha256("\n\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _computed(self, sentences: Sequence[Sequence[str]], mesh: Mesh) -> np.ndarray:
        run = load_model(self.name, mesh=mesh)
        found = np.zeros((sum(map(len, sentences)), *self.shape), np.float32)
        first, step = 0, states_step(run.model, self.layers, run.mesh)
        rows = [_row_of(run, words) for words in sentences]
        values = self.shape[0] * self.shape[1]
        outputs = token_outputs(
            *(step, run.params, [row for row, _ in rows]),
            mesh=run.mesh,
            batch_size=BATCH_SIZE,
            longest=run.positions(beyond=False),
            values=values,
        )
        for words, (_, places), of_tokens in zip(sentences, rows, outputs, strict=True):
            has_token = np.flatnonzero(places >= 0)
            found[first + has_token] = of_tokens[places[has_token]]
            first += len(words)
        return found


def word_features(specs: Sequence[str], run: str) -> tuple[WordFeatures, ...]:
    """Return the features that RUN[:LAYERS] name, without a device. run: the directory of the run that reads them.

    InputError for another form, a missing run, or a layer that it does not have.
    """
    return tuple(_parsed(spec, run) for spec in specs)


def with_features(encoded: Any, features: Sequence[WordFeatures], mesh: Mesh, kept: Path | None = None) -> Any:
    """Return a split with the features of its words; see `WordFeatures.of`."""
    if not features:
        return encoded
    return dataclasses.replace(encoded, features=tuple(one.of(encoded, mesh, kept) for one in features))


def first_features(some: Any, rows: Any) -> Any:
    """Return the first rows of a split with the features that the split has for them."""
    return dataclasses.replace(some, features=tuple(of[: some.borders[-1]] for of in rows.features))


def _parsed(spec: str, run: str) -> WordFeatures:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InputError(f"word_features must be RUN or RUN:LAYERS, got {spec!r}; give layers as 0,1,2 or all")
    name, given = match["name"], match["layers"] or "all"
    source = source_of(run, name)
    most = family_of(source.model).num_text_layers(source.model)
    layers = tuple(range(most + 1)) if given == "all" else tuple(map(int, given.split(",")))
    if wrong := [layer for layer in layers if not -most - 1 <= layer <= most]:
        raise InputError(
            f"word_features must have layers from {-most - 1} to {most} for {name}, got {wrong[0]}; 0 are the "
            "embeddings, -1 is the last layer"
        )
    return WordFeatures(spec, name, layers, source)


def _hash_of(numbers: np.ndarray) -> str:
    return hashlib.sha256(numbers.data).hexdigest()[:16]


def _kept_file(kept: Path, name: str, shape: tuple[int, ...]) -> str | None:
    """Return the name of the file of some features, or None. A damaged file is removed."""
    for path in sorted(kept.glob(f"{name}-*.bin")):
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size == 4 * math.prod(shape):
                if path.stem == f"{name}-{_hash_of(np.memmap(path, np.float32, 'r', shape=shape))}":
                    return path.name
        log.warning("%s is damaged; its features are computed again", path)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _keep(file: Path, numbers: np.ndarray) -> None:
    """Write features to a file, if there is room for it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_left(file.parent, ".*.partial")
        with atomic_file(file, "wb") as opened:
            opened.write(numbers.data)
    except OSError as error:
        log.warning("%s cannot be written (%s); the next start computes these features again", file, error.strerror)


def _row_of(run: LoadedRun, words: Sequence[str]) -> tuple[TokenRow, np.ndarray]:
    """Return a sentence as a model reads it, and the place of each word in its outputs, int (words,); -1: none."""
    text, longest = " ".join(words), run.positions(beyond=False)
    if run.model.token_characters:
        row, _ = worded(run, text, longest)
        places = np.arange(len(words))
        return row, np.where(places < len(range(*row.kept.indices(len(row.ids)))), places, -1)
    ((ids, offsets),) = run.tokenizer.encode_batch_with_offsets([text])
    row, _ = arranged(run, [ids], longest)
    before = next((n for n, i in enumerate(row.ids) if [i] == ids[:1]), 0)  # 0 for words without a token
    places = np.full(len(words), -1)
    for token, word in enumerate(first_tokens(words, offsets)):
        if word >= 0 and before + token < len(row.ids):
            places[word] = before + token
    return row, places
