"""`evaluate task`: metrics of a fine-tuned run on another labelled file."""

from typing import Any

from jaxlm.distributed.mesh import make_mesh, use_mesh
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import OnTask
from jaxlm.evaluation.command import batch_size_for, output_file, say
from jaxlm.inference.loaded_run import load_model
from jaxlm.inference.predictor import Predictor
from jaxlm.tasks import read_labelled
from jaxlm.tasks.metrics.report import report_lines
from jaxlm.tasks.prediction_lines import LineWriter, format_of_output
from jaxlm.wording import counted


def evaluate_task(arguments: OnTask) -> dict[str, Any]:
    """Return the task's metrics on another labelled file."""
    form = format_of_output(arguments.output)
    mesh = make_mesh(arguments.mesh)
    run = load_model(arguments.run, mesh=mesh, custom=arguments.custom, weights=arguments.weights)
    predictor = Predictor(run, "evaluate task", batch_size=batch_size_for(arguments, run, mesh))
    task = predictor.task
    split = read_labelled(arguments.input, task, errors=arguments.errors)
    if not split.labelled:
        raise InputError(f"--input must have labels, got {arguments.input}; use python -m jaxlm.predict for new rows")
    encoded = predictor.encode(split.examples)
    with use_mesh(mesh):
        labelled = predictor.predict(encoded)
    threshold = task.threshold or 0.0 if task.no_answer else None  # tuned when the run was trained, never here
    predicted, figures = labelled.predicted(task, encoded, threshold)
    if arguments.output is not None:
        lines = [
            {"index": index, "prediction": prediction, "label": example.gold, "scores": scores}
            for index, ((prediction, scores), example) in enumerate(zip(predicted.lines, split.examples, strict=True))
        ]
        with output_file(arguments.output) as file:
            LineWriter(file, form).write(lines)
    report = predicted.report()
    counts = {"examples": encoded.num_examples, "truncated": encoded.truncated, "dropped": len(split.dropped)}
    say(
        f"{run.name} on {arguments.input}: {task.name}, {counted(encoded.num_examples, 'example')} of "
        f"{counted(split.rows_read, 'row')} read, {len(split.dropped)} dropped, {encoded.truncated} truncated to "
        f"{predictor.limit} tokens",
        *(f"  {name:<18}{value:.4f}" for name, value in figures.items()),
        *([] if task.positive is None else [f"  f1 is of the label {task.positive!r}"]),
        *(f"  {line}" for line in report_lines(report)),
    )
    found = {"run": run.name, "input": str(arguments.input), "task": task.name, "metric": task.metric}
    positive = {} if task.positive is None else {"positive": task.positive}
    return found | positive | figures | counts | {"report": report}
