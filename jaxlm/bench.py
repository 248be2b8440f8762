"""Measure one training step: `python -m jaxlm.bench --model gpt1 --batch 4 --length 256`.

The step is the one that pretraining runs: forward, backward, global-norm clip at 1, AdamW; dropout is 0 unless asked
for. BERT's makes its masks too (15 % of the positions, gathered before the vocabulary projection), and NSP. Rows are
full ones of random ids, a pair each for BERT; with --store those of a token store as a run reads them, packed pairs
for BERT, and the tokens that are no padding are counted beside. FLOPs are counted as 6 x (non-embedding +
output-projection parameters used per token) + 12 x layers x width x length per slot of a row, halved for causal
attention. The last line of standard output is one JSON object.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxlm.config import command_line
from jaxlm.data.batch import Batch, PairBatch
from jaxlm.data.config import DataConfig, SentencePairs, Windows
from jaxlm.data.loader import batch_at
from jaxlm.data.phases import phased_rows
from jaxlm.data.store import open_store
from jaxlm.distributed.devices import peak_memory_gib, peak_tflops, prepare_process
from jaxlm.distributed.mesh import MeshConfig, check_batch, make_mesh, replicated, to_devices, use_mesh
from jaxlm.errors import InputError, run_command
from jaxlm.models.bert import BERT_BASE, BERT_LARGE, BertConfig
from jaxlm.models.gpt import GPT1, GPT2, GPTConfig
from jaxlm.nn.execution import Execution
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer import OptimizerConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import training_program
from jaxlm.training.step import settings_of

MODELS: dict[str, GPTConfig | BertConfig] = {
    "gpt1": GPT1,
    "gpt2": GPT2,
    "bert-base": BERT_BASE,
    "bert-large": BERT_LARGE,
}
LOG_EVERY = 10  # as a run does by default: the update norms are made in steps that are logged
DTYPES: dict[str, Literal["auto", "float32", "bfloat16"]] = {"auto": "auto", "f32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Arguments:
    """What is measured, and how."""

    model: Literal["gpt1", "gpt2", "bert-base", "bert-large"] = "gpt1"
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
    store: Path | None = None
    """A token store whose rows are trained on, and whose vocabulary the model has."""
    pairs_per_row: int = 0
    """Of BERT, with --store: the most pairs in a row; 1 is a pair and padding, 0 one for every 16 slots."""
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
    store = () if arguments.store is None else (str(arguments.store),)
    data: DataConfig = Windows(store=store)
    if isinstance(config, BertConfig):
        data = SentencePairs(store=store, pairs_per_row=arguments.pairs_per_row)
    data.check()
    run = PretrainConfig(
        config,
        data=data,
        optimizer=OptimizerConfig(peak_lr=1e-4, warmup=0, decay="constant"),
        execution=execution,
        batch_size=arguments.batch,
        length=arguments.length,
        mesh=arguments.mesh,
        micro_batches=arguments.micro_batches,
    )
    run, tokenizer, batches = _random_rows(run) if arguments.store is None else _rows_of_store(run, arguments)
    pretraining = make_pretraining(run, tokenizer)

    with use_mesh(mesh):
        program = training_program(pretraining, run, mesh)
        state = program.fresh_state(0)
        placed = [to_devices(batch, mesh, arguments.batch) for batch in batches]
        started = time.perf_counter()
        settings = replicated(settings_of(run.optimizer, 1, norms_every=LOG_EVERY), mesh)
        step = program.step.lower(state, placed[0], settings).compile()
        compile_seconds = time.perf_counter() - started
        times = []
        for number in range(arguments.warmup + arguments.steps):
            started = time.perf_counter()
            state, metrics = step(state, placed[number % len(placed)], settings)
            loss = float(metrics["loss"])
            jax.block_until_ready(state)
            times.append(time.perf_counter() - started)
    seconds = statistics.median(times[arguments.warmup :])
    tokens_per_second = arguments.batch * arguments.length / seconds
    tflops = tokens_per_second * pretraining.flops_per_token(arguments.length) / 1e12
    peak = peak_tflops()
    memory = peak_memory_gib()
    figures = {
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
    if arguments.store is None:
        return figures
    real = statistics.mean(float((np.asarray(batch.segments) > 0).sum()) for batch in batches)
    fill = real / (arguments.batch * arguments.length)
    return figures | {
        "store": str(arguments.store),
        "fill": round(fill, 4),
        "real_tokens_per_second": round(fill * tokens_per_second, 1),
    }


def _random_rows(run: PretrainConfig) -> tuple[PretrainConfig, None, list[Any]]:
    """A batch of random ids: full rows, a pair in each of an encoder's."""
    rows, length = run.batch_size, run.length
    rng = np.random.default_rng(0)
    positions_BL = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    if not isinstance(run.model, BertConfig):
        ids = rng.integers(run.model.vocab_size, size=(rows, length + 1)).astype(np.int32)
        weights = np.ones(positions_BL.shape, np.float32)
        batch = Batch(ids=ids[:, :-1], targets=ids[:, 1:], positions=positions_BL, segments=None, weights=weights)
        return run, None, [batch]
    ids = rng.integers(3, run.model.vocab_size, size=(rows, length)).astype(np.int32)
    ids[:, 0], ids[:, [length // 2, -1]] = 0, 1  # CLS and SEP, as make_pretraining has them without a tokenizer
    pairs = PairBatch(
        ids=ids,
        types=(positions_BL > length // 2).astype(np.int32),
        positions=positions_BL,
        segments=np.ones_like(ids),
        firsts=np.zeros((rows, 1), np.int32),
        next_labels=rng.integers(2, size=(rows, 1)).astype(np.int32),
        pair_weights=np.ones((rows, 1), np.float32),
        mask_seeds=rng.integers(2**32, size=(rows, 2), dtype=np.uint32),
    )
    return run, None, [pairs]


def _rows_of_store(run: PretrainConfig, arguments: Arguments) -> tuple[PretrainConfig, Any, list[Any]]:
    """The batches of a run's first steps on the store, as many as are measured."""
    store = open_store(run.data.store[0])
    num_steps = arguments.warmup + arguments.steps
    rows = phased_rows(
        [store], run.data, length=run.length, seed=run.seed, num_steps=num_steps, batch_size=run.batch_size
    )
    model = replace(run.model, vocab_size=store.vocab_size)
    batches = [batch_at(rows, step, run.batch_size) for step in range(num_steps)]
    return replace(run, model=model), store.tokenizer(), batches


def main() -> None:
    """Print what was measured."""
    arguments, _ = command_line(Arguments, program="bench", description=__doc__)
    prepare_process()
    print(json.dumps(measure(arguments)), flush=True)


if __name__ == "__main__":
    run_command(main)
