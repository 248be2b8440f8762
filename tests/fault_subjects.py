"""What the fault campaign damages and reads in process: small specimens of each kind of file, and a reading of each.

A reading gives a pin and a result. The pin is what a run, a store or a resumed command remembers of such files (their
fingerprints): where it differs, they refuse the files by name. So a damaged vocabulary that is a vocabulary still is
another input, not a silent difference; one that has the same pin and gives another result is a fault of ours.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import toy_encoder
import toy_run
from pair_store import pair_store, random_documents
from parity import bundle_case, published_case
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toy_runs import make_task, sentences

from jaxlm.data.arrays import CHECKSUMS
from jaxlm.data.config import MEMBERS
from jaxlm.data.loader import validation_batches
from jaxlm.data.rows import training_rows
from jaxlm.data.store import open_store
from jaxlm.inference.loaded_run import load_run
from jaxlm.interop.openai import LAYER
from jaxlm.interop.sources import read_published
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.trees import named_leaves
from jaxlm.tasks import CustomConfig, read_task
from jaxlm.text import tokenizer_from_spec, train_sentencepiece
from jaxlm.training.initialization import open_source
from jaxlm.views.run import run_lines
from jaxlm.views.store import store_lines

GOLDEN = Path(__file__).resolve().parent / "golden"
TEXT = "the sea and the wind rose; naïve café [MASK] 日本 <unk> ##ing\n\nbobo zizi 42 %!"
# Records for people: a digit that is another digit is another number there, as in any text. They must not end a
# command in a traceback, nor change what a run does.
RECORDS = ("metrics.jsonl", "starts.jsonl", "README.md")


@dataclass(frozen=True)
class Subject:
    """Something to damage. make(directory): a specimen. read(directory): its pin and result.

    older(directory): other results that are right where the log says so: those of an older checkpoint.
    weight: how often it is drawn. only: a pattern of the files that are damaged.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], tuple[Any, Any]]
    weight: int = 2
    only: str | None = None
    older: Callable[[Path], Sequence[Any]] = lambda directory: ()


def digest(arrays: Any) -> str:
    """One name for the bits of many arrays."""
    found = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def store_subjects() -> list[Subject]:
    """Stores with and without sentences, and one as 2968321 made it."""

    def make(directory: Path) -> None:
        texts = sentences(40)
        toy_run.toy_store(directory / "store", train_sentencepiece(texts, 320), texts)

    def make_old(directory: Path) -> None:
        make(directory)
        (directory / "store" / CHECKSUMS).unlink()

    def make_pairs(directory: Path) -> None:
        pair_store(directory / "store", random_documents(60))

    def read(layout: str) -> Callable[[Path], tuple[Any, Any]]:
        def rows(directory: Path) -> tuple[Any, Any]:
            store = open_store(directory / "store")
            ids = store.tokenizer().encode(TEXT)
            rows = training_rows([store], MEMBERS[layout](), length=32, seed=3)
            batch = rows.read(range(sum(source.rows for source in rows.sources)))
            held_out = [batch.ids for batch in validation_batches([store], length=32, batch_size=8)]
            shown = list(store_lines(store, 2))[1:]
            return (), (ids, digest(vars(batch).values()), digest(held_out), store.unigram_entropy(), shown)

        return rows

    return [
        Subject("store of windows", make, read("windows"), 3),
        Subject("store of packed documents", make, read("packed"), 3),
        Subject("store of sentences", make_pairs, read("pairs"), 3),
        Subject("store without chunk checksums", make_old, read("packed"), 2),
    ]


