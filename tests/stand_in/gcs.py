"""A stand-in for Google Cloud Storage in tests of runs and stores at gs://: `gcs.py FOLDER`; FOLDER/port has its port.

It is no cloud: a bucket is a folder in FOLDER, an object a file, and it answers as much of the JSON API as gcsfs,
google-cloud-storage and TensorStore ask for here. STORAGE_EMULATOR_HOST and TENSORSTORE_GCS_HTTP_URL lead them to it.
As in the cloud an object appears whole or not at all, there are no folders, and 32 objects are composed at most. The
bucket `closed` may not be read, and `fixed` not be written; `missing` is not there.
FOLDER/faults.json, an object that may be replaced at any time, says what goes wrong:

  fail      every n-th request is answered with 503
  cut       every n-th answer with content lacks its last byte, as a proxy may do
  drop      every n-th connection ends without an answer
  away      1: all requests are answered with 503
  latency   seconds before each answer
  rate      bytes per second of the content

Each request is noted in FOLDER/requests.txt: its method, the object, and the bytes of the content.
"""

import itertools
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = Path(sys.argv[1]).resolve()
UPLOADS: dict[str, tuple[Path, bytearray]] = {}
NUMBERS = itertools.count()
LOCK = threading.Lock()
SERVED = itertools.count(1)

Answer = tuple[int, dict[str, str], bytes]


class Refused(Exception):
    """An HTTP status that tells of failure."""


def faults() -> dict[str, float]:
    try:
        return json.loads((ROOT / "faults.json").read_bytes())
    except FileNotFoundError:
        return {}


def falls_on(number: int, every: float | None) -> bool:
    return bool(every) and number % int(every) == 0


def generation(file: Path) -> str:
    return str(file.stat().st_mtime_ns)


def described(file: Path) -> dict[str, str]:
    bucket, _, name = file.relative_to(ROOT).as_posix().partition("/")
    number, time = generation(file), "2020-01-01T00:00:00.000Z"
    found = {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(file.stat().st_size)}
    return found | {"generation": number, "metageneration": "1", "etag": number, "updated": time, "timeCreated": time}


def as_json(value: object, **headers: str) -> Answer:
    return 200, headers | {"Content-Type": "application/json"}, json.dumps(value).encode()


def put(file: Path, content: bytes, query: dict[str, str]) -> Answer:
    found = generation(file) if file.is_file() else "0"
    if query.get("ifGenerationMatch", found) != found:
        raise Refused(412)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = ROOT / f"upload-{next(NUMBERS)}"
    fresh.write_bytes(content)
    os.replace(fresh, file)
    return as_json(described(file))


def composed(bucket: Path, file: Path, request: dict[str, Any]) -> Answer:
    sources = [bucket / source["name"] for source in request["sourceObjects"]]
    if not 0 < len(sources) <= 32:
        raise Refused(400)
    return put(file, b"".join(source.read_bytes() for source in sources), {})


