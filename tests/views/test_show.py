"""What `show` prints of stores, runs and configs, against what is in them."""

import json
from pathlib import Path

import numpy as np
import pytest
import toy_run
from toy_store import write_store

from jaxlm import show
from jaxlm.data.config import SentencePairs
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, phased_rows
from jaxlm.data.rows import training_rows
from jaxlm.errors import InputError
from jaxlm.evaluation.fine_tuned import parts_of
from jaxlm.inference.loaded_run import run_config
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import CustomConfig
from jaxlm.text import train_sentencepiece
from jaxlm.views.data import ends
from jaxlm.views.run import run_lines
from jaxlm.views.targets import run_batch_lines


@pytest.fixture(scope="module")
def tokenizer():
    return toy_run.toy_tokenizer()


@pytest.fixture(scope="module")
def store(tokenizer, tmp_path_factory):
    return toy_run.toy_store(tmp_path_factory.mktemp("store") / "s", tokenizer)


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    return toy_run.pretrained(tmp_path_factory.mktemp("run") / "r", store)


def shown(monkeypatch, capsys, *words) -> str:
    monkeypatch.setattr("sys.argv", ["show", *map(str, words)])
    show.main()
    return capsys.readouterr().out


def test_a_store_shows_its_counts_and_documents(store, monkeypatch, capsys):
    text = shown(monkeypatch, capsys, store.path)
    assert f"3 documents, {store.num_tokens:,} tokens, {store.words} words, {store.bytes} bytes" in text
    for document in toy_run.DOCUMENTS:
        assert all(line in text for line in document.split("\n"))  # decoded as they were
    assert f"unigram entropy {store.unigram_entropy():.4f}" in text and "pad 0" in text
    assert "document 1" not in shown(monkeypatch, capsys, store.path, "--count", 1)


def test_a_run_shows_how_far_and_how_good_it_is(run, monkeypatch, capsys):
    text = shown(monkeypatch, capsys, run)
    assert "step 7 of 7: loss 5.3000" in text
    assert "best validation: step 5, loss 4.5000" in text and "last validation: step 7, loss 4.7500" in text
    assert "checkpoints at steps: 3, 7" in text and "1 start\n" in text and "from scratch" in text
    count = 310 * 16 + 48 * 16 + 2 * (16 * 48 + 48 + 16 * 16 + 16 + 2 * 16 * 32 + 32 + 16 + 4 * 16)
    assert f"{count:,} parameters" in text


@pytest.mark.parametrize(
    ("words", "parameters", "tokens", "rates"),
    [
        # Hugging Face's OpenAIGPTModel and BertForPreTraining of the published sizes have so many parameters.
        (["pretrain/gpt1"], 116_534_784, 3_000_000 * 64 * 512, "0.00025 at step 2,000"),
        (["pretrain/bert_base"], 110_106_428, 256 * (900_000 * 128 + 100_000 * 512), "9.9e-05 at step 10,000"),
        (["finetune/gpt1"], 116_534_784, None, "peak 6.25e-05"),
    ],
)
def test_a_config_without_data_shows_what_it_costs(words, parameters, tokens, rates, monkeypatch, capsys):
    """Fails when a config is refused for want of a store, or its parameters, tokens or rates are others.

    BERT's rate is linear from step 0 in the published code, so its highest is 1e-4 (1 - 10,000 / 1,000,000).
    """
    text = shown(monkeypatch, capsys, *words, "--seed", 5)
    assert f"parameters: {parameters:,} with a vocabulary of" in text and rates in text
    assert tokens is None or f"tokens of the whole run: {tokens:,} = " in text
    fields = dict(line.split(maxsplit=1) for line in text.split("\n\n")[0].splitlines())
    assert fields["seed"] == "5" and fields["model.num_layers"] == "12" and fields["model.num_positions"] == "512"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # Hugging Face's GPT2Model has so many parameters.
        (["pretrain/gpt2_small"], "124,439,808 with a vocabulary of 50,257 ids, the published size"),
        (["pretrain/transformer_xl_wt103"], "with a vocabulary of 267,735 ids, the published size"),
        (["pretrain/gpt2_small", "--model.num-layers", 3], "with a vocabulary of 40,478 ids, the published size"),
        (
            ["pretrain/gpt2_small", "--model.vocab-size", 100],
            f"{124_439_808 - 50_157 * 768:,} with a vocabulary of 100 ids",
        ),
    ],
)
def test_a_config_is_counted_with_its_own_vocabulary(words, said, monkeypatch, capsys):
    """Fails when a size is counted with the vocabulary of another size of its family, or a stated one is ignored."""
    (line,) = [line for line in shown(monkeypatch, capsys, *words).splitlines() if line.startswith("parameters: ")]
    assert said in line and ("the published size" in line) == ("the published size" in said)


