"""The table of what the paper's models would cost on a TPU."""

import importlib.metadata
import json

import pytest

from benchmarks import result_files, tpu_table

SMALL = ["wikitext2_lm/flash", "wikitext2_mlm/flash_quad", "wikitext2_lm/transformer_plus_plus"]


def row(config, n, ms, paper, **more):
    first = {"config": config, "n": n, "estimated_ms": ms, "paper_ms": paper, "hbm_bytes": 2**31, "fits": True}
    return first | {"unestimated_ms": 0.0} | more


@pytest.mark.full
def test_small_configs_of_each_model_compile_for_a_v4_chip_and_rows_at_hand_are_kept(tmp_path, capsys):
    path = tmp_path / "table.jsonl"
    sizes = ["--lengths", "256", "--tokens", "512", "--results", str(path), "--commit", "here"]
    assert tpu_table.main(["--configs", *SMALL[:2], *sizes]) == 0
    before = result_files.read(path)
    assert tpu_table.main(["--configs", *SMALL, *sizes]) == 0
    rows = result_files.read(path)
    assert rows[:2] == before
    assert [(row["config"], row["n"], row["sequences"]) for row in rows] == [(name, 256, 2) for name in SMALL]
    assert {row["libtpu"] for row in rows} == {importlib.metadata.version("libtpu")}
    assert all(row["fits"] and 0 < row["hbm_bytes"] < row["hbm_limit_bytes"] for row in rows)
    assert all(row["estimated_ms"] >= row["roofline_ms"] > 0 for row in rows)
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table[-5:-2]] == [f"| {name}" for name in SMALL]


def test_the_table_has_the_newest_rows_of_one_topology_and_size(tmp_path, capsys):
    about = {"commit": "c", "device": "v4:2x2x1", "sequences": 8}
    rows = [row("mlm_c4/flash", 512, ms, 51.2, **{**about, **more}) for ms, more in (
        (50.0, {}), (49.0, {}), (30.0, {"variant": "model.depth=4"}), (31.0, {"device": "v5e:1x1"}),
        (32.0, {"sequences": 1}),
    )]  # fmt: skip
    path = tmp_path / "table.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    sizes = ["--tokens", "4096", "--topology", "v4:2x2x1", "--lengths", "512"]
    assert tpu_table.main(["--table", *sizes, "--results", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "| mlm_c4/flash | 49.0 (51.2) ms, 2.0 GiB |"


def test_the_committed_rows_make_a_table_of_all_models_of_the_paper(capsys):
    assert tpu_table.main(["--table"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[:-3]] == [
        name for name in tpu_table.CONFIGS if name != "lm_pg19/combiner"
    ]


def test_a_config_that_the_paper_lacks_needs_lengths():
    with pytest.raises(ValueError, match="the paper has no context lengths for mlm_c4/flsh: give --lengths"):
        tpu_table.main(["--configs", "mlm_c4/flsh"])


def test_estimates_stand_beside_the_papers_times_and_ratios():
    rows = [row("mlm_c4/flash", 512, 50.0, 51.2), row("mlm_c4/transformer_plus_plus", 512, 80.0, 47.6)]
    table = tpu_table.as_text(rows).splitlines()
    assert table[3] == "| mlm_c4/flash | 50.0 (51.2) ms, 2.0 GiB |"
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
