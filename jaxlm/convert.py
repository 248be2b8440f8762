"""Import and export published models: `python -m jaxlm.convert import hf:PATH --run RUN`, `… export RUN --to hf:PATH`.

import creates a run directory from a published model, which serves as the start of other runs. export writes a run as a
directory that Hugging Face's `from_pretrained` loads, with tokenizer and model card, an ELMo as its published files,
elmo:PATH, or the encoder of an MT-LSTM as CoVe's, cove:FILE.safetensors. Both directions use every tensor exactly once.
--verify compares with the outputs of the other program.
"""

from typing import Annotated, Any

import tyro

from jaxlm.config import command_line
from jaxlm.errors import run_command
from jaxlm.inference.arguments import ExportArguments, ImportArguments

Command = (
    Annotated[ImportArguments, tyro.conf.subcommand("import")]
    | Annotated[ExportArguments, tyro.conf.subcommand("export")]
)
ARGUMENTS = (Command,)


def main() -> None:
    """Run the command."""
    kind: Any = Command  # a union: one subcommand each
    arguments, _ = command_line(kind, program="convert", description=__doc__)
    convert(arguments)


def convert(arguments: ImportArguments | ExportArguments) -> None:
    """Import or export. JAX is imported here, when the command line is known to be right."""
    import jax

    from jaxlm.inference.conversion import export_run, import_model

    jax.config.update("jax_platforms", "cpu")  # the only computation is that of checksums
    if isinstance(arguments, ImportArguments):
        import_model(arguments)
    else:
        export_run(arguments)


if __name__ == "__main__":
    run_command(main)
