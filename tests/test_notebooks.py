"""The notebooks, run as a reader runs them, but on small sizes."""

import os
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
SMALL = "--set train.steps=4 --set train.tokens_per_step=512 --set model.depth=2 --set optimizer.warmup_steps=2"
RUNS = [
    ("quickstart", {"OPTIONS": SMALL}),
    ("build_with_layers", {"BACKEND": "tensorflow", "EPOCHS": 1, "STEPS": 4}),
    ("build_with_layers", {"BACKEND": "jax", "EPOCHS": 1, "STEPS": 4}),
    ("c4_mlm_on_tpu", {"FLASH_TF": "flash-tf"}),
]


def tags(cell):
    return cell.metadata.get("tags", [])


def prepared(name, parameters):
    """The notebook up to the point that needs a TPU, with its parameters set, on what is installed."""
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    book = nbformat.read(path, as_version=4)
    at = next((i for i, cell in enumerate(book.cells) if "needs-tpu" in tags(cell)), None)
    book.cells = [cell for cell in book.cells[:at] if cell.cell_type == "code" and "install" not in tags(cell)]
    (given,) = [cell for cell in book.cells if "parameters" in tags(cell)]
    given.source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
    for cell in book.cells:
        if any(line.startswith("!") for line in cell.source.splitlines()):
            # IPython goes on after a command that failed
            cell.source = cell.source.replace("\n!", "\n_exit_code = None\n!")
            cell.source += "\nassert _exit_code == 0, _exit_code"
    return book


def printed(book):
    outputs = [output for cell in book.cells for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.full
@pytest.mark.parametrize(("name", "parameters"), RUNS, ids=[f"{n}-{p.get('BACKEND', '')}".strip("-") for n, p in RUNS])
def test_a_notebook_runs_to_its_end_or_to_where_it_needs_a_tpu(name, parameters, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    book = prepared(name, parameters)
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "Traceback" not in printed(book)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_in_colab_and_installs_the_package_first(path):
    address = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    cells = nbformat.read(path, as_version=4).cells
    place = f"{address.removeprefix('https://')}/blob/main/{path.relative_to(ROOT)}"
    assert f"(https://colab.research.google.com/{place.replace('github.com', 'github')})" in cells[0].source
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert "install" in tags(first) and address in first.source


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS} == {name for name, _ in RUNS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_it_printed(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count] == []