@pytest.mark.parametrize("layout", ["windows", "packed"])
def test_the_batch_of_a_step_is_the_loaders(tokenizer, store, layout, tmp_path):
    # Each slot that is shown is compared with the batch itself: a wrong row, shift or segment fails.
    path = toy_run.pretrained(tmp_path / "r", store, layout=layout)
    config = run_config(RunDirectory(path))
    text = "\n".join(run_batch_lines(RunDirectory(path), 2, count=4))
    batch = batch_at(training_rows([store], config.data, length=16, seed=0), 2, 4)
    assert f"{int(batch.weights.sum())} of 64 positions are predicted" in text
    slots = 0
    for block, row in zip(text.split("\nrow ")[1:], range(4), strict=True):
        ids = batch.ids[row][batch.segments[row] > 0]
        assert tokenizer.decode(ids.tolist()).split("\n")[0] in block
        for line in block.splitlines():
            words = line.split()
            if len(words) == 7 and words[0].isdigit():
                slot = int(words[0])
                slots += 1
                fields = [batch.segments[row, slot], batch.positions[row, slot], batch.ids[row, slot]]
                assert [int(word) for word in words[1:4]] == fields
                assert words[4] == repr(tokenizer.pieces([batch.ids[row, slot]])[0])
                target = repr(tokenizer.pieces([batch.targets[row, slot]])[0]) if batch.weights[row, slot] else "-"
                assert words[5] == target
    assert slots > 40


def test_a_step_of_pairs_shows_sides_labels_and_slots(tmp_path, monkeypatch, capsys):
    # Against the loader's batch: a pair of another row, a side or a label that is not the batch's fails.
    texts = [f"The cat sat on mat {k}. The dog lay down. The bird sang in tree {k}. It fell." for k in range(20)]
    tokenizer = train_sentencepiece(texts, 330)
    store = write_store(tmp_path / "s", texts, tokenizer, sentences="split")
    text = shown(monkeypatch, capsys, store.path)
    assert f"{store.sentences} sentences" in text and "| 1: The dog lay down." in text
    words = ["debug/bert", "--data.store", store.path, "--length", 64, "--batch-size", 4]
    words += ["--data.short-length", 32, "--data.short-share", 0.5, "--num-steps", 10]
    for step, length in ((4, 32), (5, 64)):
        text = shown(monkeypatch, capsys, *words, "--step", step, "--count", 4)
        assert f"step {step}: 4 rows of {length}, layout pairs, seed 0" in text
        assert f"phase {1 + (step > 4)} of 2: steps {5 * (step > 4)} to {4 + 5 * (step > 4)}" in text
        data = SentencePairs(short_length=32, short_share=0.5)
        rows = phased_rows(data, Reading([store], length=64, seed=0, batch_size=4), 10)
        batch = batch_at(rows, step, 4)
        pairs, random = int(batch.pair_weights.sum()), int(batch.next_labels.sum())
        assert f"{pairs} pairs, {pairs - random} true" in text and "% of them short" in text
        for block, row in zip(text.split("\nrow ")[1:], range(4), strict=True):
            assert str(batch.mask_seeds[row].tolist()) in block
            for k, origin in enumerate(rows.origin(4 * step + row)):
                kind = "true" if batch.next_labels[row, k] == 0 else "random"
                assert f"pair {k + 1}: {kind}, label {batch.next_labels[row, k]}" in block
                assert f"A: {origin.first}, {origin.first.tokens}" in block
                assert f"B: {origin.second}, {origin.second.tokens}" in block
                for side in (0, 1):
                    slots = (batch.segments[row] == k + 1) & (batch.types[row] == side)
                    assert f"| {'AB'[side]}: {tokenizer.decode(batch.ids[row][slots].tolist()).strip()}" in block
            for words_of_line in (line.split() for line in block.splitlines()):
                if len(words_of_line) == 6 and words_of_line[0].isdigit():
                    slot = int(words_of_line[0])
                    names = ("segments", "types", "positions", "ids")
                    assert [int(word) for word in words_of_line[1:5]] == [
                        getattr(batch, name)[row, slot] for name in names
                    ]


