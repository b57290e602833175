"""FLASH-Quad: the gated attention unit with full quadratic attention."""

import keras
from keras import ops

from flash_tf.layers.gated_attention_unit import GatedAttentionUnit
from flash_tf.layers.mixers import MIXERS
from kernels_xla import gau
from kernels_xla import softmax_attention as softmax
from kernels_xla.common.rotary import rotary
from kernels_xla.gau import SPEC, gau_attention


@MIXERS.register("quadratic")
@keras.saving.register_keras_serializable("flash_tf")
class QuadraticAttention(GatedAttentionUnit):
    """GAU, the FLASH-Quad layer: one squared-ReLU head over all positions, one gate.

    Source: FLASH (arXiv:2202.10447), section 2.2; the options `kernel`, `heads` and `gated` are rows of its Table 1.

    Args:
      causal: Whether position i may read only positions <= i.
      key_dim: Width s of the shared representation z, even.
      expansion: e / d, the width of gate and values over the model's.
      heads: Heads h into which keys and values are split [our definition; the paper gives none].
      kernel: "relu2", or "softmax", which takes no relative bias, scale or divisor.
      gated: Whether there is a gate; without it the values are 2e wide.
      relative_bias: Whether scores get a learned Toeplitz bias, 256 parameters.
      scale: "normalized", or "paper_appendix"; see `kernels_xla.gau`.
      divisor: "position" (tokens seen), "length" (tokens of the document: the paper's, cannot decode), or a constant.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.
      prefix_mask: Bool `[b, n]`, True at tokens of a prefix, which all tokens of their text see, though causal (UniLM,
        arXiv:1905.03197). For training and scoring: a stream reads each token when it comes.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is neither read nor counted; a packed document equals itself alone.

    Example:
      >>> QuadraticAttention(causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    head_names = ("q", "k")
    grows = True
    spec = SPEC
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
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.causal, self.key_dim, self.expansion, self.heads, self.kernel = causal, key_dim, expansion, heads, kernel
        self.gated, self.relative_bias, self.scale, self.divisor = gated, relative_bias, scale, divisor
        self._check()
        if heads < 1 or key_dim % (2 * heads):
            raise ValueError(f"QuadraticAttention: key_dim ({key_dim}) must be an even multiple of heads ({heads})")
        if divisor not in ("position", "length") and (isinstance(divisor, str) or divisor < 1):
            raise ValueError(f"QuadraticAttention: divisor must be 'position', 'length' or >= 1, got {divisor!r}")
        if kernel not in ("relu2", "softmax"):
            raise ValueError(f"QuadraticAttention: kernel must be 'relu2' or 'softmax', got {kernel!r}")
        if kernel == "softmax" and (relative_bias, scale, divisor) != (False, "normalized", "position"):
            raise ValueError(
                "QuadraticAttention: kernel 'softmax' needs relative_bias false and the default scale and divisor, "
                f"got {relative_bias}, {scale!r}, {divisor!r}"
            )

    def build(self, x_shape):
        super().build(x_shape)
        if self.value_width % self.heads:
            raise ValueError(f"QuadraticAttention: heads ({self.heads}) must divide the values ({self.value_width})")

    def turn(self, heads, positions):
        return {name: rotary(self._split(head), positions) for name, head in heads.items()}

    def call(self, x, padding_mask=None, segment_ids=None, positions=None, prefix_mask=None, training=None):
        if prefix_mask is None:
            return super().call(x, padding_mask, segment_ids, positions, training)
        if not self.causal or self.kernel == "softmax":
            needed = "QuadraticAttention takes a prefix_mask where it is causal and kernel is 'relu2'"
            raise ValueError(f"{needed}, got causal {self.causal} and kernel {self.kernel!r}")
        return super().call(x, padding_mask, segment_ids, positions, training, prefix_mask=prefix_mask)

    def attend(self, heads, v, a=None, b=None, padding_mask=None, segment_ids=None, offset=0, **prefix):
        masks = {"causal": self.causal, "padding_mask": padding_mask, "segment_ids": segment_ids}
        q, k, values = heads["q"], heads["k"], self._split(v)
        if self.kernel == "softmax":
            out = softmax.softmax_attention(q, k, values, **masks)
        else:
            options = {"scale": self.scale, "divisor": self.divisor, "offset": offset, **prefix}
            out = gau_attention(q, k, values, a, b, **options, **masks)
        return ops.reshape(out, ops.shape(v))

    def _split(self, x):
        """`[b, n, h s]` -> `[b, n, h, s]`."""
        return ops.reshape(x, (*ops.shape(x)[:2], self.heads, x.shape[-1] // self.heads))

    def sizes(self, b=1, n=None):
        return {"b": b, "n": n, "h": self.heads, "s": self.key_dim // self.heads, "e": self.value_width // self.heads}

    def activations(self, n: int) -> int:
        return super().activations() + 2 * n * self.heads

    @property
    def obstacle(self):
        return super().obstacle or (
            "divisor 'length' is not known before the text ends" if self.divisor == "length" else None
        )

    def attend_next(self, heads, v, state, valid, prepared):
        given = (state, heads["q"], heads["k"], self._split(v))
        if self.kernel == "softmax":
            out, state = softmax.extend(*given, valid=valid)
        else:
            options = {"scale": self.scale, "divisor": self.divisor, "prepared": (prepared or {}).get("bias")}
            out, state = gau.extend(*given, **self.stream_bias(), valid=valid, **options)
        return ops.reshape(out, ops.shape(v)), state

    def prepare(self, state):
        bias = self.stream_bias()
        return {"bias": gau.prepare(state, **bias)} if bias else {}
