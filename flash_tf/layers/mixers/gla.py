"""Gated linear attention (GLA): linear attention with a data-dependent decay for each channel."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.common import check_counts, normal, width_of
from flash_tf.layers.decayed_mixer import DecayedMixer
from flash_tf.layers.fused import check_implementation
from flash_tf.layers.linear_mixer import check_block_size, check_causal, check_epsilon
from flash_tf.layers.mixers import MIXERS
from kernels_pallas.decayed import gated_linear_attention
from kernels_xla import gla, linear_attention
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.norms import scale_norm
from kernels_xla.common.spec import KernelSpec, Tensor

RANK, TEMPERATURE, EPSILON = 16, 16.0, 1e-5


@MIXERS.register("gla")
@keras.saving.register_keras_serializable("flash_tf")
class GatedLinearAttention(DecayedMixer):
    """`y = W_o (silu(x W_r + b_r) * concat_h norm(q_t S_t))`, `S_t = (alpha_t beta_t^T) * S_{t-1} + k_t v_t^T` a head.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv:2312.06635,
    section 4. `alpha_t = sigmoid(x W_1 W_2 + b)^(1 / temperature)` gates the key channels; W_1 has `gate_rank` columns.
    beta_t gates the value channels with weights of its own. The paper dropped it after v1, so it is 1 by default.
    Queries and keys are half as wide as the model. The norm divides each head's values by their root mean square and
    multiplies each channel by a weight that all heads share.

    Matrices start from N(0, 0.02), as in every system here and in flash-linear-attention, so that results differ only
    by the systems. The authors' first code starts queries, keys and both factors of the gates from Xavier's
    distribution times 2^-2.5: 0.006 for queries and keys at a width of 1,024. The norm undoes that scale.

    Args:
      heads: h; must divide the width d into even parts. None for 4, or fewer if 4 do not divide it.
      causal: Must be true: a decay has no other form.
      gate_rank: Width between the two factors of the gates.
      temperature: Divides log alpha. A larger temperature forgets later.
      gates: Which gates exist: "key" (alpha), "value" (beta), "both" or "none", the paper's ablation. "none" takes
        neither rank nor temperature.
      norm_epsilon: Added to the mean square in the norm of a head's values.
      block_size: Tokens that einsums read as one block. It changes only the speed; see `flash-tf tune`.
      implementation: "xla" for einsums; "pallas" for fused kernels in training steps, which need `gates` "key", a
        Hopper GPU, and what docs/layers.md says; "auto" for these where they are faster and can run.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Ignored: the decays carry all position information.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read and causes no decay. A packed document gives the same output as alone.

    Example:
      >>> GatedLinearAttention(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    causal_only = True
    most_heads = 4
    fused, shared = staticmethod(gated_linear_attention), False

    def __init__(
        self,
        heads: int | None = None,
        causal: bool = True,
        gate_rank: int = RANK,
        temperature: float = TEMPERATURE,
        gates: str = "key",
        block_size: int = 64,
        norm_epsilon: float = EPSILON,
        implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.heads, self.causal, self.gate_rank, self.temperature = heads, causal, gate_rank, temperature
        self.gates, self.block_size, self.norm_epsilon = gates, block_size, norm_epsilon
        self.implementation = implementation
        check_implementation(self)
        check_causal(self)
        check_block_size(self)
        check_epsilon(self)
        check_counts(self, heads=heads, gate_rank=gate_rank)
        if temperature <= 0:
            raise ValueError(f"GatedLinearAttention needs temperature > 0, got {temperature}")
        if gates not in ("key", "value", "both", "none"):
            raise ValueError(f"GatedLinearAttention: gates must be 'key', 'value', 'both' or 'none', got {gates!r}")
        if gates == "none" and (gate_rank, temperature) != (RANK, TEMPERATURE):
            needed = "GatedLinearAttention: gates 'none' needs the default gate_rank and temperature"
            raise ValueError(f"{needed}, got {gate_rank} and {temperature}")
        if implementation == "pallas" and gates != "key":
            raise ValueError(f"GatedLinearAttention: implementation 'pallas' needs gates 'key', got {gates!r}")

    def build(self, x_shape: tuple) -> None:
        d = width_of(self, x_shape)
        self.set_heads(x_shape, multiple=2)
        self.in_projection = self._dense("in_projection", 2 * d, x_shape, use_bias=False)
        self.gate_projection = self._dense("gate_projection", d, x_shape)
        self.out_projection = self._dense("out_projection", d, x_shape, use_bias=False)
        within = (*x_shape[:-1], self.gate_rank)
        if self.gates in ("key", "both"):
            self.decay_down = self._dense("decay_down", self.gate_rank, x_shape, use_bias=False)
            self.decay_up = self._dense("decay_up", d // 2, within)
        if self.gates in ("value", "both"):
            self.value_decay_down = self._dense("value_decay_down", self.gate_rank, x_shape, use_bias=False)
            self.value_decay_up = self._dense("value_decay_up", d, within)
        self.norm_scale = self.add_weight(name="norm_scale", shape=(d // self.heads,), initializer="ones")
        self.built = True

    def _dense(self, name, width, x_shape, use_bias=True):
        layer = keras.layers.Dense(
            width, use_bias=use_bias, kernel_initializer=normal(), dtype=self.dtype_policy, name=name
        )
        layer.build(x_shape)
        return layer

    @property
    def spec(self) -> KernelSpec:
        return linear_attention.SPEC if self.gates == "none" else gla.SPEC

    @property
    def case(self) -> dict[str, Any]:
        return {"causal": True, "chunk_size": self.block_size}

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        e = self.width // self.heads
        return {"b": b, "n": n, "h": self.heads, "s": e // 2, "e": e}

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        d = self.width
        q, k, v = (self.split(part) for part in ops.split(self.in_projection(x), [d // 2, d], axis=-1))
        inputs = {"q": q, "k": k, "v": v}
        if self.gates in ("key", "both"):
            inputs["log_decay"] = self._log_gates(self.decay_up(self.decay_down(x)))
        if self.gates in ("value", "both"):
            inputs["value_log_decay"] = self._log_gates(self.value_decay_up(self.value_decay_down(x)))
        return inputs, [self.gate_projection(x)]

    @property
    def fusible(self) -> bool:
        return self.gates == "key"

    def _log_gates(self, logits):
        return self.split(ops.log_sigmoid(ops.cast(logits, sum_dtype(logits))) / self.temperature)

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        out = scale_norm(out, 1.0, epsilon=self.norm_epsilon) * ops.cast(self.norm_scale, out.dtype)
        out = ops.reshape(out, (*ops.shape(out)[:2], self.width))
        return self.out_projection(ops.silu(rest[0]) * out)

    def projection_flops(self) -> int:
        columns = {"key": 1.5, "value": 2, "both": 3.5, "none": 0}[self.gates]  # of both factors, relative to the width
        return 8 * self.width**2 + round(2 * self.gate_rank * columns * self.width)

    def activations(self, n: int) -> int:
        s, chunk = self.width // 2, min(n, self.block_size)
        gated = {"key": s, "value": 2 * s, "both": 3 * s, "none": 0}[self.gates]
        wide = 6 * gated  # queries, keys or values, and their decays, in float32
        return round(20 * self.width + 3 * chunk * self.heads + wide + 4 * s * self.width / self.heads / chunk)
