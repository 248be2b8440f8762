"""The report in a real browser, Debian's chromium without a network: charts are drawn and no error occurs.

Skipped where there is no chromium.
"""

import html as html_module
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from report_page import html_of
from report_runs import finetuned, pretrained, zero_shot

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Runs after the page's own scripts: uses the settings and the tables as a reader does, and notes what came of it.
PROBE = """
(async () => {
const found = {};
const painted = () => new Promise((done) => setTimeout(done, 20)); // charts are painted after the event
const inked = (figure) => {
  const canvas = figure.querySelector("canvas"), copy = document.createElement("canvas");
  Object.assign(copy, { width: canvas.width, height: canvas.height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const colors = new Set();
  for (let k = 0; k < pixels.length; k += 4) if (pixels[k + 3] > 200) colors.add(pixels.slice(k, k + 3).join());
  return [...colors];
};
const shown = () => [...document.querySelectorAll("figure:not([hidden])")];
const form = document.getElementById("settings");
const set = (name, value) => {
  const field = form.elements[name];
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  return painted();
};
const text = (figure) => inked(figure).length;
try {
  await painted();
  found.colors = shown().map((figure) => [figure.querySelector("h3").textContent, text(figure)]);
  const stroke = getComputedStyle(document.querySelector(".swatch.color0 line")).stroke.match(/\\d+/g).join();
  found.first = inked(shown()[0]).includes(stroke);
  document.querySelector("input[name=entry]").click();
  await painted();
  found.hidden = inked(shown()[0]).includes(stroke);
  document.querySelector("input[name=entry]").click();
  await painted();
  const image = () => shown()[0].querySelector("canvas").toDataURL();
  const before = image();
  found.changed = {};
  for (const [name, value, back] of [["logx", true, false], ["logy", true, false], ["smoothing", 0.9, 0],
      ["axis", "tokens", "step"], ["axis", "hours", "step"], ["marks", false, true]]) {
    await set(name, value);
    found.changed[name + value] = image() !== before;
    await set(name, back);
    found.changed[name + back] = image() === before;
  }
  await set("axis", "hours");
  found.notice = document.getElementById("notice").textContent;
  await set("axis", "step");
  const plot = shown()[0].querySelector(".plot");
  const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  press("ArrowRight");
  found.spoken = document.getElementById("spoken").textContent;
  found.values = shown()[0].querySelector(".values").textContent;
  const table = document.querySelector("table[data-name=seeds]");
  const last = table.tHead.rows[0].cells.length - 1;
  const column = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[last].dataset.value));
  table.querySelectorAll("thead button")[last].click();
  found.ascending = column();
  table.querySelectorAll("thead button")[last].click();
  found.descending = column();
  found.sort = table.tHead.rows[0].cells[last].getAttribute("aria-sort");
  Object.defineProperty(navigator, "clipboard", { value: { writeText: (text) => { found.copied.push(text); } } });
  found.copied = [];
  const tools = document.querySelector("table[data-name=results]").parentElement.nextElementSibling;
  for (const button of tools.querySelectorAll("button")) if (button.textContent.startsWith("copy")) button.click();
  await set("group", "seed");
  found.groups = document.getElementById("groups").textContent;
  found.banded = image() !== before;
  document.querySelector("table[data-name=curves-loss]").parentElement.nextElementSibling.querySelector("button").click();
  found.grouped = found.copied.pop();
  press("ArrowRight");
  found.center = document.getElementById("spoken").textContent;
  await set("group", "");
  found.ungrouped = image() === before;
  const words = document.getElementById("filter").elements.words;
  const filter = (text) => { words.value = text; words.dispatchEvent(new Event("input", { bubbles: true })); };
  filter("TW");
  await painted();
  const heads = (name) => document.querySelectorAll(`table[data-name=${name}] tbody tr:not([hidden]) th`);
  const names = (name) => [...heads(name)].map((one) => one.textContent);
  found.left = [names("runs"), names("curves-loss"), inked(shown()[0]).includes(stroke)];
  filter("");
  await painted();
  found.unfiltered = image() === before;
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
} catch (error) { found.error = String(error.stack); }
document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) }));
})();
"""


