"""Decisions of a pretraining run that are made before a device is used: stores, start, length and data order."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from jaxlm.data.loader import Phase, phases
from jaxlm.data.store import Store, open_store
from jaxlm.errors import InputError
from jaxlm.interop.sources import KINDS
from jaxlm.models import build, with_vocabulary
from jaxlm.objectives.config import LanguageModel
from jaxlm.runs.directory import saved_config
from jaxlm.training.arguments import PretrainArguments
from jaxlm.training.config import PretrainConfig, one_duration, resolved_json
from jaxlm.training.initialization import matched_rows
from jaxlm.training.start import (
    OF_START,
    OTHER_STORE,
    Source,
    check_rows_of,
    check_tokenizer,
    kept_start_length,
    model_of_source,
    source_of,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """All decisions made before a device is used. num_steps: from the config, or computed from its epochs."""

    config: PretrainConfig
    num_steps: int
    stores: tuple[Store, ...]
    validation: tuple[Store, ...]
    source: Source | None
    phases: tuple[Phase, ...]
    rows_per_epoch: tuple[int, ...]
    """One number per phase."""
    matches_vocabulary: bool
    """True if the stores have a tokenizer of their own, whose rows come from the source."""


def plan(arguments: PretrainArguments, given: set[str]) -> Plan:
    """Open the stores and the start, fill in the config from them, and raise InputError for inconsistent arguments."""
    config = one_duration(arguments.settings, given)
    if not config.data.store:
        raise InputError("data.store must be given; name a token store that python -m jaxlm.prepare wrote")
    stores = tuple(open_store(path) for path in config.data.store)
    validation = tuple(open_store(path) for path in config.data.validation)
    if arguments.start_with == "state" and (arguments.start or "").startswith(KINDS):
        raise InputError(
            f"--start-with must be parameters for published weights, got state with {arguments.start}; leave it out"
        )
    source = None if arguments.start is None else source_of(arguments.run, arguments.start)
    expected, expected_of, remedy = stores[0].tokenizer_fingerprint, f"store {stores[0].path}", ""
    matched = arguments.start_vocabulary == "matched"
    if matched and (source is None or arguments.start_with == "state"):
        raise InputError(
            "--start-vocabulary must be same without the parameters of a --start, got matched; leave it out"
        )
    if source is not None and matched:
        model = model_of_source(source, config.model, given, saved_config(arguments.run))
        config = replace(config, model=with_vocabulary(model, stores[0].vocab_size))
        if not build(config.model).is_causal:
            raise InputError("--start-vocabulary must be same for an encoder, got matched; leave it out")
        matched_rows(source.tokenizer, stores[0].tokenizer())
    elif source is not None:
        expected, remedy = source.tokenizer.fingerprint, source.tokenizer_spec
        expected_of = source.name if remedy else f"the run {source.name}"
        config = replace(config, model=model_of_source(source, config.model, given, saved_config(arguments.run)))
        if build(config.model).is_causal and arguments.start_with == "parameters":
            remedy = f"{remedy or OTHER_STORE}, or give --start-vocabulary matched"
    elif config.model.vocab_size not in (0, stores[0].vocab_size):
        raise InputError(
            f"model.vocab_size must be 0 or {stores[0].vocab_size}, the size of the tokenizer of {stores[0].path}, got "
            f"{config.model.vocab_size}; leave it 0"
        )
    else:
        config = replace(config, model=replace(config.model, vocab_size=stores[0].vocab_size))
    for store in stores + validation:
        check_tokenizer("store", store.path, store.tokenizer_fingerprint, expected, expected_of, remedy)
        if arguments.verify_stores:
            store.verify()
    config = with_fitting_objective(config, given)
    config.check()
    check_selection(config)
    state_of = arguments.start if arguments.start_with == "state" else None
    check_rows_of(arguments.run, state_of)
    num_steps = config.num_steps
    if num_steps is None:
        if config.num_epochs is None:
            raise InputError("num_steps or num_epochs must be given; give one of them")
        num_steps = config.data.steps_of_passes(
            stores,
            length=config.length,
            batch_size=config.batch_size,
            num_epochs=config.num_epochs,
            seed=config.seed,
        )
        config = replace(config, num_steps=num_steps)
    found = phases(config.data, length=config.length, num_steps=num_steps)
    sizes: Any = {"batch_size": config.batch_size, "seed": config.seed}
    rows = tuple(config.data.rows(stores, length=phase.length, **sizes).rows for phase in found)
    for phase in found:  # fail here, not within a run
        config.data.check_validation(validation, phase.length)
    return Plan(config, num_steps, stores, validation, source, found, rows, matched)


def selects(config: PretrainConfig) -> bool:
    """Return True if validation losses decide which parameters are kept or when a run ends."""
    return config.select == "best" or config.patience is not None


def steered_by_validation(config: PretrainConfig) -> bool:
    """Return True if validation losses decide about parameters, so that the evaluations are a part of the run."""
    return selects(config) or config.average_iterates == "non_monotone"


def check_selection(config: PretrainConfig) -> None:
    """Raise InputError for a selection by validation losses without a store or an interval of evaluation."""
    if not selects(config):
        return
    with_it = "select best" if config.select == "best" else f"patience {config.patience}"
    if not config.data.validation:
        raise InputError(f"data.validation must be given with {with_it}, got none; name a token store to evaluate on")
    if not config.eval_every:
        raise InputError(f"eval_every must be above 0 with {with_it}, got 0; give the steps between evaluations")


def with_fitting_objective(config: PretrainConfig, given: set[str]) -> PretrainConfig:
    """Return `config` with the objective language_model if the command line makes its model causal."""
    if "objective.kind" in given or not build(config.model).is_causal or config.objective.kind == "language_model":
        return config
    log.info("objective: the model is causal and predicts the next token (objective.kind language_model)")
    return replace(config, objective=LanguageModel())


def fingerprints(plan: Plan) -> dict[str, Any]:
    """Return fingerprints of the run's data, independent of its location.

    The validation stores are part of it if their losses decide about training (`steered_by_validation`).
    """
    steers = steered_by_validation(plan.config)
    return {
        "tokenizer": plan.stores[0].tokenizer_fingerprint,
        "stores": [store.fingerprint for store in plan.stores],
        "data_order": plan.config.data.data_order,
        "start": None if plan.source is None else plan.source.fingerprint,
    } | ({"validation": [store.fingerprint for store in plan.validation]} if steers else {})


def resolved_config(arguments: PretrainArguments, planned: Plan) -> dict[str, Any]:
    """Return the content of the run's config.json."""
    source = planned.source
    of_source = None if source is None else source.trained_length
    return resolved_json(planned.config, fingerprints(planned)) | {
        "start": None if source is None else source.name,
        "start_with": None if source is None else arguments.start_with,
        "start_vocabulary": arguments.start_vocabulary,
        OF_START: kept_start_length(saved_config(arguments.run), of_source),
    }


def changes_length(config: PretrainConfig) -> bool:
    """Return True if num_steps determines the step at which rows get longer, even if this run does not reach it."""
    return any(0 < fraction < 1 for _, fraction in config.data.lengths(config.length))


def profiled_steps(arguments: PretrainArguments) -> tuple[int, int] | None:
    if arguments.profile is None:
        return None
    start, colon, end = arguments.profile.partition(":")
    if not (colon and start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise InputError(f"--profile must be START:STOP with START below STOP, got {arguments.profile}; correct it")
    return int(start), int(end)
