"""The command line on bad input: one line with the need and the finding, and nothing destroyed."""

import re
import shutil

import pytest

from flash_tf.data.tokenizer import Tokenizer
from tests.training import runs

LENGTHS = "train.tokens_per_step (100) must be a multiple of data.sequence_length (32) x train.accumulate (1)"

# Overrides, and the expected line.
OPTIONS = {
    "an unknown section": ("optimiser.learning_rate=0.1", r"has no option 'optimiser'; did you mean 'optimizer'\?"),
    "an unknown option": ("train.step=4", r"train has no option 'step'; did you mean 'steps'\?"),
    "an unknown option of a mixer": (
        "model.mixer.chunk_sise=8",
        r"mixer 'flash' has no option 'chunk_sise'; did you mean 'chunk_size'\?",
    ),
    "an unknown option of a model": ("model.widht=8", r"model 'masked_lm' has no option 'widht'; did you mean 'width'"),
    "an unknown mixer": ("model.mixer.type=flahs", r"no mixer is called 'flahs'; did you mean 'flash'"),
    "an unknown model": ("model.type=maskedlm", r"no model is called 'maskedlm'; did you mean 'masked_lm'"),
    "a wrong type": ("train.steps=many", r"train: steps must be int, got 'many' \(str\)"),
    "a number that YAML reads as text": ("optimizer.learning_rate=1e-3", r"learning_rate must be float.*write 1.0e-3"),
    "a choice that there is not": ("optimizer.schedule=step", r"schedule must be one of 'linear', .*, got 'step'"),
    "a negative number": ("train.steps=-1", r"train.steps must be positive, got -1"),
    "no equals sign": ("train.steps", r"--set needs key=value, got 'train.steps'"),
    "an odd key width": ("model.mixer.key_dim=7", r"needs an even key_dim of at least 2, for rotary pairs, got 7"),
    "heads that do not divide the width": (
        "model.mixer={type: self_attention, heads: 3}",
        r"heads must divide the width .*, got heads 3, width 16",
    ),
    "texts longer than cosFormer's constant": (
        "model.mixer={type: linear_attention, heads: 2, features: relu, cosine_length: 8}",
        r"cosine_length \(8\) must be at least data.sequence_length \(32\)",
    ),
    "texts longer than Linformer's matrix": (
        "model.mixer={type: linformer, heads: 2, max_length: 8}",
        r"max_length \(8\) must be at least data.sequence_length \(32\)",
    ),
    "mixers that do not share the blocks": (
        "model.depth=2 model.mixer=[]",
        r"mixers of a list must divide the blocks, got 0 for depth 2",
    ),
    "more blocks computed again than there are": ("model.remat=3", r"remat true, false or up to depth 1 blocks, got 3"),
    "a step that sequences do not fill": ("train.tokens_per_step=100", re.escape(LENGTHS)),
    "masking of a causal model": ("model.type=causal_lm masking.rate=0.2", r"masking belongs to masked_lm .*causal_lm"),
    "more pieces than the text has": ("model.vocabulary_size=9000", r"too small for 9000 pieces: \d+ are possible"),
    "a tokenizer that is not there": ("data.tokenizer=no.model", r"tokenizer model no.model cannot be read"),
    "a TPU that is not there": ("strategy={type: tpu, tpu: none-here}", r"strategy.tpu 'none-here': no TPU answers"),
    "a worker beyond the last": (
        "strategy={type: multi_worker, workers: ['localhost:1'], index: 1}",
        r"strategy.index must be from 0 to 0, got",
    ),
}


PROGRESS = re.compile(
    r"training a tokenizer|tokenised|step |going on from|.* is damaged: .*; falling back|.*: compiling, then"
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
    """Every file except the logs, with its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("log.txt", "stdout", "stderr"))
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
    path = runs.write(folder, model={"depth": 1})
    runs.in_child(runs.train, path, folder / "model", stop_after=4)
    return folder


@pytest.fixture
def copy(stopped, tmp_path):
    shutil.copytree(stopped / "model", tmp_path / "model")
    shutil.copy(stopped / "config.yaml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_used_is_named_with_what_it_needs_and_what_came(folder, name):
    overrides, said = OPTIONS[name]
    line = one_line(train(folder, *([overrides] if "{" in overrides else overrides.split())))
    assert re.search(said, line), line


def test_packed_documents_are_refused_for_a_mixer_that_reads_a_window_as_one_text(folder):
    line = one_line(train(folder, "data.packing=documents", "model.mixer={type: nystromformer, heads: 2}"))
    assert "'nystromformer' reads a window as one text: it needs data.packing concatenate, got documents" in line


def test_a_tokenizer_of_another_vocabulary_is_refused_with_both_sizes(folder):
    text = (folder / "train.txt").read_text().splitlines()
    Tokenizer.train(iter(text), 80).save(str(folder / "small.model"))
    line = one_line(train(folder, f"data.tokenizer={folder}/small.model"))
    assert f"model.vocabulary_size is 100, but tokenizer model {folder}/small.model has 80 pieces" in line


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


def test_a_glob_that_matches_no_file_is_named(folder):
    line = one_line(train(folder, f"data.source.validation={folder}/*.text"))
    assert line == f"flash-tf: source 'text_files' needs files for validation, but '{folder}/*.text' matches none"


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


def test_a_directory_that_is_no_model_directory_is_refused_by_every_command(tmp_path):
    for arguments in (["evaluate", tmp_path / "none"], ["fill-mask", tmp_path / "none", "a <mask>"]):
        line = one_line(runs.command(tmp_path, *arguments))
        assert f"{tmp_path}/none is not a model directory: it has no config.yaml" in line
    assert not (tmp_path / "none").exists()


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


def test_a_folder_in_which_a_first_try_failed_takes_the_mended_config(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, train={"steps": 1})
    arguments = ("train", path, "--model-dir", str(tmp_path / "model"))
    status, _, err = runs.command(tmp_path, *arguments, "--set", "model.mixer.key_dim=7")
    assert status == 1 and "even key_dim" in err
    status, _, err = runs.command(tmp_path, *arguments)
    assert status == 0, err
