"""Combiner, MC-TFM++ and causal Transformer-LS against their papers, written down here once more, and wrong input."""

import math

import numpy as np
import pytest
from keras import ops

from flash_tf import config
from flash_tf.layers import Combiner, MixedChunkSelfAttention, TransformerLS
from flash_tf.training import modelling
from kernels_xla.transformer_ls.causal_attention import transformer_ls_causal_attention
from tests.backends import to_numpy
from tests.contracts.test_mixers import B, D, N, built, normal, outputs
from tests.numerics import FLOAT32, relative_error
from tests.oracles import ORACLES

H, C = 4, 8


def parameters(layer, width):
    layer.build((None, None, width))
    return sum(math.prod(w.shape) for w in layer.trainable_variables)


def test_parameters_are_as_many_as_the_formulas_have():
    d = 768
    attention = 4 * d * d + 4 * d
    assert parameters(Combiner(), d) == attention + 2 * d * d + 2 * d  # two more products, with biases
    assert parameters(Combiner(summaries="fixed"), d) == attention
    assert parameters(MixedChunkSelfAttention(), d) == attention + 4 * d  # gamma and beta of a query and of a key


def dense(layer, x):
    return x @ to_numpy(layer.kernel.value) + to_numpy(layer.bias.value)


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_across_chunks_are_those_inside_scaled_offset_and_rotated(causal):
    layer = built(MixedChunkSelfAttention, {"heads": H, "chunk_size": C, "causal": causal})
    x = normal(B, N, D).astype("float64")
    q, k, v = np.split(dense(layer.in_projection, x), 3, axis=-1)
    scale = {w.name: to_numpy(w.value) for part in (layer.query_scale, layer.key_scale) for w in part.weights}
    heads = {"q": q, "k": k}
    heads |= {f"lin_{name}": scale[f"gamma_lin_{name}"] * y + scale[f"beta_lin_{name}"] for name, y in heads.items()}
    positions = np.broadcast_to(np.arange(N), (B, N))
    turned = {name: ORACLES["rotary"](part.reshape(B, N, H, D // H), positions) for name, part in heads.items()}
    out = ORACLES["mc_tfm"](**turned, v=v.reshape(B, N, H, D // H), chunk_size=C, causal=causal)
    want = dense(layer.out_projection, out.reshape(B, N, D))
    assert relative_error(outputs(layer, x.astype("float32")), want) < FLOAT32


@pytest.mark.parametrize("summaries", ["axial", "fixed"])
def test_a_causal_combiner_without_rotary_is_its_authors_on_whole_chunks(summaries):
    layer = built(Combiner, {"heads": H, "chunk_size": C, "causal": True, "rotary": False, "summaries": summaries})
    n, s = 4 * C, D // H
    x = normal(B, n, D).astype("float64")
    chunks = x.reshape(B, 4, C, D)
    q, k, v = (part.reshape(B, 4, C, H, s) for part in np.split(dense(layer.in_projection, chunks), 3, axis=-1))
    near = np.einsum("bgihs,bgjhs->bgihj", q, k) / np.sqrt(s)
    if summaries == "axial":
        value = np.einsum("bgihj,bgjhs->bgihs", softmax(near), v)
        mixed = chunks + dense(layer.summary_in, value.reshape(B, 4, C, D))
        mixed = mixed - mixed.mean(axis=-1, keepdims=True)
        mixed = mixed / np.sqrt(np.mean(mixed**2, axis=-1, keepdims=True) + 1e-5)
        key = dense(layer.summary_out, mixed).reshape(B, 4, C, H, s)
    else:
        weights = softmax(np.einsum("bghs,bgjhs->bghj", q.max(axis=2), k) / np.sqrt(s))
        value = np.repeat(np.einsum("bghj,bgjhs->bghs", weights, v)[:, :, None], C, axis=2)
        key = np.repeat(k.max(axis=2, keepdims=True), C, axis=2)
    far = np.einsum("bgihs,bmihs->bgihm", q, key) / np.sqrt(s)
    near = np.where(np.tri(C, dtype=bool)[:, None], near, -np.inf)
    far = np.where(np.tri(4, k=-1, dtype=bool)[:, None, None], far, -np.inf)
    weights = softmax(np.concatenate([near, far], axis=-1))
    out = np.einsum("bgihj,bgjhs->bgihs", weights[..., :C], v)
    out = out + np.einsum("bgihm,bmihs->bgihs", weights[..., C:], value)
    assert relative_error(outputs(layer, x), dense(layer.out_projection, out.reshape(B, n, D))) < FLOAT32


@pytest.mark.parametrize("cls", [Combiner, MixedChunkSelfAttention, TransformerLS])
def test_a_text_of_one_chunk_is_self_attention(cls):
    layer = built(cls, {"heads": H, "chunk_size": 40, "causal": True})
    x = normal(B, N, D)
    inputs, _ = layer.enter(ops.convert_to_tensor(x), ops.arange(N, dtype="int32")[None])
    q, k, v = (np.moveaxis(to_numpy(inputs[name]), 2, 1) for name in ("q", "k", "v"))
    scores = np.where(np.tri(N, dtype=bool), q @ np.swapaxes(k, -1, -2) / np.sqrt(D // H), -1e9)
    out = np.moveaxis(softmax(scores) @ v, 1, 2).reshape(B, N, D)
    assert relative_error(outputs(layer, x), dense(layer.out_projection, out)) < FLOAT32


def test_both_combiners_keep_summaries_and_the_fixed_one_few():
    def kept(summaries, n):
        layer = built(Combiner, {"heads": H, "chunk_size": C, "causal": True, "summaries": summaries})
        return layer.state_bytes(n, 2)

    assert kept("axial", 100 * C) - kept("axial", 50 * C) == 50 * C * 2 * D * 2  # a key and a value a token
    assert kept("fixed", 100 * C) - kept("fixed", 50 * C) == 50 * 2 * D * 2  # and a chunk


def test_a_causal_transformer_ls_keeps_two_segments_and_a_few_sums_of_each():
    r = 3
    layer = built(TransformerLS, {"heads": H, "chunk_size": C, "causal": True, "landmarks": r})
    sums = r * 2 * D
    assert layer.state_bytes(100 * C, 2) - layer.state_bytes(50 * C, 2) == 50 * sums * 2
    assert layer.state_bytes(C, 2) == (2 * C * 2 * D + C * H * r + sums) * 2 + 4  # with what makes the sums


def test_a_causal_transformer_ls_reads_a_token_of_two_segments_before_through_its_sums_alone():
    layer, x = built(TransformerLS, {"heads": H, "chunk_size": C, "causal": True, "landmarks": 1}), normal(1, 4 * C, D)
    inputs, _ = layer.enter(ops.convert_to_tensor(x), None)
    inputs = {name: to_numpy(part).astype("float32") for name, part in inputs.items()}
    inputs["scores"][:, 1] = -1e9  # so that no sum has the second token
    other = {**inputs, "v": inputs["v"] + (np.arange(4 * C) == 1)[:, None, None].astype("float32")}
    before, after = (to_numpy(transformer_ls_causal_attention(**part, chunk_size=C)) for part in (inputs, other))
    changed = (before != after).any(axis=(0, 2, 3))
    assert changed.tolist() == [1 <= i < 2 * C for i in range(4 * C)]


def test_packed_documents_are_for_a_causal_transformer_ls():
    packed = ["data.packing=documents"]
    assert modelling.with_masking(config.load("wikitext2_lm/transformer_ls", packed)).data.packing == "documents"
    with pytest.raises(ValueError, match="'transformer_ls' reads a window as one text: .* got documents"):
        modelling.with_masking(config.load("wikitext2_mlm/transformer_ls", packed))


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Combiner(heads=0), "Combiner needs heads >= 1, got 0"),
    (lambda: Combiner(chunk_size=0), "Combiner needs chunk_size >= 1, got 0"),
    (lambda: Combiner(summaries="mean"), "Combiner: summaries must be 'axial' or 'fixed', got 'mean'"),
    (lambda: Combiner(heads=3).build((None, None, 16)),
     "Combiner: heads must divide the width into multiples of 2, got heads 3, width 16"),
    (lambda: built(Combiner, {"heads": H}).initial_state(1, 9),
     "Combiner cannot stream: it is not causal and reads later tokens"),
    (lambda: built(Combiner, {"heads": H, "causal": True}).initial_state(1),
     "Combiner has a state that grows with the text: it needs capacity, the most tokens of a row, got None"),
    (lambda: built(TransformerLS, {"heads": H, "causal": True}).initial_state(1),
     "TransformerLS has a state that grows with the text: it needs capacity, the most tokens of a row, got None"),
    (lambda: transformer_ls_causal_attention(*[None] * 8, chunk_size=C, causal=False),
     "transformer_ls_causal needs causal=True, got False; transformer_ls is not causal"),
    (lambda: MixedChunkSelfAttention(heads=0), "MixedChunkSelfAttention needs heads >= 1, got 0"),
    (lambda: MixedChunkSelfAttention(chunk_size=-1), "MixedChunkSelfAttention needs chunk_size >= 1, got -1"),
])  # fmt: skip
def test_a_wrong_option_is_refused_in_one_line(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == said
