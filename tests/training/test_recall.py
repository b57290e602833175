"""Training on made-up tasks: the loss and the metrics are of the answers alone, and a run resumes to the bit."""

import json

import numpy as np
import pytest
from keras import ops

from flash_tf import config
from flash_tf.data.generated import FIRST, NONE, Generated
from flash_tf.data.sources import SOURCES
from flash_tf.training import loop
from flash_tf.training.restore import restore
from tests import numerics
from tests.backends import to_numpy
from tests.contracts.test_configs import SMALL, shrunk
from tests.training import runs

SOURCE = {"type": "mqar", "length": 16, "pairs": 2, "vocabulary": 16, "train": 200, "validation": 50}


def write(folder, **sections):
    model = {"type": "causal_lm", "vocabulary_size": 24, "norm": "layer_norm", "depth": 1}
    data = {"source": SOURCE, "sequence_length": 20}  # longer than the examples
    train = {"tokens_per_step": 160}
    return runs.write(folder, model=model, data=data, train=train, **sections)


@pytest.mark.full
def test_a_run_on_recall_resumes_to_the_bit(tmp_path):
    path = write(tmp_path)
    runs.in_child(runs.train, path, tmp_path / "one")
    runs.in_child(runs.train, path, tmp_path / "two", stop_after=4)
    assert len(runs.records(tmp_path / "two")) == 4
    runs.in_child(runs.train, path, tmp_path / "two")
    runs.same(tmp_path / "one", tmp_path / "two")


def test_an_evaluation_says_how_many_answers_are_right(tmp_path):
    runs.train(write(tmp_path), tmp_path / "one", "train.steps=2")
    run, source = restore(str(tmp_path / "one"), checkpoint="newest"), SOURCES.build(SOURCE)
    (examples,) = ([*source.examples("validation", shard)] for shard in source.shards("validation"))
    ids, labels = (np.array([example[name] for example in examples]) for name in ("token_ids", "labels"))
    logits = to_numpy(run.model(ops.convert_to_tensor(ids, "int32"))).astype(np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    counts, right = labels != NONE, logits.argmax(-1) == labels
    last = runs.records(tmp_path / "one", "evaluations.jsonl")[-1]
    assert last["labels"] == 100 and last["loss"] == pytest.approx(nll[counts].mean(), rel=10 * numerics.FLOAT32)
    assert last["accuracy"] == pytest.approx(right[counts].mean())
    assert last["exact_match"] == pytest.approx((right | ~counts).all(-1).mean())
    words = " ".join(source.words[i - FIRST] for i in ids[0])
    assert run.tokenizer.encode([words])[0].tolist() == ids[0].tolist() and run.tokenizer.decode(ids[0]) == words


def is_made(name):
    """Whether a generator of the package makes a config's examples."""
    return isinstance(SOURCES.build(config.load(name).data.source), Generated)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in config.names() if is_made(name)])
def test_a_config_starts_with_its_task_and_vocabulary_as_shipped(name, tmp_path):
    sizes = {key: size for key, size in SMALL.items() if key not in ("vocabulary_size", "n")}
    n = config.load(name).data.sequence_length
    fewer = [f"data.source.{split}=50" for split in ("train", "validation")]
    small = shrunk(name, {**sizes, "n": n}, *fewer, "train.steps=1", "train.jit_compile=false", "evaluation.every=null")
    evaluation = loop.train(small, str(tmp_path), runs.Lines())
    assert evaluation["labels"] >= 50 and np.isfinite(evaluation["loss"])


@pytest.mark.full
def test_a_small_model_learns_to_recall(tmp_path):
    train = {"steps": 1500, "tokens_per_step": 1024, "steps_per_loop": 100, "checkpoint_every": 1500}
    mixer = {"type": "self_attention", "heads": 2, "rotary": True}
    model = {"type": "causal_lm", "vocabulary_size": 24, "norm": "layer_norm", "width": 32, "mixer": mixer}
    source = {**SOURCE, "train": 8192}
    path = runs.write(
        tmp_path,
        model={**model, "feedforward": {"type": "glu"}, "position_embedding": None},
        data={"source": source, "sequence_length": 16},
        train=train,
        evaluation={"every": None},
        optimizer={"warmup_steps": 100, "learning_rate": 5e-3},
    )
    runs.in_child(runs.train, path, tmp_path / "run")
    assert runs.records(tmp_path / "run", "evaluations.jsonl")[-1]["accuracy"] > 0.9  # by chance it is 1 in 8


@pytest.mark.full
def test_a_vocabulary_that_does_not_fit_the_task_is_refused_in_one_line(tmp_path):
    path = write(tmp_path)
    for option, message in {
        "model.vocabulary_size=160": "vocabulary_size is 160, but source mqar has 21 pieces",
        "data.tokenizer=other.model": "source mqar has words of its own: leave data.tokenizer out",
        "data.sequence_length=10": "train-00000-of-00001, example 1 needs 10 token_ids or fewer",
    }.items():
        status, out, err = runs.command(tmp_path, "train", path, "--model-dir", tmp_path / "run", "--set", option)
        assert (status, out) == (1, "") and message in err.splitlines()[-1], err
        assert not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.full
def test_a_prompt_of_words_is_continued_in_words(tmp_path):
    runs.in_child(runs.train, write(tmp_path), tmp_path / "run")
    status, out, err = runs.command(
        tmp_path, "generate", tmp_path / "run", "--prompt", "1 9 3 12 3", "--max-new-tokens", 2, "--json"
    )
    assert status == 0, err
    assert json.dumps("1 9 3 12 3")[:-1] in out
