"""A start with another vocabulary: rows by token, against an index made by hand, and through the command."""

import shutil

import numpy as np
import pytest
from toy_runs import assert_one_line, metrics, run_here, starts
from toy_store import write_store

from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import load_run
from jaxlm.text import bytes_tokenizer, train_words
from jaxlm.text.tokenizer import BackwardTokenizer
from jaxlm.training.initialization import NEW, matched_rows

pytestmark = pytest.mark.usefixtures("two_devices")

GENERAL, TASK = "the cat sat on the mat the cat sat", "where is the cat ? where is the mat now ?"


def test_rows_match_by_role_and_spelling():
    """Fails when a special token matches by its id, or a word by its rank."""
    old = train_words([GENERAL], 20).with_specials(["start", "pad"])
    new = train_words([TASK], 20).with_specials(["pad"])
    rows = matched_rows(old, new)
    names = {i: piece for i, piece in enumerate(old.pieces(range(old.size)))}
    for i, piece in enumerate(new.pieces(range(new.size))):
        assert rows[i] == NEW if piece in ("where", "is", "now", "?") else names[rows[i]] == piece, piece
    assert rows[new.specials["pad"]] == old.specials["pad"] != new.specials["pad"]


def test_vocabularies_of_other_kinds_are_refused():
    words = train_words([GENERAL], 20)
    for other in (BackwardTokenizer(words), train_words(["not one of them"], 20)):
        with pytest.raises(InputError, match="--start-vocabulary matched must have tokenizers of one kind"):
            matched_rows(words, other)
    assert (matched_rows(bytes_tokenizer(), bytes_tokenizer()) == np.arange(257)).all()


TOY = "--length 8 --batch-size 8 --optimizer.peak-lr 0".split()


def leaves(run) -> dict[str, np.ndarray]:
    embeddings = load_run(run).params["backbone"]["embeddings"]
    return {name: np.asarray(leaf) for name, leaf in embeddings.items()}


def test_a_run_begins_with_the_rows_of_its_words(tmp_path):
    """Fails when a row or bias is that of another word, when a resumed run maps its rows twice, or when a checkpoint
    that was lost makes the run begin otherwise.
    """
    old, new = train_words([GENERAL], 20), train_words([TASK], 20)
    for name, tokenizer, text in (("general", old, GENERAL), ("task", new, TASK)):
        write_store(tmp_path / name, {"toy": [f"{text} "] * 99}, tokenizer)

    def trained(name: str, store: str, *more):
        words = ["debug/awd_lstm", "--run", tmp_path / name, "--data.store", tmp_path / store, *TOY, *more]
        return run_here("pretrain", *words)

    small = "--model.num-layers 1 --model.width 8 --model.units 8".split()
    assert trained("first", "general", *small, "--num-steps", 3, "--optimizer.peak-lr", 1.0).code == 0
    start = ("--start", tmp_path / "first", "--num-steps", 2)
    refused = trained("run", "task", *start)
    assert_one_line(refused, 2, "was made with another tokenizer", "give --start-vocabulary matched")
    start += ("--start-vocabulary", "matched")
    ended = trained("run", "task", *start)
    assert ended.code == 0, ended.errors
    known = sum(row != NEW for row in matched_rows(old, new))
    assert f"{known} of {new.size} rows come from {tmp_path / 'first'}@3, 4 begin at their mean" in ended.errors
    before, after, spelt = leaves(tmp_path / "first"), leaves(tmp_path / "run"), old.pieces(range(old.size))
    assert np.ptp(before["output_bias"]) > 0
    for i, piece in enumerate(new.pieces(range(new.size))):
        for name, leaf in after.items():
            wanted = before[name][spelt.index(piece)] if piece in spelt else before[name].mean(axis=0)
            np.testing.assert_allclose(leaf[i], wanted, rtol=0, atol=1e-6, err_msg=f"{name} {piece}")
    losses = metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert trained("run", "task", *start).code == 0
    assert metrics(tmp_path / "run") == losses and "parameters of" in starts(tmp_path / "run")[-1]["started_from"]
    (tmp_path / "first").rename(tmp_path / "moved")
    ended = trained("run", "task", *start[:2], "--num-steps", 3, *start[4:])
    assert ended.code == 0 and starts(tmp_path / "run")[-1]["started_from"] == "resumed at step 2", ended.errors


def test_a_matched_vocabulary_needs_the_parameters_of_a_start(tmp_path):
    write_store(tmp_path / "store", {"toy": [TASK]}, train_words([TASK], 20))
    words = ["--run", tmp_path / "run", "--data.store", tmp_path / "store", "--start-vocabulary", "matched"]
    ended = run_here("pretrain", "debug/gpt", *words)
    assert_one_line(ended, 2, "--start-vocabulary must be same without the parameters of a --start")
