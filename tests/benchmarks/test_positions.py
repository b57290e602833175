"""Perplexity by position: novels read in blocks against passes over whole stretches, restarts, and bad input."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from keras import ops

from benchmarks import positions, result_files
from flash_tf.training.restore import restore
from tests import numerics, tiers
from tests.backends import to_numpy
from tests.exporting import models

TOKENS = 600  # blocks of 512 and 88
BUCKETS = [[0, 256], [256, 512], [512, 600]]
STRETCHES = (3, 0, 2)  # of each novel


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by name: two that read on, and others that cannot."""
    folder, known = tmp_path_factory.mktemp("runs"), models.sections()
    sections = {name: known[f"causal-{name}"] for name in ("flash", "transformer_plus_plus")}
    cosine = {"type": "linear_attention", "features": "relu", "rotary": False, "cosine_length": 50}
    sections["cosformer"] = {**known["causal-linear_attention"], "mixer": cosine}
    sections["learned"] = {**known["causal-transformer_plus_plus"], "position_embedding": "learned"}
    sections["masked"] = known["masked-flash"]
    return {name: str(models.directory(folder / name, section)) for name, section in sections.items()}


@pytest.fixture(scope="module")
def novels(runs, tmp_path_factory):
    """A folder with a long novel, one that is too short, another long one, and a file that is none."""
    folder = tmp_path_factory.mktemp("novels")
    text = " ".join(Path(runs["flash"]).with_name("train.txt").read_text().split())
    tokens = restore(runs["flash"]).tokenizer.encode([text])[0]
    each = len(text) / len(tokens)
    ends = np.cumsum([0, 3.5 * TOKENS, 0.5 * TOKENS, 2.5 * TOKENS]) * each
    for name, (start, end) in zip("abc", itertools.pairwise(ends.astype(int)), strict=True):
        (folder / f"{name}.txt").write_text(text[start:end])
    (folder / "index.tsv").write_text(text)
    return folder


def read(runs, novels, file):
    """The status of the command in a small batch, and the rows of its file."""
    flags = ("--tokens", str(TOKENS), "--batch", "2", "--results", str(file), "--commit", "here")
    return positions.main([*runs, "--novels", str(novels), *flags]), result_files.read(file)


def by_hand(run, novels):
    """The negative log-likelihood of every token of each stretch, by a pass over the whole: `[stretches, tokens]`."""
    found = restore(run)
    encoded = found.tokenizer.encode([path.read_text() for path in sorted(novels.glob("*.txt"))])
    assert tuple(len(ids) // TOKENS for ids in encoded) == STRETCHES
    each = []
    for ids in encoded:
        for start in range(0, len(ids) - TOKENS + 1, TOKENS):
            labels = ids[start : start + TOKENS]
            given = np.array([[found.tokenizer.eos_id, *labels[:-1]]], "int32")
            logits = to_numpy(found.model(ops.convert_to_tensor(given)))[0].astype("float64")
            each.append(np.log(np.exp(logits).sum(-1)) - logits[np.arange(TOKENS), labels])
    return np.stack(each)


@pytest.mark.parametrize("name", tiers.thinned(["flash", "transformer_plus_plus"], "flash"))
def test_each_bucket_has_the_mean_of_passes_over_whole_stretches(name, runs, novels, tmp_path):
    status, (row,) = read([runs[name]], novels, tmp_path / "found.jsonl")
    each = by_hand(runs[name], novels)
    assert (status, row["buckets"]) == (0, BUCKETS)
    want = [np.exp(each[:, start:end].mean()) for start, end in BUCKETS]
    assert numerics.relative_error(row["perplexity"], want) < numerics.FLOAT32
    assert (row["novels"], row["left_out"], row["stretches"]) == (2, 1, 5)
    assert (row["n"], row["step"], row["tokens"]) == (models.LENGTH, models.STEP, TOKENS)
    model = restore(runs[name]).model
    assert row["parameters"] == sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert row["state_bytes"] == {str(n): model.decode_state_bytes(n) for n in (1024, TOKENS)}
    assert (row["state_bytes"]["1024"] > row["state_bytes"][str(TOKENS)]) == (name == "transformer_plus_plus")


def test_edges_are_powers_of_two_up_to_the_end():
    assert positions.edges(32_768) == [0, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]
    assert [positions.edges(tokens) for tokens in (1, 256, 257)] == [[0, 1], [0, 256], [0, 256, 257]]


def test_what_cannot_be_read_is_said_in_a_line_and_the_others_are_read_once(runs, novels, tmp_path, capfd):
    file, bare = tmp_path / "found.jsonl", tmp_path / "bare"
    bare.mkdir()
    shutil.copy(f"{runs['flash']}/config.yaml", bare)
    given = [f"{name}={run}" for name, run in {**runs, "bare": str(bare), "none": str(tmp_path / "no")}.items()]
    status, rows = read(given, novels, file)
    out, err = capfd.readouterr()
    assert (status, [row["run"] for row in rows]) == (1, ["flash", "transformer_plus_plus"])
    for line in (
        "cosformer: the model reads at most 50 tokens, got --tokens 600",
        f"learned: the model reads at most {models.LENGTH} tokens, got --tokens 600",
        "masked: it needs a causal language model, got MaskedLM",
        f"bare: {bare} has no checkpoint yet: `flash-tf train` saves one",
        f"none: {tmp_path / 'no'} is not a model directory: it has no config.yaml, which `flash-tf train` writes",
    ):
        assert line in err.splitlines()
    heading, columns, *lines = out.splitlines()
    assert heading.startswith("perplexity by position: ") and "600 tokens" in heading
    assert columns.split()[-6:] == ["to", "256", "to", "512", "to", "600"]
    assert [line.split()[-3:] for line in lines] == [[f"{x:.2f}" for x in row["perplexity"]] for row in rows]

    assert read(given[:2], novels, file) == (0, rows)  # nothing is read again
    assert capfd.readouterr().out == out
    assert positions.main(["--table", "--tokens", str(TOKENS), "--results", str(file)]) == 0
    assert (capfd.readouterr().out, result_files.read(file)) == (out, rows)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").write_text((novels / "a.txt").read_text())
    assert len(read(given[:1], tmp_path / "other", file)[1]) == 3  # another text is another measurement


def test_wrong_arguments_are_said_in_a_line(runs, novels, tmp_path):
    file = ["--results", str(tmp_path / "found.jsonl")]
    for flags, message in (
        ([], "RUN and --novels are needed"),
        ([runs["flash"]], "RUN and --novels are needed"),
        ([runs["flash"], "--novels", str(novels), "--tokens", "0"], "--tokens must be 1 or more, got 0"),
        ([runs["flash"], "--novels", str(novels), "--batch", "-1"], "--batch must be 1 or more, got -1"),
        ([runs["flash"], "--novels", str(tmp_path), *file], "--novels needs a folder with .*txt, and .* has none"),
        ([f"a={run}" for run in runs.values()] + ["--novels", str(novels)], "two runs have one name"),
    ):
        with pytest.raises(ValueError, match=message):
            positions.main(flags)


def test_novels_that_are_all_too_short_are_said(runs, novels, tmp_path, capfd):
    flags = ["--novels", str(novels), "--tokens", "5000", "--results", str(tmp_path / "found.jsonl")]
    assert positions.main([runs["flash"], *flags]) == 1
    assert "tokens, got --tokens 5000" in capfd.readouterr().err
