"""The figures: what is drawn is what was measured."""

import itertools
import json
import random

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks import plot_style, plots

LENGTHS = (512, 1024, 4096)
OURS, PEER = "FLASH", "Transformer++, PyTorch"
GPU = "NVIDIA H200"
ABOUT = {"device": GPU, "commit": "1234567", "date": "2026-01-01"}


def trained(model, n, rate, task="lm", **more):
    """A row of `train_command`: `rate` is in thousand tokens per second."""
    sizes = {"config": f"wikipedia_{task}/{model}", "n": n, "tokens_per_step": 65_536}
    return {**ABOUT, **sizes, "tokens_per_second": 1e3 * rate, **more}


def peer(n, rate, task="lm", model="transformer_plus_plus", **more):
    sizes = {"model": model, "framework": "PyTorch", "task": task, "n": n, "tokens": 65_536}
    return {**ABOUT, **sizes, "tokens_per_second": 1e3 * rate, **more}


def write(folder, rows, name="train_command"):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def results(tmp_path):
    write(tmp_path, [*(trained("flash", n, 400) for n in LENGTHS), trained("flash", 512, 300, "mlm")])
    peers = [peer(n, 1e6 / n) for n in LENGTHS]
    return write(tmp_path, [*peers, peer(512, 100, "mlm"), peer(512, 90, "mlm_full_head")], "peers")


def drawn(figure, panel=0):
    """Label -> points of the lines that have one."""
    lines = [line for line in figure.axes[panel].lines if not line.get_label().startswith("_")]
    return {line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()] for line in lines}


