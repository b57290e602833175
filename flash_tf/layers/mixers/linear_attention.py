"""Linear attention with any feature map: Performer, 1 + elu, softplus, cosFormer, NormAttention."""

import math
from typing import Any

import keras
from keras import ops

from flash_tf.layers.common import check_counts
from flash_tf.layers.linear_mixer import LinearMixer, check_block_size
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.random_features import RandomFeatures
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.lengths import at_most
from kernels_xla.common.norms import simple_rms_norm
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.linear_attention import SPEC

FEATURES = {  # "favor" is a layer
    "shifted_relu": lambda x: ops.relu(x) + ops.cast(1e-3, x.dtype),
    "relu": ops.relu,
    # 1 + elu(x). Computed directly, because elu(x) rounds to -1 for small exp(x), from x = -6 on in bfloat16.
    "elu_plus_one": lambda x: ops.maximum(x, 0) + ops.exp(ops.minimum(x, 0)),
    "elu": ops.elu,
    "softplus": ops.softplus,
}
NORMALIZERS = ("sum", "rms", "none")
FORMS = ("chunks", "cumsum", "matmul")


@MIXERS.register("linear_attention")
@keras.saving.register_keras_serializable("flash_tf")
class LinearAttention(LinearMixer):
    """`out_i = sum_j (f(q_i) . f(k_j)) v_j / sum_j f(q_i) . f(k_j)` for each head, then `W_o`.

    Its options give these systems:

    - Performer with ReLU features (arXiv:2009.14794; a baseline of FLASH): the defaults.
    - Performer with FAVOR+ (the same paper's softmax features; a baseline of TransNormer): `features: favor, rotary:
      false`.
    - Linear transformer (arXiv:2006.16236): `features: elu_plus_one, rotary: false`.
    - Linear-GPT2 ("Linear Transformers Are Faster After All"): `features: softplus, rotary: false`.
    - cosFormer (arXiv:2202.08791): `features: relu, cosine_length: M, rotary: false`.
    - NormAttention of TransNormer (arXiv:2210.10340): `features: elu` (T1) or `elu_plus_one` (T2), `normalizer: rms,
      rotary: false, lrpe: true`.

    Args:
      heads: h; must divide the width d, with `rotary` into even parts. None for 12, or fewer if 12 do not divide it.
      causal: Whether position i may read only positions <= i.
      rotary: Whether queries and keys are rotated by position. The rotation comes before f: rotated features could be
        negative, and the denominator could cross zero.
      features: f: "shifted_relu" (relu(x) + 0.001), "relu", "elu_plus_one", "softplus", "elu", or "favor", random
        features with softmax attention as their mean; see `flash_tf.layers.random_features`.
      normalizer: "sum" divides by the denominator above, at least 1e-6. "rms" has no denominator and applies
        `x / (||x|| / sqrt(d))` to all heads together before W_o. "none" does neither: TransNormer's attention without
        scaling (Table 1). "elu" takes no "sum", because it is not positive. "favor" needs "sum", because each query's
        features have their own scale.
      cosine_length: M, at least the length of the longest text. Weights are multiplied by cos(pi/2 (i - j) / M), a sum
        of products of cosines and sines, so keys become twice as wide. M is a constant: with the text's own length,
        the future would change the past. None for no factor. A stream may go on beyond M, but the weights of tokens
        more than M apart are then negative.
      lrpe: Whether features are rotated by position at learned frequencies. This takes no "sum", and so any features
        except "favor"; see `flash_tf.layers.lrpe`.
      random_features: Number of features a head for "favor"; None for 128, and for other features.
      use_bias: Whether the projections have biases.
      form: How a whole text is summed: "chunks", or for benchmarks "cumsum" or "matmul", FLASH's Performer and
        Performer-Matmul of Table 11, which keep a state for each token. The function is the same, but "cumsum" takes
        the sum before a packed document off again, and loses precision; see `kernels_xla.linear_attention`.
      block_size: Tokens that the form "chunks" reads as one block. It changes only the speed; see `flash-tf tune`.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`; n is at most `cosine_length`, if there is one.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read. A packed document gives the same output as alone.

    Example:
      >>> LinearAttention(heads=2, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    def __init__(
        self,
        heads: int | None = None,
        causal: bool = False,
        rotary: bool = True,
        features: str = "shifted_relu",
        normalizer: str = "sum",
        cosine_length: int | None = None,
        lrpe: bool = False,
        random_features: int | None = None,
        use_bias: bool = True,
        form: str = "chunks",
        block_size: int = 128,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.heads, self.causal, self.rotary = heads, causal, rotary
        self.features, self.normalizer, self.cosine_length, self.lrpe = features, normalizer, cosine_length, lrpe
        self.random_features, self.use_bias, self.form, self.block_size = random_features, use_bias, form, block_size
        self._check()
        self._check_features()
        check_block_size(self)
        if features == "favor":
            count = {} if random_features is None else {"count": random_features}
            self.favor = RandomFeatures(**count, name="favor", dtype=self.dtype_policy)

    def _check(self):
        check_counts(self, heads=self.heads, cosine_length=self.cosine_length, random_features=self.random_features)
        for option, known in (("features", (*FEATURES, "favor")), ("normalizer", NORMALIZERS), ("form", FORMS)):
            if getattr(self, option) not in known:
                needed = ", ".join(map(repr, known))
                raise ValueError(f"LinearAttention: {option} must be one of {needed}, got {getattr(self, option)!r}")

    def _check_features(self):
        if self.features == "favor" and (self.lrpe or self.normalizer != "sum"):
            got = "lrpe" if self.lrpe else f"normalizer {self.normalizer!r}"
            raise ValueError(f"LinearAttention: features 'favor' need normalizer 'sum' and no lrpe, got {got}")
        signed = "features 'elu'" if self.features == "elu" else "features turned by lrpe" if self.lrpe else None
        if signed and self.normalizer == "sum":
            raise ValueError(
                f"LinearAttention: {signed} may be negative and need normalizer 'rms' or 'none', got 'sum'"
            )
        if self.random_features is not None and self.features != "favor":
            needs = f"random_features {self.random_features} needs features 'favor'"
            raise ValueError(f"LinearAttention: {needs}, got {self.features!r}")

    def build(self, x_shape: tuple) -> None:
        self.build_heads(x_shape, multiple=2 if self.rotary or self.lrpe else 1, use_bias=self.use_bias)
        if self.features == "favor":
            self.favor.build((*x_shape[:-1], self.heads, self.width // self.heads))
        self.built = True

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    @property
    def case(self) -> dict[str, Any]:
        form = {"chunk_size": self.block_size, "form": self.form}
        return {"causal": self.causal, "normalized": self.normalizer == "sum", **form}

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        e = self.width // self.heads
        s = self.favor.count if self.features == "favor" else e
        return {"b": b, "n": n, "h": self.heads, "s": s if self.cosine_length is None else 2 * s, "e": e}

    def call(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x = at_most(x, self.cosine_length, "LinearAttention needs texts of at most cosine_length")
        return super().call(x, padding_mask, segment_ids, positions, training, mask)

    @property
    def longest(self) -> int | None:
        """The most tokens of a text, `cosine_length`; None for other attention."""
        return self.cosine_length

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        q, k, v = self.heads_of(x)
        q, k = (rotary(part, positions) for part in (q, k)) if self.rotary else (q, k)
        q, k = self._features(q, k)
        q, k = (self.turn(part, positions=positions) for part in (q, k)) if self.lrpe else (q, k)
        if self.cosine_length:
            q, k = (cosine_features(part, positions, self.cosine_length) for part in (q, k))
        return {"q": q, "k": k, "v": v}, []

    def _features(self, q, k):
        if self.features == "favor":
            return self.favor(q, query=True), self.favor(k)
        return (FEATURES[self.features](part) for part in (q, k))

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        out = ops.reshape(out, (*ops.shape(out)[:2], self.width))
        if self.normalizer == "rms":
            out = simple_rms_norm(out)
        return self.out_projection(out)

    def projection_flops(self) -> int:
        made = 4 * self.favor.count * self.width if self.features == "favor" else 0  # of queries and of keys
        return 8 * self.width**2 + made

    def activations(self, n: int) -> int:
        keys, e = self.sizes()["s"] * self.heads, self.width // self.heads
        inside = (
            3 * min(n, self.block_size) * self.heads if self.form == "chunks" else 2 * keys * e
        )  # a state for each token
        exponentials = 4 * self.favor.count * self.heads if self.features == "favor" else 0  # float32 counts twice
        return 9 * self.width + 4 * keys + exponentials + inside


def cosine_features(x: Tensor, positions: Tensor, length: int) -> Tensor:
    """`[b, n, h, s]` -> `[b, n, h, 2s]`: x times cosines and sines of a quarter turn over `length` tokens.

    The product of two such features is multiplied by cos(pi/2 (i - j) / length), as in cosFormer
    (arXiv:2202.08791). `positions` are `[b, n]`.
    """
    wide = ops.cast(x, sum_dtype(x))
    angle = ops.cast(positions, wide.dtype)[..., None, None] * (math.pi / 2 / length)
    both = ops.concatenate([wide * ops.cos(angle), wide * ops.sin(angle)], axis=-1)
    return ops.cast(both, x.dtype)
