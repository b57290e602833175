"""The command line on good input: what it prints, and where."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training import runs

# All that `train` shows.
OURS = re.compile(
    r"training a tokenizer|tokenised \d|step [\d,]+/[\d,]+  loss|step [\d,]+  validation loss|going on from step"
    r"|SIG(TERM|INT): saving|flash-tf: |done; the run is in "
)


def foreign(stderr):
    return [line for line in stderr.splitlines() if not OURS.match(line)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of a masked and of a causal run that the command trained, with what it printed."""
    found = {}
    for kind in ("masked", "causal"):
        folder = tmp_path_factory.mktemp(kind)
        runs.corpus(folder)
        path = runs.write(folder, model={"type": f"{kind}_lm", "depth": 1}, evaluation={"every": None})
        counts = "data.source.counts_words=true"
        found[kind] = folder, runs.command(folder, "train", path, "--model-dir", folder / "model", "--set", counts)
    return found


def test_train_prints_nothing_on_standard_output_and_only_its_own_lines_on_standard_error(trained):
    for folder, (status, out, err) in trained.values():
        assert (status, out, foreign(err)) == (0, "", [])
        assert err.splitlines()[-1] == f"done; the run is in {folder}/model"
        assert "train | step" in (folder / "model/log.txt").read_text()


def one_object(result):
    """The only thing on standard output, with nothing on standard error."""
    status, out, err = result
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


def test_evaluate_prints_one_object_which_is_what_training_recorded(trained):
    figures = {"step", "loss", "perplexity", "unigram_perplexity", "tokens"}
    for kind, more in (("masked", set()), ("causal", {"word_perplexity", "words"})):
        folder, _ = trained[kind]
        found = one_object(runs.command(folder, "evaluate", folder / "model", "--json"))
        assert set(found) == figures | more
        recorded = runs.records(folder / "model", "evaluations.jsonl")
        assert recorded == [found]


def test_evaluate_without_json_prints_a_line_for_each_figure(trained):
    folder, _ = trained["causal"]
    status, out, err = runs.command(folder, "evaluate", folder / "model", "--checkpoint", "newest")
    assert (status, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()]
    assert names[:3] == ["step", "loss", "perplexity"] and "word_perplexity" in names


def test_describe_prints_one_object_and_allocates_nothing_in_the_folder(tmp_path):
    found = one_object(runs.command(tmp_path, "describe", "quickstart", "--json", "--set", "model.depth=2"))
    assert found["model"] == "masked_lm" and found["mixer"] == "flash"
    assert found["parameters"] > 4000 * 128
    assert found["training_flops_per_token"] == pytest.approx(3 * found["forward_flops_per_token"], abs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr", "stdout"]


def test_list_prints_one_object_of_names(tmp_path):
    found = one_object(runs.command(tmp_path, "list", "--json"))
    assert {"flash", "gau"} <= set(found["mixers"])
    assert {"masked_lm", "causal_lm"} <= set(found["models"])
    assert "text_files" in found["sources"] and "quickstart" in found["configs"]


def test_fill_mask_gives_the_likeliest_tokens_of_each_mask_with_falling_probabilities(trained):
    folder, _ = trained["masked"]
    word = (folder / "validation.txt").read_text().split()[0]
    text = f"{word} <mask> {word} <mask>"
    found = one_object(runs.command(folder, "fill-mask", folder / "model", text, "--top-k", "3", "--json"))["masks"]
    assert [len(mask) for mask in found] == [3, 3]
    for mask in found:
        probabilities = [candidate["probability"] for candidate in mask]
        assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) < 1
        assert all(candidate["text"].startswith(word) for candidate in mask)
    status, out, _ = runs.command(folder, "fill-mask", folder / "model", text, "--top-k", "3")
    assert status == 0 and len(out.splitlines()) == 6


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, "the command ended by itself"
        time.sleep(0.05)


def interrupted(folder, number, *, after):
    """Starts `flash-tf train` as a process of its own, signals it after so many steps; its status and outputs."""
    metrics = folder / "model/metrics.jsonl"
    arguments = ["train", str(folder / "config.yaml"), "--model-dir", str(folder / "model")]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen([sys.executable, "-m", "flash_tf.cli", *arguments], stdout=out, stderr=err)
        try:
            wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= after, process)
            process.send_signal(number)
            process.wait()
        finally:
            process.kill()
    return process.returncode, Path(out.name).read_text(), Path(err.name).read_text()


def test_a_signal_saves_and_ends_with_128_plus_its_number_and_the_same_command_goes_on(tmp_path):
    runs.corpus(tmp_path)
    train = {"steps": 10**6, "steps_per_loop": 5, "checkpoint_every": 10**6}
    runs.write(tmp_path, model={"depth": 1}, train=train, evaluation={"every": None})
    status, out, err = interrupted(tmp_path, signal.SIGTERM, after=5)
    assert (status, out, foreign(err)) == (143, "", [])
    assert "SIGTERM: saving after this loop of steps" in err.splitlines()
    assert err.splitlines()[-1] == "flash-tf: stopped by SIGTERM; the same command goes on from here"
    steps = len(runs.losses(tmp_path / "model"))
    assert [int(name.name[5:]) for name in (tmp_path / "model/checkpoints").iterdir()] == [steps]
    noise = (tmp_path / "model/log.txt").read_text()
    assert "Interrupted" in noise and "train | step" in noise

    status, out, err = interrupted(tmp_path, signal.SIGINT, after=steps + 5)
    assert (status, out, foreign(err)) == (130, "", [])
    assert f"going on from step {steps:,}" in err.splitlines()
    assert err.splitlines()[-1] == "flash-tf: stopped by SIGINT; the same command goes on from here"
    assert len(runs.losses(tmp_path / "model")) >= steps + 5
