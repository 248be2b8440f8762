"""The report as a page: nothing in a run's files becomes markup or ends it, and nothing is loaded from elsewhere."""

import base64
import hashlib
import json
import re
import shutil

import pytest
from report_page import Page, html_of
from report_runs import START, finetuned, pretrained, write_lines, zero_shot

from jaxlm.errors import InputError
from jaxlm.files import write_json
from jaxlm.views.report.page import LIBRARY, note_html, packaged

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'\u2028]]>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    return pretrained(place / "one"), finetuned(place / "tuned")


def test_texts_of_files_are_escaped(tmp_path, monkeypatch):
    """Fails when a text of a file becomes an element, ends the script of JSON, or is changed on its way."""
    name = 'a<b onclick=x>"&'
    one = pretrained(tmp_path / name)
    write_lines(one / "starts.jsonl", [START | {"command": EVIL, "commit": "<i>", "time": "<b>"}])
    lines = (one / "metrics.jsonl").read_text()
    (one / "metrics.jsonl").write_text(lines + json.dumps({"step": 40, "<script>x_loss": 1.0}) + "\n")
    (one / "samples.txt").write_text(EVIL)
    tuned = finetuned(tmp_path / 'tuned" onfocus="x', text=EVIL)
    (tmp_path / "note.md").write_text(f"# {EVIL}\n\n- {EVIL}\n\n`{EVIL}`\n\n[x](javascript:alert(3))\n")
    (tmp_path / "figures.json").write_text(json.dumps({EVIL: EVIL}))
    targets = (one, tuned, tmp_path / "figures.json")
    html = html_of(monkeypatch, tmp_path / "r.html", *targets, "--note", tmp_path / "note.md")
    page = Page(html)
    assert len(re.findall("<script", html)) == len(re.findall("</script", html)) == 3
    assert not re.findall("<img|<i>|<b>|<b |onclick=x>", html)
    assert page.text.count(EVIL) >= 5  # the note, the sample, the command, the figures
    assert name in [row[0] for row in page.table("The runs")]
    assert "<script>x loss" in [chart["title"] for chart in json.loads(page.payload)["charts"]]
    assert EVIL in page.table('tuned" onfocus="x, dev, seed')[1][1]
    assert not [attribute for attribute in page.attributes if attribute.startswith("on")]
    assert 'href="javascript' not in html and "<a href" not in html.split("</nav>")[1]


def test_the_page_names_no_url_and_allows_its_own_scripts_alone(tmp_path, runs, monkeypatch):
    """Fails when something could be loaded, or a script that is not ours could run.

    The library's licence comment names its home page; it is a comment in a file that is kept unchanged.
    """
    html = html_of(monkeypatch, tmp_path / "r.html", *runs)
    library = packaged(LIBRARY)
    assert re.findall(r"\w+://[^\s\"']*", library) == ["https" + "://github.com/leeoniya/uPlot"]
    assert library.startswith("/*! https" + "://") and library in html
    rest = html.replace(library, "")
    assert not re.findall(r"\w+://|url\(|@import|\bsrc=|<link|<iframe|<object|<base", rest)
    assert set(re.findall(r'href="(.)', rest)) == {"#"}
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    assert len(scripts) == 2
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none'; script-src ")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-(.*?)'", policy) == hashes and "script-src 'unsafe" not in policy


def test_the_library_is_the_published_file():
    """Fails when a file of uPlot 1.6.32 is changed; the hashes are those of the files in its package."""
    expected = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    found = {name: hashlib.sha256(packaged(f"vendor/{name}").encode()).hexdigest() for name in expected}
    assert found == expected and "(v1.6.32)" in packaged(LIBRARY)[:60]


def test_the_same_files_give_the_same_page(tmp_path, runs, monkeypatch):
    """Fails when the page has the time, an order of a set, or something else of the process that wrote it."""
    first = html_of(monkeypatch, tmp_path / "a.html", *runs)
    assert html_of(monkeypatch, tmp_path / "b.html", *runs) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]  # nothing partial is left