def test_a_config_of_two_lengths_shows_the_phase_of_its_run(tmp_path, monkeypatch, capsys):
    """Fails on 2968321: num_epochs was not looked at, and step + 1 taken for the length of a run that names none."""
    texts = [f"The cat sat on mat {k}. The dog lay down. The bird sang in tree {k}. It fell." for k in range(20)]
    store = write_store(tmp_path / "s", texts, train_sentencepiece(texts, 330), sentences="split")
    words = ["debug/bert", "--data.store", store.path, "--length", 64, "--batch-size", 4]
    words += ["--data.short-length", 32, "--data.short-share", 0.5]
    data = SentencePairs(short_length=32, short_share=0.5)
    steps = data.steps_of_passes(Reading([store], length=64, batch_size=4), 5)
    for step in (0, steps // 2 - 1, round(steps / 2), steps - 1):
        text = shown(monkeypatch, capsys, *words, "--num-epochs", 5, "--step", step)
        phase = int(step >= round(steps / 2))
        assert f"phase {phase + 1} of 2" in text and f"step {step}: 4 rows of {(32, 64)[phase]}," in text
    assert steps > 4
    with pytest.raises(InputError, match=r"num_steps must be given with data\.short_length 32"):
        shown(monkeypatch, capsys, *words, "--num-steps", "None")


def test_a_config_shows_its_batch_with_fields_changed(store, monkeypatch, capsys):
    words = ["debug/gpt", "--data.store", store.path, "--length", 12, "--batch-size", 2, "--step", 3]
    text = shown(monkeypatch, capsys, *words)
    assert "step 3: 2 rows of 12, layout windows, seed 0" in text and "\nrow 1\n" in text and "\nrow 2\n" not in text
    assert shown(monkeypatch, capsys, *words, "--seed", 1) != text
    with pytest.raises(InputError, match=r"data\.store must be given"):
        shown(monkeypatch, capsys, "debug/gpt", "--step", 0)


@pytest.fixture
def custom(tmp_path):
    rows = [("the cat sat", "on a mat", "tree", "first"), ("the fox", "saw a crow", "lay " * 60, "second")] * 10
    lines = (
        json.dumps({"t": f"{k} {t}", "first": a, "second": b, "label": label})
        for k, (t, a, b, label) in enumerate(rows)
    )
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return CustomConfig(train=str(file), text="t", choices=("first", "second"), label="label", kind="choice")


def test_a_fine_tuning_batch_shows_sequences_labels_and_what_was_cut(tokenizer, custom, tmp_path):
    path, task, data = toy_run.finetuned(tmp_path / "r", tokenizer, custom)
    text = "\n".join(run_batch_lines(RunDirectory(path), 0, count=4))
    assert "step 0 of 9: 4 examples of 2 sequences" in text
    assert "'<s>'" in text and "'<delimiter>'" in text and "'<extract>'" in text
    blocks = text.split("\nexample ")[1:]
    assert len(blocks) == 4
    for block in blocks:
        example = data.splits["train"].examples[int(block.split()[0])]
        assert example.texts[0] in block and f"label {example.label!r}" in block
        assert (", truncated" in block) == (example.label == "second")  # 60 words do not fit 40 positions
    run_text = "\n".join(run_lines(RunDirectory(path)))
    assert "fine-tuning on custom" in run_text and "start: runs/x@7" in run_text


def test_a_fine_tuning_config_takes_the_flags_of_finetune(store, custom, monkeypatch, capsys):
    """Fails when a command line of finetune, its options included, cannot be shown."""
    words = ["finetune/gpt1", "--task", "custom", "--tokenizer", f"store:{store.path}", "--length", 40]
    for name in ("train", "text", "label", "kind"):
        words += [f"--custom.{name}", getattr(custom, name)]
    words += ["--custom.choices", *custom.choices, "--batch-size", 4, "--options.stride", 7, "--strict"]
    text = shown(monkeypatch, capsys, *words, "--step", 1)
    assert "task custom: choice" in text and "4 examples of 2 sequences" in text
    with pytest.raises(InputError, match=r"options\.stride"):
        shown(monkeypatch, capsys, *words, "--options.stride", 0)


def test_every_split_of_the_results_is_shown(tokenizer, custom, tmp_path):
    """Fails on 2968321: MNLI's two dev splits are left out."""
    path, *_ = toy_run.finetuned(tmp_path / "r", tokenizer, custom)
    splits = {
        name: {"accuracy": {"mean": mean, "std": 0.01}, "loss": {"mean": 1.0, "std": 0.0}}
        for name, mean in (("dev_matched", 0.75), ("dev_mismatched", 0.625))
    }
    runs = [{"seed": seed, "learning_rate": 1e-5} for seed in (0, 1)]
    results = {"task": "mnli", "metric": "accuracy", "runs": runs, "learning_rate": 1e-5, **splits}
    best = {"best": {"seed": 0, "learning_rate": 1e-5, "step": 9}}
    (path / "results.json").write_text(json.dumps(results | best))
    lines = list(run_lines(RunDirectory(path)))
    assert "    dev_matched    accuracy 0.7500 ± 0.0100  loss 1.0000 ± 0.0000" in lines
    assert "    dev_mismatched accuracy 0.6250 ± 0.0100  loss 1.0000 ± 0.0000" in lines
    assert not any(line.startswith("    best") for line in lines)
    (path / "results.json").write_text(json.dumps(results | best | {"runs": runs[:1]}))
    assert "    dev_matched    accuracy 0.7500  loss 1.0000" in list(run_lines(RunDirectory(path)))


def test_a_run_whose_data_changed_is_refused(run, tokenizer, custom, tmp_path):
    path, *_ = toy_run.finetuned(tmp_path / "r", tokenizer, custom)
    with open(custom.train, "a", encoding="utf-8") as file:
        file.write('{"t": "more", "first": "x", "second": "y", "label": "first"}\n')
    with pytest.raises(InputError, match="not those it was trained on"):
        list(run_batch_lines(RunDirectory(path), 0, count=1))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["nosuch"], "nosuch must be a token store, a run directory or a config, and nothing of that name exists"),
        (["."], r"not a run directory: it has no config\.json"),
        (["nosuch@3"], "nosuch: no such run directory"),
        ([".", "--count", "-1"], "count must be at least 0, got -1"),
    ],
)
def test_bad_input(words, rule, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rule):
        shown(monkeypatch, capsys, *words)


