"""Timed sizes: `tune` writes a block size, and leaves a model's chunk size alone."""

import json
import re
from pathlib import Path

import pytest
import yaml

from flash_tf import config
from flash_tf.compiling import tuning
from flash_tf.registry import listed
from tests.training import runs
from tests.training.test_bad_input import one_line

LINEAR = {"type": "linear_attention", "heads": 2, "block_size": 8}
CAUSAL = {"type": "causal_lm", "vocabulary_size": runs.VOCABULARY, "width": 16, "depth": 1}


def written(folder, mixer):
    """A tiny config with this mixer, after two lines of comment."""
    path = Path(runs.write(folder, model={**CAUSAL, "mixer": mixer}))
    path.write_text(f"# what it is\n# measured: nothing\n{path.read_text()}")
    return str(path)


@pytest.mark.full
def test_a_tile_is_timed_and_the_fastest_is_written(tmp_path):
    path = written(tmp_path, LINEAR)
    before = config.to_mapping(config.load(path))
    status, out, err = runs.command(tmp_path, "tune", path, "--sizes", "16", "32", "--steps", "2", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["option"], found["now"], [row["size"] for row in found["rows"]]) == ("block_size", 8, [8, 16, 32])
    assert all(row["median_ms"] > 0 and row["program_bytes"] > 1e4 for row in found["rows"])
    assert found["fastest"] == tuning.faster(found["rows"], 8)
    after = config.to_mapping(config.load(path))
    assert after["model"]["mixer"]["block_size"] == found["fastest"]
    before["model"]["mixer"]["block_size"] = found["fastest"]
    assert after == before
    assert Path(path).read_text().startswith("# what it is\n# measured: nothing\n")


@pytest.mark.parametrize(("least", "fastest"), [(10.1, 16), (9.9, 8)])
def test_a_size_is_faster_only_where_every_step_of_the_present_one_took_longer(least, fastest):
    rows = [{"size": 8, "median_ms": 12.0, "least_ms": least}, {"size": 16, "median_ms": 10.0, "least_ms": 1.0}]
    assert tuning.faster(rows, 8) == fastest


@pytest.mark.parametrize(
    ("mixer", "after"),
    [
        (
            "mixer: {type: linear_attention, block_size: 8, heads: 2}  # two",
            "mixer: {type: linear_attention, block_size: 64, heads: 2}  # two",
        ),
        (
            "mixer: {type: linear_attention, heads: 2}  # two",
            "mixer: {block_size: 64, type: linear_attention, heads: 2}  # two",
        ),
        ("mixer:  # of a block\n    heads: 2  # two", "mixer:  # of a block\n    block_size: 64\n    heads: 2  # two"),
        (
            "mixer:\n  - &one {type: linear_attention, heads: 2}\n  - {type: diag_attention}\n  - *one",
            "mixer:\n  - &one {block_size: 64, type: linear_attention, heads: 2}\n  - {type: diag_attention}\n  - *one",
        ),
    ],
)
def test_a_tile_is_all_that_changes_in_the_text(tmp_path, mixer, after):
    base, path = written(tmp_path, LINEAR), tmp_path / "own.yaml"
    text = "# own\nbase: {base}\nmodel:  # small\n  depth: {depth}\n  {mixer}\n# end\n"
    depth = 3 if "diag" in mixer else 1
    path.write_text(text.format(base=base, mixer=mixer, depth=depth))
    tuning.write(str(path), 64)
    assert path.read_text() == text.format(base=base, mixer=after, depth=depth)
    loaded = listed(config.load(str(path)).model["mixer"])
    assert all(one["block_size"] == 64 for one in loaded if one["type"] == "linear_attention")


def test_a_tile_leaves_a_link_its_file_the_mode_and_the_ends_of_lines(tmp_path):
    path, link = written(tmp_path, LINEAR), tmp_path / "link.yaml"
    text = Path(path).read_text().replace("\n", "\r\n")
    Path(path).write_text(text, newline="")
    Path(path).chmod(0o600)
    link.symlink_to(path)
    tuning.write(str(link), 64)
    assert link.is_symlink() and Path(path).stat().st_mode & 0o777 == 0o600
    content = Path(path).read_bytes()
    assert b"block_size: 64" in content and content.count(b"\r\n") == content.count(b"\n") == text.count("\r\n")


@pytest.mark.parametrize("own", ["width: 32", "width: 32, mixer: {block_size: 4}", ""])
def test_a_tile_goes_into_a_config_that_has_its_mixer_from_a_base(tmp_path, own):
    base, path = written(tmp_path, LINEAR), tmp_path / "wide.yaml"
    path.write_text(f"# wide\nbase: {base}\nmodel: {{{own}}}\n")
    tuning.write(str(path), 64)
    loaded = config.load(str(path))
    assert (loaded.model["mixer"], loaded.model["width"]) == ({**LINEAR, "block_size": 64}, 32 if own else 16)
    assert yaml.safe_load(path.read_text())["base"] == base


@pytest.mark.full
def test_a_chunk_of_the_model_is_timed_and_the_config_stays(tmp_path):
    path = written(tmp_path, runs.MIXER)
    before = Path(path).read_text()
    status, out, err = runs.command(tmp_path, "tune", path, "--sizes", "8", "16", "--steps", "2")
    assert status == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["chunk_size", "8", "16"] and "(now)" in out
    assert "is a part of its function: nothing was changed" in err
    assert Path(path).read_text() == before


@pytest.mark.parametrize(
    ("mixer", "arguments", "line"),
    [
        (
            {"type": "self_attention", "heads": 2},
            [],
            "needs a mixer with a block_size or a chunk_size, and self_attention",
        ),
        (LINEAR, ["--steps", "1"], "tune needs --steps >= 2 and sizes >= 1, got 1 and"),
        pytest.param(
            LINEAR, ["--sizes", "0"], r"tune needs --steps >= 2 and sizes >= 1, got 5 and \[0\]", marks=pytest.mark.full
        ),
    ],
)
def test_what_cannot_be_tuned_is_said_in_a_line(tmp_path, mixer, arguments, line):
    path = written(tmp_path, mixer)
    assert re.search(line, one_line(runs.command(tmp_path, "tune", path, *arguments)))


@pytest.mark.parametrize("text", ["{{base: {base}}}\n", "%YAML 1.1\n---\nbase: {base}\n...\n"])
def test_a_form_that_cannot_be_edited_stays_and_is_said(tmp_path, text):
    path = tmp_path / "own.yaml"
    path.write_text(text.format(base=written(tmp_path, LINEAR)))
    before = path.read_text()
    with pytest.raises(ValueError, match="own.yaml: put block_size: 64 into its mixer by hand"):
        tuning.write(str(path), 64)
    assert path.read_text() == before and not (tmp_path / "own.yaml.partial").exists()
