"""Curves of runs: what is drawn and said is what was recorded and stands."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from flash_tf.pictures import curves, page, records, style

TOKENS = 512


def run_directory(path, steps=300, *, planned=300, evaluations=(100, 200, 300), loss=lambda s: 9 - s / 100, **columns):
    """A run of so many steps, one second each unless `tokens_per_second` says otherwise."""
    path.mkdir(parents=True)
    columns = {"tokens_per_second": lambda s: TOKENS, "gradient_norm": lambda s: 1 / s, **columns}
    lines = [{"step": s, "loss": loss(s), **{k: f(s) for k, f in columns.items() if f}} for s in range(1, steps + 1)]
    write(path / "metrics.jsonl", lines)
    if evaluations:
        write(path / "evaluations.jsonl", [{"step": s, "loss": loss(s) + 0.1} for s in evaluations])
    (path / "config.yaml").write_text(f"train: {{tokens_per_step: {TOKENS}, steps: {planned}}}\n")
    return str(path)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(figure, panel=0):
    """The drawn lines of a panel: x and y each."""
    return [(line.get_xdata(), line.get_ydata()) for line in figure.axes[panel].lines]


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def drawn(runs, name):
    return curves.figure(runs, next(one for one in curves.QUANTITIES if one.name == name))


def ends(axes):
    """The values at the ends of a panel's curves."""
    return sorted(text.get_text() for text in axes.texts)


def test_a_run_is_read_with_time_by_its_rates_and_its_best_evaluation(tmp_path):
    folder = run_directory(tmp_path / "run", tokens_per_second=lambda s: 256 if s <= 100 else 512)
    (run,) = records.read_all([folder])
    assert (run.label, run.planned, run.best, run.diverged) == ("run", 300, 300, None)
    assert run.seconds[[99, 299]] == pytest.approx([200, 400])
    assert run.evaluations[300] == pytest.approx(6.1)


@pytest.mark.parametrize(
    ("metric", "values", "state"),
    [("loss", (5, 6, 5), "stopped early"), ("loss", (5, 6, 4), "60% of 500"), ("accuracy", (5, 4, 4), "stopped early")],
)
def test_a_run_that_patience_has_ended_is_said_to_have_stopped(tmp_path, metric, values, state):
    folder = run_directory(tmp_path / "run", planned=500)
    write(
        tmp_path / "run/evaluations.jsonl", [{"step": 100 * i, "loss": 1, metric: x} for i, x in enumerate(values, 1)]
    )
    with open(tmp_path / "run/config.yaml", "a") as file:
        file.write(f"evaluation: {{patience: 2, metric: {metric}}}\n")
    assert curves.rows(records.read_all([folder]))[0][-1] == state


def test_of_steps_that_were_written_again_after_a_crash_the_last_records_stand(tmp_path):
    folder = run_directory(tmp_path / "run", steps=20, evaluations=(10, 20))
    again = [{"step": s, "loss": 1.0, "tokens_per_second": TOKENS} for s in range(11, 15)]
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in again)
        file.write('{"step": 15, "lo')  # it died again
    (run,) = records.read_all([folder])
    assert run.steps.tolist() == list(range(1, 15))
    assert run.loss[9:].tolist() == [pytest.approx(8.9), 1, 1, 1, 1]
    assert run.seconds[-1] == pytest.approx(14)


def test_time_goes_on_over_steps_whose_records_are_lost(tmp_path):
    folder = run_directory(tmp_path / "run", steps=20)
    kept = [line for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] > 10]
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(kept))
    (run,) = records.read_all([folder])
    assert (run.steps[0], run.seconds[0], run.seconds[-1]) == (11, 11, 20)


