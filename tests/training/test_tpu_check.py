"""The step that `make tpu-check` lowers is the training step, on tensors in place of variables."""

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.training import loop
from scripts import tpu_check
from tests import tiers
from tests.training import runs

VARIANTS = {
    "masked_lm": ({"type": "masked_lm", "dropout": 0.1}, "replica"),
    "causal_lm": ({"type": "causal_lm"}, "global"),
    "frozen": ({"type": "causal_lm", "mixer": {"type": "linear_attention", "heads": 2, "features": "favor"}}, "global"),
}


def both_steps(path, folder):
    """The result of a first step and the validation sums before it, of the function of tensors and of a run."""
    run, trainer = runs.opened(path, folder)
    batch, done = next(trainer._iterator), tf.constant(0, tf.int64)
    weights = {name: tf.constant(v.numpy()) for name, v in run.optimizer.variables.items()}
    zeros = {name: tf.zeros_like(w) for name, w in weights.items()}
    function, _ = tpu_check.train_and_evaluate(run.config)
    record, updated, sums = tf.function(function, autograph=False)(batch, done, weights, zeros, zeros)
    tensors = {"record": record, "sums": sums, **{name: values[0] for name, values in updated.items()}}
    place, size = {"strategy": run.strategy, "progress": run.progress}, run.config.batch_size
    evaluator = loop.make_evaluator(run.config, folder, run.model, run.tokenizer, batch_size=size, **place)
    real = {"sums": tf.function(evaluator.sums)(batch)}
    real |= {"record": tf.function(trainer.step)(batch, done), **run.optimizer.variables}
    return [{name: x.numpy() for name, x in side.items()} for side in (tensors, real)]


@pytest.mark.full
@pytest.mark.parametrize("name", tiers.thinned(VARIANTS, "masked_lm"))
def test_the_step_on_tensors_leaves_what_the_training_step_leaves(tmp_path, name):
    model, scope = VARIANTS[name]
    runs.corpus(tmp_path)
    path = runs.write(
        tmp_path, model=model, data={"packing": "documents"}, optimizer={"clip": {"scope": scope, "norm": 0.1}}
    )
    tensors, real = runs.in_child(both_steps, path, str(tmp_path / "run"))
    assert tensors.keys() == real.keys()
    differ = {name for name in real if not np.array_equal(tensors[name], real[name])}
    assert differ == set()  # to the bit