def run_subjects() -> list[Subject]:
    """Runs that are evaluated, started from and shown."""

    def make(directory: Path) -> None:
        store = toy_run.toy_store(directory / "store", toy_run.toy_tokenizer())
        toy_run.pretrained(directory / "run", store)

    def make_tuned(directory: Path) -> None:
        vocabulary = toy_encoder.write_vocabulary(directory / "vocabulary")
        files = toy_encoder.make_files(directory / "files", "classification")
        toy_encoder.finetuned(directory / "run", vocabulary, files, "classification")

    def read(directory: Path, step: str = "") -> tuple[Any, Any]:
        run = load_run(f"{directory / 'run'}{step}")
        task = None if run.task is None else run.task.to_json()
        params = {name: digest([leaf]) for name, leaf in named_leaves(run.params).items()}
        return (), (run.step, asdict(run.model.config), params, run.tokenizer.encode(TEXT), task)

    def start(directory: Path) -> tuple[Any, Any]:
        source = open_source(str(directory / "run"))
        pin = (source.fingerprint, asdict(source.model), source.tokenizer.fingerprint)
        return pin, source.name

    def show(directory: Path) -> tuple[Any, Any]:
        lines = list(run_lines(RunDirectory(directory / "run")))
        return (), [line for line in lines if line.startswith("  ") and "step" not in line]

    older = lambda directory: [read(directory, "@3")[1]]  # noqa: E731
    return [
        Subject("run", make, read, 5, only="run/", older=older),
        Subject("start", make, start, 2, only="run/", older=lambda directory: [f"{directory / 'run'}@3"]),
        Subject("fine-tuned run", make_tuned, read, 4, only="run/"),
        Subject("show", make, show, 2, only="run/"),
    ]


def tokenizer_subjects() -> list[Subject]:
    """Vocabularies of every kind, as `--tokenizer` names them."""

    def make_pieces(directory: Path) -> None:
        train_sentencepiece(sentences(30), 300).save(directory / "saved")
        (model,) = (directory / "saved").glob("*.model")
        model.rename(directory / "spm.model")

    def make_words(directory: Path) -> None:
        toy_encoder.write_vocabulary(directory)

    def make_bytes(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        library = Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        )
        library.train_from_iterator(sentences(30), trainer)
        model = json.loads(library.to_str())["model"]
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        (directory / "encoder.json").write_text(json.dumps(model["vocab"]))
        (directory / "vocab.bpe").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
        library.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|endoftext|>"}))

    def read(spec: str) -> Callable[[Path], tuple[Any, Any]]:
        def ids(directory: Path) -> tuple[Any, Any]:
            tokenizer = tokenizer_from_spec(spec.format(directory))
            ids = tokenizer.encode(TEXT)
            return tokenizer.fingerprint, (ids, tokenizer.decode(ids), tokenizer.size, tokenizer.specials)

        return ids

    return [
        Subject("SentencePiece model", make_pieces, read("sentencepiece:{}/spm.model"), 2, only="spm.model"),
        Subject("WordPiece vocabulary", make_words, read("wordpiece:{}/vocab.txt")),
        Subject("tokenizer.json", make_bytes, read("hf:{}"), 2, only="tokenizer*.json"),
        Subject("GPT-2 vocabulary", make_bytes, read("gpt2:{}"), 2, only="*c*.[bj]*"),
    ]


