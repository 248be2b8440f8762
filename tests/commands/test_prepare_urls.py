"""`prepare` with sources at URLs: the store is that of the same files on a disk. A stand-in for gs:// answers."""

import gzip
import json
import shutil

import pytest
from stand_in_cloud import inject, requests
from toy_store import contents

from jaxlm import storage
from jaxlm.data import shards
from jaxlm.data.preparation import prepare_store
from jaxlm.errors import InputError
from jaxlm.progress import LOGGED

WORDS = "the cat sat on a mat and the dog lay by the door of an old house".split()
DESCRIPTION = "description.json"


def text(number: int, count: int) -> str:
    return " ".join(WORDS[(number * k * k + k) % len(WORDS)] for k in range(count))


@pytest.fixture
def corpus(cloud):
    """A bucket with files of each kind that may be at a URL, and a directory with the same ones."""
    folder = cloud / "bucket" / "corpus"
    folder.mkdir(parents=True)
    for k in range(4):
        (folder / f"{k}.txt").write_text(text(k, 300 + k))
    (folder / "lines.lines").write_text("\n\n".join(text(k, 100 + k) for k in range(50)))
    rows = "".join(json.dumps({"body": text(k, 60 + k)}) + "\n" for k in range(40))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (folder / "more.jsonl").write_text(rows)
    return folder


def sources(place: str) -> list[str]:
    names = ("text:{}/*.txt", "lines:{}/lines.*", "jsonl:{}/*.jsonl#body", "jsonl:{}/rows.jsonl.gz#body")
    return [name.format(place) for name in names]


def arrays(store) -> dict[str, bytes]:
    """Return all files but the description, which names the sources, and the checksums, which name the description."""
    return {name: content for name, content in contents(store).items() if name not in (DESCRIPTION, "checksums.bin")}


def prepared(place: str, output, **more):
    return prepare_store(
        sources(place), tokenizer="words:100", output=str(output), workers=1, unit_bytes=4000, messages=LOGGED, **more
    )


@pytest.mark.parametrize("fault", [{}, {"fail": 20, "cut": 15}], ids=["healthy", "faulty"])
def test_the_store_of_objects_is_that_of_files(corpus, cloud, tmp_path, fault):
    """Fails if a document is lost, repeated or cut where a unit begins in the middle of an object."""
    shutil.copytree(corpus, tmp_path / "corpus")
    local = prepared(str(tmp_path / "corpus"), tmp_path / "local")
    inject(cloud, **fault)
    remote = prepared("gs://bucket/corpus", tmp_path / "remote")
    assert {**local, "store": ""} == {**remote, "store": ""}
    assert arrays(tmp_path / "local") == arrays(tmp_path / "remote")
    here, there = ((tmp_path / name / DESCRIPTION).read_text() for name in ("local", "remote"))
    here, there = map(json.loads, (here.replace(str(tmp_path / "corpus"), "gs://bucket/corpus"), there))
    assert here.pop("fingerprint") != there.pop("fingerprint"), "it is that of the whole description"
    assert here == there
    inject(cloud)
    assert prepared("gs://bucket/corpus", tmp_path / "remote") == remote


def test_a_parquet_object_is_read_in_ranges(cloud, tmp_path):
    """pyarrow writes the file. Fails if row groups are mixed up, or if a slice reads the whole object."""
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra [parquet]")
    from pyarrow import parquet

    folder = cloud / "bucket"
    folder.mkdir()
    table = arrow.table({"text": [text(k, 80) for k in range(400)], "other": ["x" * 2000] * 400})
    parquet.write_table(table, folder / "rows.parquet", row_group_size=100, compression="none", use_dictionary=False)
    shutil.copy(folder / "rows.parquet", tmp_path / "rows.parquet")
    for place, output in ((str(tmp_path), "local"), ("gs://bucket", "remote")):
        prepare_store(
            f"parquet:{place}/*.parquet", tokenizer="bytes", output=str(tmp_path / output), workers=1, unit_bytes=9000
        )
    assert arrays(tmp_path / "local") == arrays(tmp_path / "remote")


def test_an_object_that_is_replaced_is_noticed(corpus, tmp_path, monkeypatch):
    """Fails if a store holds one part of the old text and another of the new one."""
    encode = shards.make_shards

    def replaced(*arguments):
        yield from encode(*arguments)
        (corpus / "2.txt").write_text(text(9, 302))

    monkeypatch.setattr(shards, "make_shards", replaced)
    with pytest.raises(
        InputError, match=r"gs://bucket/corpus/2\.txt has changed while it was read; delete .*\.partial"
    ):
        prepared("gs://bucket/corpus", tmp_path / "store")
    assert not (tmp_path / "store").exists()
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("text:gs://bucket/none/*.txt", r"no object matches 'gs://bucket/none/\*\.txt'; fix the pattern"),
        (
            "text:gs://closed/*.txt",
            r"gs://closed/\*\.txt cannot be reached: .*Forbidden.*; check its name and your access",
        ),
        ("midi:gs://bucket/*.mid", r"midi must be on this machine; copy it, or use one of jsonl, lines, parquet, text"),
        (
            "text:ftp://bucket/a",
            r"a URL must be gs://BUCKET/NAME, s3://BUCKET/NAME or file:///NAME, got ftp://bucket/a",
        ),
        ("text:gs://bucket/corpus/empty", r"its 1 files are empty|must have a document"),
        ("lines:gs://bucket/corpus/bad", r"gs://bucket/corpus/bad line 2: byte 0xff at offset 4 is not UTF-8"),
    ],
)
def test_bad_objects_are_named(corpus, tmp_path, source, said):
    """Each in one line, and nothing is left behind that the corrected command would find."""
    (corpus / "empty").write_bytes(b"")
    (corpus / "bad").write_bytes(b"one\n\xfftwo\n")
    tokenizer = "events:performance" if source.startswith("midi") else "bytes"
    with pytest.raises(InputError, match=said):
        prepare_store(source, tokenizer=tokenizer, output=str(tmp_path / "store"), workers=1, messages=LOGGED)
    assert not (tmp_path / "store.partial").exists()


def test_objects_are_listed_once_and_read_in_few_requests(corpus, cloud, tmp_path):
    """Fails if a request is made per line or unit that the storage would bill, beyond those of the ranges."""
    prepared("gs://bucket/corpus", tmp_path / "store")
    assert storage.matching("gs://bucket/corpus/*")
    made = requests(cloud)
    assert len(made) < 400, len(made)
