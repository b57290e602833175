"""The sweep of learning rates over exported steps, and its picture."""

import math
import shutil

import numpy as np
import pytest

from benchmarks import plots, result_files
from tests.compiling import exports

pytestmark = pytest.mark.full
RATES = (1e-3, 1e-2)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = exports.folder_of(tmp_path_factory.mktemp("learning"), "causal_lm")
    (folder / "artifact").rename(folder / "lm_flash")
    files = exports.token_files(folder)
    np.save(files[1], np.load(files[1])[:2000])  # short passes
    options = [
        "--learning-rates",
        *RATES,
        "--passes",
        2,
        "--out",
        folder / "runs",
        "--results",
        folder / "learning.jsonl",
    ]
    status, _, err = exports.run(folder / "lm_flash", *files, *options, module="benchmarks.learning")
    assert status == 0, err
    return folder


def rows(folder):
    return result_files.read(folder / "learning.jsonl")


def test_each_rate_goes_over_the_tokens_once_and_the_best_goes_on(learned):
    *swept, longest = rows(learned)
    assert [(row["learning_rate"], row["passes"]) for row in swept] == [(rate, 1) for rate in RATES]
    assert longest["learning_rate"] == min(swept, key=lambda row: row["validation_loss"])["learning_rate"]
    assert longest["steps"] == 2 * swept[0]["steps"] == 2 * (2000 // swept[0]["tokens_per_step"])
    assert [record["step"] for record in longest["evaluations"]] == [swept[0]["steps"], longest["steps"]]
    assert longest["validation_perplexity"] == pytest.approx(math.exp(longest["validation_loss"]))


def test_the_curve_is_that_of_the_losses(learned):
    row = rows(learned)[0]
    folder = learned / "runs" / f"lm_flash-{RATES[0]:g}-1"
    losses = [record["loss"] for record in exports.records(folder)]
    sizes = np.diff([0, *row["curve"]["step"]])
    assert np.dot(sizes, row["curve"]["loss"]) / len(losses) == pytest.approx(np.mean(losses))
    assert {len(column) for column in row["curve"].values()} == {len(sizes)}


def test_a_rate_that_diverges_is_a_row_that_says_so_and_the_others_go_on(learned, tmp_path):
    files = ["--tokens", learned / "train.npy", "--validation", learned / "validation.npy"]
    options = ["--learning-rates", 1e30, RATES[0], "--passes", 1, "--out", tmp_path / "runs"]
    status, _, err = exports.run(
        learned / "lm_flash", *files, *options, "--results", tmp_path / "learning.jsonl", module="benchmarks.learning"
    )
    assert status == 0, err
    diverged, swept = rows(tmp_path)
    assert (diverged["learning_rate"], swept["learning_rate"]) == (1e30, RATES[0])
    assert diverged["error"].startswith("the loss or its gradient is not a number at step ")
    assert diverged["error"] in err and swept["validation_loss"] == rows(learned)[0]["validation_loss"]


def test_other_tokens_are_another_run_and_a_pass_has_two_steps(learned, tmp_path):
    np.save(tmp_path / "other.npy", np.load(learned / "validation.npy")[::-1])
    np.save(tmp_path / "short.npy", np.load(learned / "train.npy")[:40])
    options = ["--learning-rates", RATES[0], "--out", learned / "runs", "--results", tmp_path / "learning.jsonl"]
    for tokens, validation, said in [
        (learned / "train.npy", tmp_path / "other.npy", "holds a run of another validation"),
        (tmp_path / "short.npy", learned / "validation.npy", "a pass needs two steps"),
    ]:
        files = ["--tokens", tokens, "--validation", validation]
        status, _, err = exports.run(learned / "lm_flash", *files, *options, module="benchmarks.learning")
        assert status == 1 and said in err.splitlines()[-1]


def test_what_cannot_begin_says_so_before_it_is_compiled(learned, tmp_path):
    shutil.copytree(learned / "lm_flash", tmp_path / "lm_flash", ignore=shutil.ignore_patterns("config.yaml"))
    files = ["--tokens", learned / "train.npy", "--validation", learned / "validation.npy"]
    status, _, err = exports.run(
        tmp_path / "lm_flash", *files, "--out", tmp_path / "runs", module="benchmarks.learning"
    )
    assert status == 1 and err.splitlines()[-1].endswith(
        "No such file or directory: " + str(tmp_path / "lm_flash/config.yaml")
    )
    assert "compiling" not in err

    # Nothing ran in its folder, so any other run may use it.
    shutil.copy(learned / "lm_flash/config.yaml", tmp_path / "lm_flash")
    (tmp_path / "lm_flash/manifest.json").write_text((learned / "lm_flash/manifest.json").read_text() + "\n")
    options = ["--learning-rates", 1e-3, "--passes", 1, "--out", tmp_path / "runs"]
    options += ["--results", tmp_path / "learning.jsonl"]
    status, _, err = exports.run(tmp_path / "lm_flash", *files, *options, module="benchmarks.learning")
    assert status == 0, err


def test_the_longest_runs_are_drawn(learned):
    (axes, *_) = plots.figures(learned)["learning_lm_cpu"].axes
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    longest = rows(learned)[-1]
    assert lines["FLASH"][-1] == pytest.approx((longest["steps"], longest["validation_perplexity"]))
