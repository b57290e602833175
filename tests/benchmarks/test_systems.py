"""The table of all systems: rows that are measured, kept, and put in order."""

import json

import pytest

from benchmarks import backends, one_pass, result_files, systems


def row(name, ms, state, **more):
    quartiles = {n: [x, x] for n, x in ms.items()}
    times = {"step_ms": ms, "quartiles_ms": quartiles}
    row = {"config": name, "device": "a device", "commit": "c", "tokens": 4096, **times, "parameters": 1_460_000}
    return {**row, "state_bytes": state, **more}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_table_has_the_best_of_the_learning_rates_and_the_best_model_first():
    rows = [row("wikitext2_lm/a", {"512": 90.0, "4096": 1100.0}, 2048), row("wikitext2_lm/b", {"512": 1, "4096": 2}, 0)]
    learned = [("wikitext2_lm/a", 50.0), ("wikitext2_lm/b", 47.0), ("wikitext2_lm/b", 40.0), ("wikitext2_lm/a", 45.0)]
    learned = [
        {"config": name, "perplexity": perplexity, "learning_rate": i, "seed": 0, "steps": 1}
        for i, (name, perplexity) in enumerate(learned)
    ]
    where, _, head, _, *lines = systems.as_text(rows, one_pass.best(learned)).splitlines()
    assert where == "Steps on a device:"
    assert head == "| wikitext2_lm | parameters | perplexity | step at 512 | step at 4,096 | state |"
    assert lines == [
        "| b | 1.46 M | 40.00 | 1 ms | 2 ms | 0 KiB |",
        "| a | 1.46 M | 45.00 | 90 ms | 1,100 ms | 2 KiB |",
    ]


@pytest.mark.full
def test_a_system_that_this_commit_has_no_row_of_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(systems, "LENGTHS", (64, 128))  # seconds rather than minutes
    about = {"device": backends.device_name(), "tokens": 256}
    flash = row("wikitext2_lm/flash", {"64": 7.0, "128": 8.0}, None, **about, commit="here")
    old = row("wikitext2_lm/cosformer", {"64": 9.0, "128": 9.0}, None, **about, commit="before")
    file = write(tmp_path / "found.jsonl", [old, flash])
    only = ["--only", "wikitext2_lm/flash", "wikitext2_lm/cosformer", "--steps", "2", "--tokens", "256"]
    assert systems.main([*only, "--results", file, "--commit", "here"]) == 0
    *kept, new = result_files.read(file)
    assert kept == [old, flash]
    assert (new["config"], new["commit"]) == ("wikitext2_lm/cosformer", "here")
    assert new["parameters"] > 1_400_000 and new["state_bytes"] > 0
    assert all(new["step_ms"][n] > 0 for n in ("64", "128"))
    assert "| 7 ms | 8 ms | – |" in capsys.readouterr().out


def test_the_table_of_a_file_has_its_newest_rows_of_one_number_of_tokens(tmp_path, capsys):
    rows = [
        row("wikitext2_lm/flash", {"512": ms, "4096": ms}, None, tokens=n) for ms, n in ((5, 4096), (6, 4096), (7, 8))
    ]
    file = write(tmp_path / "found.jsonl", rows)
    learned = write(tmp_path / "learned.jsonl", [])
    assert systems.main(["--table", "--results", file, "--one-pass", learned]) == 0
    assert capsys.readouterr().out.splitlines()[4:] == ["| flash | 1.46 M | – | 6 ms | 6 ms | – |"]


def test_the_committed_rows_make_a_table_of_every_system(capsys):
    from flash_tf import config
    from flash_tf import model_zoo as known

    assert systems.main(["--table"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " M | " in line]
    names = [name.partition("/") for name in config.names()]
    assert {cells[0].removeprefix("| ") for cells in lines} == {
        name for folder, _, name in names if folder in known.FOLDERS
    }
    assert all(float(cells[2]) > 20 for cells in lines)  # each has a perplexity