def test_ends_of_long_lists():
    assert ends([1, 2, 3], head=1, tail=1) == [1, 2, 3]
    assert ends(list(range(9)), head=2, tail=1) == [0, 1, None, 8]
    assert np.all(np.diff([k for k in ends(list(range(100))) if k is not None]) > 0)


def test_the_batch_of_a_run_is_shown_from_another_directory(tokenizer, tmp_path, monkeypatch, capsys):
    """Fails when the store of a run that was named by a relative path is looked for where the command runs."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    store = toy_run.toy_store(Path("s"), tokenizer)
    run = toy_run.pretrained(tmp_path / "r", store)
    saved = json.loads((run / "config.json").read_text())
    assert saved["data"]["store"] == ["s"]
    here = shown(monkeypatch, capsys, run, "--step", 2)
    monkeypatch.chdir(tmp_path)
    assert shown(monkeypatch, capsys, run, "--step", 2).replace(str(tmp_path / "there/s"), "s") == here


def test_the_files_of_a_fine_tuned_run_are_read_from_another_directory(tokenizer, tmp_path, monkeypatch, capsys):
    """Fails when the task's files, named by relative paths, are looked for where show or an ensemble runs."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    rows = [{"t": f"ba da {k}", "label": "yes" if k % 2 else "no"} for k in range(12)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    custom = toy_run.CustomConfig(train="train.jsonl", dev="dev.jsonl", text="t", label="label")
    run, _, data = toy_run.finetuned(tmp_path / "r", tokenizer, custom)
    here = shown(monkeypatch, capsys, run, "--step", 2)
    monkeypatch.chdir(tmp_path)
    assert shown(monkeypatch, capsys, run, "--step", 2) == here and "ba da" in here
    (found,) = parts_of([RunDirectory(run)]).values()
    assert found.examples == data.splits["dev"].examples
