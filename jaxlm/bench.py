"""Measure one training step: `python -m jaxlm.bench --model gpt1 --batch 4 --length 256`.

The step is the one that pretraining runs: forward, backward, global-norm clip at 1, AdamW; dropout is 0 unless asked
for. BERT's makes its masks too (15 % of the positions, gathered before the vocabulary projection), and NSP, of one pair
a row. FLOPs are counted as 6 x (non-embedding + output-projection parameters used per token) + 12 x layers x width x
length per token, halved for causal attention. The last line of standard output is one JSON object.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.batch import Batch, PairBatch
from jaxlm.config import command_line
from jaxlm.devices import peak_memory_gib, peak_tflops, prepare_process
from jaxlm.errors import InputError, run_command
from jaxlm.heads import MaskedLMHead, NextSentenceHead
from jaxlm.masking import MaskingConfig, Specials, predictions_of
from jaxlm.models import bert, gpt
from jaxlm.models.bert import BERT_BASE, BERT_LARGE, Bert, BertConfig
from jaxlm.models.gpt import GPT, GPT1, GPTConfig
from jaxlm.nn.execution import Execution
from jaxlm.objectives import Objective, language_model, masked_language_model
from jaxlm.optim import OptimizerConfig, decay_mask, make_optimizer
from jaxlm.sharding import MeshConfig, check_batch, make_mesh, to_devices, use_mesh
from jaxlm.training.state import InitParams, abstract_state, fresh_state
from jaxlm.training.step import make_train_step

MODELS: dict[str, GPTConfig | BertConfig] = {"gpt1": GPT1, "bert-base": BERT_BASE, "bert-large": BERT_LARGE}
LOG_EVERY = 10  # as a run does by default: the update norms are made in steps that are logged
DTYPES: dict[str, Literal["auto", "float32", "bfloat16"]] = {"auto": "auto", "f32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Arguments:
    """What is measured, and how."""

    model: Literal["gpt1", "bert-base", "bert-large"] = "gpt1"
    batch: int = 8
    """Sequences in the global batch."""
    length: int = 512
    """Tokens in a sequence."""
    dtype: Literal["auto", "f32", "bf16"] = "auto"
    """auto: bfloat16 on accelerators, float32 on the CPU."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    dropout: float = 0.0
    steps: int = 10
    """Steps that are timed; the median counts."""
    warmup: int = 3
    micro_batches: int = 1
    remat: Literal["none", "dots", "full"] = "none"
    unroll: int = 0
    """Layers per iteration of the layer loop; 0: all on the CPU, one elsewhere."""
    loss_chunks: int = 0
    """Pieces of the length in which the loss is made; 0: chosen."""
    mesh: MeshConfig = MeshConfig()


def measure(arguments: Arguments) -> dict:
    """Compile the step, run it, and return the figures."""
    config = MODELS[arguments.model]
    config = replace(
        config,
        num_positions=max(config.num_positions, arguments.length),
        num_layers=arguments.layers or config.num_layers,
        width=arguments.width or config.width,
        num_heads=arguments.heads or config.num_heads,
        feed_forward_width=4 * arguments.width if arguments.width else config.feed_forward_width,
        dropout_rate=arguments.dropout,
        embedding_dropout_rate=arguments.dropout,
        attention_dropout_rate=arguments.dropout,
    )
    config.check()
    execution = Execution(
        dtype=DTYPES[arguments.dtype],
        remat=arguments.remat,
        unroll=arguments.unroll,
        loss_chunks=arguments.loss_chunks,
    )
    if arguments.loss_chunks < 0 or (arguments.loss_chunks and arguments.length % arguments.loss_chunks):
        raise InputError(f"--loss-chunks {arguments.loss_chunks}: --length {arguments.length} must be divisible by it")
    mesh = make_mesh(arguments.mesh)
    check_batch(arguments.batch, arguments.micro_batches, mesh)
    work = _encoder if isinstance(config, BertConfig) else _decoder
    init_params, objective, batch, flops_per_token = work(config, execution, arguments)

    with use_mesh(mesh):
        mask = decay_mask(jax.eval_shape(init_params, jax.random.key(0)))
        optimizer = make_optimizer(OptimizerConfig(peak_lr=1e-4, warmup=0, decay="constant"), 1, mask)
        abstract = abstract_state(init_params, optimizer, mesh)
        state = fresh_state(init_params, optimizer, abstract, 0)
        step = make_train_step(objective, optimizer, micro_batches=arguments.micro_batches, norms_every=LOG_EVERY)
        batch = to_devices(batch, mesh, arguments.batch)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        started = time.perf_counter()
        step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, batch).compile()
        compile_seconds = time.perf_counter() - started
        times = []
        for _ in range(arguments.warmup + arguments.steps):
            started = time.perf_counter()
            state, metrics = step(state, batch)
            loss = float(metrics["loss"])
            jax.block_until_ready(state)
            times.append(time.perf_counter() - started)
    seconds = statistics.median(times[arguments.warmup :])
    tokens_per_second = arguments.batch * arguments.length / seconds
    tflops = tokens_per_second * flops_per_token / 1e12
    peak = peak_tflops()
    memory = peak_memory_gib()
    return {
        "model": arguments.model,
        "layers": config.num_layers,
        "width": config.width,
        "batch": arguments.batch,
        "length": arguments.length,
        "dtype": execution.compute_dtype().name,
        "device": jax.devices()[0].device_kind,
        "devices": mesh.size,
        "loss": loss,
        "compile_seconds": round(compile_seconds, 2),
        "step_seconds": round(seconds, 5),
        "tokens_per_second": round(tokens_per_second, 1),
        "model_tflops_per_second": round(tflops, 4),
        "mfu": None if peak is None else round(tflops / (peak * mesh.size), 4),
        "peak_memory_gib": None if memory is None else round(memory, 2),
    }


