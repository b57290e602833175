"""Prefix language models: tokens of a prefix are seen by all of their text, the others by later ones alone."""

import numpy as np
import pytest

from flash_tf.layers import GatedAttentionUnit
from flash_tf.models.causal_lm import CausalLM
from kernels_xla.gau import gau_attention
from tests import backends
from tests.backends import compiled, tensors, to_numpy
from tests.numerics import FLOAT32, inputs, masks, real_tokens, relative_error
from tests.oracles import ORACLES

B, N, D, V = 2, 21, 16, 30
MIXER = {"type": "gau", "key_dim": 8}


def prefix(*lengths, n=N):
    return np.arange(n)[None] < np.array(lengths)[:, None]


@pytest.mark.parametrize("layout", ["whole", "padded", "packed"])
@pytest.mark.parametrize("options", [{}, {"divisor": "length"}, {"scale": "paper_appendix", "divisor": 5}], ids=str)
def test_the_kernel_is_the_formula(layout, options):
    from kernels_xla.gau import SPEC

    arrays, masked = inputs(SPEC), masks(layout)
    masked["prefix_mask"] = np.random.default_rng(3).random([B, 37]) < 0.3  # wherever a document has them
    want = ORACLES["gau"](**arrays, causal=True, **masked, **options)
    given = tensors({**arrays, **masked}, "float32")
    got = to_numpy(compiled(lambda given: gau_attention(**given, causal=True, **options))(given))
    real = real_tokens(masked)[..., None, None]
    assert relative_error(got * real, want * real) < FLOAT32


def test_no_prefix_is_causal_and_a_prefix_of_all_is_not():
    from kernels_xla.gau import SPEC

    arrays = tensors(inputs(SPEC), "float32")
    run = lambda **options: to_numpy(gau_attention(**arrays, **options))  # noqa: E731
    none, every = (tensors({"m": np.full([B, 37], all_)}, "float32")["m"] for all_ in (False, True))
    assert relative_error(run(causal=True, prefix_mask=none), run(causal=True)) < FLOAT32
    assert relative_error(run(causal=True, prefix_mask=every), run()) < FLOAT32


def model_of(**options):
    backends.seed(0)
    model = CausalLM(V, **{"width": D, "depth": 2, "mixer": MIXER, **options})
    model.build()
    for weight in model.trainable_variables:
        weight.assign(weight + 0.2 * np.random.default_rng(1).normal(size=weight.shape))
    return model


def test_a_model_reads_its_prefix_whole_and_the_rest_token_by_token():
    model, ids = model_of(), np.random.default_rng(0).integers(0, V, [B, N]).astype("int32")
    seen = prefix(8, 8)
    before = to_numpy(model(ids, prefix_mask=seen))
    in_prefix, after = ids.copy(), ids.copy()
    in_prefix[:, 7], after[:, 15] = (in_prefix[:, 7] + 1) % V, (after[:, 15] + 1) % V
    assert np.abs(to_numpy(model(in_prefix, prefix_mask=seen)) - before)[:, 0].max() > 1e-4  # an earlier one sees it
    assert relative_error(to_numpy(model(after, prefix_mask=seen))[:, :15], before[:, :15]) < FLOAT32
    alone = to_numpy(model(ids[:, :8], prefix_mask=seen[:, :8]))
    assert relative_error(before[:, :8], alone) < FLOAT32  # a prefix is the same whatever follows


def test_rows_have_prefixes_of_their_own():
    model, ids = model_of(), np.random.default_rng(0).integers(0, V, [B, N]).astype("int32")
    both = to_numpy(model({"token_ids": ids, "prefix_mask": prefix(3, 11)}))
    for row, length in enumerate((3, 11)):
        alone = to_numpy(model(ids[row : row + 1], prefix_mask=prefix(length)))
        assert relative_error(both[row : row + 1], alone) < FLOAT32


def test_what_takes_no_prefix_says_so():
    ids = np.zeros([B, N], "int32")
    model = model_of(mixer={"type": "flash", "chunk_size": 8, "key_dim": 8})
    with pytest.raises(ValueError, match="needs mixers that support it, as gau; MixedChunkAttention does not"):
        model(ids, prefix_mask=prefix(3, 3))
    x, seen = np.zeros([B, N, D], "float32"), prefix(3, 3)
    for options, said in (({"causal": False}, "got causal False"), ({"kernel": "softmax"}, "and kernel 'softmax'")):
        options = {"causal": True, "key_dim": 8, "relative_bias": False, **options}
        with pytest.raises(ValueError, match=said):
            GatedAttentionUnit(**options)(x, prefix_mask=seen)
