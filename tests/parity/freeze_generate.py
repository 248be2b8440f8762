"""Write tests/golden/generated.json from Hugging Face: `cd tests && python -m parity.freeze_generate`.

Needs PyTorch and transformers (the extra [parity]).
"""

import json
from pathlib import Path

from parity import generate_case, published_torch
from parity import published_case as case

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def main() -> None:
    """Write what `generate` finds, and print how many sequences of each setting end before the longest length."""
    answers = {name: published_torch.generated(name) for name in case.DECODERS}
    for name, by_title in answers.items():
        for title, prompts in by_title.items():
            lengths = [len(found["ids"]) for rows in prompts for found in rows]
            print(name, title, sum(length < generate_case.NEW for length in lengths), "of", len(lengths), lengths[:12])
    (GOLDEN / "generated.json").write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
