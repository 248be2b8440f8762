"""`evaluate score`: log-probabilities of sentences and choices, and predictions for [MASK]."""

import collections
import math
from collections.abc import Iterator
from typing import Any

from jaxlm.evaluation.arguments import Scoring
from jaxlm.evaluation.command import batch_size_for, opened, output_file, progress_of, say, values_json
from jaxlm.evaluation.scored_rows import ScoredRow, Tally, check_rows, row_result, row_text, rows_to_score
from jaxlm.inference.masked_lm_scoring import MaskedText, candidates_json, candidates_text
from jaxlm.inference.scoring import Scored
from jaxlm.inference.text_scorer import text_scorer


def evaluate_score(arguments: Scoring) -> dict[str, Any]:
    """Return the sum of log-probabilities and the accuracies, writing one line per row."""
    check_rows(arguments)
    run = opened(arguments)
    batch_size = batch_size_for(arguments.batch_size, run)
    positions = run.positions(beyond=arguments.beyond_length)
    scorer = text_scorer(run, batch_size=batch_size, positions=positions, top=arguments.top)
    pending: collections.deque[ScoredRow] = collections.deque()
    longer = 0

    def sequences() -> Iterator[Any]:
        nonlocal longer
        for row in rows_to_score(arguments, scorer.encode):
            pending.append(row)
            longer += sum(_positions(one) > positions for one in row.sequences)
            yield from row.sequences

    answered = scorer.score(sequences())
    tally = Tally()
    total, tokens, index = 0.0, 0, 0
    several = len(arguments.fields) > 1 or arguments.choice_list is not None
    with output_file(arguments.output) as file, progress_of("rows", active=arguments.output is not None) as progress:
        for first in answered:
            row = pending.popleft()
            found = [first, *(next(answered) for _ in row.sequences[1:])]
            scores = [one.score for one in found]
            total += sum(score.log_probability for score in scores)
            tokens += sum(score.tokens for score in scores)
            if first.candidates and not several:
                line: dict[str, Any] = {"index": index, "fillings": candidates_json(run.tokenizer, first.candidates)}
                text = candidates_text(row.texts[0], line["fillings"])
            else:
                line = row_result(index, row, scores, arguments.by, several)
                text = row_text(line, row, scores, several)
            if row.label is not None:
                tally.add(row, scores)
            if arguments.output is not None:
                file.write(values_json(line) + "\n")
            else:
                say(text)
            index += 1
            progress.count(None)
    mean = total / tokens if tokens else math.nan
    what = "rows of choices" if several else "sentences"
    given = "their context" if arguments.context and not run.model.family.is_encoder else scorer.given
    say(
        f"{run.name} on {arguments.input}: {index:,} {what}, {tokens:,} tokens scored given {given}",
        f"  log-probability {mean:.4f} nats per token, {total:.2f} in total",
        *([] if not tally.rows else [f"  accuracy        {tally.by_sum:.4f} by sum, {tally.by_mean:.4f} per token"]),
        *([f"  {longer:,} texts scored in chunks: {run.limit}"] if longer and positions < run.model.max_length else []),
    )
    values: dict[str, Any] = {"rows": index, "tokens": tokens, "log_probability": total, "per_token": mean}
    if tally.rows:
        by = {"sum": tally.by_sum, "per-token": tally.by_mean}
        values |= {"accuracy": by[arguments.by], "accuracy_sum": by["sum"], "accuracy_per_token": by["per-token"]}
    return {"run": run.name, "input": arguments.input} | values


def _positions(one: Scored | MaskedText) -> int:
    """Return the number of positions of a sequence: all but the last token in a decoder, with CLS and SEP in an
    encoder.
    """
    return len(one.ids) - 1 if isinstance(one, Scored) else len(one.ids) + 2
