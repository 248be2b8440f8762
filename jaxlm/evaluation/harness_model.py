"""A run as a model of the lm-evaluation-harness, for Python and under the harness's name `jaxlm`.

`lm_eval.simple_evaluate(model=HarnessModel("runs/gpt1"), tasks=[...])`; once this module is imported,
`lm_eval.simple_evaluate(model="jaxlm", model_args="run=runs/gpt1", tasks=[...])` too. It needs the package lm_eval,
version 0.4.13 (the extra `harness`), and no PyTorch.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from jaxlm.distributed.config import MeshConfig
from jaxlm.distributed.mesh import make_mesh
from jaxlm.errors import InputError
from jaxlm.evaluation.opening import batch_size_for
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.zero_shot.harness_requests import Answered, GenerationRequests, HarnessRequests


@register_model("jaxlm")
class HarnessModel(TemplateLM):
    """A run that answers the harness's requests: batched, sorted by length, and on all devices.

    run: RUN, RUN@STEP, published weights (hf:DIR), or a run that is open; then `mesh` is its own. batch_size: sequences
    per batch; "auto": that of the run. beyond_length: use positions that were never trained. prefix_token_id: the id in
    front of a text without a context; default: `start`, else `end`. seed: of sampling. max_batch_size, device:
    arguments that the harness gives to every model; they must be None.
    With several processes each must evaluate the same tasks; the harness reports and writes on process 0.
    """

    def __init__(
        self,
        run: str | LoadedRun,
        *,
        batch_size: int | str | None = None,
        beyond_length: bool = False,
        prefix_token_id: int | None = None,
        seed: int = 0,
        mesh: Mesh | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("max_batch_size", max_batch_size), ("device", device)):
            if value is not None:
                raise InputError(f"--{name} must be left out for a model of jaxlm, got {value}; leave it out")
        if not isinstance(run, LoadedRun):
            run = load_model(run, mesh=make_mesh(MeshConfig()) if mesh is None else mesh)
        run.require_one_text("the harness")
        size = run.tokenizer.size
        if prefix_token_id is not None and not 0 <= prefix_token_id < size:
            raise InputError(f"--prefix-token-id must be from 0 to {size - 1}, got {prefix_token_id}; give another")
        self.run = run
        self.requests = HarnessRequests(
            run,
            batch_size=_batch_size(batch_size, run),
            beyond_length=beyond_length,
            prefix=None if prefix_token_id is None else [prefix_token_id],
        )
        self._generation = GenerationRequests(self.requests, seed=seed)
        if jax.process_count() > 1:  # the harness reports where this is 0, and gives all requests to every process
            os.environ["LOCAL_RANK"] = str(jax.process_index())

    def __str__(self) -> str:
        return f"jaxlm {self.run.name}"

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        """The id that ends a text; None without one."""
        return self.run.tokenizer.specials.get("end")

    @property
    def prefix_token_id(self) -> int | None:
        """The id in front of a text without a context; None without one."""
        return next(iter(self.requests.prefix), None)

    @property
    def max_length(self) -> int:
        """The most positions in use."""
        return self.requests.longest

    @property
    def batch_size(self) -> int:
        """Sequences per batch."""
        return self.requests.batch_size

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer, for the harness's caches."""
        return self.run.tokenizer.fingerprint[:16]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text. No special token is added."""
        return self.run.tokenizer.encode(string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-probability, True if greedy) of each request's continuation, in nats."""
        pairs = [request.args for request in requests]
        return self.requests.log_likelihoods(pairs, self._kept("loglikelihood", pairs))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each request's text, in nats."""
        texts = [request.args for request in requests]
        return self.requests.rolling([text for (text,) in texts], self._kept("loglikelihood_rolling", texts))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each request's context."""
        prompts = [request.args for request in requests]
        return self._generation(prompts, self._kept("generate_until", prompts))

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        return self.requests.token_log_likelihoods([(context, rest) for _, context, rest in requests])

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Raise InputError: a run has no chat template."""
        raise InputError(f"--apply_chat_template must be left out for {self.run.name}, which has none; leave it out")

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts of the model for the harness's results."""
        leaves = jax.tree.leaves(self.run.params["backbone"])
        return {
            "model": "jaxlm",
            "model_num_parameters": sum(leaf.size for leaf in leaves),
            "model_dtype": str(self.run.model.execution.compute_dtype()),
            "model_run": self.run.name,
            "max_length": self.max_length,
            "prefix_token_id": self.prefix_token_id,
        }

    def _kept(self, kind: str, arguments: Sequence[Any]) -> Answered:
        """Return a function that saves an answer in the harness's cache, for an evaluation that is interrupted."""

        def keep(index: int, answer: Any) -> None:
            self.cache_hook.add_partial(kind, arguments[index], answer)

        return keep


def _batch_size(given: int | str | None, run: LoadedRun) -> int:
    """Return the batch size, by default that of the run's evaluation."""
    if given in (None, "auto"):
        return batch_size_for(None, run)
    if not str(given).isdecimal() or int(given) < 1:
        raise InputError(f"--batch-size must be at least 1, or auto, got {given}; give auto")
    return batch_size_for(int(given), run)