def dump(html, folder, *, width: int = 1000) -> tuple[str, str]:
    """The document after its scripts ran, and what the browser logged."""
    (folder / "page.html").write_text(html)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=5000 --dump-dom".split()
    )
    flags += [f"--window-size={width},900", "--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
    command = [CHROMIUM, *flags, (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_charts_are_drawn_and_no_error_occurs(tmp_path, monkeypatch):
    """Fails when a chart stays empty, a setting has no effect, sorting or copies are wrong, or an error is logged.

    The policy of the page is replaced for the second look alone, whose probe is a script that it would refuse.
    """
    runs = [pretrained(tmp_path / "one"), pretrained(tmp_path / "two", seed=1), finetuned(tmp_path / "tuned", seed=1)]
    zero_shot(runs[0])
    html = html_of(monkeypatch, tmp_path / "r.html", *runs)
    document, log = dump(html, tmp_path)
    assert "CONSOLE" not in log, log
    assert document.count('<div class="uplot') == 5 + 1  # two of pretraining, two of dev, zero-shot, and calibration
    assert document.count("copy LaTeX") >= 10

    probed = re.sub(r"<meta http-equiv[^>]*>", "", html).replace("</body>", f"<script>{PROBE}</script></body>")
    document, log = dump(probed, tmp_path, width=400)
    found = json.loads(html_module.unescape(re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)[1]))
    assert "error" not in found, found["error"]
    assert "CONSOLE" not in log, log
    assert all(colors > 3 for _, colors in found["colors"]), found["colors"]
    assert found["first"] and not found["hidden"]
    assert all(found["changed"].values()), found["changed"]
    assert "tuned" in found["notice"] and "one" not in found["notice"]
    assert re.match(r"step \d+: ", found["spoken"]) and "two" in found["values"]
    accuracies = [trial["dev"]["accuracy"] for trial in json.loads((runs[2] / "results.json").read_text())["runs"]]
    assert found["ascending"] == sorted(accuracies) and found["descending"] == sorted(accuracies, reverse=True)
    assert found["sort"] == "descending"
    results = json.loads((runs[2] / "results.json").read_text())
    csv, latex = found["copied"]
    mean, std = (results["dev"]["accuracy"][name] for name in ("mean", "std"))
    assert csv.splitlines()[0] == "run,task,learning rate,seeds,dev accuracy,dev accuracy std"
    assert [float(cell) for cell in csv.splitlines()[1].split(",")[2:]] == pytest.approx([1e-3, 3, mean, std])
    assert f"tuned & sst2 & 0.001 & 3 & {mean:.4f} $\\pm$ {std:.4f} \\\\" in latex
    assert latex.startswith("\\begin{tabular}{llrrr}\n")
    assert found["overflow"] <= 0
    check_groups(found, runs[1:])
    assert found["left"] == [["two"], ["two"], False] and found["unfiltered"]


def check_groups(found: dict, runs: list) -> None:
    """The group of seed 1 has the mean of two runs, which are read from their files here, of 40 and of 9 steps."""
    assert found["groups"] == "seed:0 (1)1 (2)" and found["banded"] and found["ungrouped"]
    curves = []
    for run in runs:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        of_steps: dict = {}
        for line in lines:
            if "loss" in line:
                of_steps.setdefault(line["step"], []).append(line["loss"])
        curves.append([np.mean(values) for _, values in sorted(of_steps.items())])
    first, best = (np.array([of(curve) for curve in curves]) for of in (lambda curve: curve[0], min))
    head, _, row = found["grouped"].splitlines()
    values = dict(zip(head.split(","), row.split(","), strict=True))
    for name, own in (("first", first), ("best", best)):
        assert float(values[name]) == pytest.approx(own.mean()) and float(values[f"{name} std"]) == pytest.approx(
            own.std(ddof=1)
        )
    step, said = re.match(r"step (\d+): .*?\b1 \(2\) ([\d.]+)", found["center"]).groups()
    own = [curve[int(step) - 1] for curve in curves if len(curve) >= int(step)]
    assert float(said) == pytest.approx(np.mean(own), rel=1e-4)
