"""The memory that `prepare` takes for large documents."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_text import paragraphs
from toy_tokenizers import byte_level

from jaxlm.data.preparation import PrepareConfig, prepare
from jaxlm.data.store import open_store
from jaxlm.text import train_sentencepiece

ROOT = Path(__file__).resolve().parents[2]


def test_the_estimate_says_what_a_large_document_takes(tmp_path, capsys, monkeypatch):
    """Fails on 2968321: a vocabulary that needs whole documents runs out of memory without a word before."""
    monkeypatch.setattr("jaxlm.data.preparation.LARGE_MEMORY", 4 << 20)
    text = tmp_path / "one.txt"
    text.write_text("\n".join(paragraphs(400)), encoding="utf-8")
    size, said = text.stat().st_size, []
    assert 120 * size > 4 << 20
    for name, options in (("cuts", {}), ("whole", {"add_prefix_space": True})):
        byte_level(**options).save(str(tmp_path / f"{name}.json"))
        prepare(PrepareConfig((f"text:{text}",), f"hf:{tmp_path}/{name}.json", str(tmp_path / name), workers=1))
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("memory: ")])
    assert not said[0], "it is encoded in blocks"
    assert len(said[1]) == 1 and f"{size / 1e3:,.1f} kB of text" in said[1][0] and "GB in one worker" in said[1][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("lines", "sentencepiece"),
        ("text", "hf"),
        pytest.param("text", "sentencepiece", marks=pytest.mark.campaign),
    ],
)
def test_memory_does_not_grow_with_the_text(tmp_path, kind, scheme):
    """One document of 24 MB, in one file, takes hardly more memory than one of 2 MB.

    Fails on 2968321 for `hf`: 120 bytes of memory for each of a document.
    """
    from tokenizers import trainers

    train_sentencepiece(paragraphs(300), 420).save(tmp_path / "tokenizer")
    library = byte_level()
    library.train_from_iterator(paragraphs(300), trainers.BpeTrainer(vocab_size=420, show_progress=False))
    library.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    spec = f"hf:{tmp_path}/tokenizer/tokenizer.json"
    if scheme == "sentencepiece":
        spec = f"sentencepiece:{tmp_path}/tokenizer/sentencepiece.model"
    block = "\n".join(paragraphs(6000)) + "\n"
    program = (
        "import resource, sys; from pathlib import Path; from jaxlm.data.preparation import *;"
        "prepare(PrepareConfig((sys.argv[1],), sys.argv[2], sys.argv[3], workers=1));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for copies in (2, 24):
        size = 0
        with (tmp_path / f"{copies}.txt").open("w", encoding="utf-8") as file:
            while size < copies * 1e6:
                size += file.write(block)
        arguments = [f"{kind}:{tmp_path}/{copies}.txt", spec]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments, str(tmp_path / f"store{copies}")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert open_store(tmp_path / "store24").documents == 1
    assert peaks[1] < peaks[0] + 30, f"{peaks[0]:.0f} MiB for 2 MB of text, {peaks[1]:.0f} MiB for 24 MB"