def listed(bucket: Path, query: dict[str, str]) -> Answer:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    items, prefixes = [], set()
    for file in sorted(path for path in bucket.rglob("*") if path.is_file()):
        name = file.relative_to(bucket).as_posix()
        if not name.startswith(prefix):
            continue
        folder, between, _ = name[len(prefix) :].partition(delimiter or "\0")
        if between:
            prefixes.add(prefix + folder + between)
        else:
            items.append(described(file))
    return as_json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        url = urlsplit(self.path)
        words = [unquote(word) for word in url.path.strip("/").split("/")]
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        wrong, number = faults(), next(SERVED)
        if falls_on(number, wrong.get("drop")):
            self.close_connection = True
            return
        try:
            if wrong.get("away") or falls_on(number, wrong.get("fail")):
                raise Refused(503)
            with LOCK:
                status, headers, content = self.reply(words, query, body)
            if falls_on(number, wrong.get("cut")) and status == 206:
                content = content[:-1]
        except (Refused, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            status, headers = error.args[0] if isinstance(error, Refused) else 404, {}
            content = json.dumps({"error": {"code": status, "message": "refused"}}).encode()
        except Exception as error:  # a request that the stand-in does not know
            status, headers = 400, {}
            content = json.dumps({"error": {"code": status, "message": repr(error)}}).encode()
        if status == 304:  # has no body: a client takes it for the beginning of the next answer
            content = b""
        with LOCK, (ROOT / "requests.txt").open("a") as notes:
            notes.write(f"{self.command} {'/'.join(words).partition('/b/')[2] or '-'} {len(content)}\n")
        time.sleep(wrong.get("latency", 0.0) + (len(content) / wrong["rate"] if "rate" in wrong else 0.0))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, words: list[str], query: dict[str, str], body: bytes) -> Answer:
        upload = words[0] == "upload"
        media = words[0] == "download" or query.get("alt") == "media"
        _, _, _, bucket, *rest = words[words.index("storage") :]  # storage/v1/b/BUCKET/o/NAME
        name = "/".join(rest[1:])
        if bucket == "missing":
            raise Refused(404)
        if bucket == "closed" or (bucket == "fixed" and self.command != "GET"):
            raise Refused(403)
        if upload:
            return self.upload(bucket, query, body)
        if not rest:
            return as_json({"kind": "storage#bucket", "name": bucket, "location": "US"})
        if not name:
            return listed(ROOT / bucket, query)
        source, move, target = name.partition("/moveTo/o/")
        if move:
            put(ROOT / bucket / target, (ROOT / bucket / source).read_bytes(), {})
            (ROOT / bucket / source).unlink()
            return as_json(described(ROOT / bucket / target))
        target, composes, _ = name.rpartition("/compose")
        if composes and self.command == "POST":
            return composed(ROOT / bucket, ROOT / bucket / target, json.loads(body))
        file = ROOT / bucket / name
        if self.command == "DELETE":
            file.unlink()
            return 204, {}, b""
        if not file.is_file():  # there are no folders
            raise Refused(404)
        number = generation(file)
        if query.get("ifGenerationNotMatch") == number:
            raise Refused(304)
        if not media:
            return as_json(described(file))
        headers = {"x-goog-generation": number, "ETag": number}
        if "Range" not in self.headers:
            return 200, headers, file.read_bytes()
        size = file.stat().st_size
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        begin, end = int(first), min(size, int(last or size) + 1)
        if begin >= size:
            raise Refused(416)
        with file.open("rb") as opened:
            opened.seek(begin)
            content = opened.read(end - begin)
        return 206, headers | {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}, content

    def upload(self, bucket: str, query: dict[str, str], body: bytes) -> Answer:
        if query["uploadType"] == "media":
            return put(ROOT / bucket / query["name"], body, query)
        if query["uploadType"] == "multipart":  # gcsfs writes small objects in one request, their description first
            boundary = self.headers["Content-Type"].partition("boundary=")[2].strip("\"'").encode()
            _, described_part, content_part, _ = body.split(b"--" + boundary)
            name = json.loads(described_part.partition(b"\n\n")[2])["name"]
            return put(ROOT / bucket / name, content_part.partition(b"\n\n")[2].removesuffix(b"\n"), query)
        if "upload_id" not in query:  # gcsfs writes in pieces
            number = str(next(NUMBERS))
            UPLOADS[number] = ROOT / bucket / query["name"], bytearray()
            place = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={number}"
            return as_json({}, Location=f"http://{self.headers['Host']}{place}")
        file, content = UPLOADS[query["upload_id"]]
        content += body
        if self.headers["Content-Range"].endswith("/*"):
            return 308, {"Range": f"bytes=0-{len(content) - 1}"}, b""
        return put(file, bytes(content), {})


if __name__ == "__main__":
    server = ThreadingHTTPServer(("localhost", 0), Handler)
    (ROOT / "port.new").write_text(str(server.server_port))
    (ROOT / "port.new").rename(ROOT / "port")
    server.serve_forever()