def test_every_figure_is_a_png_file_that_is_named(results, tmp_path, capsys):
    assert plots.main(["--results", results, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.split()
    assert said == [str(tmp_path / "out" / f"{name}.png") for name in plots.figures(results)]
    for task, name in itertools.product(("lm", "mlm"), ("throughput", "speedup")):
        assert len(np.unique(imread(tmp_path / "out" / f"{task}_{name}_h200.png"))) > 2  # more than the empty page
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is nothing to draw in"):
        plots.main(["--results", str(tmp_path / "empty"), "--out", str(tmp_path / "none")])


def test_the_committed_results_give_the_figures_of_the_docs():
    figures = plots.figures()
    trainings = {f"{task}_{name}_h200" for task in ("lm", "mlm") for name in ("throughput", "speedup")}
    assert trainings | {"decode_cpu"} <= figures.keys()
    for figure in figures.values():
        assert figure.axes[0].get_title(loc="left")
        for panel, axes in enumerate(figure.axes):
            assert axes.get_xlabel() and axes.get_ylabel()
            assert {text.get_text() for text in axes.texts} == drawn(figure, panel).keys()  # each line has its label
    assert {file.stem for file in plots.OUT.glob("*.png")} >= figures.keys()


def test_each_series_is_drawn_with_its_points(results):
    figures = plots.figures(results)
    assert drawn(figures["lm_throughput_h200"]) == {
        OURS: [(n, 400) for n in LENGTHS],
        PEER: [(n, pytest.approx(1e6 / n)) for n in LENGTHS],
    }
    assert drawn(figures["lm_speedup_h200"]) == {OURS: [(n, pytest.approx(n / 2500)) for n in LENGTHS]}
    assert figures["lm_speedup_h200"].axes[0].get_ylabel() == f"speed-up over {PEER} (times)"
    assert drawn(figures["mlm_speedup_h200"]) == {OURS: [(512, 3)]}
    assert GPU in figures["lm_throughput_h200"].axes[0].get_title(loc="left")


def test_what_ran_at_the_commit_of_the_newest_peers_is_compared_and_nothing_else(tmp_path):
    later = {"commit": "7654321", "date": "2026-01-02"}
    write(tmp_path, [peer(1024, 100, device="NVIDIA A100"), peer(512, 100), peer(512, 200, **later)], "peers")
    rows = [trained("flash", 512, 100, "mlm"), trained("flash", 512, 300, **later), trained("flash", 512, 400, **later)]
    rows += [trained("flash", 512, 9, variant="train.accumulate=2", **later), trained("flash", 1024, 9)]
    rows += [{**trained("flash", 1024, 9, **later), "config": name} for name in ("quickstart", "wikipedia_lm/a b")]
    rows += [trained("flash", 512, 500, commit="newer"), trained("flash", 512, 9, device="NVIDIA A100", **later)]
    found = plots.figures(write(tmp_path, rows))
    assert drawn(found["lm_speedup_h200"]) == {OURS: [(512, 2)]}
    assert found.keys() == {"lm_throughput_h200", "lm_speedup_h200"}  # the masked ones have no peers
    assert "Commit: 7654321." in small_print(found["lm_speedup_h200"])


def test_other_peers_alone_are_no_comparison(tmp_path):
    later = {"commit": "7654321", "date": "2026-01-02"}
    write(tmp_path, [peer(512, 100), peer(512, 50, model="gla", **later)], "peers")
    figures = plots.figures(write(tmp_path, [trained("flash", 512, 100), trained("flash", 512, 300, **later)]))
    assert drawn(figures["lm_speedup_h200"]) == {OURS: [(512, 1)]}
    write(tmp_path, [peer(512, 50, model="gla")], "peers")
    assert plots.figures(str(tmp_path)) == {}


def test_what_could_not_be_timed_is_said_and_not_drawn(tmp_path):
    failed = {key: x for key, x in peer(4096, 1).items() if key != "tokens_per_second"}
    write(tmp_path, [peer(512, 100), {**failed, "error": "out of memory"}], "peers")
    figures = plots.figures(write(tmp_path, [trained("flash", n, 100) for n in LENGTHS]))
    assert drawn(figures["lm_throughput_h200"])[PEER] == [(512, 100)]
    assert f"Not shown: {PEER} at 4k: out of memory." in small_print(figures["lm_throughput_h200"])
    assert f"{PEER} was not measured at 1k, 4k." in small_print(figures["lm_speedup_h200"])
    assert "was not measured" not in small_print(figures["lm_throughput_h200"])


def small_print(figure):
    return " ".join(text.get_text().replace("\n", " ") for text in figure.texts)


def test_the_name_of_a_device_is_short_in_a_file_name():
    assert plots.slug("NVIDIA A100-SXM4-80GB") == "a100" and plots.slug("TPU v4") == "tpu_v4"
    assert plots.slug("one core of AMD EPYC") == plots.slug("2 cores of B") == plots.slug("cpu") == "cpu"


@pytest.mark.parametrize(
    ("artifact", "model"),
    [
        ("lm_wiki40b-flash", "flash"),
        ("lm_flash_quad", "flash_quad"),
        ("transformer_plus_plus-2", "transformer_plus_plus"),
        ("wikitext2_lm-mamba", "wikitext2_lm-mamba"),
    ],
)
def test_a_run_has_the_colour_of_the_model_in_its_name(artifact, model):
    assert plots.model_in(artifact) == model


def decoded(model, n, ms, date, **more):
    about = {"device": "2 cores of A", "commit": "c", "date": date, "batch": 1, "model": model, "context": n}
    return {**about, "ms_per_token": ms, "state_bytes": n * 2**20, **more}


def test_each_device_has_figures_of_its_own_and_of_several_cpus_the_last_is_drawn(tmp_path):
    devices = (GPU, "2026-01-01", 10), ("2 cores of B", "2026-01-02", 30), ("2 cores of A", "2026-01-01", 40)
    rows = [decoded(m, 512, ms, date, device=name) for name, date, ms in devices for m in ("flash", "transformer")]
    figures = plots.figures(write(tmp_path, rows, "decode"))
    found = {name: drawn(figures[f"decode_{name}"])[OURS] for name in ("h200", "cpu")}
    assert found == {"h200": [(512, 10)], "cpu": [(512, 30)]}


def test_decoding_shows_the_newest_comparison_alone(tmp_path):
    rows = [decoded("transformer", 512, 9, "2026-01-01"), decoded("flash", 512, 8, "2026-01-01")]
    rows += [decoded("flash", 512, 2, "2026-01-02"), decoded("flash", 1024, 3, "2026-01-02")]
    rows += [decoded("gla", 512, 4, "2026-01-02")]
    without_state = {key: x for key, x in decoded("gla", 512, 1, "2026-01-03").items() if key != "state_bytes"}
    rows += [without_state, decoded("flash", 512, 7, "2026-01-04")]  # and one model, which compares nothing
    figure = plots.figures(write(tmp_path, rows, "decode"))["decode_cpu"]
    assert drawn(figure) == {OURS: [(512, 2), (1024, 3)], "GLA": [(512, 4)]}
    assert drawn(figure, 1) == {OURS: [(512, 512), (1024, 1024)], "GLA": [(512, 512)]}


def test_recall_is_a_panel_for_each_size_with_a_point_for_each_system(tmp_path):
    about = {"device": GPU, "commit": "1234567", "task": "mqar", "length": 64, "pairs": 4, "examples": 8, "steps": 9}
    found = [("flash", 8, 0.1), ("mamba", 4, 1.0), ("flash", 8, 0.5)]  # the second FLASH is newer
    rows = [
        {**about, "width": width, "system": name, "state_bytes": 1024 * kib, "accuracy": accuracy}
        for width in (64, 128)
        for name, kib, accuracy in found
    ]
    rows[-1]["device"] = "NVIDIA H100"  # what a model learns does not depend on it
    alone = {**rows[0], "steps": 5}  # which compares nothing
    write(tmp_path, [*rows, alone, {**rows[0], "system": "informer", "state_bytes": None}], "recall")
    figure = plots.figures(tmp_path)["recall_mqar"]
    for panel, width in enumerate((64, 128)):
        assert drawn(figure, panel) == {"mamba 100%": [(4, 100)], "FLASH 50%": [(8, 50)]}
        assert figure.axes[panel].get_xlabel().endswith(f"4 pairs or words\n8 examples a step, 9 steps, width {width}")
    assert len(figure.axes) == 2
    assert figure.axes[0].get_title(loc="left").endswith(f", NVIDIA H100 and {GPU}")


def test_positions_are_drawn_by_the_ends_of_their_buckets_for_the_text_that_was_read_last(tmp_path):
    about = {"device": GPU, "commit": "1234567", "tokens": 512, "text": "new", "n": 256}
    about["buckets"] = [[0, 256], [256, 512]]
    found = [("flash", [9.0, 9.0]), ("flash", [30.0, 20.0]), ("flash, local", [40.0, 41.0]), ("mamba", [50.0, 900.0])]
    found += [("length-lm-gla-gates_none-2048-45M-0.002-0", [60.0, 61.0])]
    rows = [{**about, "run": name, "perplexity": pair} for name, pair in found]
    sizes = [("length-lm-retnet-2048-45M-0.002-0", 30_200_000, [70.0, 71.0])]
    sizes += [("title-lm-retnet-2048-86M-0.0028-0", 109_900_000, [80.0, 81.0])]
    rows += [{**about, "run": name, "parameters": size, "perplexity": pair} for name, size, pair in sizes]
    other = [{**rows[0], "text": "old", "run": "gla"}, *rows, {**rows[0], "tokens": 256, "variant": "x"}]
    figure = plots.figures(write(tmp_path, other, "positions"))["perplexity_by_position"]
    assert drawn(figure) == {
        OURS: [(256, 30), (512, 20)],
        "flash, local": [(256, 40), (512, 41)],
        "mamba": [(256, 50), (512, 900)],
        "GLA, gates_none": [(256, 60), (512, 61)],
        "retnet, 30 M": [(256, 70), (512, 71)],
        "retnet, 110 M": [(256, 80), (512, 81)],
    }
    assert figure.axes[0].get_xscale() == "log" and figure.axes[0].get_ylim()[1] > 900
    (trained,) = [line for line in figure.axes[0].lines if line.get_label() == "_trained"]
    assert trained.get_xdata()[0] == 256


def test_a_claim_shows_the_validation_of_the_first_seed_and_changes_for_the_better(tmp_path):
    about = {"device": GPU, "commit": "1234567", "claim": "length", "task": "lm", "length": 64, "learning_rate": 0.001}
    about |= {"tokens": 4_000_000, "tokens_per_step": 1_000_000, "seed": 0, "change": None, "perplexity": 7.04}
    about["curve"] = [[2, 9.0], [4, 7.0]]
    rows = [{**about, "system": "flash"}, {**about, "system": "mamba", "change": "chunk_64", "perplexity": 8.0}]
    rows += [{**rows[0], "seed": 1}, {**rows[0], "tokens": 1_000_000}]
    rows += [{**rows[0], "task": "mlm"}, {**rows[1], "task": "mlm"}]
    rows += [{**rows[0], "change": name, "perplexity": end} for name, end in (("worse", 7.1), ("better", 7.0))]
    rows += [{**one, "length": 128} for one in rows[:1]] + [{**rows[0], "claim": "one"}]  # there is nothing to compare
    alone = [{**rows[0], "claim": "chunks", "change": change} for change in (None, "worse")]
    alone[1]["perplexity"] = 7.1
    figures = plots.figures(write(tmp_path, rows + alone, "claims"))
    assert drawn(figures.pop("claim_chunks")).keys() == {"7.0  FLASH", "7.1  FLASH, worse"}
    figure = figures["claim_length"]
    points = [(2, 9), (4, 7)]
    assert len(figures) == 1 and len(figure.axes) == 2
    assert drawn(figure) == {name: points for name in ("7.0  FLASH", "7.0  FLASH, better", "8.0  mamba, chunk_64")}
    assert drawn(figure, 1) == {name: points for name in ("7.0  FLASH", "8.0  mamba, chunk_64")}


def test_runs_of_a_claim_that_were_timed_on_one_device_are_also_drawn_against_time(tmp_path):
    about = {"device": GPU, "commit": "1234567", "claim": "title", "task": "lm", "length": 64, "learning_rate": 0.001}
    about |= {"tokens": 4_000_000, "tokens_per_step": 1_000_000, "seed": 0, "change": None, "perplexity": 7.0}
    about["curve"] = [[2, 9.0], [4, 7.0]]
    rates = {"flash": 50_000, "mamba": 25_000, "gla": None}  # tokens a second
    rows = [{**about, "system": name, "tokens_per_second": rate} for name, rate in rates.items()]
    figure = plots.figures(write(tmp_path, rows, "claims"))["claim_title"]
    assert drawn(figure, 1) == {
        "7.0  FLASH": [(pytest.approx(2 / 3), 9), (pytest.approx(4 / 3), 7)],
        "7.0  mamba": [(pytest.approx(4 / 3), 9), (pytest.approx(8 / 3), 7)],
    }
    assert [axes.get_xlabel().partition(":")[0] for axes in figure.axes] == [
        "tokens (millions)",
        "minutes of training steps",
    ]
    rows[1]["device"] = "NVIDIA H100"
    assert len(plots.figures(write(tmp_path, rows, "claims"))["claim_title"].axes) == 1


def test_models_are_told_apart_by_colour():
    others = ["a", "b"]
    found = [plot_style.look(model, others)[1] for model in (*plot_style.MODELS, *others)]
    assert len(set(found)) == len(found)


def test_labels_keep_apart_in_their_order_and_stay_where_there_is_room():
    assert plot_style.apart([0.1, 0.5], 0.1) == [0.1, 0.5]
    assert plot_style.apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    draw = random.Random(0)
    for _ in range(50):
        heights = sorted(draw.random() for _ in range(6))
        placed = plot_style.apart(heights, 0.1)
        assert all(b - a > 0.1 - 1e-9 for a, b in itertools.pairwise(placed))
        assert sum(placed) == pytest.approx(sum(heights))


def test_a_line_knows_whether_it_is_ours():
    assert plots.Series("flash", "TensorFlow").label == "FLASH"
    assert plots.Series("gla", "PyTorch").label == "GLA, PyTorch"
    assert plots.Series("retnet", "TensorFlow").label == "retnet"
