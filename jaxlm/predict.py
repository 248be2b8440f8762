"""Label new rows with a fine-tuned run: `python -m jaxlm.predict --run RUN --input new.csv [--output labelled.csv]`.

Rows are streamed and labelled in order, with `index` (0-based), `prediction` and `scores`. The prediction is spelled
as in the task's files: a label, a list of labels, a score, the text of an answer ("" for none), a generated text, or a
list of tags, which come with their `tokens`. `scores` has a probability for each label, the probability of an answer,
the log-probability of a generated text, or the probabilities of the tags; it is empty for a score. In CSV and TSV,
lists and scores are JSON in a cell, and cells are quoted as in CSV. An output that ends in .conll has a line
for each word with its tag, and an empty line after each sentence.
"""

import contextlib
import sys

from jaxlm.config import command_line
from jaxlm.errors import run_command
from jaxlm.inference.arguments import PredictArguments

ARGUMENTS = (PredictArguments,)


def predict(arguments: PredictArguments) -> int:
    """Label all rows and return their number. JAX is imported here, when the command line is known to be right."""
    from jaxlm.distributed.mesh import make_mesh, use_mesh
    from jaxlm.files import atomic_output
    from jaxlm.inference.loaded_run import load_model
    from jaxlm.inference.prediction import ROWS_AT_A_TIME, Predictor, empty_rows, in_chunks, warn_of_rows
    from jaxlm.inference.rows import default_batch_size
    from jaxlm.progress import Progress
    from jaxlm.tasks.predicted import LineWriter, Summary, check_output, check_top_k, format_of_output
    from jaxlm.tasks.registry import read_rows

    form = format_of_output(arguments.output)
    mesh = make_mesh(arguments.mesh)
    run = load_model(arguments.run, mesh=mesh, custom=arguments.custom, weights=arguments.weights)
    batch_size = default_batch_size(arguments.batch_size, mesh)
    predictor = Predictor(run, "predict", batch_size=batch_size, embeddings=arguments.embeddings)
    check_top_k(predictor.task, arguments.top_k)
    check_output(predictor.task, form)
    at_a_time = batch_size if arguments.input == "-" else max(ROWS_AT_A_TIME, batch_size)
    rows = read_rows(
        arguments.input,
        predictor.task,
        errors=arguments.errors,
        form=arguments.input_format,
        keep=arguments.with_inputs,
    )
    done, num_truncated, empty, summary = 0, 0, 0, Summary(type(predictor.task))
    progress = Progress("rows", active=arguments.output is not None)
    path = arguments.output
    with use_mesh(mesh), contextlib.nullcontext(sys.stdout) if path is None else atomic_output(path) as out:
        writer = LineWriter(out, form)
        for examples in in_chunks(rows, at_a_time):
            lines, truncated = predictor.lines(
                examples, first=done, inputs=arguments.with_inputs, top_k=arguments.top_k
            )
            writer.write(lines)
            summary.add(lines)
            out.flush()
            done, num_truncated, empty = done + len(examples), num_truncated + truncated, empty + empty_rows(examples)
            progress.update(done)
    if arguments.output is not None:
        progress.close()
        print(summary.text(str(arguments.output)))
    name = "standard input" if arguments.input == "-" else arguments.input
    warn_of_rows(name, done, truncated=num_truncated, empty=empty, limit=predictor.limit)
    return done


def main() -> None:
    """Run the command."""
    arguments, _ = command_line(PredictArguments, program="predict", description=__doc__)
    from jaxlm.distributed.devices import prepare_process

    prepare_process()
    predict(arguments)


if __name__ == "__main__":
    run_command(main)
