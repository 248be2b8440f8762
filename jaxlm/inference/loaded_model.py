"""A trained model for programs in Python: scores, states and embeddings, generated text, predictions.

Each method shares its code with the command of the same purpose. Batches, their lengths and the mesh are chosen inside;
with several processes each must make the same calls. Methods that a model does not support raise InputError.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.config import from_json, of_call, to_json, with_fields
from jaxlm.distributed.mesh import MeshConfig, make_mesh, use_mesh
from jaxlm.errors import InputError, names_arguments
from jaxlm.inference.arguments import Pooling, Weights
from jaxlm.inference.generation import GenerationSettings, Generator
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.inference.prediction import ROWS_AT_A_TIME, Predictor, empty_rows, in_chunks, warn_of_rows
from jaxlm.inference.rows import default_batch_size
from jaxlm.inference.text_scoring import fill_masks, masked_texts, text_scorer
from jaxlm.inference.token_outputs import (
    Step,
    TokenRow,
    check_pooling,
    check_texts,
    logits_step,
    pooled,
    states_step,
    token_outputs,
    token_rows,
)
from jaxlm.models.model import Model
from jaxlm.ranges import Range
from jaxlm.tasks import CustomConfig, rows_of_records

_GENERATORS = 8  # settings whose compiled programs a model keeps


@names_arguments
def load(
    source: str | Path,
    *,
    batch_size: int = 32,
    beyond_length: bool = False,
    mesh: Mapping[str, Any] | None = None,
    custom: Mapping[str, Any] | None = None,
    weights: Weights = "average",
) -> "LoadedModel":
    """Load a trained model: a run, or published weights, which are read into memory.

    Args:
      source: A run, RUN or RUN@STEP, or the files of a published model: hf:DIR, openai:DIR or google:DIR.
      batch_size: Sequences per batch. Results do not depend on it beyond rounding.
      beyond_length: Use positions of the position table that were never trained; `generate` continues texts beyond the
        trained length, given their last tokens.
      mesh: Devices along each axis, as the flags of --mesh: `{"fsdp": 2}`. Default: all devices hold the whole model
        and share the rows of a batch.
      custom: Columns of the rows of a published model with a head, as for `run_finetuning`. Default: `text` or
        `sentence`.
      weights: average: the average of the parameters, or the best ones, if the run has them. raw: those of the last
        step.

    Returns:
      The model. Models are independent of each other and may be used from any thread.

    Raises:
      InputError: `source` is not a run or a model, or is damaged. The message says how to fix it.

    Example:
      >>> model = jaxlm.load("runs/gpt")
      >>> model.name, model.kind
      ('runs/gpt@7', 'language model')
    """
    Range(1).check("batch_size", from_json(int, to_json(batch_size), "batch_size"))
    if weights not in ("average", "raw"):
        raise InputError(f"weights must be average or raw, got {weights!r}; choose one of them")
    devices = make_mesh(with_fields(MeshConfig(), mesh or {}, "mesh"))
    columns = with_fields(CustomConfig(), custom or {}, "custom")
    run = load_model(source, mesh=devices, custom=columns, weights=weights)
    return LoadedModel(run, batch_size=default_batch_size(batch_size, devices), beyond_length=beyond_length)


class LoadedModel:
    """A trained model in memory; `load` returns it.

    name: RUN@STEP. length: the most tokens of a sequence, a very large number for models without positions.

    Example:
      >>> model = jaxlm.load("runs/bert")
      >>> model.kind, model.length
      ('masked language model', 32)
    """

    def __init__(self, run: LoadedRun, *, batch_size: int, beyond_length: bool) -> None:
        self.run, self.name, self.length = run, run.name, run.positions(beyond=beyond_length)
        self._batch_size, self._beyond_length = batch_size, beyond_length

    def __repr__(self) -> str:
        return f"<jaxlm.LoadedModel {self.name}: {self.kind}>"

    @property
    def kind(self) -> str:
        """The kind of the model: `language model`, `masked language model`, `encoder-decoder`, or the kind of its task:
        `classification`, `multilabel`, `regression`, `choice`, `span`, `tagging` or `text`.

        Example:
          >>> jaxlm.load("runs/tuned").kind
          'classification'
        """
        if self.run.task is not None:
            return self.run.task.kind
        if self.run.model.has_source:
            return "encoder-decoder"
        return "language model" if self.run.model.is_causal else "masked language model"

    @property
    def module(self) -> Model:
        """The model as a function of parameters, for programs in JAX: `module(params, inputs)` gives `Outputs`.

        `outputs.states` are those of the last layer, (B, L, D). `module.logits(params, outputs.states, outputs.output)`
        are the scores over the vocabulary, (B, L, V), and `module.loss` the sum of the negative log-likelihoods of
        given targets. All can be jitted and differentiated. `module.module` is the Flax module of the backbone.

        Example:
          >>> import numpy as np
          >>> model = jaxlm.load("runs/gpt")
          >>> inputs = jaxlm.Inputs(ids=np.array([[5, 6, 7]]), positions=np.arange(3)[None])
          >>> outputs = model.module(model.params, inputs)
          >>> model.module.logits(model.params, outputs.states, outputs.output).shape[:2]
          (1, 3)
        """
        return self.run.model

    @property
    def params(self) -> Any:
        """The parameters, a tree of arrays on the devices: `backbone`, and `head` where there is one.

        Example:
          >>> sorted(jaxlm.load("runs/tuned").params)
          ['backbone', 'head']
        """
        return self.run.params

    @property
    def labels(self) -> list[str]:
        """The names of the labels of a classifier or tagger, in the order of its outputs; else empty.

        Example:
          >>> jaxlm.load("runs/tuned").labels
          ['bad', 'good']
        """
        return [] if self.run.task is None else list(self.run.task.labels)

    @names_arguments
    def encode(self, texts: Sequence[str], *, truncate: bool = False) -> list[list[int]]:
        """Return the ids of each text as the model was trained to read them.

        An encoder reads CLS text SEP, a fine-tuned decoder start text extract, or with special_tokens end the text
        after the token that separates documents. A language model reads the text, after that token if its rows began
        with it.

        Args:
          texts: Texts, none of them empty unless the model has a token that begins a text.
          truncate: Keep the first tokens of texts that are longer than the model reads. Default: InputError.

        Example:
          >>> jaxlm.load("runs/bert").encode(["ba be"])
          [[2, 5, 6, 3]]
        """
        return [list(row.ids) for row in self._rows(texts, truncate)]

    @names_arguments
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids.

        Example:
          >>> jaxlm.load("runs/bert").decode([5, 6])
          'ba be'
        """
        size = self.run.tokenizer.size
        try:
            given = np.asarray(ids)
        except ValueError:  # of lists of different lengths
            given = np.array([math.nan])
        if given.size and (given.ndim != 1 or given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= size):
            raise InputError(f"ids must be a list of numbers from 0 to {size - 1}, got {str(ids):.80}; correct it")
        return self.run.tokenizer.decode(given.tolist())

    @names_arguments
    def logits(self, texts: Sequence[str] | Sequence[Sequence[int]], *, truncate: bool = False) -> list[np.ndarray]:
        """Return the scores over the vocabulary at each token of each text, float32 (tokens, vocabulary).

        A decoder's are those of the next token, an encoder's those of the token itself.

        Args:
          texts: Texts, which are encoded as by `encode`; or rows of ids, which are read as they are.
          truncate: See `encode`.

        Raises:
          InputError: The model has no scores over the vocabulary (a fine-tuned BERT), or a text is too long.

        Example:
          >>> [found.shape for found in jaxlm.load("runs/bert").logits(["ba be", "bo"])]
          [(4, 71), (3, 71)]
        """
        run, model = self.run, self.run.model
        run.require_one_text("logits")
        if not model.output_layer.available(run.params):
            raise InputError(
                f"{self.name} has no scores over the vocabulary, which fine-tuning {model.family.title} does not keep; "
                "load the model that it started from, or use predict"
            )
        return self._outputs(logits_step(model, run.mesh), texts, truncate, values=model.config.vocab_size)

    @names_arguments
    def hidden_states(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, truncate: bool = False
    ) -> list[np.ndarray]:
        """Return the states of each text, float32 (layers + 1, tokens, width): the embeddings, then every layer.

        Those of a model with a source are of its encoder. texts, truncate: see `logits`.

        Example:
          >>> [found.shape for found in jaxlm.load("runs/bert").hidden_states(["ba be"])]
          [(2, 4, 16)]
        """
        run, config = self.run, self.run.model.config
        layers = tuple(range(run.model.family.num_text_layers(config) + 1))
        step = states_step(run.model, layers, run.mesh)
        found = self._outputs(step, texts, truncate, values=len(layers) * config.width)
        return [np.swapaxes(states, 0, 1) for states in found]

    @names_arguments
    def embed(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        pooling: Pooling | Literal["cls"] = "mean",
        *,
        truncate: bool = False,
    ) -> np.ndarray:
        """Return a vector for each text, float32 (texts, width), from the states of the last layer.

        Args:
          texts: See `logits`.
          pooling: mean: the mean over all tokens that the model reads. first, or cls: the first token, of an encoder.
            last: the last token.
          truncate: See `encode`.

        Example:
          >>> jaxlm.load("runs/gpt").embed(["The cat sat.", "The dog lay on the rug."], pooling="last").shape
          (2, 16)
        """
        run, width = self.run, self.run.model.config.width
        if pooling not in ("mean", "first", "last", "cls"):
            raise InputError(f"pooling must be mean, first, last or cls, got {pooling!r}; choose one of them")
        kind: Pooling = "first" if pooling == "cls" else pooling
        check_pooling(kind, run.model, self.name)
        found = self._outputs(states_step(run.model, None, run.mesh), texts, truncate, values=width)
        vectors = [pooled(states[:, 0], kind) for states in found]
        return np.stack(vectors) if vectors else np.zeros((0, width), np.float32)

    @names_arguments
    def score(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the log-probability of each text, in nats, and the number of tokens that it covers.

        A decoder scores each token given those before it; an encoder masks one token at a time and gives the
        pseudo-log-likelihood (Salazar et al. 2020). The same as `jaxlm.evaluate score`.

        Example:
          >>> found = jaxlm.load("runs/gpt").score(["The cat sat on the mat."])
          >>> sorted(found[0]), found[0]["log_probability"] < 0
          (['log_probability', 'tokens'], True)
        """
        check_texts(texts)
        self.run.require_one_text("score")
        scorer = text_scorer(self.run, batch_size=self._batch_size, positions=self.length)
        found = scorer.score(scorer.encode(text, "", " ") for text in texts)
        return [{"log_probability": one.score.log_probability, "tokens": one.score.tokens} for one in found]

    @names_arguments
    def fill(self, text: str, *, top: int = 5) -> list[list[dict[str, Any]]]:
        """Return the best tokens for each [MASK] of a text, the most likely first, with an encoder.

        Each mask is filled given all other tokens, independently of the other masks.

        Example:
          >>> found = jaxlm.load("runs/bert").fill("ba [MASK] bo", top=3)
          >>> len(found), len(found[0]), sorted(found[0][0])
          (1, 3, ['piece', 'probability'])
        """
        Range(1).check("top", from_json(int, to_json(top), "top"))
        (masked,) = masked_texts(self.run, [text])
        return fill_masks(self.run, masked, top=top, positions=self.length)

    @names_arguments
    def generate(
        self,
        prompts: Sequence[str],
        *,
        length: int | None = None,
        min_length: int = 0,
        stop: Sequence[str] = (),
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        beams: int = 1,
        length_penalty: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Return the text that continues each prompt, without the prompt. The same as `jaxlm.generate`.

        Args:
          prompts: Texts to continue. An empty one starts a new text.
          length: Maximum number of new tokens. Default: 100, or less to stay within the trained length.
          min_length: Minimum number of new tokens before the text may end.
          stop: Texts that end a continuation, which ends before them.
          num_samples: Continuations of each prompt. Those of a prompt follow each other in the result.
          temperature: Temperature of sampling. 0 takes the most likely token.
          top_k: Sample from this many most likely tokens only; 0: from all.
          top_p: Sample from the fewest most likely tokens with this total probability; 1: from all.
          repetition_penalty: Divisor of positive scores of tokens that the text has; 1: off.
          beams: Number of beams of a beam search. 1: sampling.
          length_penalty: Exponent of the length in the ranking of beams.
          seed: Seed of the sampling.

        Raises:
          InputError: The model is an encoder, a setting is out of range, or a prompt is too long.

        Example:
          >>> texts = jaxlm.load("runs/gpt").generate(["The cat", "The dog"], length=4, temperature=0)
          >>> len(texts)
          2
        """
        check_texts(prompts, "prompts")
        settings = of_call(
            GenerationSettings,
            locals(),
            sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p},
            beyond_length=self._beyond_length,
            batch_size=self._batch_size,
        )
        return [sample.generated for samples in self._generator(settings)(prompts) for sample in samples]

    @names_arguments
    def predict(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        top_k: int | None = None,
        with_inputs: bool = False,
        embeddings: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the predictions for rows of a fine-tuned model's task. The same as `jaxlm.predict`.

        Args:
          rows: Dictionaries by the names of the columns that the model was trained on. Other columns are ignored.
          top_k: Number of labels or answers in `scores`, the most probable first. Default: all labels.
          with_inputs: Add every column of the row, and the gold label as `label` where there is one.
          embeddings: Add the vector that the task's head reads as `embedding`, a list of numbers; for choices a list
            per choice.

        Returns:
          A dictionary for each row: `index`; `prediction`, spelled as in the training files: a label, a score, the text
          of an answer or a list of tags; `scores`, a probability for each label; and the `tokens` of tags.

        Raises:
          InputError: The model is not fine-tuned, or a row lacks a column.

        Example:
          >>> found = jaxlm.load("runs/tuned").predict([{"text": "The cat sat."}])
          >>> sorted(found[0]), found[0]["prediction"] in ("bad", "good")
          (['index', 'prediction', 'scores'], True)
        """
        from_json(int | None, to_json(top_k), "top_k")
        predictor, found, num_truncated, empty = self._predictor(embeddings), list[dict[str, Any]](), 0, 0
        if not len(rows):
            return found
        with use_mesh(self.run.mesh):
            for examples in in_chunks(rows_of_records(rows, predictor.task, keep=with_inputs), ROWS_AT_A_TIME):
                lines, truncated = predictor.lines(examples, first=len(found), inputs=with_inputs, top_k=top_k)
                found, num_truncated, empty = found + lines, num_truncated + truncated, empty + empty_rows(examples)
        warn_of_rows("rows", len(found), truncated=num_truncated, empty=empty, limit=predictor.limit)
        return found

    @names_arguments
    def answer(self, question: str, context: str) -> dict[str, Any]:
        """Return the answer to a question in a text, as `predict` does, with a model fine-tuned on such questions.

        Example:
          >>> found = jaxlm.load("runs/answers").answer("ba ?", "ba be bi bo")
          >>> sorted(found), found["prediction"] in "ba be bi bo"
          (['prediction', 'scores'], True)
        """
        columns = self._columns_of("span", "answer", "questions on texts")
        return self._single({columns[0]: context, columns[1]: question})

    @names_arguments
    def tag(self, tokens: Sequence[str]) -> dict[str, Any]:
        """Return the tags of the tokens of a sentence, as `predict` does, with a model fine-tuned on tagged sentences.

        Example:
          >>> found = jaxlm.load("runs/tagger").tag(["ba", "be", "bi"])
          >>> sorted(found), len(found["prediction"])
          (['prediction', 'scores', 'tokens'], 3)
        """
        if isinstance(tokens, str):
            raise InputError("tokens must be a list of strings, got a string; split it, or use predict")
        columns = self._columns_of("tagging", "tag", "tagged sentences")
        return self._single({columns[0]: list(tokens)})

    @functools.cached_property
    def _predictor(self) -> Callable[[bool], Predictor]:
        return functools.cache(
            lambda embeddings: Predictor(self.run, "predict", batch_size=self._batch_size, embeddings=embeddings)
        )

    @functools.cached_property
    def _generator(self) -> Callable[[GenerationSettings], Generator]:
        return functools.lru_cache(_GENERATORS)(lambda settings: Generator(self.run, settings))

    def _columns_of(self, kind: str, method: str, rows: str) -> list[str]:
        """Return the first names of the columns of texts. InputError, with the method, for a task of another kind."""
        if self.kind != kind:
            raise InputError(f"{self.name} must be fine-tuned on {rows} for {method}, got the kind {self.kind!r}")
        return [names[0] for names in self._predictor(False).task.columns.texts]

    def _single(self, row: Mapping[str, Any]) -> dict[str, Any]:
        (found,) = self.predict([row])
        return {name: value for name, value in found.items() if name != "index"}

    def _rows(self, texts: Sequence[Any], truncate: bool) -> list[TokenRow]:
        longest = self.length if self.run.task is None else self._predictor(False).limit
        return token_rows(self.run, texts, longest=longest, truncate=truncate)

    def _outputs(self, step: Step, texts: Sequence[Any], truncate: bool, *, values: int) -> list[np.ndarray]:
        return token_outputs(
            step,
            self.run.params,
            self._rows(texts, truncate),
            mesh=self.run.mesh,
            batch_size=self._batch_size,
            longest=self.length,
            values=values,
        )
