"""Sources: every document once, whatever the slices and the compression, and one clear line for what is wrong."""

import gzip
import json
import lzma
import random

import numpy as np
import pytest
import zstandard

from jaxlm.data import sources
from jaxlm.data.sources import Slice, Unit, list_units, parse_source, read_unit
from jaxlm.errors import InputError

COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def joined(fragments) -> list[str]:
    """The documents of fragments."""
    documents, parts = [], []
    for text, last in fragments:
        parts.append(text)
        if last:
            documents.append("".join(parts))
            parts = []
    assert not parts, "a document was not ended"
    return documents


def read_all(spec: str, unit_bytes: int = 1 << 22, errors="strict") -> list[str]:
    source = parse_source(spec)
    units, _ = list_units(source, 0, unit_bytes)
    return [document for unit in units for document in joined(read_unit(source, unit, errors))]


def random_lines(rng: random.Random) -> bytes:
    """Lines with blank ones among them, of one byte or many, with and without a last line break."""
    kinds = [b"", b"", b" \t", b"x", b"two words", "é日本".encode(), b"a" * 50, b"\r"]
    content = b"\n".join(rng.choice(kinds) for _ in range(rng.randrange(0, 40)))
    return content + rng.choice([b"", b"\n", b"\n\n"])


def test_line_slices_share_no_document_and_lose_none(tmp_path, monkeypatch):
    rng = random.Random(0)
    path = str(tmp_path / "f.txt")
    for round_number in range(150):
        content = random_lines(rng)
        (tmp_path / "f.txt").write_bytes(content)
        # An independent statement: blocks of lines between blank ones.
        expected, block = [], []
        for line in [*content.decode().replace("\r\n", "\n").split("\n"), ""]:
            line = line.removesuffix("\r")
            if line.strip():
                block.append(line)
            elif block:
                expected.append("\n".join(block))
                block = []
        cuts = sorted(rng.sample(range(1, max(2, len(content))), min(rng.randrange(4), max(1, len(content) - 1))))
        monkeypatch.setattr(sources, "_FRAGMENT", rng.choice([1, 7, 1 << 20]))
        found = []
        for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
            found += joined(sources.read_lines(path, begin, end))
        assert found == expected, (round_number, content, cuts)


def test_jsonl_slices_share_no_record_and_lose_none(tmp_path):
    texts = [f"text {k} é\n" + "x" * (k % 13) for k in range(60)]
    content = "".join(json.dumps({"text": text}, ensure_ascii=k % 2 == 0) + "\n" for k, text in enumerate(texts))
    (tmp_path / "f.jsonl").write_text(content, encoding="utf-8")
    size = len(content.encode())
    for step in (1, 3, 17, 100, size - 1, size, size + 5):
        found = []
        for begin in range(0, size, step):
            found += sources.read_jsonl(str(tmp_path / "f.jsonl"), "text", begin, begin + step)
        assert found == texts, step


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_compressed_files_are_read_as_they_are(tmp_path, suffix):
    text = "First paragraph,\nsecond line.\n\nÉtude — 日本\n" * 3
    content = text.encode()
    record = (json.dumps({"body": text}) + "\n").encode()
    pack = COMPRESS.get(suffix, bytes)
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(content))
    (tmp_path / f"b.txt{suffix}").write_bytes(pack(content[:40]) + pack(content[40:]))  # two members, one file
    (tmp_path / f"c.jsonl{suffix}").write_bytes(pack(record * 2))
    assert read_all(f"text:{tmp_path}/*.txt{suffix}") == [text, text]
    block, last = "First paragraph,\nsecond line.", "Étude — 日本\nFirst paragraph,\nsecond line."
    assert read_all(f"lines:{tmp_path}/a.txt{suffix}") == [block, last, last, "Étude — 日本"]
    assert read_all(f"jsonl:{tmp_path}/c.jsonl{suffix}#body") == [text, text]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_damaged_compressed_file_is_named(tmp_path, suffix):
    """Fails when a cut file is read, or an error of a library, such as zlib's, ends in a traceback."""
    content = COMPRESS[suffix](bytes(random.Random(0).choices(b"abcdefgh \n", k=50_000)))
    zeroed = content[:30] + bytes(40) + content[70:]
    cut = content[: len(content) // 2]
    for name, damaged in [("cut", cut), ("other", b"no such format at all" * 9), ("zeroed", zeroed)]:
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"{name}\{suffix}: .*damaged or truncated"):
            read_all(f"text:{path}")


def test_a_file_is_a_document_as_it_is(tmp_path, monkeypatch):
    text = "\ufeff  Title\r\n\r\n" + "é日😀 x\n" * 500 + "end  \n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text(" \n\t\n" * 50)
    for fragment in (3, 64, 1 << 20):
        monkeypatch.setattr(sources, "_FRAGMENT", fragment)
        assert read_all(f"text:{tmp_path}/*.txt") == [text.removeprefix("\ufeff")]


