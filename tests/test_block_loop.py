"""Blocks as one loop, on JAX. `tests/contracts/test_models.py` holds every model's gradients to the ones without."""

import keras
import numpy as np
import pytest

from flash_tf.models import MODELS, block_loop
from tests import backends, numerics, tiers
from tests.backends import to_numpy

pytestmark = pytest.mark.skipif(not tiers.ON_JAX, reason="XLA takes no gradient of TensorFlow's loop")
FLASH = {"type": "flash", "chunk_size": 4, "key_dim": 8}
TWO_KINDS = {"mixer": [{"type": "gau", "key_dim": 8}, FLASH], "feedforward": {"type": "mlp"}, "dropout": 0.5}


def made(depth=4, **options):
    backends.seed(0)
    sizes = {"type": "causal_lm", "vocabulary_size": 50, "width": 16, "depth": depth, "remat": True}
    model = MODELS.build({**sizes, "mixer": FLASH, **options})
    model.build()
    return model


def step(model):
    """`values -> (gradients, dropout's next seeds)` of a model's variables, compiled."""
    import jax

    ids = np.arange(32).reshape(2, 16)
    trained = [v for v in model.variables if v.trainable]
    seeds = [v for v in model.variables if not v.trainable]

    def loss(values, states):
        mapping = [*zip(trained, values, strict=True), *zip(seeds, states, strict=True)]
        with keras.StatelessScope(state_mapping=mapping):
            x = model.encode(ids, training=True)
            return keras.ops.sum(x**2 * np.arange(16, dtype="float32")), [v.value + 0 for v in seeds]

    arguments = [v.value for v in trained], [v.value for v in seeds]
    return jax.jit(jax.grad(loss, has_aux=True)), arguments


@pytest.mark.full  # dropout takes XLA a minute to compile for a CPU
def test_a_loop_gives_the_gradients_and_the_dropout_of_its_blocks_in_turn(monkeypatch):
    model = made(**TWO_KINDS)
    run, arguments = step(model)
    gradients, seeds = run(*arguments)
    assert len(seeds) == 8 and all((a != b).any() for a, b in zip(seeds, arguments[1], strict=True))
    through = block_loop.through
    monkeypatch.setattr(block_loop, "through", lambda *arguments: through(*arguments[:-1], loop=False))
    run, arguments = step(model)
    wanted, same = run(*arguments)
    assert all((a == b).all() for a, b in zip(seeds, same, strict=True))
    for found, one in zip(gradients, wanted, strict=True):
        assert numerics.relative_error(to_numpy(found), to_numpy(one)) < numerics.FLOAT32


def test_the_products_of_a_program_do_not_grow_with_the_depth():
    products = []
    for depth in (3, 9):
        run, arguments = step(made(depth))
        products.append(run.lower(*arguments).as_text().count("dot_general"))
    assert products[0] == products[1] > 0
