"""Write tests/golden/conlleval.json from CoNLL's script: `cd tests && python -m parity.freeze_conlleval`.

Needs Perl, `conlleval` of version 2004-01-26, whose path the variable CONLLEVAL names, and CoNLL-2000's `test.txt` in
`$JAXLM_DATA/chunk/conll2000`. The script prints percentages with two decimals, and whole numbers of entities.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from parity import conlleval_case as case

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
if not os.environ.get("CONLLEVAL"):
    raise ImportError("the variable CONLLEVAL must name the script conlleval.pl")


def scores(truth: case.Sentences, guess: case.Sentences) -> dict[str, Any]:
    """Return the numbers that the script prints."""
    lines = [
        "".join(f"x {tag} {found}\n" for tag, found in zip(*pair, strict=True))
        for pair in zip(truth, guess, strict=True)
    ]
    command = ["perl", os.environ["CONLLEVAL"]]
    printed = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, check=True).stdout
    first, second, *types = printed.splitlines()
    tokens, given, found, correct = map(int, re.findall(r"\d+", first))
    accuracy, precision, recall, f1 = map(float, re.findall(r"\d+\.\d+", second))
    of_types = {}
    for line in types:
        name, _, numbers = line.partition(":")
        of_types[name.strip()] = [*map(float, re.findall(r"\d+\.\d+", numbers)), int(numbers.split()[-1])]
    return {
        "numbers": [tokens, given, found, correct],
        "percentages": [accuracy, precision, recall, f1],
        "types": of_types,
    }


def main() -> None:
    """Write the file."""
    tags = case.invented() | {"chunk": case.chunks(Path(os.environ["JAXLM_DATA"]) / "chunk/conll2000/test.txt")}
    found = {name: scores(*pair) for name, pair in tags.items()}
    (GOLDEN / "conlleval.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
