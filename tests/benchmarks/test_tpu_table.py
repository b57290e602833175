"""The table of what the paper's models would cost on a TPU."""

import importlib.metadata
import json

import pytest

from benchmarks import tpu_table

SMALL = ["wikitext2_lm/flash", "wikitext2_mlm/flash_quad", "wikitext2_lm/transformer_plus_plus"]


def row(config, n, ms, paper, **more):
    first = {"config": config, "n": n, "estimated_ms": ms, "paper_ms": paper, "hbm_bytes": 2**31, "fits": True}
    return first | {"unestimated_ms": 0.0} | more


@pytest.mark.full
def test_small_configs_of_each_model_compile_for_a_v4_chip_and_rows_at_hand_are_kept(tmp_path, capsys):
    path = tmp_path / "table.json"
    sizes = ["--lengths", "256", "--tokens", "512", "--json", str(path)]
    assert tpu_table.main(["--configs", *SMALL[:2], *sizes]) == 0
    before = json.loads(path.read_text())["rows"]
    assert tpu_table.main(["--configs", *SMALL, *sizes]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert rows[:2] == before
    assert [(row["config"], row["n"], row["sequences"]) for row in rows] == [(name, 256, 2) for name in SMALL]
    assert {row["libtpu"] for row in rows} == {importlib.metadata.version("libtpu")}
    assert all(row["fits"] and 0 < row["hbm_bytes"] < row["hbm_limit_bytes"] for row in rows)
    assert all(row["estimated_ms"] >= row["roofline_ms"] > 0 for row in rows)
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table[-5:-2]] == [f"| {name}" for name in SMALL]


def test_rows_of_another_topology_or_size_are_not_mixed_and_a_config_needs_lengths(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"device": "v4:2x2x1", "rows": [row("mlm_c4/flash", 512, 50.0, 51.2, sequences=8)]}))
    same = ["--configs", "mlm_c4/flash", "--lengths", "512", "--json", str(path)]
    for options, said in [
        (["--topology", "v5e:1x1"], "has rows of v4:2x2x1, this would add some of v5e:1x1"),
        (["--topology", "v4:2x2x1", "--tokens", "8192"], "has rows of 4,096 tokens, --tokens is 8,192"),
    ]:
        with pytest.raises(ValueError, match=said):
            tpu_table.main([*same, *options])
    with pytest.raises(ValueError, match="the paper has no context lengths of mlm_c4/flsh: give --lengths"):
        tpu_table.main(["--configs", "mlm_c4/flsh"])


def test_estimates_stand_beside_the_papers_times_and_ratios():
    rows = [row("mlm_c4/flash", 512, 50.0, 51.2), row("mlm_c4/transformer_plus_plus", 512, 80.0, 47.6)]
    table = tpu_table.as_text(rows).splitlines()
    assert table[2] == "| mlm_c4/flash | 50.0 (51.2) ms, 2.0 GiB |"
    assert table[-1] == "| mlm_c4: Transformer++ / FLASH | 1.60 (0.93) |"


def test_what_leaves_out_more_than_a_hundredth_is_called_a_lower_bound():
    fast = row("lm/flash", 512, 50.0, None, unestimated_ms=0.4)
    slow = row("lm/transformer_plus_plus", 512, 80.0, None, unestimated_ms=9.0)
    table = tpu_table.as_text([fast, slow]).splitlines()
    assert table[2:] == [
        "| lm/flash | 50.0 ms, 2.0 GiB |",
        "| lm/transformer_plus_plus | ≥ 80.0 ms, 2.0 GiB |",
        "| lm: Transformer++ / FLASH | ≥ 1.60 |",
    ]


def test_what_does_not_fit_or_was_not_compiled_has_no_ratio():
    rows = [row("lm/flash", 512, 5.0, None), row("lm/transformer_plus_plus", 1024, 9.0, None, fits=False)]
    table = tpu_table.as_text(rows).splitlines()
    assert table[3:] == ["| lm/transformer_plus_plus | – | too large |", "| lm: Transformer++ / FLASH | – | – |"]
