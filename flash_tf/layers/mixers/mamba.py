"""Mamba: a diagonal state space whose steps, inputs and outputs the text chooses, behind a short convolution."""

import keras
import numpy as np
from keras import ops

from flash_tf.layers.common import check_counts, normal, width_of
from flash_tf.layers.fused import check_implementation, runs_fused
from flash_tf.layers.linear_mixer import LinearMixer, check_causal
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.streaming import check_capacity, check_next, check_streams, kept_dtype
from kernels_pallas import mamba as fused
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import KernelSpec, State, Tensor
from kernels_xla.mamba import convolution
from kernels_xla.mamba.selective_scan import SPEC

STEPS = (1e-3, 1e-1)  # range of the initial steps


@MIXERS.register("mamba")
@keras.saving.register_keras_serializable("flash_tf")
class Mamba(LinearMixer):
    """`W_o (silu(z) * y)`, `h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`, `y_t = C_t . h_t + D x_t` for each channel.

    The tokens u give (x, z) = W_in u, then x = silu(conv(x)), (r, B, C) = W_x x, and dt = softplus(W_dt r + b).

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752, sections
    3.4 and 3.6. It has no heads. Two Mamba blocks replace one attention block and one MLP. At the start, each channel
    has A = -(1, 2, ..) and D = 1. The initial steps are spaced evenly in their logarithm over 0.001 .. 0.1; the authors
    draw them from that range. W_dt and the convolution are drawn as in the authors' code, the rest from N(0, 0.02).

    Args:
      causal: Must be true: a state has no other form.
      state_size: s, the state's numbers for each channel.
      conv_width: Tokens that the convolution reads.
      expansion: Channels of x over the width d.
      dt_rank: Width of the steps' projection; None for a sixteenth of d, rounded up.
      implementation: How a training step computes the scan: "xla"; "pallas", by fused kernels on an NVIDIA GPU from
        Hopper on; or "auto", by fused kernels where they run and were measured to be faster. The function and the
        weights are the same.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Ignored: the decays carry all position information.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding leaves the states unchanged, and the convolution reads it as zeros. A packed document gives the
    same output as alone.

    Example:
      >>> Mamba()(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    causal_only = True

    def __init__(
        self,
        causal: bool = True,
        state_size: int = 16,
        conv_width: int = 4,
        expansion: int = 2,
        dt_rank: int | None = None,
        implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.causal, self.state_size, self.conv_width = causal, state_size, conv_width
        self.expansion, self.dt_rank, self.implementation = expansion, dt_rank, implementation
        check_implementation(self)
        check_causal(self)
        check_counts(self, state_size=state_size, conv_width=conv_width, expansion=expansion, dt_rank=dt_rank)

    def build(self, x_shape: tuple) -> None:
        self.width = width_of(self, x_shape)
        self.inner, self.rank = self.expansion * self.width, self.dt_rank or -(-self.width // 16)
        s, e = self.state_size, self.inner
        inner_shape = (*x_shape[:-1], e)
        self.in_projection = self._dense("in_projection", 2 * e, x_shape)
        self.state_projection = self._dense("state_projection", self.rank + 2 * s, inner_shape)
        within = keras.initializers.RandomUniform(-(self.rank**-0.5), self.rank**-0.5)
        self.step_projection = self._dense("step_projection", e, (*x_shape[:-1], self.rank), within)
        self.out_projection = self._dense("out_projection", self.width, inner_shape)
        within = keras.initializers.RandomUniform(-(self.conv_width**-0.5), self.conv_width**-0.5)
        self.conv_weights = self.add_weight(name="conv_weights", shape=(self.conv_width, e), initializer=within)
        self.conv_bias = self.add_weight(name="conv_bias", shape=(e,), initializer=within)
        # Always float32. Vectors, because the optimizer applies weight decay to matrices.
        steps = np.geomspace(*STEPS, e)
        starts = {
            "log_decay_rate": np.tile(np.log1p(np.arange(s)), e),
            "skip": np.ones(e),
            "step_bias": np.log(np.expm1(steps)),  # their softplus is `steps`
        }
        for name, start in starts.items():
            drawn = lambda shape, dtype, start=start: ops.cast(start, dtype)  # noqa: E731
            setattr(self, name, self.add_weight(name=name, shape=start.shape, initializer=drawn, autocast=False))
        self.built = True

    def _dense(self, name, width, x_shape, initializer=None):
        layer = keras.layers.Dense(
            width, use_bias=False, kernel_initializer=initializer or normal(), dtype=self.dtype_policy, name=name
        )
        layer.build(x_shape)
        return layer

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        return {"b": b, "n": n, "e": self.inner, "s": self.state_size, "w": self.conv_width}

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The scan's inputs, from x `[b, n, e]` after the convolution."""
        x = ops.silu(x)
        r, s = self.rank, self.state_size
        steps, b, c = ops.split(self.state_projection(x), [r, r + s], axis=-1)
        bias, log_rate, d = (ops.cast(w, sum_dtype(x)) for w in (self.step_bias, self.log_decay_rate, self.skip))
        dt = ops.softplus(ops.cast(self.step_projection(steps), bias.dtype) + bias)
        a = -ops.exp(ops.reshape(log_rate, (self.inner, s)))
        return {"x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d}, []

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        return self.out_projection(out * ops.silu(rest[0]))

    def call(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x, padding_mask = zero_padding(x, padding_mask, segment_ids, mask)
        masked = {"padding_mask": padding_mask, "segment_ids": segment_ids}
        x, z = ops.split(self.in_projection(x), 2, axis=-1)
        inputs, _ = self.enter(convolution.convolution(x, self.conv_weights, self.conv_bias, **masked), positions)
        scan = fused.selective_scan if training and self._runs_fused(tuple(x.shape[:2]), x.dtype) else self.spec.fast
        return self.leave(scan(**inputs, **masked), [z])

    def check_training(self, b: int, n: int) -> None:
        """Raises a ValueError if a training step over `[b, n]` tokens must run fused kernels, and cannot here."""
        self._runs_fused((b, n), self.compute_dtype)

    def _runs_fused(self, lead, dtype):
        return runs_fused(self, lead, fused, lambda: fused.sizes((*lead, self.inner), self.state_size, dtype))

    def projection_flops(self) -> int:
        d, e, r, s = self.width, self.inner, self.rank, self.state_size
        return 2 * (d * 2 * e + e * (r + 2 * s) + r * e + e * d) + convolution.SPEC.flops(self.sizes(n=1), {})

    def activations(self, n: int) -> int:
        return round(9 * self.inner + 3 * self.state_size)  # steps in float32; the states are recomputed

    def state_bytes(self, n: int, itemsize: int = 2) -> int:
        kernels = (SPEC, convolution.SPEC)
        return sum(spec.state_bytes(self.sizes(), {}, itemsize) for spec in kernels)

    def initial_state(self, batch: int, capacity: int | None = None, dtype: str | None = None) -> State:
        """Independent of the text's length: `conv [b, w - 1, e]`, `ssm [b, s, e]`, float32, and `position [b]`."""
        check_streams(self, self.obstacle)
        check_capacity(self, capacity)
        sizes, dtype = self.sizes(batch), kept_dtype(self, dtype)
        tokens = convolution.initial_state(sizes, {}, dtype)["tokens"]
        return {"conv": tokens, **SPEC.stream.initial_state(sizes, {}, dtype)}

    def extend(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
        precomputed: dict | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens of each row; see `flash_tf.layers.mixers`."""
        valid = check_next(self, self.obstacle, x, state, valid)
        x, z = ops.split(self.in_projection(x), 2, axis=-1)
        weights = (ops.cast(w, x.dtype) for w in (self.conv_weights, self.conv_bias))
        x, after = convolution.extend({"tokens": state["conv"]}, x, *weights, valid=valid)
        inputs, _ = self.enter(x, positions)
        scanned = {name: state[name] for name in ("ssm", "position")}
        out, scanned = SPEC.stream.extend(scanned, **inputs, valid=valid)
        return self.leave(out, [z]), {"conv": after["tokens"], **scanned}
