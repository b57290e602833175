"""The table of all systems: rows that are measured, kept, and put in order."""

import json

import pytest

from benchmarks import backends, systems


def row(name, ms, state):
    quartiles = {n: [x, x] for n, x in ms.items()}
    times = {"step_ms": ms, "quartiles_ms": quartiles}
    return {"config": name, "commit": "c", "tokens": 4096, **times, "parameters": 1_460_000, "state_bytes": state}


def test_the_table_has_the_best_of_the_learning_rates_and_the_best_model_first():
    rows = [row("wikitext2_lm/a", {"512": 90.0, "4096": 1100.0}, 2048), row("wikitext2_lm/b", {"512": 1, "4096": 2}, 0)]
    learned = [("wikitext2_lm-a", 50.0), ("wikitext2_lm-b", 47.0), ("wikitext2_lm-b", 40.0), ("wikitext2_lm-a", 45.0)]
    learned = [{"artifact": name, "validation_perplexity": perplexity} for name, perplexity in learned]
    head, _, *lines = systems.as_text(rows, learned).splitlines()
    assert head == "| wikitext2_lm | parameters | perplexity | step at 512 | step at 4,096 | state |"
    assert lines == [
        "| b | 1.46 M | 40.00 | 1 ms | 2 ms | 0 KiB |",
        "| a | 1.46 M | 45.00 | 90 ms | 1,100 ms | 2 KiB |",
    ]


@pytest.mark.full
def test_a_system_that_is_not_there_yet_is_measured_and_one_that_is_stays(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(systems, "LENGTHS", (64, 128))  # seconds rather than minutes
    file, before = tmp_path / "found.json", {**row("wikitext2_lm/flash", {"64": 7.0, "128": 8.0}, None), "tokens": 256}
    file.write_text(json.dumps({"device": backends.device_name(), "rows": [before]}))
    only = ["--only", "wikitext2_lm/flash", "wikitext2_lm/cosformer", "--steps", "2", "--tokens", "256"]
    assert systems.main([*only, "--json", str(file), "--commit", "here"]) == 0
    kept, new = json.loads(file.read_text())["rows"]
    assert kept == before
    assert (new["config"], new["commit"]) == ("wikitext2_lm/cosformer", "here")
    assert new["parameters"] > 1_400_000 and new["state_bytes"] > 0
    assert all(new["step_ms"][n] > 0 for n in ("64", "128"))
    assert "| flash | 1.46 M | – | 7 ms | 8 ms | – |" in capsys.readouterr().out


def test_rows_of_another_size_are_not_mixed(tmp_path):
    found = {"device": backends.device_name(), "rows": [row("wikitext2_lm/flash", {"512": 7, "4096": 8}, 1)]}
    (tmp_path / "found.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="has rows of 4,096 tokens a step, --tokens is 8,192"):
        systems.main(["--tokens", "8192", "--json", str(tmp_path / "found.json")])
