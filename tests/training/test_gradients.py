"""Clipping and accumulation: the gradient that a step applies, against a hand computation."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.config import ClipConfig, OptimizerConfig
from flash_tf.models.causal_lm import CausalLM
from flash_tf.models.masked_lm import MaskedLM
from flash_tf.training.trainer import uses_xla
from flash_tf.training.update import clipped_mean
from tests import numerics, tiers
from tests.training import runs

NORM = 0.1
XLA = functools.partial(tf.function, jit_compile=True, autograph=False)
CAUSAL = {"model": {"type": "causal_lm", **runs.SMALLEST}, "data": {"packing": "documents"}}


def after_one_step(path, folder, clip):
    """The gradient that a first step applied, from AdamW's running mean, and the norm that it recorded."""
    run, trainer = runs.opened(path, f"{folder}/{clip}", "strategy.type=mirrored", f"optimizer.clip={clip}")
    trainer.train(tf.constant(1))
    mean = {name: m.numpy() / (1 - OptimizerConfig.betas[0]) for name, m in run.optimizer.m.items()}
    return mean, float(trainer.history[0, 1])


def gradients_by_rows(path, folder):
    """Sums of gradients and predicted tokens over the first two rows of the first batch, and over the last two."""
    run, trainer = runs.opened(path, f"{folder}/by-rows")
    batch = next(trainer._iterator)
    sums = []
    for rows in (slice(0, 2), slice(2, 4)):
        gradients, _, tokens = trainer.step.gradients({name: x[rows] for name, x in batch.items()})
        sums.append(({n: g.numpy() for n, g in zip(run.optimizer.variables, gradients, strict=True)}, tokens.numpy()))
    return sums


def measured(path, folder):
    clips = {scope: f"{{scope: {scope}, norm: {NORM}}}" for scope in ("replica", "global", "layer")} | {"none": "null"}
    return gradients_by_rows(path, folder), {name: after_one_step(path, folder, clip) for name, clip in clips.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clipping")
    runs.corpus(folder)
    return runs.in_child(measured, runs.write(folder, **CAUSAL), str(folder), devices=2)


def norm(gradients):
    return np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values()))


def clipped(gradients):
    factor = min(1.0, NORM / norm(gradients))
    return {name: factor * g.astype(np.float64) for name, g in gradients.items()}


def weighted(parts):
    """The sum of each replica's mean gradient times its share of all predicted tokens."""
    total = sum(tokens for _, tokens in parts)
    return {name: sum(tokens / total * mean[name] for mean, tokens in parts) for name in parts[0][0]}


def means(sums):
    return [({name: g / tokens for name, g in gradients.items()}, tokens) for gradients, tokens in sums]


def assert_equal(got, want):
    every = [np.concatenate([one[name].ravel() for name in want]) for one in (got, want)]
    assert numerics.relative_error(*every) < numerics.FLOAT32_RUN


def test_replicas_of_the_case_predict_unequal_numbers_of_tokens_and_exceed_the_norm(case):
    sums, _ = case
    (first, tokens), (second, others) = sums
    assert tokens != others
    assert min(norm(mean) for mean, _ in means(sums)) > 2 * NORM
    assert numerics.relative_error(norm(first), norm(second)) > 1e-3


def test_scope_replica_clips_each_mean_weighs_it_by_its_tokens_and_records_the_mean_norm_before_that(case):
    sums, steps = case
    gradient, recorded = steps["replica"]
    assert_equal(gradient, weighted([(clipped(mean), tokens) for mean, tokens in means(sums)]))
    assert recorded == pytest.approx(np.mean([norm(mean) for mean, _ in means(sums)]), rel=numerics.FLOAT32_RUN)


def test_scope_global_clips_the_mean_over_all_tokens_and_records_its_norm_before_that(case):
    sums, steps = case
    gradient, recorded = steps["global"]
    mean = weighted(means(sums))
    assert norm(mean) > NORM
    assert_equal(gradient, clipped(mean))
    assert recorded == pytest.approx(norm(mean), rel=numerics.FLOAT32_RUN)


def test_scope_layer_clips_the_mean_of_each_layer_alone_and_records_the_norm_of_all(case):
    sums, applied = case
    gradient, recorded = applied["layer"]
    mean = weighted(means(sums))
    assert recorded == pytest.approx(norm(mean), rel=numerics.FLOAT32)
    layers = {name.split("/")[1] for name in mean}
    assert layers == {"embedding", "positions", "mixer_0", "final_norm", "output_bias"}
    for layer in layers:
        own = {name: g for name, g in mean.items() if name.split("/")[1] == layer}
        assert_equal({name: gradient[name] for name in own}, clipped(own))
    norms = [norm({name: g for name, g in mean.items() if name.split("/")[1] == layer}) for layer in layers]
    assert min(norms) < NORM < max(norms)  # of some layers nothing is clipped