DAMAGES = {
    "torn metrics": ("metrics.jsonl", '{"step": 4', None),
    "metrics of another kind": ("metrics.jsonl", '[1]\n{"step": 1, "loss": "x", "seed": [1]}\n', None),
    "unhashable": (
        "metrics.jsonl",
        '{"step": 1, "loss": 1.0, "seed": [1]}\n',
        "metrics.jsonl is left out: it is damaged",
    ),
    "altered results": ("results.json", '{"runs": [], "sha256": "0"}', "results.json is left out"),
    "results of another kind": ("results.json", '{"runs": [{"seed": "x"}]}', "results.json is left out: it is damaged"),
    "a list": ("results.json", "[]", "results.json is left out"),
    "task": ("task.json", "{", "task.json is left out"),
    "predictions": ("predictions.jsonl", '{"split": "dev"}\n', "predictions.jsonl is left out: it is damaged"),
    "nested": ("predictions.jsonl", "[" * 100_000 + "\n", "predictions.jsonl is left out"),
    "zero-shot": ("zero_shot.jsonl", '{"step": 1}\n', "zero_shot.jsonl is left out"),
    "starts": ("starts.jsonl", '[1]\n{"devices": 3, "started_from": "resumed at step x"}\n{"tor', None),
    "samples": ("samples.jsonl", '{"txt": 1}\n', "samples.jsonl is left out"),
    "config": ("config.json", '{"kind": "pretraining", "model": 3}', "tuned cannot be shown"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_a_sentence_on_the_page(name, tmp_path, runs, monkeypatch):
    """Fails when a damaged file ends in a traceback, hides another run, or is not named."""
    file, content, said = DAMAGES[name]
    shutil.copytree(runs[0], tmp_path / "one")
    shutil.copytree(runs[1], tmp_path / "tuned")
    (tmp_path / "tuned" / file).write_text(content)
    html = html_of(monkeypatch, tmp_path / "r.html", tmp_path / "one", tmp_path / "tuned")
    page = Page(html)
    assert ("Problems" in page.titles) == (said is not None)
    assert said is None or said in page.text
    assert len(page.table("The runs")) == (2 if name == "config" else 3)
    assert page.table("loss: values")[1][0] == "one"


def test_nothing_readable_is_an_error(tmp_path, monkeypatch):
    run = pretrained(tmp_path / "one")
    (run / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        html_of(monkeypatch, tmp_path / "r.html", run)
    assert not (tmp_path / "r.html").exists()


def test_a_run_that_has_logged_nothing(tmp_path, monkeypatch):
    run = pretrained(tmp_path / "one")
    for file in ("metrics.jsonl", "starts.jsonl"):
        (run / file).unlink()
    page = Page(html_of(monkeypatch, tmp_path / "r.html", run))
    assert page.titles == ["Runs"] and page.table("The runs")[1][4] == "no logged steps"
    write_json(run / "results.json", {"task": "x", "metric": "accuracy", "runs": []}, signed=True)
    zero_shot(run)
    assert "Zero-shot tasks" in Page(html_of(monkeypatch, tmp_path / "r.html", run)).titles


def test_markdown():
    """Fails when a construct of the subset is not rendered, or one outside of it is not shown as its text."""
    text = "# One\nsome *thin* **bold** `a<b`\nmore\n\n- x\n  y\n- z\n\n1. p\n2. q\n"
    text += "> said\n\n```\n# <raw>\n```\n<hr> [a](b) 2 * 3 * 4 2\\*3\\*4 &amp; <https://a.b>"
    text += '\n\n##### five\n```js"><b>\n###### open'
    assert note_html(text).splitlines() == [
        "<h3>One</h3>",
        "<p>some <em>thin</em> <strong>bold</strong> <code>a&lt;b</code>",
        "more</p>",
        *("<ul>", "<li>x", "y</li>", "<li>z</li>", "</ul>"),
        *("<ol>", "<li>p</li>", "<li>q</li>", "</ol>"),
        *("<blockquote>", "<p>said</p>", "</blockquote>"),
        *("<pre><code># &lt;raw&gt;", "</code></pre>"),
        "<p>&lt;hr&gt; [a](b) 2 * 3 * 4 2*3*4 &amp;amp; &lt;https://a.b&gt;</p>",
        *("<h6>five</h6>", "<pre><code>###### open</code></pre>"),
    ]
    assert note_html("") == ""
