"""Records survive damage, and what is cut off is kept."""

import json
import shutil

import pytest

from flash_tf.training.run_directory import Records
from tests.training import runs
from tests.training.test_bad_input import contents


def lines(*steps):
    return [json.dumps({"step": step, "loss": step / 2}).encode() for step in steps]


def written(path, parts):
    path.write_bytes(b"".join(part + b"\n" for part in parts))


def read(path):
    return path.read_bytes().splitlines()


DAMAGES = {
    "half a line": b'{"step": 3, "lo',
    "no JSON": b"\x00" * 40,
    "no text": b'{"step": 3, "loss": "\xff\xfe"}',
    "no object": b"3",
    "no step": b'{"loss": 1.5}',
    "another step": b'{"step": 5, "loss": 1.5}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_set_aside_and_the_lines_after_it_stay(tmp_path, damage):
    path, said = tmp_path / "metrics.jsonl", []
    one, two, *rest = lines(1, 2, 4, 5, 6)
    written(path, [one, two, DAMAGES[damage], *rest])
    Records(str(path), 6, said.append)
    assert read(path) == [one, two, *rest]
    assert read(tmp_path / "metrics.jsonl.1") == [DAMAGES[damage]]
    assert said == [
        f"{path}: 1 lines that are damaged, repeated or after step 6 are now in {path}.1",
    ]


def test_records_after_the_step_are_set_aside_each_time_in_a_file_of_their_own(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, lines(1, 2, 3, 4))
    Records(str(path), 3)
    Records(str(path), 0)
    assert [read(tmp_path / f"metrics.jsonl{end}") for end in ("", ".1", ".2")] == [[], lines(4), lines(1, 2, 3)]


def test_whole_records_stay_as_they_are_and_nothing_is_said(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    written(path, lines(1, 2))
    Records(str(path), 2, said.append)
    assert (read(path), [*tmp_path.iterdir()], said) == (lines(1, 2), [path], [])
    path.write_bytes(path.read_bytes()[:-1])  # it died before the line's end
    Records(str(path), 2).append([{"step": 3, "loss": 1.5}])
    assert read(path) == lines(1, 2, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    runs.corpus(folder)
    path = runs.write(folder, model=runs.SMALLEST)
    runs.in_child(runs.train, path, folder / "model")
    return folder


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run / "model", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.full
def test_a_run_whose_checkpoints_are_missing_begins_again_and_keeps_the_old_records(run, copy):
    """Its checkpoints were moved to another disk, but for one that lost its marker."""
    kept = copy / "checkpoints/step-00000006"
    for folder in (copy / "checkpoints").iterdir():
        if folder != kept:
            shutil.rmtree(folder)
    (kept / "complete.json").unlink()
    old = contents(copy)
    shown = runs.in_child(runs.train, str(run / "config.yaml"), copy)
    assert runs.losses(copy) == runs.losses(run / "model")
    now = contents(copy)
    assert now["metrics.jsonl.1"] == old["metrics.jsonl"] and now["evaluations.jsonl.1"] == old["evaluations.jsonl"]
    assert f"{copy}/metrics.jsonl: 8 lines" in shown and f"are now in {copy}/metrics.jsonl.1" in shown
    for name in ("variables.index", "variables.data-00000-of-00001"):
        assert now[f"checkpoints/step-00000006.1/{name}"] == old[f"checkpoints/step-00000006/{name}"]
    assert f"is now in {copy}/checkpoints/step-00000006.1" in shown