def test_without_clipping_the_mean_over_all_tokens_is_applied(case):
    sums, steps = case
    gradient, _ = steps["none"]
    assert_equal(gradient, weighted(means(sums)))


@pytest.mark.parametrize("compiled", [lambda function: function, XLA], ids=["plain", "xla"])
@pytest.mark.parametrize("scope", ["none", "replica", "global"])
def test_the_norm_that_is_recorded_costs_no_further_sum_over_replicas(scope, compiled):
    clip = None if scope == "none" else ClipConfig(scope=scope, norm=NORM)
    sums, gradients = [], [tf.constant([3.0, 4.0]), tf.constant([0.0])]
    total = lambda values: sums.append(values) or values  # noqa: E731
    options = {"norm_of": tf.linalg.global_norm, "replicas": 1, "compiled": compiled}
    applied, recorded, *_ = clipped_mean(clip, gradients, tf.constant(6.0), tf.constant(2.0), total=total, **options)
    assert len(sums) == 2
    assert float(recorded) == pytest.approx(2.5)
    assert norm({str(i): g.numpy() for i, g in enumerate(applied)}) == pytest.approx(2.5 if clip is None else NORM)


def operators(path, folder, scope):
    """Of a step on two replicas that XLA compiles: programs, other operators that are left by kind, and weights."""
    clip = f"optimizer.clip={{scope: {scope}, norm: {NORM}}}"
    run, trainer = runs.opened(path, folder, "strategy.type=mirrored", "train.jit_compile=true", clip)
    arguments = trainer._iterator, trainer.global_step.read_value(), tf.constant(1), tf.zeros((), tf.float64)
    graph = trainer._run.get_concrete_function(*arguments).graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    programs, others = [], collections.Counter()

    def read(nodes):
        for node in nodes:
            others[node.op] += 1
            for called in (functions[x.func.name] for x in node.attr.values() if x.HasField("func")):
                if called.attr["_XlaMustCompile"].b:
                    programs.append(called.signature.name)
                else:
                    read(called.node_def)

    read(graph.node)
    return programs, others, len(run.optimizer.variables)


@pytest.mark.parametrize("scope", tiers.thinned(["global", "replica"], "global"))
def test_on_several_replicas_xla_does_all_work_on_gradients_but_their_sum(tmp_path, scope):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, **CAUSAL)
    programs, others, weights = runs.in_child(operators, path, str(tmp_path / "model"), scope, devices=2)
    of_each = 4 if scope == "replica" else 3  # gradients, clipping and update; and the replica's own norm
    assert len(programs) == 2 * of_each, programs
    assert others["CollectiveReduceV2"] > 0
    assert max(others[kind] for kind in ("Mul", "RealDiv", "L2Loss")) < weights, others


@pytest.mark.parametrize(
    "sections",
    [pytest.param({"model": runs.SMALLEST}, id="masked"), pytest.param(CAUSAL, id="causal", marks=pytest.mark.full)],
)
def test_two_micro_batches_give_the_steps_of_one_batch(tmp_path, sections):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, **sections)
    one = runs.start(runs.train, path, tmp_path / "one", "train.steps=4")
    runs.in_child(runs.train, path, tmp_path / "two", "train.steps=4", "train.accumulate=2")
    runs.finish(one)
    got, want = (np.array(runs.losses(tmp_path / name)) for name in ("two", "one"))
    assert len(want) == 4
    assert numerics.relative_error(got, want) < numerics.FLOAT32_RUN


@pytest.mark.parametrize(("setting", "causal", "masked"), [("auto", True, False), ("true", True, True)])
def test_on_a_cpu_xla_compiles_causal_models_unless_the_config_says_otherwise(tmp_path, setting, causal, masked):
    runs.corpus(tmp_path)
    values = config.load(runs.write(tmp_path), [f"train.jit_compile={setting}"])
    assert (uses_xla(values, CausalLM), uses_xla(values, MaskedLM)) == (causal, masked)


@pytest.mark.full
def test_a_step_that_xla_compiles_gives_the_losses_of_one_that_it_does_not(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, **CAUSAL)
    plain = runs.start(runs.train, path, tmp_path / "plain", "train.steps=4")
    runs.in_child(runs.train, path, tmp_path / "xla", "train.steps=4", "train.jit_compile=auto")
    runs.finish(plain)
    got, want = (np.array(runs.losses(tmp_path / name)) for name in ("xla", "plain"))
    assert len(want) == 4
    assert numerics.relative_error(got, want) < numerics.FLOAT32_RUN
