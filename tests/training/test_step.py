"""The training step on every backend: the same losses, norms and masks from the same weights and windows."""

import re
import types
import zlib

import keras
import numpy as np
import pytest

from flash_tf import config
from flash_tf.training import modelling
from flash_tf.training.objective import OBJECTIVES
from tests import numerics

ROWS, LENGTH, VOCABULARY = 4, 32, 100
TOKENIZER = types.SimpleNamespace(
    pad_id=0,
    eos_id=1,
    mask_id=3,
    cls_id=4,
    special_ids=(0, 1, 3, 4),
    vocabulary_size=VOCABULARY,
    starts_word=np.arange(VOCABULARY) % 3 > 0,
)
MIXER = {"type": "flash", "chunk_size": 8, "key_dim": 8}
# The loss and the gradient's norm of each step, on TensorFlow.
CASES = {
    "masked": (
        {"masking": {"whole_words": True}, "optimizer": {"clip": {"scope": "replica", "norm": 0.5}}},
        [(4.6979318, 1.4076767), (4.580514, 1.1988212), (4.4757738, 1.371775)],
    ),
    "causal": (
        {
            "model": {"type": "causal_lm", "norm": "layer_norm"},
            "data": {"packing": "documents"},
            "optimizer": {"clip": {"scope": "global", "norm": 0.5}, "schedule": "cosine"},
        },
        [(4.8350353, 0.7649211), (4.7249541, 0.8671281), (4.6743546, 0.5952001)],
    ),
}


def experiment(sections):
    values = {
        "model": {"type": "masked_lm", "vocabulary_size": VOCABULARY, "width": 16, "depth": 1, "mixer": MIXER},
        "data": {"source": {"type": "python_stdlib"}, "sequence_length": LENGTH},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
        "train": {"steps": 3, "tokens_per_step": ROWS * LENGTH, "precision": "float32", "accumulate": 2},
    }
    values = {name: {**values.get(name, {}), **sections.get(name, {})} for name in values | sections}
    return modelling.with_masking(config.from_mapping(config.Config, values, where="test"))


def weight(path, shape):
    """A weight that its name decides: near 1 for scales, else small."""
    draw = np.random.default_rng(zlib.crc32(path.encode())).normal(0, 0.1, shape)
    return np.asarray(draw + (len(shape) < 2), np.float32)


def batch(step, overlap, packing):
    draw = np.random.default_rng(step)
    window = np.stack([np.zeros(ROWS), np.arange(ROWS) + ROWS * step], axis=1).astype(np.int32)
    tokens = draw.integers(5, VOCABULARY, (ROWS, LENGTH + overlap)).astype(np.int32)
    segments = {}
    if packing == "documents":
        segments["segment_ids"] = np.sort(draw.integers(1, 4, tokens.shape), axis=1).astype(np.int32)
    return {"tokens": tokens, "window": window, **segments}


def step_of_tensorflow(wanted, objective):
    from flash_tf.training.optimizer import AdamW
    from flash_tf.training.trainer import TrainStep

    model = modelling.make_model(wanted)
    for v in model.weights:
        v.assign(weight(v.path, v.shape))
    optimizer = AdamW(wanted.optimizer, wanted.train.steps, {v.path: v.value for v in model.trainable_variables})
    return TrainStep(model, objective, optimizer, wanted)


def curve_of_tensorflow(wanted, objective):
    import tensorflow as tf

    step = step_of_tensorflow(wanted, objective)
    batches = (batch(i, objective.overlap, wanted.data.packing) for i in range(3))
    return [step({k: tf.constant(x) for k, x in one.items()}, tf.constant(i)).numpy() for i, one in enumerate(batches)]


def program_of_tensorflow(wanted, objective):
    """The names of the step's operators, also in its loops."""
    import tensorflow as tf

    step = tf.function(step_of_tensorflow(wanted, objective), autograph=False)
    given = {k: tf.constant(x) for k, x in batch(0, objective.overlap, wanted.data.packing).items()}
    graph = step.get_concrete_function(given, tf.constant(0)).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return sorted(node.op for node in nodes)


def step_of_jax(wanted, objective):
    """The step and its first state."""
    import jax

    from flash_tf import model_stats
    from flash_tf.training.on_jax.mesh import make_mesh
    from flash_tf.training.on_jax.step import Step

    with model_stats.without_weights():
        model = modelling.make_model(wanted)
    step = Step(model, objective, wanted, make_mesh(wanted.strategy))
    weights = {v.path for v in model.weights}
    new = {name: weight(name, shape) if name in weights else np.zeros(shape) for name, shape in step.shapes.items()}
    return step, jax.device_put({name: x.astype(np.float32) for name, x in new.items()}, step.shardings)


def curve_of_jax(wanted, objective):
    (step, state), records = step_of_jax(wanted, objective), []
    for i in range(3):
        state, record = step.run(state, batch(i, objective.overlap, wanted.data.packing), np.uint32(i))
        records.append(np.asarray(record))
    return records


def program_of_jax(wanted, objective):
    """The names of the step's operators, also in its loops."""
    step, state = step_of_jax(wanted, objective)
    given = batch(0, objective.overlap, wanted.data.packing)
    return sorted(re.findall(r"= \"?(\w+\.\w+)", step.run.lower(state, given, np.uint32(0)).as_text()))


@pytest.mark.parametrize("name", CASES)
def test_three_steps_have_the_losses_and_norms_that_they_have_on_tensorflow(name):
    sections, golden = CASES[name]
    wanted = experiment(sections)
    objective = OBJECTIVES[wanted.model["type"]](wanted, TOKENIZER)
    curve_of = curve_of_jax if keras.backend.backend() == "jax" else curve_of_tensorflow
    found = [tuple(float(x) for x in record[:2]) for record in curve_of(wanted, objective)]
    np.testing.assert_allclose(found, golden, rtol=numerics.FLOAT32_RUN)


def test_more_micro_batches_do_not_make_a_larger_program():
    """Else XLA compiles the model once for each, and may have all in memory together."""

    def program(parts):
        wanted = experiment({**CASES["masked"][0], "train": {"accumulate": parts}})
        objective = OBJECTIVES[wanted.model["type"]](wanted, TOKENIZER)
        return (program_of_jax if keras.backend.backend() == "jax" else program_of_tensorflow)(wanted, objective)

    two, four = len(program(2)), len(program(4))
    assert two > 500
    assert four < 1.05 * two  # a micro-batch of one row has some operators less
