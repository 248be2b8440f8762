"""README.md: short, with commands that are parsed, names that exist, and a command beside each measured figure.

Fails when it grows into a manual again, when a flag or a config in it is renamed, or when a figure has no command.
`tests/test_docs.py` parses the commands of all pages.
"""

import re

from documents import blocks, commands, of_jaxlm, without_blocks
from paths import REPOSITORY

from jaxlm.config import known_configs, load_config
from jaxlm.training.config import FinetuneConfig, PretrainConfig

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
LONGEST = 120


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of a table, without its heading."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def test_it_can_be_read_in_one_sitting():
    assert len(README.splitlines()) <= LONGEST
    assert max(map(len, README.splitlines())) <= 400  # rows of tables are long


def test_it_shows_the_main_commands():
    """Fails when pretraining, fine-tuning, the quickstart or the tests are no longer shown."""
    shown = [words for block in blocks(README) if block.language == "bash" for words in commands(block.text)]
    assert {"prepare", "pretrain", "finetune", "predict"} <= {found[0] for words in shown if (found := of_jaxlm(words))}
    assert {"launch/quickstart.sh", "launch/setup.sh", "launch/test.sh"} <= {words[0] for words in shown}


def test_every_system_has_configs_that_exist():
    """Fails when a config of the table of systems is renamed."""
    found = {
        system: re.findall(r"`((?:pretrain|finetune)/\w+)`", " ".join(row)) for system, *row in rows(section("Systems"))
    }
    assert len(found) == 14 and all(found.values())
    assert {name for names in found.values() for name in names} <= set(known_configs())


def test_every_measured_figure_has_its_command():
    """Fails when a row of the table of figures names no command of jaxlm or script of launch/."""
    figures = rows(section("Measured"))
    assert len(figures) >= 5
    for figure, command, *_ in figures:
        named = [name for name in re.findall(r"`([^`]+)`", command) if re.match(r"python -m jaxlm\.|launch/", name)]
        assert named, figure


def test_it_links_to_the_pages():
    """Fails when the entry pages of the documentation are not linked."""
    linked = set(re.findall(r"\]\(docs/(\w+)\.md\)", without_blocks(README)))
    assert {"quickstart", "pretrain", "tpu_pod", "fine_tuning", "own_files", "gpt1", "python", "adding"} <= linked


def test_small_models_are_followed_by_recipes_of_their_size():
    """Fails when README or the table of recipes leads a small model to a large one's, or a recipe is in neither."""
    assert "finetune/gpt_small --run runs/mine --start runs/small" in README  # the run of pretrain/gpt_small
    page = (REPOSITORY / "docs/fine_tuning.md").read_text(encoding="utf-8")
    table = rows(page.split("\n## Which recipe\n", 1)[1].split("\n## ", 1)[0])
    named = {name for _, recipe in table for name in re.findall(r"`((?:finetune|debug)/\w+)`", recipe)}
    assert {name for name in known_configs() if name.startswith("finetune/")} <= named <= set(known_configs())
    for models, recipe in table:
        small = re.fullmatch(r"`(pretrain/\w+_small)`", models)
        if small is not None:
            same = load_config(small[1], PretrainConfig).model, load_config(recipe.strip("`"), FinetuneConfig).model
            assert same[0] == same[1], models