def published_subjects() -> list[Subject]:
    """Published weights: safetensors whole and in shards, TensorFlow's and NumPy's files."""
    listed = json.loads((GOLDEN / "published.json").read_text())

    def make_safetensors(name: str, shards: int) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.json").write_text(json.dumps(listed[name]["config"]))
            tensors = {key: published_case.tensor(key, shape) for key, shape in listed[name]["tensors"].items()}
            names = sorted(tensors)
            files = ["model.safetensors"]
            if shards > 1:
                files = [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
                index = {key: files[k % shards] for k, key in enumerate(names)}
                (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
            for k, file in enumerate(files):
                save_file({key: tensors[key] for key in names[k::shards]}, directory / file, metadata={"format": "pt"})

        return make

    def make_bundle(name: str) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            directory.mkdir(parents=True, exist_ok=True)
            for file in (GOLDEN / "tensorflow" / name).iterdir():
                (directory / file.name).write_bytes(file.read_bytes())

        return make

    def make_flat(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        width, inner = 64, 256
        sizes = {
            "attn.c_attn.weight": (1, width, 3 * width),
            "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (1, width, width),
            "mlp.c_fc.weight": (1, width, inner),
            "mlp.c_fc.bias": (inner,),
            "mlp.c_proj.weight": (1, inner, width),
        }
        shapes = [(11, width), (31, width), *(sizes.get(name, (width,)) for name in LAYER)]
        vector = np.concatenate([bundle_case.numbers(str(k), shape).ravel() for k, shape in enumerate(shapes)])
        for k, piece in enumerate(np.array_split(vector, 10)):
            np.save(directory / f"params_{k}.npy", piece)
        (directory / "params_shapes.json").write_text(json.dumps(shapes))

    def read(kind: str) -> Callable[[Path], tuple[Any, Any]]:
        def weights(directory: Path) -> tuple[Any, Any]:
            published = read_published(f"{kind}:{directory}")
            task = None if published.task is None else published.task.to_json()
            pin = (published.fingerprint, asdict(published.model), task, published.architecture)
            leaves = {name: digest([published.leaves[name]]) for name in sorted(published.leaves)}
            return pin, (leaves, published.parts)

        return weights

    return [
        Subject("safetensors", make_safetensors("gpt2", 1), read("hf"), 3),
        Subject("safetensors in shards", make_safetensors("bert_classification", 2), read("hf"), 3),
        Subject("TensorFlow checkpoint of BERT", make_bundle("bert"), read("google"), 3),
        Subject("TensorFlow checkpoint of GPT-2", make_bundle("gpt2"), read("openai")),
        Subject("NumPy files of GPT-1", make_flat, read("openai"), 2),
    ]


def task_subjects() -> list[Subject]:
    """Labelled files of every form."""

    def make_columns(suffix: str) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            make_task(directory)
            for file in directory.glob("*.tsv"):
                if suffix != "tsv":
                    file.rename(file.with_suffix(f".{suffix}"))
                    content = file.with_suffix(f".{suffix}")
                    content.write_text(content.read_text().replace("\t", ","))

        return make

    def make_lines(kind: str) -> Callable[[Path], None]:
        return lambda directory: toy_encoder.make_files(directory, kind) and None

    def make_squad(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(("train-v1.1", "dev-v1.1")):
            rows = [row for row in toy_encoder.make_rows("span", 20, number) if row["answers"]]
            paragraphs = [
                {"context": row.pop("context"), "qas": [{name: row[name] for name in ("id", "question", "answers")}]}
                for row in rows
            ]
            data = [{"title": "toy", "paragraphs": paragraphs}]
            (directory / f"{part}.json").write_text(json.dumps({"version": "1.1", "data": data}))

    def make_conll(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(("train.txt", "valid.txt", "test.txt")):
            rows = toy_encoder.make_rows("tagging", 12, number)
            lines = []
            for row in rows:
                for word, tag in zip(row["tokens"], row["tags"], strict=True):
                    lines.append(f"{word} NN O {tag.replace('X', 'PER').replace('Y', 'LOC')}\n")
                lines.append("\n")
            (directory / part).write_text("-DOCSTART- -X- O O\n\n" + "".join(lines))

    def make_cola(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        for part in ("train", "dev"):
            rows = [f"gj04\t{rng.randrange(2)}\t*\t{text[:60]}" for text in sentences(30, seed=len(part))]
            (directory / f"{part}.tsv").write_text("\n".join(rows) + "\n")

    def read(name: str, **columns: Any) -> Callable[[Path], tuple[Any, Any]]:
        def examples(directory: Path) -> tuple[Any, Any]:
            suffix = columns.get("suffix")
            custom = None
            if suffix:
                files = {part: str(directory / f"{part}.{suffix}") for part in ("train", "dev", "test")}
                custom = CustomConfig(**files, **{key: value for key, value in columns.items() if key != "suffix"})
            task, data = read_task(name, None if custom else str(directory), custom)
            rows = {part: [repr(example) for example in split.examples] for part, split in data.splits.items()}
            return (data.fingerprint(), task.to_json()), rows

        return examples

    text = {"text": "text", "label": "label"}
    return [
        Subject("TSV", make_columns("tsv"), read("custom", suffix="tsv", **text)),
        Subject("CSV", make_columns("csv"), read("custom", suffix="csv", **text)),
        Subject("JSON lines", make_lines("classification"), read("custom", suffix="jsonl", **text)),
        Subject("JSON lines of spans", make_lines("span"), read("custom", suffix="jsonl", kind="span"), 1),
        Subject(
            "JSON lines of tags",
            make_lines("tagging"),
            read("custom", suffix="jsonl", kind="tagging", text="tokens", label="tags"),
            1,
        ),
        Subject("SQuAD", make_squad, read("squad")),
        Subject("CoNLL columns", make_conll, read("ner")),
        Subject("CoLA", make_cola, read("cola"), 1),
    ]


def subjects() -> list[Subject]:
    """All that is damaged and read in process."""
    return [*store_subjects(), *run_subjects(), *tokenizer_subjects(), *published_subjects(), *task_subjects()]
