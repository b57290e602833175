"""The code of README and docs/, run as a reader runs it: in order, page by page, in a folder of its own.

- A block of Python runs in one namespace for each page.
- A block of a console runs each line after `$`; the other lines show what it prints.
- A block of YAML is the mixer of a config.
- A block whose title is a path is a file at that path. A file of YAML is a config.
- A block whose title says what it needs, as a GPU or the network, is not run.
"""

import ast
import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flash_tf import config
from flash_tf.layers.mixers import MIXERS
from flash_tf.registry import listed

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "yaml", "text", "bibtex"}
SMALL = "train.steps=4 train.tokens_per_step=512 model.depth=2 optimizer.warmup_steps=2 evaluation.windows=2".split()
QUICK = ("README.md", "docs/data.md", "docs/systems/", "docs/choosing.md")  # pages that take seconds
CHANGES_THE_PACKAGE = "docs/contributing.md"
A_CHECKOUT = (
    "flash_tf",
    "kernels_pallas",
    "kernels_xla",
    "tests",
    "configs",
    "benchmarks",
    "scripts",
    "pyproject.toml",
    "setup.py",
    "README.md",
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block; `line` is where it begins."""

    language: str
    title: str
    text: str
    line: int

    @property
    def needs(self):
        return self.title.startswith("Needs ")


def blocks(page):
    text = (ROOT / page).read_text("utf-8")
    return [Block(m[1], m[2] or "", m[3], text.count("\n", 0, m.start(3))) for m in FENCE.finditer(text)]


def runs(block):
    return not block.needs and block.language not in ("text", "bibtex")


PAGES = [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
WITH_CODE = [page for page in PAGES if any(map(runs, blocks(page)))]


class Reader:
    """Someone who does what a page says, in `folder`, with the package that is in `package`."""

    def __init__(self, page, folder, package):
        self.page, self.folder, self.package, self.namespace = page, folder, package, {"__name__": "__main__"}

    def read(self):
        for block in filter(runs, blocks(self.page)):
            (self.write if block.title else getattr(self, block.language))(block)

    def write(self, block):
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        if block.language == "yaml" and self.package == ROOT:
            config.load(block.title)

    def python(self, block):
        exec(compile("\n" * block.line + block.text, self.page, "exec"), self.namespace)

    def yaml(self, block):
        part = yaml.safe_load(block.text)
        assert part.keys() == {"mixer"}, part
        for mixer in listed(part["mixer"]):
            MIXERS.check(mixer)

    def console(self, block):
        assert block.text.startswith("$ ")
        for line in block.text.splitlines():
            if line.startswith("$ "):
                self.shell(line.removeprefix("$ "))

    def shell(self, command):
        if command.startswith("flash-tf train "):
            command += "".join(f" --set {value}" for value in SMALL)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(self.package), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("KERAS_BACKEND", None)
        ran = subprocess.run(["bash", "-ec", command], cwd=self.folder, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, f"$ {command}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES
    fences = re.findall(r"^\s*```", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_imports_from_the_package_is_there(page):
    own = {block.title.removesuffix(".py").replace("/", ".") for block in blocks(page)}
    for block in blocks(page):
        for line in ast.parse(block.text).body if block.language == "python" else ():
            ours = isinstance(line, ast.ImportFrom) and line.module.partition(".")[0] in A_CHECKOUT
            if ours and line.module not in own:
                module = importlib.import_module(line.module)
                assert [name.name for name in line.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page.startswith(QUICK) else pytest.mark.full) for page in WITH_CODE]
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == CHANGES_THE_PACKAGE:
        unwanted = shutil.ignore_patterns("__pycache__", "results")
        for path in map(ROOT.joinpath, A_CHECKOUT):
            if path.is_dir():
                shutil.copytree(path, tmp_path / path.name, symlinks=True, ignore=unwanted)
            elif path.exists():
                shutil.copy(path, tmp_path)
    Reader(page, tmp_path, tmp_path if page == CHANGES_THE_PACKAGE else ROOT).read()
