"""The page of a report: a template filled with sections, data, styles and scripts, without anything from outside.

The page allows its own two scripts alone, by their hashes, so that nothing in a run's files can run as a script.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from markdown_it import MarkdownIt

from jaxlm.views.report import result_sections, sections
from jaxlm.views.report.charts import charts_json, charts_of, entries_of, groups_json
from jaxlm.views.report.run_record import Evaluation, Record
from jaxlm.views.report.sections import Section, short_names
from jaxlm.views.report.tables import escaped
from jaxlm.wording import counted, finite

LIBRARY, LIBRARY_STYLE = "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"
SCRIPTS = ("tables.js", "report.js")  # parts of one script
# Constructs of a note in Markdown. Everything else, HTML and links included, is shown as the text that it is.
MARKDOWN = ("heading", "list", "blockquote", "fence", "backticks", "emphasis", "escape")
LARGEST_HEADING = 3  # level of the largest heading of a note within the page
# In a script of JSON, the characters that could end it or begin a comment.
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def page_html(
    records: Sequence[Record], evaluations: Sequence[Evaluation], problems: Sequence[str] = (), note: str | None = None
) -> str:
    """Return the page. problems: sentences about what could not be read. note: a text in Markdown."""
    names = short_names([record.name for record in records])
    entries = entries_of(records, names)
    groups = groups_json(sections.settings_of(records), entries, records)
    charts = charts_of(records, entries)
    runs = list(zip(names, records, strict=True))
    found: list[Section | None] = [
        sections.runs_section(records, names) if records else None,
        sections.curves_section(charts, entries, records, list(groups)) if charts else None,
        sections.differences_section(records, names),
        result_sections.results_section(runs),
        result_sections.errors_section(runs),
        result_sections.predictions_section(runs),
        sections.zero_shot_section(records, names),
        sections.evaluations_section(evaluations),
        sections.samples_section(records, names),
        sections.starts_section(records, names),
    ]
    parts = [part for part in found if part is not None]
    payload = charts_json(charts, entries, records)
    payload["groups"] = groups
    payload["calibration"] = result_sections.calibration_json(runs, entries)
    shown = ((len(records), "run"), (len(evaluations), "evaluation"))
    title = " and ".join(counted(number, noun) for number, noun in shown if number)
    return _filled(f"Report of {title}", parts, payload, _notes(problems, note))


def _notes(problems: Sequence[str], note: str | None) -> str:
    """Return the note and the problems, which come before the sections."""
    lines = "".join(f"<li>{escaped(problem)}</li>" for problem in problems)
    found = f'<section class="problems"><h2>Problems</h2><ul>{lines}</ul></section>\n' if problems else ""
    return (f'<section class="note">\n{note_html(note)}\n</section>\n' if note else "") + found


def note_html(text: str) -> str:
    """Return a text in Markdown as HTML: headings, paragraphs, lists, quotes, code, strong text, emphasis."""
    markdown = MarkdownIt("zero").enable(MARKDOWN)
    tokens = markdown.parse(text)
    for token in tokens:
        token.info = ""  # the language of code, which would be a class
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1:]) + LARGEST_HEADING - 1, 6)}"
    return markdown.renderer.render(tokens, markdown.options, {})


def _filled(title: str, parts: Sequence[Section], payload: Any, notes: str) -> str:
    library, script = packaged(LIBRARY), "\n".join(map(packaged, SCRIPTS))
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in (library, script)]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    shown = "".join(
        f'<section id="{part.anchor}" aria-labelledby="{part.anchor}-title"><h2 id="{part.anchor}-title">'
        f"{escaped(part.title)}</h2>\n{part.content}</section>\n"
        for part in parts
    )
    return Template(packaged("template.html")).substitute(
        policy=policy,
        title=escaped(title),
        library_style=packaged(LIBRARY_STYLE),
        style=packaged("report.css"),
        links="".join(f'<li><a href="#{part.anchor}">{escaped(part.title)}</a></li>' for part in parts),
        notes=notes,
        sections=shown,
        payload=payload_json(payload),
        library=library,
        script=script,
    )


def payload_json(payload: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(finite(payload), allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPES)


def packaged(name: str) -> str:
    """Return a file of this package, with line feeds alone, as browsers hash it."""
    text = (resources.files("jaxlm.views.report") / name).read_text(encoding="utf-8")
    assert "</script" not in text or name == "template.html"
    return text.replace("\r\n", "\n")
