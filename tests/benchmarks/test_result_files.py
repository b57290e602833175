"""The result files: what is appended, and what readers get."""

import argparse
import json
import re
import subprocess

import pytest

from benchmarks import recall, result_files

COMMITTED = sorted(result_files.FOLDER.glob("*.jsonl"))


def results(path, commit="1234567", variant=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.name")
    result_files.add_options(parser)
    arguments = ["--results", str(path), "--commit", commit]
    args = result_files.parse(parser, [*arguments, *(["--variant", variant] if variant else [])])
    return result_files.Results(args, "name", device="a device", packages=("numpy", "nothing"))


def test_a_row_is_in_the_file_as_soon_as_it_is_measured_and_stands_by_itself(tmp_path):
    path = tmp_path / "new" / "name.jsonl"
    found = results(path)
    assert path.read_text() == ""
    found.add({"n": 512})
    (row,) = result_files.read(path)
    assert (row["device"], row["commit"], row["n"]) == ("a device", "1234567", 512)
    assert row["command"] == f"python -m benchmarks.name --results {path} --commit 1234567"
    assert row["versions"].keys() == {"python", "numpy"} and len(row["date"]) == len("2026-01-31")


def test_rows_are_appended_and_never_replaced(tmp_path):
    path = tmp_path / "name.jsonl"
    results(path).add({"n": 512, "ms": 1})
    before = path.read_text()
    results(path).add({"n": 512, "ms": 2})
    assert path.read_text().startswith(before)
    assert [row["ms"] for row in result_files.read(path)] == [1, 2]


def test_the_newest_row_of_each_thing_counts_and_variants_do_not(tmp_path):
    path = tmp_path / "name.jsonl"
    results(path).add({"n": 512, "ms": 1})
    results(path).add({"n": 1024, "ms": 2})
    results(path, commit="7654321").add({"n": 512, "ms": 3})
    results(path, variant="model.depth=2").add({"n": 512, "ms": 4})
    assert [row["ms"] for row in result_files.newest(result_files.read(path), "n")] == [3, 2]


def test_a_script_knows_what_its_commit_has_measured(tmp_path):
    path = tmp_path / "name.jsonl"
    for commit in ("1234567", "1234567-dirty", "unknown"):
        results(path, commit).add({"n": 512})
    results(path, variant="model.depth=2").add({"n": 2048})
    assert results(path).has(n=512) and not results(path).has(n=2048)
    assert results(path, variant="model.depth=2").has(n=2048)
    assert not results(path, commit="7654321").has(n=512)
    for commit in ("1234567-dirty", "unknown"):  # neither says which code it was
        assert not results(path, commit).has(n=512)


def test_a_file_that_cannot_be_written_or_is_damaged_is_refused_before_anything_is_timed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        results(tmp_path / "file" / "name.jsonl")
    for text in ("no JSON", "[]", '{"n": 512}'):
        (tmp_path / "file").write_text('{"commit": "c", "device": "d"}\n' + text)
        with pytest.raises(ValueError, match="is damaged: line 2 needs a JSON object with `commit` and `device`, got"):
            results(tmp_path / "file")


def test_appending_a_result_does_not_make_the_commit_dirty(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *arguments], cwd=tmp_path, check=True)

    folder = tmp_path / "benchmarks/results"
    folder.mkdir(parents=True)
    (folder / "name.jsonl").write_text("")
    (tmp_path / "code.py").write_text("")
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    monkeypatch.setattr(result_files, "FOLDER", folder)
    assert result_files.commit() == "unknown"
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    clean = result_files.commit()
    (folder / "name.jsonl").write_text("{}\n")
    assert result_files.commit() == clean and len(clean) == 7
    (tmp_path / "code.py").write_text("1\n")
    assert result_files.commit() == f"{clean}-dirty"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_each_committed_row_says_when_where_and_how_it_was_measured(path):
    rows = result_files.read(path)
    assert rows
    for row in rows:
        assert {"date", "commit", "device", "versions"} <= row.keys()
        assert row.get("command") or row.get("note")
        assert not any(place in json.dumps(row) for place in ("/dev/shm", "/tmp/", "/root/"))
    assert [row["date"] for row in rows] == sorted(row["date"] for row in rows)


def test_what_configs_say_was_measured_is_in_the_file_that_they_name():
    cited = 0
    for path in sorted((result_files.ROOT / "configs").rglob("*.yaml")):
        found = re.search(
            r"# Measured: (?:perplexity ([\d.]+))?.*?benchmarks/results/(\S+?), commit (\w+),", path.read_text()
        )
        if found is None:
            continue
        folder, name = path.parent.name, path.stem
        names = (f"{folder}/{name}", f"{folder}-{name}", f"{folder.removeprefix('wikipedia_')}_{name}")
        rows = [row for row in result_files.read(result_files.FOLDER / found[2]) if row["commit"] == found[3]]
        rows = [row for row in rows if row.get("config", row.get("artifact")) in names]
        assert rows, path
        if found[1]:
            assert float(found[1]) in [round(row["validation_perplexity"], 1) for row in rows], path
        cited += 1
    assert cited > 60


def test_wrong_arguments_end_a_script_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        recall.main(["--task", "other"])
    assert ended.value.code == 2
    said = "recall: argument --task: invalid choice: 'other' (choose from 'mqar', 'selective_copying')"
    assert capsys.readouterr().err == f"{said}; see python -m benchmarks.recall --help\n"
