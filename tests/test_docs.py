"""README and docs/: their words, their links, and the site that is built from them."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import flash_tf.layers
from flash_tf import config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"))]
SOURCES = [
    "benchmarks",
    "flash_tf",
    "kernels_pallas",
    "kernels_xla",
    "scripts",
    "tests",
]  # folders whose docstrings and comments are held to the same English
TWISTED = re.compile(r"\b(?:that|those) of\b|\bof which\b", re.IGNORECASE)
FILE = re.compile(
    r"`((?:flash_tf|kernels_pallas|kernels_xla|tests|benchmarks|colab|configs|docs|requirements|scripts)/[\w./-]*)`"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ADDRESS = re.compile(r"github\.com/[\w-]+/flash-tf\b")
README_WORDS = 900

each_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= README_WORDS


def test_nothing_says_that_of_or_of_which():
    found = []
    for path in [*TEXTS, *(path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")))]:
        text = path.read_text("utf-8")
        for match in TWISTED.finditer(re.sub(r"\n[ \t]*(?:#[ \t]*)?", " ", text)):
            found.append((str(path.relative_to(ROOT)), match.string[max(0, match.start() - 40) : match.end() + 20]))
    assert found == []


def test_the_address_of_the_repository_stands_once_and_is_everywhere_the_same():
    address = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    written = [*TEXTS, ROOT / "mkdocs.yml", *sorted((ROOT / "colab").glob("*.ipynb"))]
    found = {match for path in written for match in ADDRESS.findall(path.read_text("utf-8"))}
    assert found == {address.removeprefix("https://")}


@each_text
def test_every_link_to_a_file_finds_it(path):
    links = [link.partition("#")[0] for link in LINK.findall(path.read_text("utf-8"))]
    inside = [link for link in links if link and "://" not in link]
    assert [link for link in inside if not (path.parent / link).exists()] == []


@each_text
def test_every_file_of_the_package_that_is_named_exists(path):
    assert [name for name in FILE.findall(path.read_text("utf-8")) if not (ROOT / name).exists()] == []


def test_every_public_layer_is_on_the_page_of_the_api():
    shown = re.findall(r"^::: flash_tf\.layers\.(\w+)$", (ROOT / "docs/api/layers.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(dir(flash_tf.layers))


def test_every_option_of_a_config_stands_with_its_default_on_its_page():
    sections = {"The sections": config.Config, "data": config.DataConfig, "data.tokenizer": config.TokenizerConfig}
    sections |= {"masking": config.MaskingConfig, "optimizer": config.OptimizerConfig}
    sections |= {"optimizer.clip": config.ClipConfig, "train": config.TrainConfig, "profile": config.ProfileConfig}
    sections |= {"evaluation": config.EvaluationConfig, "strategy": config.StrategyConfig}
    parts = re.split(r"^## (.*)\n", (ROOT / "docs/config.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    rows = {
        name: re.findall(r"^\| (\**)`(\w+)`\**\s*\|\s*(?:`(.*?)`)?\s*\|", text, re.MULTILINE)
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }
    found = {name: [(bool(bold), *row) for bold, *row in of_section] for name, of_section in rows.items()}
    assert found == {name: [*map(_option, dataclasses.fields(section))] for name, section in sections.items()}


def _option(field):
    """Whether the option is needed, its name, and its default in YAML; a section has none."""
    needed, default = field.default is dataclasses.MISSING, field.default
    if needed or dataclasses.is_dataclass(default):
        return needed, field.name, ""
    value = list(default) if isinstance(default, tuple) else default
    return needed, field.name, yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
