"""`flash-tf export` as its user sees it, and TensorFlow's own command on what it wrote."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from flash_tf import owned_files
from flash_tf.exporting import saved_model
from flash_tf.filling import fill_mask
from tests.backends import to_numpy
from tests.exporting import models
from tests.numerics import BFLOAT16_LAYER, relative_error
from tests.training import runs

SECTIONS = models.sections()
PLAIN = "from tensorflow.python.tools import saved_model_cli as c; c.main()"
WITH_TEXT = f"import sys, tensorflow_text; {PLAIN}"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return models.directory(tmp_path_factory.mktemp("masked"), SECTIONS["masked-flash_quad"])


def written(out):
    return json.loads((out / "assets.extra/export.json").read_text())


def test_an_export_is_announced_replaced_whole_and_nothing_else_is_overwritten(model_dir, tmp_path):
    out = tmp_path / "out"
    status, shown, err = runs.command(tmp_path, "export", model_dir, out, "--vocabulary-licence", "CC0", "--tflite")
    assert status == 0
    assert err.splitlines() == [
        *(f"tracing {name}" for name in ("fill_mask", "embed", "score", "logits")),
        "writing 4 signatures",
        "converting to TensorFlow Lite",
    ]
    assert shown.splitlines()[-1] == f"masked_lm of step {models.STEP}, float32, in {out}"
    assert written(out)["vocabulary_licence"] == "CC0" and "model.tflite" in written(out)["files"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stderr", "stdout"]

    status, shown, err = runs.command(tmp_path, "export", model_dir, out, "--ids-only", "--max-length", 9, "--json")
    assert status == 0 and json.loads(shown) == written(out)
    assert written(out)["reads"] == "ids" and written(out)["max_length"] == 9 and not (out / "model.tflite").exists()

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter").write_text("1")
    (out / "notes").write_text("1")
    tail = ", which flash-tf export did not write: give another folder, or move that file away"
    for there, said in {
        tmp_path / "thesis": f"{tmp_path}/thesis holds chapter{tail}",
        tmp_path
        / "thesis/chapter": f"{tmp_path}/thesis/chapter needs to be a folder, and {tmp_path}/thesis/chapter is a file",
        model_dir: f"{model_dir} holds config.yaml{tail}",
        out: f"{out} holds notes{tail}",
    }.items():
        before = runs.contents(there.parent)
        assert runs.command(tmp_path, "export", model_dir, there) == (1, "", f"flash-tf: {said}\n")
        assert runs.contents(there.parent) == before


def tool(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.full
def test_saved_model_cli_runs_an_export_of_ids_as_it_is_and_one_of_text_beside_tf_text(model_dir, tmp_path):
    run, _ = models.exported(model_dir, tmp_path / "ids", ids_only=True)
    models.exported(model_dir, tmp_path / "text")
    common = ("--tag_set", "serve", "--signature_def", "fill_mask")
    np.save(tmp_path / "ids.npy", run.tokenizer.encode_with_masks("ab <mask>")[None])
    out = tool(PLAIN, "run", "--dir", tmp_path / "ids", *common, "--inputs", f"ids={tmp_path / 'ids.npy'}")
    (want,) = fill_mask(run.model, run.tokenizer, "ab <mask>", top_k=3, max_tokens=models.LENGTH)
    assert f"[[[{' '.join(str(list_of_ids(run).index(c['token'])) for c in want)}]]]" in " ".join(out.split())
    out = tool(WITH_TEXT, "run", "--dir", tmp_path / "text", *common, "--input_exprs", 'text=["ab <mask>"]')
    assert all(repr(c["text"].encode()) in out for c in want)


def list_of_ids(run):
    return [run.tokenizer.piece(i) for i in range(run.tokenizer.vocabulary_size)]


BAD = {
    "a folder that is no model directory": ("none", [], "is not a model directory"),
    "a run without a checkpoint": ("unfinished", [], "has no checkpoint yet"),
    "a run of an exported step": ("of_a_step", [], "of_a_step needs checkpoints, got weights of an exported step"),
    "more candidates than pieces": ("model", ["--top-k", "101"], "top-k must be at most the vocabulary's 100, got 101"),
    "no candidate": ("model", ["--top-k", "0"], "an export needs --top-k of 1 or more, got 0"),
    "a length of none": ("model", ["--max-length", "0"], "an export needs --max-length of 1 or more, got 0"),
    "an option of other models": (
        "model",
        ["--max-new-tokens", "3"],
        "--max-new-tokens is for models that generate, and this one does not: it is not causal",
    ),
    "steps that XLA compiles, of a model without": (
        "model",
        ["--jit-compile"],
        "--jit-compile is for models that generate, and this one does not: it is not causal",
    ),
    "a bucket": ("model", ["gs://there"], "flash-tf export needs a local folder"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_argument_is_one_line_and_leaves_nothing(model_dir, tmp_path, what):
    name, options, said = BAD[what]
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "of_a_step/weights").mkdir(parents=True)
    (tmp_path / "of_a_step/weights/manifest.json").touch()
    for run in ("unfinished", "of_a_step"):
        (tmp_path / run / "config.yaml").write_text((model_dir / "config.yaml").read_text())
    given = model_dir if name == "model" else tmp_path / name
    out = [] if options[:1] == ["gs://there"] else [tmp_path / "out"]
    status, shown, err = runs.command(tmp_path, "export", given, *out, *options)
    assert (status, shown, err.count("\n")) == (1, "", 1)
    assert err.startswith("flash-tf: ") and said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of_a_step", "stderr", "stdout", "unfinished"]


def test_more_new_tokens_than_a_cache_holds_are_refused(tmp_path):
    directory = models.directory(tmp_path, SECTIONS["causal-flash_quad"])
    with pytest.raises(ValueError, match="40 new tokens and a prompt do not fit 40 tokens: raise --max-length"):
        models.exported(directory, tmp_path / "out", new_tokens=40)
    run = models.restored(directory)
    assert saved_model.served(run, saved_model.Options()).limits.new_tokens == 20  # by default at most half of a row
    learned = models.directory(tmp_path / "learned", SECTIONS["causal-transformer"])
    with pytest.raises(ValueError, match="reads at most 40 tokens, got a max length of 41"):
        models.exported(learned, tmp_path / "out", longest=41)
    assert not (tmp_path / "out").exists()


def test_options_for_generation_are_refused_for_a_model_that_does_not_generate(tmp_path):
    section = SECTIONS["causal-flash_quad"]
    model_dir = models.directory(tmp_path, {**section, "mixer": {**section["mixer"], "divisor": "length"}})
    for option in (["--jit-compile"], ["--max-new-tokens", 3]):
        status, shown, err = runs.command(tmp_path, "export", model_dir, tmp_path / "out", *option)
        said = f"{option[0]} is for models that generate, and this one does not: divisor 'length' is not known before"
        assert (status, shown) == (1, "") and err == f"flash-tf: {said} the text ends\n"
    with pytest.raises(ValueError, match="--jit-compile is for models that generate"):
        models.exported(model_dir, tmp_path / "out", jit_compile=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_an_export_in_bfloat16_takes_half_the_space_and_is_known_without_a_manifest(model_dir, tmp_path):
    run, about = models.exported(model_dir, tmp_path / "half", precision="bfloat16", ids_only=True)
    assert about["precision"] == "bfloat16"
    reader = tf.train.load_checkpoint(str(tmp_path / "half/variables/variables"))
    kinds = {dtype for name, dtype in reader.get_variable_to_dtype_map().items() if name.startswith("model_weights")}
    assert kinds == {tf.bfloat16}
    ids = np.arange(4, 30, dtype="int32")[None]
    loaded = tf.saved_model.load(str(tmp_path / "half"))
    got = loaded.signatures["logits"](ids=tf.constant(ids))["logits"]
    assert got.dtype == tf.float32
    assert 0 < relative_error(got, to_numpy(run.model(ids))) < BFLOAT16_LAYER

    (tmp_path / "half" / owned_files.MANIFEST).unlink()  # as of a version that wrote none
    saved_model.check_folder(str(tmp_path / "half"))
    (tmp_path / "half/notes").write_text("1")
    with pytest.raises(ValueError, match="holds notes, which flash-tf export did not write"):
        saved_model.check_folder(str(tmp_path / "half"))
