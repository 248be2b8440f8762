"""Parquet files and data sets of `datasets.save_to_disk`: every text once, in order, whatever the encoding of a column.

Files are written with pyarrow; directories by hand, in the layout of `datasets` (arrow_dataset.py, save_to_disk).
"""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.data.preparation import PrepareConfig, prepare
from jaxlm.data.sources import list_units, parse_source, read_unit
from jaxlm.errors import InputError
from jaxlm.reading.columns import ColumnFile

TEXTS = [None if k % 7 == 3 else "" if k % 7 == 5 else f"text {k}, é 日本\n" + "x" * (k % 13) for k in range(50)]
KEPT = [text for text in TEXTS if text]
TYPES = {
    "string": pa.array(TEXTS),
    "large": pa.array(TEXTS, pa.large_string()),
    "view": pa.array(TEXTS, pa.string_view()),
    "binary": pa.array([text and text.encode() for text in TEXTS], pa.binary()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "struct": pa.array([None if text is None else {"id": 1, "text": text} for text in TEXTS]),
    "a.b": pa.array(TEXTS),
}
FIELDS = [*(name for name in TYPES if name != "struct"), "struct.text"]


def read(spec: str, unit_bytes: int = 1 << 20, errors="strict") -> tuple[list[str], int]:
    """The documents of a source, and its number of units."""
    source = parse_source(spec)
    units, _ = list_units(source, 0, unit_bytes)
    fragments = [pair for unit in units for pair in read_unit(source, unit, errors)]
    assert all(last for _, last in fragments)
    return [text for text, _ in fragments], len(units)


def write_stream(path, table: pa.Table, rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)


def save_to_disk(directory, table: pa.Table, shards: int = 2, split: str | None = None, **state):
    """Write a directory as `datasets.save_to_disk` does."""
    names = [f"data-{k:05d}-of-{shards:05d}.arrow" for k in range(shards)]
    bounds = [len(table) * k // shards for k in range(shards + 1)]
    for name, begin, end in zip(names, bounds, bounds[1:], strict=False):
        write_stream(directory / name, table.slice(begin, end - begin), 6)
    values = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (directory / "state.json").write_text(json.dumps(values | state))
    (directory / "dataset_info.json").write_text(json.dumps({"citation": "", "description": "", "features": {}}))
    return directory


@pytest.mark.parametrize("compression", ["none", "zstd", "snappy"])
def test_every_type_of_column_gives_the_same_documents(tmp_path, compression):
    """Fails if a type is read otherwise, a null becomes a document, or row groups overlap or are left out."""
    pq.write_table(pa.table(TYPES), tmp_path / "a.parquet", compression=compression, row_group_size=7)
    for field in FIELDS:
        for unit_bytes in (1, 300, 1 << 20):
            found, units = read(f"parquet:{tmp_path}/*.parquet#{field}", unit_bytes)
            assert found == KEPT, field
            assert units == {1: 8, 1 << 20: 1}.get(unit_bytes, units)


def test_several_files_are_read_in_sorted_order(tmp_path):
    for k in (2, 0, 1):
        pq.write_table(pa.table({"text": [f"{k} first", f"{k} second"]}), tmp_path / f"part-{k}.parquet")
    assert read(f"parquet:{tmp_path}/*")[0] == [f"{k} {which}" for k in range(3) for which in ("first", "second")]


def test_a_saved_data_set_is_read_batch_by_batch(tmp_path):
    """Fails if shards are read in another order than state.json's, or if a batch is lost or doubled between units."""
    directory = save_to_disk(tmp_path / "one", pa.table(TYPES), shards=3)
    for field in FIELDS:
        for unit_bytes in (1, 300, 1 << 20):
            assert read(f"hf-dataset:{directory}#{field}", unit_bytes)[0] == KEPT, field
    assert read(f"hf-dataset:{directory}#string", 1)[1] == 9  # 3 shards of 16 or 17 rows, 6 in a batch


def test_splits_of_a_saved_data_set(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "two" / split, pa.table({"text": [f"of {split}"]}), shards=1, split=split)
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read(f"hf-dataset:{tmp_path}/two")[0] == ["of train"]
    assert read(f"hf-dataset:{tmp_path}/two@test#text")[0] == ["of test"]
    assert read(f"hf-dataset:{tmp_path}/two/test@test")[0] == ["of test"]
    for spec, why in ((f"{tmp_path}/two@dev", "one of train, test, got 'dev'"), (f"{tmp_path}/two/test@dev", "'test'")):
        with pytest.raises(InputError, match=why):
            read(f"hf-dataset:{spec}")


def test_bytes_that_are_not_utf8(tmp_path):
    """Fails if pyarrow's own decoding is used, which knows no replacement."""
    bad = pa.array([b"good", b"caf\xe9 au lait"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, bad.buffers())
    table = pa.table({"text": text, "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1]), text)})
    pq.write_table(table, tmp_path / "a.parquet")
    write_stream(save_to_disk(tmp_path / "one", table, shards=1) / "data-00000-of-00001.arrow", table, 1)
    saved = f"hf-dataset:{tmp_path}/one"
    for spec in (f"parquet:{tmp_path}/a.parquet#text", f"{saved}#text", f"{saved}#dictionary"):
        with pytest.raises(InputError, match="row 2: field '.*': byte 0xe9 at offset 3 is not UTF-8.*--errors replace"):
            read(spec)
        assert read(spec, errors="replace")[0] == ["good", "caf\ufffd au lait"]
    with pytest.raises(InputError, match="Invalid UTF8"):  # pyarrow decodes dictionaries of Parquet files by itself
        read(f"parquet:{tmp_path}/a.parquet#dictionary")


def test_bad_files_and_fields_end_in_one_line(tmp_path):
    table = pa.table({"body": ["x"] * 100, "n": range(100), "list": [["a"]] * 100})
    pq.write_table(table, tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.parquet").write_text("plain text")
    saved = save_to_disk(tmp_path / "saved", table, shards=1)
    selected = save_to_disk(tmp_path / "selected", table, _indices_data_files=[{"filename": "indices.arrow"}])
    cut = save_to_disk(tmp_path / "cut", table, shards=1)
    stream = (cut / "data-00000-of-00001.arrow").read_bytes()
    (cut / "data-00000-of-00001.arrow").write_bytes(stream[:-8])  # all batches, but not the end
    lost = save_to_disk(tmp_path / "lost", table)
    (lost / "data-00001-of-00002.arrow").unlink()
    broken = save_to_disk(tmp_path / "broken", table, shards=1)
    (broken / "state.json").write_text("{")
    for spec, why in (
        (f"parquet:{tmp_path}/a.parquet", "no field 'text'; its fields are body, n, list; name the field with #FIELD"),
        (f"parquet:{tmp_path}/a.parquet#body.x", "no field 'body.x'"),
        (f"parquet:{tmp_path}/a.parquet#n", "field 'n' must be text, got int64"),
        (f"parquet:{tmp_path}/a.parquet#list", "must be text, got list"),
        (f"parquet:{tmp_path}/cut.parquet", "cut.parquet cannot be read as a Parquet file"),
        (f"parquet:{tmp_path}/text.parquet", "text.parquet cannot be read as a Parquet file"),
        (f"parquet:{tmp_path}/nothing*", "no file matches"),
        (f"hf-dataset:{saved}", "no field 'text'"),
        (f"hf-dataset:{selected}#body", "flatten_indices"),
        (f"hf-dataset:{cut}#body", "damaged or truncated"),
        (f"hf-dataset:{lost}#body", "data-00001-of-00002.arrow: no such file"),
        (f"hf-dataset:{broken}#body", "state.json cannot be read"),
        (f"hf-dataset:{tmp_path}", "without state.json; for Parquet files use parquet:GLOB"),
        (f"hf-dataset:{tmp_path}/nothing", "must name a directory of datasets.save_to_disk"),
        ("hf-dataset:x@", "no empty part"),
        ("parquet:x#", "no empty part"),
    ):
        with pytest.raises(InputError, match=why) as caught:
            read(spec)
        assert "\n" not in str(caught.value)


def test_a_damaged_stream_is_named(tmp_path):
    """Flipped offsets would let a reader read past the buffers; fails if such a batch gives texts or a crash."""
    directory = save_to_disk(tmp_path / "one", pa.table({"text": ["first", "second", "third"]}), shards=1)
    path = directory / "data-00000-of-00001.arrow"
    content = path.read_bytes()
    offsets = pa.array([0, 5, 11, 16], pa.int32()).buffers()[1].to_pybytes()[:16]
    at = content.index(offsets)
    path.write_bytes(content[: at + 4] + b"\xff\xff\xff\x7f" + content[at + 8 :])
    with pytest.raises(InputError, match="cannot be read as an Arrow stream"):
        read(f"hf-dataset:{directory}")


def test_pyarrow_is_named_where_it_is_missing(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="needs pyarrow, which is not installed; run launch/setup.sh cpu parquet, or"):
        read(f"parquet:{tmp_path}/a.parquet")


def test_rows_are_python_values(tmp_path):
    rows = [{"a": "x", "n": 1, "list": ["p", "q"], "d": {"k": None}}, {"a": None, "n": None, "list": [], "d": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(ColumnFile(str(tmp_path / "a.parquet"), "parquet").rows()) == rows


def test_a_store_of_parquet_equals_that_of_json_lines(tmp_path):
    """Fails if units or documents depend on the workers or the format, or if a changed file is not noticed."""
    texts = [f"Document {k} says this. And that.\n" * (k % 5 + 1) for k in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=20)
    saved = save_to_disk(tmp_path / "dataset", pa.table({"text": texts}))
    sources = {"json": f"jsonl:{tmp_path}/a.jsonl", "parquet": f"parquet:{tmp_path}/*.parquet"}
    tokenizer, fingerprints = "train-wordpiece:300", set()
    for name, source in (sources | {"saved": f"hf-dataset:{saved}"}).items():
        config = PrepareConfig((source,), tokenizer, str(tmp_path / name), workers=1, unit_bytes=2000)
        store = prepare(config)
        tokenizer = f"store:{tmp_path}/json"
        assert store.documents == 300
        fingerprints.add((store.num_tokens, store.description["arrays"]["tokens"]["sha256"]))
    assert len(fingerprints) == 1
    again = PrepareConfig((sources["parquet"],), f"store:{tmp_path}/json", str(tmp_path / "parquet"), unit_bytes=2000)
    assert prepare(again).documents == 300  # complete already
    pq.write_table(pa.table({"text": texts[:-1]}), tmp_path / "a.parquet", row_group_size=20)
    with pytest.raises(InputError, match="has changed since"):
        prepare(again)
