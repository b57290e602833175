"""GAU: the gated attention unit with attention over all positions, FLASH-Quad's layer."""

import keras
import numpy as np
from keras import ops

from flash_tf.layers import gated_unit
from flash_tf.layers.fused import check_implementation, runs_fused
from flash_tf.layers.kernel_mixer import KernelMixer
from flash_tf.layers.masking import check_shape, zero_padding
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero, token_positions
from flash_tf.layers.streaming import check_next, next_positions
from kernels_pallas import gau as fused
from kernels_xla import gau, softmax_attention, softmax_plus
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import State, Tensor

TURNED = (True, True)  # queries and keys are rotated
SOFTMAX = {"softmax": softmax_attention.SPEC, "softmax_plus": softmax_plus.SPEC}


@MIXERS.register("gau")
@keras.saving.register_keras_serializable("flash_tf")
class GatedAttentionUnit(KernelMixer):
    """The gated attention unit (GAU), the layer of FLASH-Quad: one squared-ReLU head over all positions, one gate.

    Source: FLASH (arXiv:2202.10447), section 2.2; its Table 1 varies the options `kernel`, `heads` and `gated`.

    Args:
      causal: Whether position i may read only positions <= i.
      key_dim: Width s of the shared representation z, even.
      expansion: e / d, the width of gate and values over the model's.
      heads: Heads h into which keys and values are split [our definition; the paper gives none].
      kernel: "relu2", "softmax", or "softmax_plus", GAU-alpha's softmax, whose temperature follows the number of tokens
        seen. The last two take no relative bias, scale or divisor.
      gated: Whether there is a gate; without it the values are 2e wide.
      relative_bias: Whether scores get a learned Toeplitz bias, 256 parameters.
      scale: "normalized", or "paper_appendix"; see `kernels_xla.gau`.
      divisor: "position" (tokens seen), "length" (tokens of the document: the paper's, cannot decode), or a constant.
      bias_start: How the bias starts: "normal", as in the paper, or "symmetric"; see `RelativeBias`.
      use_bias: Whether projections and heads have biases.
      implementation: How a training step computes attention and gate: "xla", as einsums; "pallas", by fused kernels on
        an NVIDIA GPU from Hopper on; or "auto", by fused kernels where they run and were measured to be faster. They
        need the kernel "relu2", one head, a gate and a relative bias, and no prefix. The function and the weights are
        the same.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.
      prefix_mask: Bool `[b, n]`, True at the tokens of a prefix. All tokens of their document see them, even if causal
        (UniLM, arXiv:1905.03197). For training and scoring only: a stream reads each token when it comes.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is neither read nor counted. A packed document gives the same output as alone.

    Example:
      >>> GatedAttentionUnit(causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    head_names = ("q", "k")
    grows = True
    spec = gau.SPEC
    gated_unit = True
    takes_prefix = True

    def __init__(
        self,
        causal: bool = False,
        key_dim: int = 128,
        expansion: int = 2,
        heads: int = 1,
        kernel: str = "relu2",
        gated: bool = True,
        relative_bias: bool = True,
        scale: str = "normalized",
        divisor: str | int = "position",
        bias_start: str = "normal",
        use_bias: bool = True,
        implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.causal, self.key_dim, self.expansion, self.heads, self.kernel = causal, key_dim, expansion, heads, kernel
        self.gated, self.relative_bias, self.scale, self.divisor = gated, relative_bias, scale, divisor
        self.use_bias, self.bias_start, self.implementation = use_bias, bias_start, implementation
        gated_unit.check(self)
        check_implementation(self)
        if implementation == "pallas" and (given := self._einsums_alone()) is not None:
            raise ValueError(f"GatedAttentionUnit: implementation 'pallas' needs {given}")
        if heads < 1 or key_dim % (2 * heads):
            raise ValueError(
                f"GatedAttentionUnit: key_dim must be an even multiple of heads, 1 or more, got {key_dim} and {heads}"
            )
        if divisor not in ("position", "length") and (isinstance(divisor, str) or divisor < 1):
            raise ValueError(f"GatedAttentionUnit: divisor must be 'position', 'length' or >= 1, got {divisor!r}")
        if kernel not in ("relu2", *SOFTMAX):
            raise ValueError(f"GatedAttentionUnit: kernel must be 'relu2', 'softmax' or 'softmax_plus', got {kernel!r}")
        if kernel in SOFTMAX and (relative_bias, scale, divisor) != (False, "normalized", "position"):
            raise ValueError(
                f"GatedAttentionUnit: kernel {kernel!r} needs relative_bias false and the default scale and divisor, "
                f"got {relative_bias}, {scale!r}, {divisor!r}"
            )

    def build(self, x_shape: tuple) -> None:
        gated_unit.build(self, x_shape)
        if self.value_width % self.heads:
            raise ValueError(f"GatedAttentionUnit: heads ({self.heads}) must divide the values ({self.value_width})")

    def call(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x, padding_mask = zero_padding(x, padding_mask, segment_ids, mask)
        positions = token_positions(x, segment_ids, positions)
        masks = {"causal": self.causal, "padding_mask": padding_mask, "segment_ids": segment_ids}
        options = {"scale": self.scale, "divisor": self.divisor, "offset": runtime_zero(positions)}
        if training and self._runs_fused(tuple(x.shape[:2]), x.dtype, positions, prefix_mask):
            given = {**gated_unit.projected(self, x, positions), **gated_unit.bias(self), **masks, **options}
            return self.out_projection(fused.gated_attention(**given, turned=TURNED, value_width=self.value_width))
        u, v, z = gated_unit.project(self, x)
        q, k = self._rotated(z, positions)
        if self.kernel in SOFTMAX:
            self._check_prefix(prefix_mask, x)
            attended = SOFTMAX[self.kernel].fast(q, k, self._split(v), **masks)
        else:
            masks |= self._check_prefix(prefix_mask, x)
            attended = gau.gau_attention(q, k, self._split(v), **gated_unit.bias(self), **options, **masks)
        return gated_unit.leave(self, u, ops.reshape(attended, ops.shape(v)))

    def check_training(self, b: int, n: int) -> None:
        """Raises a ValueError if a training step over `[b, n]` tokens must run fused kernels, and cannot here."""
        self._runs_fused((b, n), self.compute_dtype, np.zeros((1, n)))

    def _runs_fused(self, lead, dtype, positions, prefix_mask=None):
        """Whether the fused kernels compute a step over tokens `lead`; a ValueError if they must and cannot."""
        if prefix_mask is not None and self.implementation == "pallas":
            raise ValueError("GatedAttentionUnit: implementation 'pallas' needs no prefix_mask, got one")
        if prefix_mask is not None or self._einsums_alone() is not None:
            return False
        shape = (*lead, 2 * self.value_width + self.key_dim)
        angled = gated_unit.angled(positions, lead[0])
        return runs_fused(
            self, lead, fused, lambda: fused.sizes(shape, dtype, self.value_width, self.causal, TURNED, angled)
        )

    def _einsums_alone(self):
        """The options that the fused kernels need instead, or None."""
        needed = {"kernel": "relu2", "heads": 1, "gated": True, "relative_bias": True}
        given = {name: getattr(self, name) for name in needed}
        return None if given == needed else f"{needed}, got {given}"

    def _check_prefix(self, prefix_mask, x):
        """The prefix mask as the kernel's argument; a ValueError where the layer takes none."""
        if prefix_mask is None:
            return {}
        if not self.causal or self.kernel in SOFTMAX:
            needed = "GatedAttentionUnit takes a prefix_mask where it is causal and kernel is 'relu2'"
            raise ValueError(f"{needed}, got causal {self.causal} and kernel {self.kernel!r}")
        check_shape("prefix_mask", prefix_mask, x)
        return {"prefix_mask": prefix_mask}

    def _rotated(self, z, positions):
        """The shared representation `[b, n, s]` -> q and k, `[b, n, h, s / h]`."""
        heads = self.offset_scale(z)
        return (rotary(self._split(heads[name]), positions) for name in self.head_names)

    def _split(self, x):
        """`[b, n, h s]` -> `[b, n, h, s]`."""
        return ops.reshape(x, (*ops.shape(x)[:2], self.heads, x.shape[-1] // self.heads))

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        return {"b": b, "n": n, "h": self.heads, "s": self.key_dim // self.heads, "e": self.value_width // self.heads}

    def projection_flops(self) -> int:
        return gated_unit.projection_flops(self)

    def activations(self, n: int) -> int:
        return gated_unit.activations(self) + 2 * n * self.heads

    @property
    def obstacle(self) -> str | None:
        return super().obstacle or (
            "divisor 'length' is not known before the text ends" if self.divisor == "length" else None
        )

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
        u, v, z = gated_unit.project(self, x)
        positions = next_positions(state["position"], ops.shape(x)[1]) if positions is None else positions
        given = (state, *self._rotated(z, positions), self._split(v))
        if self.kernel in SOFTMAX:
            attended, state = SOFTMAX[self.kernel].stream.extend(*given, valid=valid)
        else:
            options = {"scale": self.scale, "divisor": self.divisor, "precomputed": (precomputed or {}).get("bias")}
            attended, state = gau.extend(*given, **gated_unit.bias(self), valid=valid, **options)
        return gated_unit.leave(self, u, ops.cast(ops.reshape(attended, ops.shape(v)), v.dtype)), state

    def precompute(self, state: State) -> dict:
        vectors = gated_unit.bias(self)
        return {"bias": gau.precompute(state, **vectors)} if vectors else {}


@keras.saving.register_keras_serializable("flash_tf")
class QuadraticAttention(GatedAttentionUnit):
    """The old name of `GatedAttentionUnit`. Saved models name their layers and weights after it."""
