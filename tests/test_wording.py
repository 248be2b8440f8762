"""Counted nouns, suggestions, and fields as flags, in the words of real messages."""

import pytest

from jaxlm.wording import byte_size, counted, did_you_mean, plain_number, with_arguments, with_flags

FIELDS = {
    "num_steps",
    "length",
    "seed",
    "label",
    "optimizer.peak_lr",
    "model.num_positions",
    "mesh.data",
    "data.layout",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_steps must be above 0, got 0", "--num-steps must be above 0, got 0"),
        ("length must be from 1 to 8, got 9; give at most 8", "--length must be from 1 to 8, got 9; give at most 8"),
        ("r/config.json: seed must be 1, got 0", "r/config.json: --seed must be 1, got 0"),
        ("r holds another (saved -> given): seed: 0 -> 1; length: 2 -> 3; give the saved values",
         "r holds another (saved -> given): --seed: 0 -> 1; --length: 2 -> 3; give the saved values"),
        ("with data.layout pairs", "with --data.layout pairs"),
        # What is not a field: words, paths, quoted text, flags, longer names, modules.
        ("t.tsv line 3: the label must be one of no, yes", "t.tsv line 3: the label must be one of no, yes"),
        ("the row length must divide 8", "the row length must divide 8"),
        ("runs/num_steps/x, 'num_steps', `mesh.data`", "runs/num_steps/x, 'num_steps', `mesh.data`"),
        ("--mesh.data and my_num_steps and mesh.data.x", "--mesh.data and my_num_steps and mesh.data.x"),
    ],
)  # fmt: skip
def test_fields_in_messages_are_named_as_flags(text, expected):
    """Fails when a field keeps its name in the config, or a word that is not the field becomes a flag."""
    assert with_flags(text, FIELDS) == expected
    assert with_flags(text, set()) == text


def test_numbers_and_sizes_read_well():
    """Fails on `1 steps`, `0.0 MB` and `3.27e+04 epochs`."""
    assert [counted(n, "step") for n in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    assert [counted(n, "epoch") for n in (1.0, 0.5, 32_712.3)] == ["1 epoch", "0.5 epochs", "32,700 epochs"]
    assert counted(2, "entry", "entries") == "2 entries"
    assert [plain_number(n) for n in (0.2141, 999.4, 21_349)] == ["0.214", "999", "21,300"]
    assert [byte_size(n) for n in (1, 740, 23_440, 1.2e6, 3.5e9)] == [
        "1 byte",
        "740 bytes",
        "23.4 kB",
        "1.2 MB",
        "3.5 GB",
    ]


@pytest.mark.parametrize(
    ("word", "expected"), [("sst-2", "sst2"), ("Macro_F1", "macro-f1"), ("perplexty", "perplexity")]
)
def test_the_nearest_name_is_suggested(word, expected):
    """Fails when case, hyphens or a missing letter hide the name."""
    assert did_you_mean(word, ["cola", "sst2", "macro-f1", "perplexity"]) == f"did you mean {expected}?"
    assert did_you_mean("zzzz", ["cola", "sst2"], "choose one of them") == "choose one of them"


def test_flags_become_arguments_but_in_command_lines():
    """Fails when a message of a function names a flag, or a command line in it loses its flags."""
    for text, wanted in (
        ("--top-p must be above 0, got 3; give 1", "top_p must be above 0, got 3; give 1"),
        ("choose another --run; with --custom.quoting csv", "choose another run; with custom.quoting csv"),
        (
            "no store; make one with python -m jaxlm.prepare --output DIR; or name --data.store",
            "no store; make one with python -m jaxlm.prepare --output DIR; or name data.store",
        ),
        ("give hf:DIR -- or a-b--c", "give hf:DIR -- or a-b--c"),
    ):
        assert with_arguments(text) == wanted
