"""The command line on bad input: one line with the need and the finding, and nothing destroyed."""

import re
import shutil

import pytest

from tests.training import runs

# What only a run of its own can tell; `tests/robustness/bad_inputs.txt` has all else. Overrides, and the expected line.
OPTIONS = {
    "more pieces than the text has": ("model.vocabulary_size=9000", r"too small for 9000 pieces: \d+ are possible"),
    "a TPU that is not there": ("strategy={type: tpu, tpu: none-here}", r"strategy.tpu 'none-here': no TPU answers"),
}


PROGRESS = re.compile(
    r"training a tokenizer|tokenized|step |going on from|.* is damaged: .*; falling back|.*: compiling, then"
)


def one_line(result):
    """The only line about an error. Only progress may come before it."""
    status, out, err = result
    assert (status, out) == (1, "")
    *before, line = err.splitlines()
    assert line.startswith("flash-tf: ")
    assert all(PROGRESS.match(other) for other in before), err
    return line


def contents(folder):
    """Every file except what a terminal got, with its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("stdout", "stderr"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if "summaries" not in path.parts}


def train(folder, *overrides):
    options = [part for override in overrides for part in ("--set", override)]
    return runs.command(folder, "train", folder / "config.yaml", "--model-dir", folder / "model", *options)


@pytest.fixture
def folder(tmp_path):
    runs.corpus(tmp_path)
    runs.write(tmp_path, model={"depth": 1})
    return tmp_path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that a signal stopped after four of its eight steps."""
    folder = tmp_path_factory.mktemp("stopped")
    runs.corpus(folder)
    path = runs.write(folder, model=runs.SMALLEST)
    runs.in_child(runs.train, path, folder / "model", stop_after=4)
    return folder


@pytest.fixture
def copy(stopped, tmp_path):
    shutil.copytree(stopped / "model", tmp_path / "model")
    shutil.copy(stopped / "config.yaml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_used_is_named_with_what_it_needs_and_what_came(folder, name):
    override, said = OPTIONS[name]
    line = one_line(train(folder, override))
    assert re.search(said, line), line


def test_text_that_is_none_is_refused_by_the_name_of_its_file_and_the_place_in_it(folder):
    bad = folder / "train.txt"
    for data, said in {
        b"": "is empty",
        b"good text\nbad \xff text\n": "needs UTF-8 text, got byte 0xff at byte 14",
        b"good\n\x00\x01\x02binary\n": "needs UTF-8 text, got byte 0x00 at byte 5",
        b"\n  \n\n": "needs text for train, found none",
    }.items():
        bad.write_bytes(data)
        line = one_line(train(folder))
        assert f"{bad}" in line and said in line


def test_a_config_that_is_not_there_or_no_yaml_is_named(folder):
    line = one_line(runs.command(folder, "train", "quickstrat", "--model-dir", folder / "model"))
    assert line.endswith(
        "no config file 'quickstrat', and no config of this name in the package; did you mean 'quickstart'?"
    )
    assert f"is a run, not a config: its config is {folder}/config.yaml" in one_line(
        runs.command(folder, "describe", folder)
    )
    (folder / "config.yaml").write_text("model: [")
    assert f"{folder}/config.yaml is not YAML" in one_line(train(folder))
    (folder / "config.yaml").write_text("- a list")
    assert "a config must be a mapping with model, data, …, got list" in one_line(train(folder))


def test_a_model_directory_of_another_config_names_the_option_and_both_values_and_stays_as_it_is(copy):
    before = contents(copy)
    line = one_line(train(copy, "model.width=32"))
    assert f"{copy}/model holds a run with model.width = 16, this one has 32; use another --model-dir" in line
    line = one_line(train(copy, "model.width=32", "train.seed=5"))
    assert "(and 1 more options differ)" in line
    assert contents(copy) == before


def test_checkpoints_without_a_config_are_not_written_over(copy):
    for name in ("config.yaml", "run.json"):
        (copy / "model" / name).unlink()
    before = contents(copy)
    assert "has checkpoints or records but no config.yaml" in one_line(train(copy))
    assert contents(copy) == before


def test_fill_mask_needs_a_mask_and_a_number_of_tokens_that_there_is(copy):
    line = one_line(runs.command(copy, "fill-mask", copy / "model", "no such thing"))
    assert line == "flash-tf: the text needs a <mask>, got 'no such thing'"
    line = one_line(runs.command(copy, "fill-mask", copy / "model", "a <mask>", "--top-k", "0"))
    assert line == "flash-tf: top-k must be between 1 and the vocabulary's 100, got 0"
    line = one_line(runs.command(copy, "fill-mask", copy / "model", "a <mask> " * 40))
    assert re.search(r"the text has \d+ tokens, the model takes 32", line)


def test_checkpoints_that_cannot_be_read_are_said_to_be_damaged(copy):
    for data in (copy / "model/checkpoints").glob("step-*/*.index"):
        data.write_bytes(b"not an index")
    before = contents(copy)
    assert "none of the 2 checkpoints in" in one_line(train(copy)).splitlines()[-1]
    line = one_line(runs.command(copy, "evaluate", copy / "model"))
    assert "none of the 2 checkpoints in" in line and "step-00000002 is damaged" in line
    assert contents(copy) == before


@pytest.mark.full
def test_a_disk_that_fills_while_saving_ends_the_run_with_a_line_and_leaves_earlier_checkpoints_whole(copy):
    before = {name: data for name, data in contents(copy / "model/checkpoints").items() if "variables" in name}
    size = max(len(data) for data in before.values())
    command = ["train", copy / "config.yaml", "--model-dir", copy / "model"]
    line = one_line(runs.command(copy, *command, file_size=size // 2))
    assert re.fullmatch(r"flash-tf: [^{}]*/model/checkpoints/step-00000006[^{}]*File too large[^{}]*", line), line
    assert before.items() <= contents(copy / "model/checkpoints").items()
    status, _, err = runs.command(copy, *command)
    assert status == 0 and "going on from step 4" in err
    assert len(runs.losses(copy / "model")) == 8


@pytest.mark.full
def test_a_folder_in_which_a_first_try_failed_takes_the_mended_config(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"depth": 1}, train={"steps": 1})
    arguments = ("train", path, "--model-dir", str(tmp_path / "model"))
    status, _, err = runs.command(tmp_path, *arguments, "--set", "model.mixer.key_dim=7")
    assert status == 1 and "even key_dim" in err
    status, _, err = runs.command(tmp_path, *arguments)
    assert status == 0, err
