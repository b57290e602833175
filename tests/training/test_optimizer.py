"""AdamW and its schedules against plain NumPy."""

import math

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.config import OptimizerConfig
from flash_tf.training.optimizer import AdamW
from flash_tf.training.schedule import learning_rate as schedule_of
from flash_tf.training.update import learning_rate
from tests import numerics

SHAPES = {"matrix": (3, 4), "tensor": (2, 3, 2), "vector": (5,), "scalar": ()}


def draws(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def by_hand(weights, all_gradients, *, rates, beta1, beta2, epsilon, decay):
    """Weights after AdamW's steps in float64: bias-corrected, with decay of matrices only, times the rate."""
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    m, v = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for t, (gradients, rate) in enumerate(zip(all_gradients, rates, strict=True), 1):
        for name, w in weights.items():
            g = gradients[name].astype(np.float64)
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            direction = m[name] / (1 - beta1**t) / (np.sqrt(v[name] / (1 - beta2**t)) + epsilon)
            weights[name] = w - rate * (direction + (decay * w if w.ndim >= 2 else 0))
    return weights


@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["ordinary gradients", "gradients as small as epsilon"])
def test_five_steps_of_adamw_are_those_of_a_numpy_loop(scale):
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, weight_decay=0.3, betas=(0.8, 0.95))
    assert config.epsilon == 1e-6
    variables = {name: tf.Variable(w) for name, w in draws(0).items()}
    optimizer = AdamW(config, 10, variables)
    gradients = [{name: scale * g for name, g in draws(1 + step).items()} for step in range(5)]
    step = tf.Variable(0, dtype=tf.int64)
    for one in gradients:
        optimizer.apply([tf.constant(one[name]) for name in variables], step.read_value())
        step.assign_add(1)
    rates = [0.05, 0.1, 0.1, 0.1 * 7 / 8, 0.1 * 6 / 8]
    want = by_hand(draws(0), gradients, rates=rates, beta1=0.8, beta2=0.95, epsilon=1e-6, decay=0.3)
    for name, variable in variables.items():
        assert numerics.relative_error(variable.numpy(), want[name]) < numerics.FLOAT32


def test_weights_decay_without_a_gradient_if_they_are_matrices_and_not_if_they_are_vectors():
    variables = {name: tf.Variable(tf.ones(shape)) for name, shape in SHAPES.items()}
    optimizer = AdamW(OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.1), 10, variables)
    optimizer.apply([tf.zeros(shape) for shape in SHAPES.values()], tf.constant(0, tf.int64))
    after = {name: float(np.unique(v.numpy())[0]) for name, v in variables.items()}
    assert after == pytest.approx({"matrix": 0.95, "tensor": 0.95, "vector": 1.0, "scalar": 1.0})


def rates(steps, **options):
    config = OptimizerConfig(learning_rate=2.0, **options)
    return [float(learning_rate(config, steps, tf.constant(step, tf.int64))) for step in range(steps)]


def test_the_linear_schedule_rises_over_the_warm_up_and_falls_to_the_final_rate():
    got = rates(10, schedule="linear", warmup_steps=4, final_learning_rate=0.5)
    assert got == pytest.approx([0.5, 1, 1.5, 2, *(0.5 + 1.5 * (1 - i / 6) for i in range(6))])


def test_the_cosine_schedule_falls_by_half_a_wave():
    got = rates(10, schedule="cosine", warmup_steps=2)
    assert got == pytest.approx([1, 2, *(1 + math.cos(math.pi * i / 8) for i in range(8))], rel=numerics.FLOAT32)


def test_the_inverse_sqrt_schedule_goes_on_falling_without_regard_to_the_length_of_the_run():
    got = rates(20, schedule="inverse_sqrt", warmup_steps=4)
    assert got == pytest.approx([0.5, 1, 1.5, 2, *(2 * math.sqrt(4 / (step + 1)) for step in range(4, 20))])
    assert got == rates(40, schedule="inverse_sqrt", warmup_steps=4)[:20]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt"])
def test_a_rate_stays_what_it_was_at_a_step_by_the_plan_for_other_steps(schedule):
    planned = rates(10, schedule=schedule, warmup_steps=2)
    assert rates(16, schedule=schedule, warmup_steps=2, schedule_steps=10)[:10] == planned
    got = rates(16, schedule=schedule, warmup_steps=2, schedule_steps=10, constant_after=6)
    assert got == planned[:6] + [planned[5]] * 10 and planned[5] > 0
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=2, schedule_steps=10, constant_after=6)
    assert [schedule_of(config, 16, np.float32(i), np) for i in range(16)] == pytest.approx(got, rel=numerics.FLOAT32)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt"])
def test_a_run_shorter_than_its_warm_up_ends_while_the_rate_rises(schedule):
    assert rates(5, schedule=schedule, warmup_steps=20) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt"])
def test_a_run_without_a_warm_up_begins_at_the_peak(schedule):
    assert rates(5, schedule=schedule, warmup_steps=0)[0] == pytest.approx(2.0)
