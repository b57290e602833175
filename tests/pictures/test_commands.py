"""`flash-tf plot` and `flash-tf inspect` as their users meet them."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from flash_tf import owned_files, pictures
from flash_tf.pictures import page
from tests.training import runs

SECTIONS = {"train": {"steps": 4}, "evaluation": {"every": 2}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a masked FLASH, and its files again as of a causal model: drawing records needs no more."""
    folder = tmp_path_factory.mktemp("pictures")
    runs.corpus(folder)
    runs.train(runs.write(folder, model={"depth": 2}, **SECTIONS), folder / "flash")
    again = Path(shutil.copytree(folder / "flash", folder / "tpp", ignore=shutil.ignore_patterns("checkpoints")))
    config = (again / "config.yaml").read_text()
    assert "type: masked_lm" in config
    (again / "config.yaml").write_text(config.replace("type: masked_lm", "type: causal_lm"))
    return folder


@pytest.fixture(scope="module")
def folder_of(trained, tmp_path_factory):
    """The folder of a model by name: of the masked FLASH, or of a causal Transformer, trained when asked for."""

    def find(name):
        if name == "flash":
            return trained
        folder = tmp_path_factory.mktemp(name)
        runs.corpus(folder)
        transformer = {"type": "causal_lm", "depth": 1, "mixer": {"type": "self_attention", "heads": 2}}
        path = runs.write(folder, model={**transformer, "feedforward": {"type": "mlp"}}, **SECTIONS)
        runs.train(path, folder / name)
        return folder

    return find


def printed(folder, *arguments):
    status, out, err = runs.command(folder, *arguments)
    assert (status, err) == (0, "")
    return out


def refused(folder, *arguments):
    status, out, err = runs.command(folder, *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    return err.removeprefix("flash-tf: ").strip()


def text_of(folder):
    return (folder / "validation.txt").read_text().splitlines()[0]


@pytest.mark.full
def test_plot_prints_a_table_and_the_files_that_it_wrote(trained):
    places = [trained / name for name in ("flash", "tpp")]
    out = printed(trained, "plot", *places, "--out", trained / "curves")
    head, flash, transformer, _, *files = out.splitlines()
    assert head.split()[:2] == ["run", "steps"]
    assert flash.split()[:2] == ["flash", "4"] and flash.split()[-1] == "done" == transformer.split()[-1]
    assert len(files) == 5 and all(Path(file).stat().st_size for file in files)
    (loss,) = [r["loss"] for r in runs.records(trained / "flash") if r["step"] == 4]
    assert f"{loss:.4f}" in flash


def test_plot_of_one_run_writes_beside_it_and_gives_its_figures_as_json(trained):
    found = json.loads(printed(trained, "plot", trained / "flash", "--json"))
    best = min(runs.records(trained / "flash", "evaluations.jsonl"), key=lambda record: record["loss"])
    (run,) = found["runs"]
    assert (run["steps"], run["best_step"], run["best_validation_loss"]) == (4, best["step"], best["loss"])
    assert found["files"][0] == f"{trained}/flash/pictures/plot.html"


@pytest.mark.parametrize(("name", "layers"), [("flash", 2), pytest.param("tpp", 1, marks=pytest.mark.full)])
def test_inspect_prints_a_table_and_the_files_that_it_wrote(folder_of, name, layers):
    folder = folder_of(name)
    out = printed(folder, "inspect", folder / name, "--text", text_of(folder))
    table, files = out.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()[: layers + 1]] == ["layer", *map(str, range(layers))]
    names = ["inspect.html", "inspect_overview.png", *(f"inspect_layer_{i:02d}.png" for i in range(layers))]
    assert files.splitlines() == [f"{folder}/{name}/pictures/{file}" for file in names]
    assert all(Path(file).stat().st_size for file in files.splitlines())
    assert Path(files.splitlines()[0]).read_text().count("data:image/png") == layers + 1


def test_inspect_takes_masks_a_layer_and_a_place_and_gives_json(trained):
    options = ["--layer", "1", "--start", "1", "--tokens", "2", "--checkpoint", "newest", "--json"]
    text = f"{text_of(trained)[:10]} <mask>"
    found = json.loads(printed(trained, "inspect", trained / "flash", "--text", text, "--out", trained / "o", *options))
    assert found["tokens"][-1] == "<mask>" and found["step"] == 4
    assert [layer["layer"] for layer in found["layers"]] == [1]
    assert set(found["layers"][0]["parts"]) == {"local", "global"}
    assert sorted(file.name for file in (trained / "o").iterdir()) == [
        ".flash-tf.json", "inspect.html", "inspect_layer_01.png", "inspect_overview.png",
    ]  # fmt: skip


def drawn(out, name, *pictures):
    return page.write(str(out), name, page.html("T", {}, [], pictures, ""), pictures)


@pytest.mark.parametrize("manifest", [True, False], ids=["of today", "from before manifests"])
def test_pictures_take_the_place_of_older_ones_and_of_no_other_file(tmp_path, manifest):
    one, other = (page.Picture(f"inspect_layer_0{i}", "", "", f"PNG {i}".encode()) for i in range(2))
    drawn(tmp_path, "inspect", one, other)
    (tmp_path / "inspect_layer_07.png").write_text("mine")
    if not manifest:
        (tmp_path / owned_files.MANIFEST).unlink()
    drawn(tmp_path, "inspect", one._replace(png=b"new"))
    found = runs.contents(tmp_path)
    assert found.keys() == {owned_files.MANIFEST, "inspect.html", "inspect_layer_00.png", "inspect_layer_07.png"}
    assert found["inspect_layer_00.png"] == b"new" and found["inspect_layer_07.png"] == b"mine"
    for name in ("plot.html", "loss.png"):
        (tmp_path / name).write_text("mine")
        before = runs.contents(tmp_path)
        with pytest.raises(ValueError, match=f"holds {name}, which flash-tf plot did not write"):
            drawn(tmp_path, "plot", page.Picture("loss", "", "", b"new"))
        assert runs.contents(tmp_path) == before
        (tmp_path / name).unlink()


def test_what_cannot_be_drawn_is_refused_in_one_line_and_nothing_is_written(trained, tmp_path):
    nowhere = tmp_path / "nowhere"
    assert refused(tmp_path, "plot", nowhere) == f"{nowhere} is no run: there is no such folder"
    said = refused(tmp_path, "plot", trained)
    assert said.startswith(f"{trained} is no run: it has no metrics.jsonl") and "flash, tpp" in said
    assert "is not a model directory" in refused(tmp_path, "inspect", nowhere, "--text", "a")
    blank = refused(tmp_path, "inspect", trained / "flash", "--text", "  ", "--out", tmp_path / "out")
    assert blank == "the text needs a token or more, got none of ' '"
    (tmp_path / "file").write_text("")
    assert "file" in refused(tmp_path, "plot", trained / "flash", "--out", tmp_path / "file")
    assert not nowhere.exists()


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch):
    pictures.check_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pictures need matplotlib, which is not installed: pip install 'flash-tf"):
        pictures.check_matplotlib()