Work = tuple[InitParams, Objective, Any, float]  # parameters, what is minimised, a batch, FLOPs per token


def _decoder(config: Any, execution: Execution, arguments: Arguments) -> Work:
    rows, length = arguments.batch, arguments.length
    model = GPT(config, execution)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=(rows, length + 1)).astype(np.int32)
    positions_BL = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    batch = Batch(
        ids=ids[:, :-1],
        targets=ids[:, 1:],
        positions=positions_BL,
        segments=None,
        weights=np.ones(positions_BL.shape, np.float32),
    )

    def init_params(key: jax.Array) -> Any:
        return {"backbone": model.init(key, ids[:1, :1], positions_BL[:1, :1])["params"]}

    objective = language_model(model, loss_chunks=arguments.loss_chunks)
    return init_params, objective, batch, gpt.model_flops_per_token(config, length)


def _encoder(config: Any, execution: Execution, arguments: Arguments) -> Work:
    rows, length = arguments.batch, arguments.length
    model, masked_lm, next_sentence = Bert(config, execution), MaskedLMHead(config), NextSentenceHead(config.init_std)
    specials = Specials(cls=0, sep=1, mask=2)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.vocab_size, size=(rows, length)).astype(np.int32)
    ids[:, 0], ids[:, [length // 2, -1]] = specials.cls, specials.sep
    positions_BL = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    batch = PairBatch(
        ids=ids,
        types=(positions_BL > length // 2).astype(np.int32),
        positions=positions_BL,
        segments=np.ones_like(ids),
        firsts=np.zeros((rows, 1), np.int32),
        next_labels=rng.integers(2, size=(rows, 1)).astype(np.int32),
        pair_weights=np.ones((rows, 1), np.float32),
        mask_seeds=rng.integers(2**32, size=(rows, 2), dtype=np.uint32),
    )

    def init_params(key: jax.Array) -> Any:
        keys, states = jax.random.split(key, 3), jnp.zeros((1, 1, config.width))
        return {
            "backbone": model.init(keys[0], ids[:1, :1], positions_BL[:1, :1])["params"],
            "head": {
                "masked_lm": masked_lm.init(keys[1], states)["params"],
                "next_sentence": next_sentence.init(keys[2], states)["params"],
            },
        }

    masking = MaskingConfig()
    slots = predictions_of(length, masking.rate)
    objective = masked_language_model(
        model,
        masked_lm,
        next_sentence,
        masking=masking,
        specials=specials,
        continues=None,
        slots=slots,
        loss_chunks=arguments.loss_chunks,
    )
    return init_params, objective, batch, bert.model_flops_per_token(config, length, slots / length)


def main() -> None:
    """Print what was measured."""
    arguments, _ = command_line(Arguments, program="bench", description=__doc__)
    prepare_process()
    print(json.dumps(measure(arguments)), flush=True)


if __name__ == "__main__":
    run_command(main)
