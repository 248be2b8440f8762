"""`evaluate perplexity`: perplexity of a language model on token stores."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxlm.config import to_json
from jaxlm.data.config import MEMBERS, DataConfig, Windows
from jaxlm.data.layouts.windows import ValidationWindows
from jaxlm.data.store import Store, open_store
from jaxlm.data.text_store import store_of_text
from jaxlm.distributed.mesh import host_rows, make_mesh, to_devices, use_mesh
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import Perplexity
from jaxlm.evaluation.command import batch_size_for, progress_of, say, write_figures
from jaxlm.evaluation.evaluation_steps import (
    Timed,
    check_rows,
    losses_by_position,
    make_position_step,
    make_sliding_step,
    position_lines,
    with_memory,
)
from jaxlm.evaluation.pointer_cache import make_cached_step, with_history
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.models.model import Model
from jaxlm.objectives.language_model import language_model
from jaxlm.training.config import check_layout, check_sizes
from jaxlm.training.program import CompiledStep, carry_of
from jaxlm.training.start import check_trained
from jaxlm.training.step import EvalStep, first_carry, make_eval_step
from jaxlm.training.validation import divide, metrics_of, text_notes, text_sizes, totals


def evaluate_perplexity(arguments: Perplexity) -> dict[str, Any]:
    """Return perplexity, bits per byte and accuracy on whole stores, or on a text file."""
    if (arguments.input is None) == (not arguments.data.store):
        got = "none" if arguments.input is None else "both"
        raise InputError(f"data.store must be given if input is not, got {got}; give one of them")
    mesh = make_mesh(arguments.mesh)
    run = load_model(arguments.run, mesh=mesh, weights=arguments.weights)
    remedy = "score sentences with python -m jaxlm.evaluate score, or read the validation metrics in its metrics.jsonl"
    model = run.decoder("evaluate perplexity", remedy)
    if arguments.input is not None:
        with store_of_text(arguments.input, run.tokenizer, arguments.errors) as store:
            return perplexity_of(arguments, run, model, (store,), str(arguments.input))
    stores = tuple(open_store(path) for path in arguments.data.store)
    for store in stores:
        check_store(store, run)
    return perplexity_of(arguments, run, model, stores, ", ".join(str(store.path) for store in stores))


def perplexity_of(
    arguments: Perplexity, run: LoadedRun, model: Model, stores: tuple[Store, ...], names: str
) -> dict[str, Any]:
    """Return the figures of stores, which are called `names` in the summary, on the run's mesh."""
    mesh = run.mesh
    length = arguments.length
    if length is None:
        length = run.config.length or run.model.max_length
    check_sizes(length, 1, run.model.config)
    check_trained("--length", length, run.trained_length, run.name, beyond=arguments.beyond_length)
    batch_size = batch_size_for(arguments, run, mesh)
    data = _layout_of(arguments, run)
    arguments.cache.check(data)
    check_rows(arguments, length, data)
    check_layout(run.model.config, data.layout, "layout")
    own = host_rows(batch_size, mesh)
    if arguments.stride is None:
        sizes: Any = {"length": length, "batch_size": batch_size, "host_rows": own, "versions": run.versions}
        batches = data.validation_rows(stores, **sizes)
    else:
        batches = ValidationWindows(stores, length, batch_size, own, stride=arguments.stride)
    arguments.cache.check_streams(batches.num_targets, batch_size)
    model = with_memory(model, arguments.memory, data, -(-batches.num_targets // batch_size))
    sizes = text_sizes(stores)
    with use_mesh(mesh), progress_of("batches", len(batches), compiles=True) as progress:
        from_host = (to_devices(batch, mesh, batch_size) for batch in batches)
        evaluate, make_carry = _step_of(model, arguments, data)
        step = Timed(CompiledStep("evaluation", jax.jit(evaluate)))
        carry = first_carry(make_carry, batch_size, mesh)
        sums = totals(lambda *given: progress.count(step(*given)), run.params, from_host, carry)
        figures = metrics_of(sums, **sizes)
        mixed = {"mixed": divide(*sums["mixed"])} if "mixed" in sums else {}
        figures["tokens_per_second"] = step.tokens_per_second(figures["tokens"])
    entropy = sum(store.unigram_entropy() * store.num_tokens for store in stores) / sum(s.num_tokens for s in stores)
    words, size = sizes["words"], sizes["bytes"]
    speed, timed = figures["tokens_per_second"], not math.isnan(figures["tokens_per_second"])
    per_character = [f"  bits per char   {figures['bits_per_character']:.4f}"] if sizes["characters"] else []
    say(
        f"{run.name} on {names}: {figures['tokens']:,} tokens, {words:,} words, {size:,} bytes, "
        f"in {data.describe_rows(batch_size)} of {length}",
        f"  loss            {figures['validation_loss']:.4f} nats per token (unigram entropy: {entropy:.4f})",
        f"  perplexity      {figures['perplexity']:.3f} per token, {figures['word_perplexity']:.3f} per word",
        f"  bits per byte   {figures['bits_per_byte']:.4f}",
        *per_character,
        f"  accuracy        {figures['accuracy']:.4f} of next-token prediction",
        *(f"  cache           mixed into {share:.1%} of the predictions" for share in mixed.values()),
        *([f"  speed           {speed:,.0f} tokens per second, without the first batch"] if timed else []),
        *(position_lines(sums, length) if arguments.by_position else ()),
        *(f"  note: {note}" for note in text_notes(run.tokenizer)),
    )
    found: dict[str, Any] = {"run": run.name}
    read_from_stores = arguments.input is None
    found |= {"stores": [str(store.path) for store in stores]} if read_from_stores else {"input": str(arguments.input)}
    found |= {"layout": data.layout, "length": length, "carry": carry_of(model, data, 1) is not None}
    given = {name: value for name, value in to_json(arguments.memory).items() if value is not None}
    found |= {"memory": given} if given else {}
    found |= {"streams": batch_size} if data.carries else {}
    found |= {"stride": arguments.stride} if arguments.stride is not None else {}
    found |= {"loss_by_position": losses_by_position(sums, length)} if arguments.by_position else {}
    found |= ({"cache": to_json(arguments.cache) | mixed} if arguments.cache.window else {}) | figures
    write_figures(arguments.output, found)
    return found


def _layout_of(arguments: Perplexity, run: LoadedRun) -> DataConfig:
    """Return the layout of an evaluation: the given one, or that of the run if each token has a target in it."""
    if arguments.layout is not None:
        return MEMBERS[arguments.layout]()
    return run.data if run.data.whole_text else Windows()


def _step_of(model: Model, arguments: Perplexity, data: DataConfig) -> tuple[EvalStep, Callable[[int], Any]]:
    """Return the step of an evaluation, and the function that makes its first carry for a number of rows."""
    make_carry: Callable[[int], Any] = partial(carry_of, model, data, cached=True)
    if arguments.stride is not None:
        return make_sliding_step(model, arguments.stride), make_carry
    if arguments.by_position:
        return make_position_step(model), make_carry
    if arguments.cache.window:
        return make_cached_step(model, arguments.cache), with_history(model, arguments.cache, make_carry)
    return make_eval_step(language_model(model, loss_chunks=0)), make_carry


def check_store(store: Store, run: LoadedRun) -> None:
    """Raise InputError for a store of another tokenizer, apart from special tokens that fine-tuning added."""
    tokenizer = store.tokenizer()
    specials = run.tokenizer.specials
    grown = tokenizer.with_specials(sorted(specials, key=lambda role: specials[role]))
    if run.tokenizer.fingerprint not in (tokenizer.fingerprint, grown.fingerprint):
        raise InputError(
            f"{store.path} was made with another tokenizer than {run.path}; prepare the text again with --tokenizer "
            f"{run.tokenizer_spec}"
        )