def test_units_follow_from_the_inputs_alone(tmp_path):
    for k, size in enumerate([10, 2500, 10, 10, 900, 900, 10]):
        (tmp_path / f"{k}.txt").write_text("x" * size)
    source = parse_source(f"lines:{tmp_path}/*.txt")
    units, described = list_units(source, 3, 1000)
    assert described == {"source": source.spec, "files": 7, "bytes": 4340}
    assert all(unit.source == 3 and 0 < unit.size <= 1000 for unit in units)
    cover = [(part.path[-5], part.begin, part.end) for unit in units for part in unit.slices]
    assert cover[:4] == [("0", 0, None), ("1", 0, 1000), ("1", 1000, 2000), ("1", 2000, None)]
    assert [path for path, begin, _ in cover if begin == 0] == list("0123456")
    whole, _ = list_units(parse_source(f"text:{tmp_path}/*.txt"), 0, 1000)
    assert all(part.begin == 0 and part.end is None for unit in whole for part in unit.slices)


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize("kind", ["text", "lines", "jsonl"])
def test_bytes_that_are_not_utf8(tmp_path, kind, errors, monkeypatch):
    head = b'{"text": "fine"}\n\n' if kind == "jsonl" else "première\n\n".encode()
    bad = b'{"text": "caf\xe9 noir"}\n' if kind == "jsonl" else b"caf\xe9 noir\n"
    path = tmp_path / "f.txt"
    path.write_bytes(head + bad)
    offset = (head + bad).index(b"\xe9 ")
    for fragment in (3, 1 << 20):
        monkeypatch.setattr(sources, "_FRAGMENT", fragment)
        if errors == "replace":
            assert "caf\ufffd noir" in read_all(f"{kind}:{path}", errors=errors)[-1]
            continue
        with pytest.raises(InputError, match=rf"f\.txt.*: byte 0xe9 at offset {offset} is not UTF-8.*--errors replace"):
            read_all(f"{kind}:{path}")
        if kind != "text":
            with pytest.raises(InputError, match=f"at offset {offset} "):
                read_all(f"{kind}:{path}", unit_bytes=3)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"body": "x", "id": 1}', "no field 'text'; its fields are body, id; .*#FIELD"),
        ('{"text": 7}', "must be a string, got int"),
        ('{"text": null}', "must be a string, got NoneType"),
        ('["text"]', "must be a JSON object, got list"),
        ('{"text": "x"', "is not JSON"),
        ("plain words", "is not JSON"),
        ("[" * 100_000, "is n"),
        ('{"text": "half \\ud800"}', "surrogate"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, message):
    good = '{"text": "good"}\n'
    path = tmp_path / "f.jsonl"
    path.write_text(good * 4 + "\n" + line + "\n" + good)
    packed = tmp_path / "g.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for spec, unit_bytes in [(path, 1 << 20), (path, 16), (path, 17), (path, 18), (packed, 1 << 20)]:
        with pytest.raises(InputError, match=rf"jsonl(\.gz)? line 6.*{message}"):
            read_all(f"jsonl:{spec}", unit_bytes)


def test_half_a_surrogate_pair_is_replaced_on_request(tmp_path):
    (tmp_path / "f.jsonl").write_text('{"text": "half \\ud800, whole \\ud83d\\ude00"}\n')
    (document,) = read_all(f"jsonl:{tmp_path}/f.jsonl", errors="replace")
    assert document.encode() and document.endswith("whole 😀")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("books/*.txt", "--source must be one of text:GLOB"),
        ("csv:x.csv", "--source must be one of text:GLOB"),
        ("text:", "--source must be one of text:GLOB"),
        ("jsonl:x.jsonl#", "--source must have no empty part"),
        ("tfds:glue/cola@", "--source must have no empty part"),
        ("text:{}/none/*.txt", "no file matches"),
        ("text:{}", r"is a directory; name its files with text:.*/\*"),
        ("text:{}/*/", "only directories match"),
        ("lines:{}/empty", "its 1 files are empty"),
        ("tfds-dir:{}/none", "must be a directory"),
        ("tfds-dir:{}", "is not a prepared TFDS directory"),
    ],
)
def test_a_source_that_cannot_be_read(tmp_path, spec, message):
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match=message):
        source = parse_source(spec.format(tmp_path))
        list_units(source, 0)


def test_names_of_fields_and_splits():
    assert parse_source("jsonl:a#b/*.jsonl#body").field == "body"
    source = parse_source("tfds:glue/cola:2.0.0@validation#sentence")
    assert (source.place, source.split, source.field) == ("glue/cola:2.0.0", "validation", "sentence")
    assert (parse_source("tfds-dir:x").split, parse_source("tfds-dir:x").field) == ("train", "text")
    assert parse_source("text:a#b@c.txt").place == "a#b@c.txt"


@pytest.fixture(scope="module")
def tfds_directory(tmp_path_factory):
    """A TFDS data set of our own, in ArrayRecord files, made without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="needs the extra [tfds]")
    pytest.importorskip("array_record", reason="needs array_record")

    class TinyPoems(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict(
                {"poem": tfds.features.Text(), "year": tfds.features.Scalar(np.int32)}
            )
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(25), "test": self._generate_examples(3)}

        def _generate_examples(self, count):
            for k in range(count):
                yield k, {"poem": f"poem {k:02d} é" if k % 10 else "", "year": k}

    builder = TinyPoems(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare()
    return builder.data_dir


def test_tfds_records(tfds_directory):
    texts = read_all(f"tfds-dir:{tfds_directory}#poem")
    assert sorted(texts) == sorted(f"poem {k:02d} é" for k in range(25) if k % 10)
    assert read_all(f"tfds-dir:{tfds_directory}@train#poem", unit_bytes=40) == texts
    source = parse_source(f"tfds-dir:{tfds_directory}@test#poem")
    assert list_units(source, 0)[1]["records"] == 3
    parts = [Unit(0, (Slice(None, begin, end),), 1) for begin, end in [(0, 1), (1, 3)]]
    assert sorted(text for part in parts for text in joined(read_unit(source, part))) == ["poem 01 é", "poem 02 é"]


@pytest.mark.parametrize(
    "ending, message",
    [
        ("", "no field 'text'; its fields are poem, year"),
        ("#year", "must be text, got "),
        ("@dev#poem", "split must be one of .*, got 'dev'"),
    ],
)
def test_tfds_mistakes(tfds_directory, ending, message):
    with pytest.raises(InputError, match=message):
        read_all(f"tfds-dir:{tfds_directory}{ending}")
