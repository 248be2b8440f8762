"""Time every family here and in PyTorch, in turn, and print one table: `cd tests && python -m parity.speed DATA`.

DATA has GPT-2's `encoder.json` and `vocab.bpe` in `vocab/gpt2`. The rows are those of the scripts NAME_speed, which
describe what they time. The machine must be idle.
"""

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPTS = {
    "gpt_speed": "GPT",
    "bert_speed": "BERT-Base",
    "lstm_speed": "LSTM",
    "awd_lstm_speed": "AWD-LSTM",
    "transformer_xl_speed": "Transformer-XL",
    "character_transformer_speed": "character Transformer",
    "t5_speed": "T5 small",
    "elmo_speed": "ELMo",
    "mt_lstm_speed": "MT-LSTM",
    "cvt_speed": "cross-view training",
}
ROUND = re.compile(r"(\w+): jaxlm ([\d.]+) s, torch ([\d.]+) s, speed ([\d.]+)")


def rows_of(system: str, output: str) -> list[str]:
    """Return a row of the table for each measure of a script's output, with medians and the range of the ratios."""
    measures: dict[str, list[list[float]]] = {}
    for what, *numbers in ROUND.findall(output):
        measures.setdefault(what, []).append([float(number) for number in numbers])
    rows = []
    for what, rounds in measures.items():
        ours, theirs, ratios = zip(*rounds, strict=True)
        seconds = f"{statistics.median(ours):.3f} | {statistics.median(theirs):.3f}"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(f"| {system}, {what} | {seconds} | {statistics.median(ratios):.2f} | {spread} |")
    return rows


def main() -> None:
    """Run the scripts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SCRIPTS, nargs="+", default=list(SCRIPTS), help="scripts to run")
    arguments = parser.parse_args()
    of_script = {"gpt_speed": [str(arguments.data / "vocab/gpt2")]}
    rows = ["| program | jaxlm, s | PyTorch, s | speed | range |", "|---|---|---|---|---|"]
    for script in arguments.only:
        command = [sys.executable, "-m", f"parity.{script}", *of_script.get(script, [])]
        with subprocess.Popen(
            [*command, "--rounds", str(arguments.rounds)], stdout=subprocess.PIPE, text=True
        ) as process:
            output = ""
            for line in process.stdout:
                print(f"{SCRIPTS[script]}: {line}", end="", file=sys.stderr, flush=True)
                output += line
        if process.returncode:
            raise SystemExit(f"parity.{script} failed with exit code {process.returncode}")
        rows += rows_of(SCRIPTS[script], output)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
