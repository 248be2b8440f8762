"""Continue prompts with a trained language model: `python -m jaxlm.generate --run RUN --prompt 'It was'`.

An encoder fills the blanks of its prompts instead: `--prompt 'It was a [MASK] day.'` gives the best tokens for each.
The text printed begins with the decoded prompt. On a terminal a single sample appears while it is generated. Without
--prompt and --prompts each line of standard input is a prompt (blank lines are skipped). --prompt "" starts a new text.

A model of music (`--tokenizer events:performance`) continues the beginning of a MIDI file into another one: `--prompt
piece.mid --prompt-seconds 5 --output longer.mid`.

With --prompts FILE --output FILE a killed command continues: prompts that are answered in the output are left out, and
the result is the same. --output has a line for each sample: {"prompt": "It was", "sample": 0, "text": "It was cold.",
"generated": " cold.", "tokens": [310, 12], "ended": true}; with "stop", the stop string that ended the text, and
"score", of a beam search, where there is one; and with --log-probabilities "log_probabilities", one per token.
"""

import sys

from jaxlm.config import command_line
from jaxlm.errors import EXIT_FAILED, run_command
from jaxlm.flags import refuse_other_names
from jaxlm.inference.arguments import GenerateArguments

ARGUMENTS = (GenerateArguments,)

# Names of options in transformers and in other programs, and ours.
OTHER_NAMES = {
    "--max-new-tokens": "--length",
    "--max-tokens": "--length",
    "--max-length": "--length, the number of new tokens",
    "--min-new-tokens": "--min-length",
    "--num-beams": "--beams",
    "--num-return-sequences": "--num-samples",
    "--do-sample": "--temperature, which is 0 without sampling",
    "--stop-strings": "--stop",
    "--prompt-file": "--prompts",
}


def main() -> None:
    """Run the command."""
    refuse_other_names(sys.argv[1:], OTHER_NAMES)
    arguments, _ = command_line(GenerateArguments, program="generate", description=__doc__)
    generate(arguments)


def generate(arguments: GenerateArguments) -> None:
    """Answer the prompts. JAX is imported here, when the command line is known to be right."""
    from jaxlm.distributed.devices import prepare_process
    from jaxlm.inference.answers import answer

    prepare_process()
    try:
        answer(arguments)
    except KeyboardInterrupt:  # the usual way to end a long text, or a series of prompts, at a terminal
        print()
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    run_command(main)
