"""The figures: what is drawn is what was measured."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks import plot_curves, plot_steps, plot_style, plots

LENGTHS = (512, 1024, 4096)
OURS, PEER = "FLASH", "Transformer++, PyTorch"


def row(model, n, milliseconds, framework="TensorFlow", task="lm", **more):
    sizes = {"model": model, "framework": framework, "task": task, "n": n, "tokens": 4096}
    rate = {"median_ms": milliseconds, "tokens_per_second": 4096 / milliseconds * 1e3, "peak_bytes": n * 2**30}
    return {**sizes, **rate, **more}


def write(path, rows, **head):
    path.write_text(json.dumps({"device": "a device", "commit": "1234567", "rows": rows, **head}))
    return str(path)


@pytest.fixture
def results(tmp_path):
    ours = [row("flash", n, 10) for n in LENGTHS]
    peer = [row("transformer_plus_plus", n, n / 100, "PyTorch") for n in LENGTHS]
    masked = [row("transformer_plus_plus", 512, 7, "PyTorch", task) for task in ("mlm", "mlm_full_head")]
    return [write(tmp_path / "ours.json", ours), write(tmp_path / "peers.json", peer + masked)]


def drawn(figure, panel=0):
    """Label -> points of the lines that have one."""
    lines = [line for line in figure.axes[panel].lines if not line.get_label().startswith("_")]
    return {line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()] for line in lines}


def run_directory(path, *, evaluations=True, **columns):
    """A run of 300 steps, loss 9 - step / 100."""
    path.mkdir()
    lines = [{"step": s, "loss": 9 - s / 100, **{k: f(s) for k, f in columns.items()}} for s in range(1, 301)]
    (path / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluations:
        lines = [{"step": s, "loss": 9 - s / 100} for s in (100, 200, 300)]
        (path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_every_figure_is_a_png_file_that_is_named(results, tmp_path, capsys):
    run = run_directory(tmp_path / "lm-flash", seconds=lambda s: s / 2)
    assert plots.main([*results, run, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.split()
    assert said == [str(tmp_path / "out" / f"{name}.png") for name in plots.draw([*results, run])]
    for task, name in itertools.product(("lm", "mlm"), ("latency", "throughput", "memory", "speedup")):
        assert len(np.unique(imread(tmp_path / "out" / f"{task}_{name}.png"))) > 2  # more than the empty page


def test_each_series_is_drawn_with_its_points(results):
    figures = plots.draw(results)
    assert drawn(figures["lm_latency"]) == {
        OURS: [(n, 10) for n in LENGTHS],
        PEER: [(n, n / 100) for n in LENGTHS],
    }
    assert drawn(figures["lm_throughput"])[OURS] == [(n, 409.6) for n in LENGTHS]
    assert drawn(figures["lm_memory"])[PEER] == [(n, n) for n in LENGTHS]
    assert drawn(figures["lm_speedup"]) == {OURS: [(n, n / 1000) for n in LENGTHS]}
    assert figures["lm_speedup"].axes[0].get_ylabel() == f"speed-up over {PEER}"
    assert "a device" in figures["lm_latency"].axes[0].get_title(loc="left")


def test_a_head_on_every_position_has_a_line_of_its_own(results):
    figures = plots.draw(results)
    assert drawn(figures["mlm_latency"]).keys() == {PEER, f"{PEER}, full head"}
    assert drawn(figures["mlm_speedup"]) == {f"{PEER}, full head": [(512, 1)]}


def test_without_a_peer_the_speed_up_is_over_our_own_transformer(tmp_path):
    rows = [row("flash", 512, 10), row("transformer_plus_plus", 512, 30)]
    figure = plots.draw([write(tmp_path / "a.json", rows)])["lm_speedup"]
    assert (drawn(figure), figure.axes[0].get_ylabel()) == ({OURS: [(512, 3)]}, "speed-up over Transformer++")
    assert "lm_speedup" not in plots.draw([write(tmp_path / "b.json", rows[:1])])


def test_what_could_not_be_timed_is_said_and_not_drawn(tmp_path):
    failed = {key: x for key, x in row("flash_quad", 4096, 1).items() if key not in ("median_ms", "tokens_per_second")}
    rows = [row("flash", 512, 10), {**failed, "peak_bytes": None, "error": "out of memory"}]
    figure = plots.draw([write(tmp_path / "a.json", rows)])["lm_latency"]
    assert drawn(figure).keys() == {OURS}
    assert "Not shown: FLASH-Quad at 4k: out of memory." in figure.texts[0].get_text()


def small_print(figure):
    return " ".join(text.get_text() for text in figure.texts)


def test_a_length_without_the_baseline_is_said_to_have_no_speed_up(tmp_path):
    rows = [row("flash", n, 10) for n in LENGTHS] + [row("transformer_plus_plus", 512, 7, "PyTorch")]
    figures = plots.draw([write(tmp_path / "rows.json", rows)])
    assert "without speed-up: 1k, 4k." in small_print(figures["lm_speedup"])
    assert "without speed-up" not in small_print(figures["lm_latency"])


def test_memory_says_when_it_is_measured_in_two_ways(tmp_path):
    ours, peer = row("flash", 512, 10, runner="JAX"), row("transformer_plus_plus", 512, 7, "PyTorch")
    said = [small_print(plots.draw([write(tmp_path / "x.json", rows)])["lm_memory"]) for rows in ([ours, peer], [ours])]
    assert ["XLA laid out" in text for text in said] == [True, False]


def test_quartiles_are_bars_of_the_latency(tmp_path):
    rows = [row("flash", 512, 10, quartiles_ms=[9, 13])]
    figure = plots.draw([write(tmp_path / "rows.json", rows)])["lm_latency"]
    (bars,) = figure.axes[0].collections
    assert [segment.tolist() for segment in bars.get_segments()] == [[[512, 9], [512, 13]]]


def test_results_that_cannot_be_compared_are_refused(tmp_path):
    one = write(tmp_path / "a.json", [row("flash", 512, 10)])
    for name, rows, head in (
        ("device", [row("flash", 1024, 10)], {"device": "another"}),
        ("tokens", [row("flash", 1024, 10, tokens=8192)], {}),
    ):
        with pytest.raises(ValueError, match=f"one figure compares results of one {name} alone, got "):
            plots.draw([one, write(tmp_path / "b.json", rows, **head)])
    with pytest.raises(ValueError, match="there are two results of FLASH, lm, at n=512"):
        plots.draw([one, one])


def test_a_file_that_is_no_result_is_named(tmp_path):
    for text, said in (
        ("no JSON", "is no result file: it holds no JSON object"),
        ("[1]", "is no result file: it holds no JSON object"),
        ('{"rows": []}', "is no result of training steps: it lacks 'device'"),
        (
            '{"device": "d", "commit": "c", "rows": [{"kernel": "norms"}]}',
            "is no result of training steps: it lacks 'task'",
        ),
        ('{"device": "d", "commit": "c", "rows": []}', "there is nothing to draw in"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            plots.draw([str(tmp_path / "a.json")])
    with pytest.raises(ValueError, match="is no run: it has neither losses.jsonl nor metrics.jsonl"):
        plots.draw([str(tmp_path)])


def test_curves_show_validation_against_steps_and_time(tmp_path):
    runs = [
        run_directory(tmp_path / f"lm-{model}", seconds=lambda s, rate=rate: rate * s)
        for model, rate in (("flash", 60), ("flash_quad", 120))
    ]
    figure = plots.draw([runs[0], f"another name={runs[1]}"])["curves"]
    points = [(step, math.exp(9 - step / 100)) for step in (100, 200, 300)]
    for panel, scales in ((0, (1, 1)), (1, (1 / 60, 1 / 30))):  # steps; hours
        for (_, line), scale in zip(drawn(figure, panel).items(), scales, strict=True):
            assert line == [pytest.approx((scale * step, y)) for step, y in points]
    assert list(drawn(figure)) == ["lm-flash", "another name"]
    assert figure.axes[1].get_xlabel() == "hours of training steps"


def test_a_run_of_train_gets_its_time_from_its_rates(tmp_path):
    folder = run_directory(tmp_path / "run", tokens_per_second=lambda s: 256 if s <= 100 else 512)
    (tmp_path / "run" / "losses.jsonl").rename(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / "run" / "config.yaml").write_text("train: {tokens_per_step: 512}\n")
    run = plot_curves.read(folder)
    assert run.seconds[99] == pytest.approx(200) and run.seconds[-1] == pytest.approx(400)


def test_runs_without_time_or_evaluations_show_training_against_steps(tmp_path):
    figure = plots.draw([run_directory(tmp_path / "run", evaluations=False)])["curves"]
    assert len(figure.axes) == 1
    (line,) = drawn(figure).values()
    assert line[-1] == pytest.approx((300, math.exp(9 - 2.995)))  # the mean of steps 299 and 300


@pytest.mark.parametrize(
    ("folder", "model"),
    [
        ("lm_wiki40b-flash", "flash"),
        ("lm-flash_quad", "flash_quad"),
        ("transformer_plus_plus-2", "transformer_plus_plus"),
    ],
)
def test_a_run_has_the_colour_of_the_model_in_its_name(tmp_path, folder, model):
    assert plot_curves.read(run_directory(tmp_path / folder)).model == model


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
    assert plot_steps.series_of(row("flash", 1, 1)).label == "FLASH"
    assert plot_steps.series_of(row("gla", 1, 1, "PyTorch")).label == "GLA, PyTorch"
    assert plot_steps.series_of(row("retnet", 1, 1)).label == "retnet"