def test_runs_get_the_shortest_names_that_tell_them_apart(tmp_path):
    folders = [run_directory(tmp_path / name) for name in ("a/flash", "b/flash", "quad", "lr=0.1")]
    runs = records.read_all([*folders, folders[0] + "/", f"ours={folders[2]}"])
    assert [run.label for run in runs] == ["a/flash", "b/flash", "quad", "lr=0.1"]
    assert [run.label for run in records.read_all([f"a name={folders[0]}", folders[2]])] == ["a name", "quad"]
    places = [run_directory(tmp_path / "sweep/rate=1e-5"), f"lr=1={folders[2]}"]
    runs = records.read_all([f"A={places[0]}", places[1], places[0].replace("sweep", "sweep/.")])
    assert [run.label for run in runs] == ["A", "lr=1"]
    with pytest.raises(ValueError, match="two runs are called 'x': give them other names"):
        records.read_all([f"x={folders[0]}", f"x={folders[1]}"])


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (None, "", "is no run: there is no such folder"),
        ("config.yaml", "", "is no run: it has no metrics.jsonl, which `flash-tf train` writes"),
        ("inside/metrics.jsonl", "", "which `flash-tf train` writes; the runs in it are inside"),
        ("metrics.jsonl", "", "metrics.jsonl has no record yet: the run has not finished its first loop of steps"),
        ("metrics.jsonl", '{"step": 1, "lo', "metrics.jsonl has no record yet"),
        ("metrics.jsonl", 'what?\n{"step": 1, "loss": 2}', "metrics.jsonl is damaged: line 1 needs a JSON object with"),
        ("metrics.jsonl", '[1]\n{"step": 1, "loss": 2}', "metrics.jsonl is damaged: line 1 needs a JSON object with"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_with_what_it_lacks(tmp_path, file, text, said):
    if file is not None:
        (tmp_path / "folder" / file).parent.mkdir(parents=True)
        (tmp_path / "folder" / file).write_text(text)
    with pytest.raises(ValueError) as refused:
        records.read_all([str(tmp_path / "folder")])
    assert said in str(refused.value) and str(tmp_path / "folder") in str(refused.value)


def test_curves_are_means_of_neighbouring_steps_and_dots_are_evaluations(tmp_path):
    runs = records.read_all([run_directory(tmp_path / "run"), run_directory(tmp_path / "other")])
    figure = drawn(runs, "perplexity")
    for panel, unit in ((0, 1), (1, 60)):  # steps, minutes
        (x, y), (at, validated), *_ = lines_of(figure, panel)
        assert (x[-1] * unit, y[-1]) == pytest.approx((300, math.exp(9 - 2.995)))  # steps 299 and 300
        assert at * unit == pytest.approx([100, 200, 300]) and validated == pytest.approx(np.exp([8.1, 7.1, 6.1]))
    assert figure.axes[0].get_yscale() == "log"
    assert [axes.get_xlabel() for axes in figure.axes] == ["training step", "training time (minutes)"]
    assert labels(figure) == ["run", "other", "validation"]


@pytest.mark.parametrize(
    ("name", "label", "last"),
    [
        ("loss", "loss (nats per token)", ["6.005", "● 6.100"]),
        ("perplexity", "perplexity, exp(loss per token)", ["405.45", "● 445.86"]),
        ("throughput", "throughput (tokens per second)", ["512"]),
        ("gradient_norm", "gradient norm (before clipping)", ["0.00334"]),
    ],
)
def test_a_single_run_has_one_panel_with_its_title_its_units_and_its_last_values(tmp_path, name, label, last):
    figure = drawn(records.read_all([run_directory(tmp_path / "run")]), name)
    (axes,) = figure.axes
    assert figure.get_suptitle() == f"{name.capitalize().replace('_', ' ')} of run"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training step", label)
    assert ends(axes) == last
    assert labels(figure) == ["training", "validation"][: len(last)]


def test_values_at_the_ends_of_curves_do_not_cover_each_other(tmp_path):
    folders = [run_directory(tmp_path / f"{i}", loss=lambda s, i=i: 9 - s / 100 + i / 1000) for i in range(6)]
    figure = drawn(records.read_all(folders), "loss")
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
        assert len(boxes) == 12
        assert all(below.y0 + below.height * 0.6 < above.y0 for below, above in zip(boxes, boxes[1:], strict=False))


TASK = "model: {type: masked_lm, vocabulary_size: 100}\nmasking: {rate: 0.15}\n"


@pytest.mark.parametrize(
    ("config", "tokenizer", "said"),
    [
        (TASK.replace("masked_lm", "causal_lm"), b"one", "causal language model, 15% masked, vocabulary 100"),
        (TASK.replace("100", "200"), b"one", "masked language model, 15% masked, vocabulary 200"),
        (TASK.replace("0.15", "0.3"), b"one", "masked language model, 30% masked, vocabulary 100"),
        (TASK, b"another", "masked language model, 15% masked, vocabulary 100"),
    ],
)
def test_losses_of_different_tasks_or_vocabularies_are_not_compared(tmp_path, config, tokenizer, said):
    folders = [run_directory(tmp_path / name) for name in ("a", "b", "c")]
    give_tasks(folders, (TASK, config, TASK), (b"one", tokenizer, b"one"))
    groups = records.by_task(records.read_all(folders))
    assert [[run.label for run in group] for group in groups] == [["a", "c"], ["b"]]
    assert str(groups[1][0].task).startswith(f"{said}, tokenizer ")


def give_tasks(folders, configs, tokenizers):
    for folder, config, tokenizer in zip(folders, configs, tokenizers, strict=True):
        with open(f"{folder}/config.yaml", "a") as file:
            file.write(config)
        Path(folder, "tokenizer.model").write_bytes(tokenizer)


@pytest.mark.usefixtures("unsaved")
def test_what_cannot_be_compared_has_a_panel_of_its_own_with_its_task_over_it(tmp_path):
    folders = [run_directory(tmp_path / name) for name in ("a", "b", "c")]
    give_tasks(folders, [TASK] * 3, (b"one", b"another", b"one"))
    runs = records.read_all(folders)
    loss = drawn(runs, "loss")
    assert [len(axes.lines) for axes in loss.axes] == [4, 4, 2, 2]  # training and validation
    titles = [axes.get_title(loc="left") for axes in loss.axes[::2]]
    assert titles == [str(run.task) for run in runs[:2]] and titles[0] != titles[1]
    assert [len(drawn(runs, name).axes) for name in ("gradient_norm", "throughput")] == [2, 1]
    assert "Different tasks cannot be compared" in curves.pictures(runs)[0].caption


def test_a_run_that_does_not_say_its_tokenizer_is_compared_by_what_it_says(tmp_path):
    folders = [run_directory(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "a/tokenizer.model").write_bytes(b"one")
    for folder in folders:
        with open(f"{folder}/config.yaml", "a") as file:
            file.write(TASK)
    assert len(records.by_task(records.read_all(folders))) == 1


@pytest.mark.usefixtures("unsaved")
def test_only_runs_of_language_models_have_a_perplexity(tmp_path):
    folders = [run_directory(tmp_path / name, steps=5, evaluations=(5,)) for name in ("rows", "tokens")]
    give_tasks(folders, ("model: {type: regressor, vocabulary_size: 100}\n", TASK), (b"one", b"one"))
    runs = records.read_all(folders)
    assert [one.name for one in curves.pictures(runs[:1])] == ["loss", "throughput", "gradient_norm"]
    assert curves.summary(runs[0])["best_validation_perplexity"] is None
    assert [table.head[1:] for table in curves.evaluations(runs)] == [
        ("validation loss",), ("validation loss", "perplexity"),
    ]  # fmt: skip
    assert [len(table.rows[0]) for table in curves.evaluations(runs)] == [2, 3]
    assert [axes.get_ylabel() for axes in drawn(runs, "loss").axes[::2]] == ["loss", "loss (nats per token)"]
    both = curves.pictures(runs)
    assert both[1].name == "perplexity" and "rows" in both[0].caption and "rows" not in both[1].caption
    perplexity = drawn(runs, "perplexity")
    assert perplexity.get_suptitle() == "Perplexity of tokens"
    assert perplexity.axes[0].lines[0].get_color() == drawn(runs, "loss").axes[2].lines[0].get_color()


def test_a_run_that_diverged_ends_in_a_cross_and_leaves_others_in_sight(tmp_path):
    loss = lambda s: 8 - s / 100 if s < 50 else 1e5 if s < 60 else math.nan  # noqa: E731
    folders = [run_directory(tmp_path / "good"), run_directory(tmp_path / "bad", 80, evaluations=(), loss=loss)]
    runs = records.read_all(folders)
    assert (runs[1].diverged, curves.summary(runs[1])["loss"]) == (60, None)
    assert curves.rows(runs)[1][-1] == "diverged at step 60"
    figure = drawn(runs, "loss")
    cross = lines_of(figure)[-1]
    assert cross[0] == 59 and cross[1] == pytest.approx(8.99 + 1) == figure.axes[0].dataLim.y1
    assert labels(figure) == ["good", "bad", "validation", "diverged"]
    assert len(figure.axes) == 2 and "1 above" in figure.legends[0].get_title().get_text()


def test_what_a_run_does_not_have_is_left_out_and_said(tmp_path):
    bare = {"tokens_per_second": None, "gradient_norm": None, "evaluations": ()}
    folders = [run_directory(tmp_path / "bare", steps=1, **bare), run_directory(tmp_path / "_hidden", steps=30)]
    runs = records.read_all(folders)
    assert curves.rows(runs)[0] == ["bare", "1", "8.9900", "-", "-", "-", "-", "-", "0% of 300"]
    found = curves.pictures(runs)
    assert "Without times, so against steps alone: bare." in found[0].caption
    assert len(curves.evaluations(runs)) == 1
    both = drawn(runs, "loss")
    assert [len(axes.lines) for axes in both.axes] == [
        3,
        2,
    ]  # training of two and validation of one; the one with times
    assert labels(drawn(runs[:1], "loss")) == ["training"]


def test_everything_that_is_drawn_is_inside_the_picture(tmp_path):
    folders = [run_directory(tmp_path / f"{'a very long name ' * i}$x$ {i}", steps=5 + i) for i in range(1, 12)]
    runs = records.read_all(folders)
    figure = drawn(runs, "perplexity")
    figure.draw_without_rendering()
    box = figure.bbox
    for artist in (*figure.legends, *figure.axes):
        inside = artist.get_tightbbox()
        assert inside.x0 >= box.x0 and inside.x1 <= box.x1 and inside.y0 >= box.y0 and inside.y1 <= box.y1
    looks = [tuple(style.line_look(i).values()) for i in range(len(runs))]
    assert len(set(looks)) == len(runs)


def test_the_page_holds_every_picture_and_needs_nothing_else(tmp_path):
    runs = records.read_all([run_directory(tmp_path / "<b>&run")])
    made = curves.pictures(runs)
    table = page.Table("Runs", curves.HEAD, curves.rows(runs))
    html = page.html("Training <runs>", {"a": "<i>"}, [table, *curves.evaluations(runs)], made, "n & m")
    files = page.write(str(tmp_path / "out/deep"), "plot", html, made)
    assert [file.rsplit("/", 1)[1] for file in files] == [
        "plot.html", "loss.png", "perplexity.png", "throughput.png", "gradient_norm.png",
    ]  # fmt: skip
    text = (tmp_path / "out/deep/plot.html").read_text()
    assert "<b>&run" not in text and "<i>" not in text and "&lt;b&gt;&amp;run" in text and "6.1000" in text
    assert "http" not in text and "<script" not in text and text.count('src="data:image/png;base64,') == 4
    assert all(len(np.unique(imread(io.BytesIO(one.png)))) > 2 for one in made)
