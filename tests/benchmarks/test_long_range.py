"""Classifiers of long texts, on texts whose class a byte tells."""

import json

import pytest

from benchmarks import long_range


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reviews")
    for name, byte in (("bad", "x"), ("good", "o")):
        (folder / name).mkdir()
        for i in range(40):
            (folder / name / f"{name}{i}.txt").write_text(f"{byte * (i % 7 + 9)} {'a' * i}")
    return str(folder)


def test_a_mixer_learns_and_its_row_is_kept(folder, tmp_path, capsys):
    file = tmp_path / "found.json"
    small = [
        folder,
        "--length",
        "64",
        "--steps",
        "60",
        "--batch",
        "16",
        "--learning-rate",
        "0.003",
        "--json",
        str(file),
    ]
    assert long_range.main([*small, "--mixers", "nystromformer"]) == 0
    first = json.loads(file.read_text())["rows"]
    assert [row["mixer"] for row in first] == ["nystromformer"]
    assert first[0]["accuracy"] > 0.9 and first[0]["held_out"] >= 2
    assert long_range.main([*small, "--steps", "2", "--mixers", "nystromformer", "linformer"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["mixer"] for row in rows] == ["nystromformer", "linformer"] and rows[0] == first[0]
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "linformer"


def test_a_folder_without_classes_is_said_in_a_line(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"needs two folders or more with .txt files, one a class, has \['one'\]"):
        long_range.main([str(tmp_path)])
