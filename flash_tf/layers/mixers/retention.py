"""Retention: linear attention with a fixed decay for each head."""

from typing import Any

import keras
import numpy as np
from keras import ops

from flash_tf.layers.common import check_counts, normal
from flash_tf.layers.decayed_mixer import DecayedMixer
from flash_tf.layers.fused import check_implementation
from flash_tf.layers.linear_mixer import check_block_size, check_causal, check_epsilon
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero
from kernels_pallas import decayed
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.norms import scale_norm
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.retention import SPEC


@MIXERS.register("retention")
@keras.saving.register_keras_serializable("flash_tf")
class Retention(DecayedMixer):
    """`y = W_o (silu(x W_g) * concat_h norm(sum_{j <= i} gamma_h^(i - j) (q_i . k_j) v_j))`, without biases.

    Source: Sun et al., "Retentive Network", arXiv:2307.08621, section 2. gamma_h = 1 - 2^(-5 - h) for h = 0, 1, ....
    Keys are as wide as the model, and values twice as wide. Keys are divided by the root of their width. The norm acts
    on each head's values and has no weights. Queries and keys are rotated by 10000^(-i / (m - 1)) a token, for the m
    pairs i = 0 .. m - 1 of a head, as in the authors' code, where the last exponent is 1. The authors pair neighbouring
    channels; here channel i is paired with i + m, which only changes the order of the channels. The authors' code also
    divides scores by the root of the row's summed decays and by the row's sum. The norm undoes both, so they are left
    out here.

    Matrices start from N(0, 0.02), as in every system here, so that results differ only by the systems. The authors'
    code starts from Xavier's distribution, times 2^-2.5 for queries, keys, values and gate, times 2^-1 for W_o: 0.006
    for queries and keys at a width of 1,024, and 0.013 for W_o. The norm undoes all scales except the gate's and W_o's.

    Args:
      heads: h; must divide the width d into even parts. None for 4, or fewer if 4 do not divide it.
      causal: Must be true: retention has no other form.
      rope_theta: The longest wavelength of the rotation over 2 pi: pair i turns by rope_theta^(-i / m) a token, as in
        flash-linear-attention. None for the authors' rotation, above.
      norm_scale: Whether the norm multiplies each channel by a weight that all heads share.
      norm_epsilon: Added to the mean square in the norm.
      block_size: Tokens that einsums read as one block. It changes only the speed; see `flash-tf tune`.
      implementation: "xla" for einsums; "pallas" for fused kernels in training steps, which need a Hopper GPU and what
        docs/layers.md says; "auto" for these where they are faster and can run.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`. They turn queries and keys; the decay counts real tokens.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is neither read nor counted by the decay. A packed document gives the same output as alone.

    Example:
      >>> Retention(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    causal_only = True
    most_heads = 4
    fused, shared = staticmethod(decayed.retention), True

    def __init__(
        self,
        heads: int | None = None,
        causal: bool = True,
        block_size: int = 128,
        rope_theta: float | None = None,
        norm_scale: bool = False,
        norm_epsilon: float = 1e-6,
        implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.heads, self.causal, self.block_size = heads, causal, block_size
        self.rope_theta, self.norm_scale, self.norm_epsilon = rope_theta, norm_scale, norm_epsilon
        self.implementation = implementation
        check_causal(self)
        check_implementation(self)
        check_block_size(self)
        check_epsilon(self)
        if rope_theta is not None and rope_theta <= 1:
            raise ValueError(f"Retention needs rope_theta > 1, got {rope_theta}")
        check_counts(self, heads=heads)

    def build(self, x_shape: tuple) -> None:
        self.set_heads(x_shape, multiple=2)
        dense = lambda width, name: keras.layers.Dense(  # noqa: E731
            width, use_bias=False, kernel_initializer=normal(), dtype=self.dtype_policy, name=name
        )
        self.in_projection = dense(6 * self.width, "in_projection")
        self.out_projection = dense(self.width, "out_projection")
        self.in_projection.build(x_shape)
        self.out_projection.build((*x_shape[:-1], 2 * self.width))
        self.scale = None
        if self.norm_scale:
            self.scale = self.add_weight(name="norm_scale", shape=(2 * self.width // self.heads,), initializer="ones")
        self.built = True

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    @property
    def case(self) -> dict[str, Any]:
        return {"causal": True, "chunk_size": self.block_size}

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        s = self.width // self.heads
        return {"b": b, "n": n, "h": self.heads, "s": s, "e": 2 * s}

    def log_decay(self) -> np.ndarray:
        """The logarithm of each head's gamma, `[h]`."""
        return np.log1p(-(2.0 ** (-5 - np.arange(self.heads))))

    def base(self) -> float:
        """The longest wavelength of the rotation over 2 pi."""
        if self.rope_theta is not None:
            return self.rope_theta
        pairs = self.width // self.heads // 2
        return 10_000.0 ** (pairs / max(pairs - 1, 1))  # the last pair turns by 1 / 10,000

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        d = self.width
        q, k, v, gate = ops.split(self.in_projection(x), [d, 2 * d, 4 * d], axis=-1)
        q, k = (rotary(self.split(part), positions, base=self.base()) for part in (q, k))
        k = k * ops.cast((d // self.heads) ** -0.5, k.dtype)
        # The positions make this a runtime value: a compiler would store a constant table in the program.
        zero = ops.cast(runtime_zero(positions), sum_dtype(q))
        log_decay = ops.convert_to_tensor(self.log_decay(), zero.dtype) + zero
        log_decay = ops.broadcast_to(log_decay, (*ops.shape(x)[:2], self.heads))
        return {"q": q, "k": k, "v": self.split(v), "log_decay": log_decay}, [gate]

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        out = scale_norm(out, 1.0, epsilon=self.norm_epsilon)
        out = out if self.scale is None else out * ops.cast(self.scale, out.dtype)
        out = ops.reshape(out, (*ops.shape(out)[:2], 2 * self.width))
        return self.out_projection(ops.silu(rest[0]) * out)

    def projection_flops(self) -> int:
        return 16 * self.width**2

    def activations(self, n: int) -> int:
        chunk = min(n, self.block_size)
        return round(25 * self.width + 5 * chunk * self.heads + 3 * 2 * self.width**2 / self.heads / chunk)
