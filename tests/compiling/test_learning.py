"""The sweep of learning rates over exported steps, and its picture."""

import json
import math

import numpy as np
import pytest

from benchmarks import plots
from tests.compiling import exports

RATES = (1e-3, 1e-2)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = exports.folder_of(tmp_path_factory.mktemp("learning"), "causal_lm")
    (folder / "artifact").rename(folder / "lm_flash")
    files = exports.token_files(folder)
    np.save(files[1], np.load(files[1])[:2000])  # short passes
    options = ["--learning-rates", *RATES, "--passes", 2, "--out", folder / "runs", "--json", folder / "result.json"]
    status, _, err = exports.run(folder / "lm_flash", *files, *options, module="benchmarks.learning")
    assert status == 0, err
    return folder


def rows(folder):
    return json.loads((folder / "result.json").read_text())["rows"]


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
    sizes = np.diff([0, *(point["step"] for point in row["curve"])])
    means = [point["loss"] for point in row["curve"]]
    assert np.dot(sizes, means) / len(losses) == pytest.approx(np.mean(losses))


def test_the_longest_runs_are_drawn(learned):
    (axes, *_) = plots.draw([str(learned / "result.json")])["curves"].axes
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    longest = rows(learned)[-1]
    assert lines["FLASH"][-1] == pytest.approx((longest["steps"], longest["validation_perplexity"]))
