"""Pre-norm residual block around a mixer or a feed-forward layer."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

import keras
from keras import ops

from flash_tf.layers.base import SameShape
from flash_tf.layers.common import quantized, width_of
from flash_tf.layers.fused import check_implementation, takes_fused
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.remat import Recomputed, check_recomputed, remat
from flash_tf.layers.scale_norm import ScaleNorm
from flash_tf.layers.simple_rms_norm import SimpleRMSNorm
from flash_tf.layers.streaming import normalized
from kernels_pallas import norms as fused
from kernels_xla.common.norms import SIMPLE_EPSILON
from kernels_xla.common.spec import State, Tensor

EPSILON = 1e-5  # the papers' value
PASSED = ("padding_mask", "segment_ids", "positions", "training")
NORMS = {
    "scale_norm": ScaleNorm,
    "layer_norm": keras.layers.LayerNormalization,
    "layer_norm_without_bias": functools.partial(keras.layers.LayerNormalization, center=False),
    "rms_norm": keras.layers.RMSNormalization,
    "simple_rms_norm": SimpleRMSNorm,
}
SCALES = {"scale_norm": "g", "layer_norm": "gamma", "layer_norm_without_bias": "gamma", "rms_norm": "scale"}


def normalizer(kind: str, epsilon: float = EPSILON, **kwargs) -> keras.layers.Layer:
    """A normalizer by name. "simple_rms_norm" takes no epsilon but the default, which it does not need."""
    if kind not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {kind!r}")
    if kind == "simple_rms_norm":
        if epsilon != EPSILON:
            raise ValueError(f"norm 'simple_rms_norm' has no epsilon: it needs the default, got {epsilon}")
        return SimpleRMSNorm(**kwargs)
    if epsilon <= 0:
        raise ValueError(f"norm {kind!r} needs an epsilon > 0, got {epsilon}")
    return NORMS[kind](epsilon=epsilon, **kwargs)


@keras.saving.register_keras_serializable("flash_tf")
class ResidualBlock(SameShape, Recomputed, keras.layers.Layer):
    """`y = x + dropout(inner(norm(x)))`, or `norm(x + dropout(inner(x)))` with `post_norm`.

    Args:
      inner: The layer inside: a mixer, a feed-forward layer, or any other whose call takes their arguments.
      norm: "scale_norm", "layer_norm", "layer_norm_without_bias", "rms_norm" or "simple_rms_norm".
      dropout: Dropout rate of the branch's output in training.
      remat: Whether the backward pass recomputes the branch instead of keeping its activations. The dropout is outside,
        so that both passes see one mask. `keras.RematScope` sets it.
      post_norm: Whether the norm comes after the sum, as in BERT.
      norm_epsilon: Added to the mean square or the variance in the norm.
      norm_implementation: How a training step computes the norm: "xla", as Keras does; "pallas", by fused kernels, one
        pass forward and one backward, on an NVIDIA GPU from Hopper on; "auto", where these were measured to be faster.
        The function is the same. Fused kernels need a norm before the branch, and no `remat`.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask, segment_ids, positions: Passed to `inner`.
      prefix_mask: Passed to `inner` if given; `inner` must accept it.
      training: Whether dropout is active.

    Returns:
      Float tensor `[b, n, d]`.

    Example:
      >>> from keras import ops
      >>> from flash_tf.layers import GLU
      >>> ResidualBlock(GLU())(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    def __init__(
        self,
        inner: keras.layers.Layer,
        norm: str = "scale_norm",
        dropout: float = 0.0,
        remat: bool = False,
        norm_epsilon: float = EPSILON,
        post_norm: bool = False,
        norm_implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not 0 <= dropout < 1:
            raise ValueError(f"ResidualBlock needs 0 <= dropout < 1, got {dropout}")
        _check_inner(inner)
        self.inner, self.kind, self.rate, self.remat, self.norm_epsilon = inner, norm, dropout, remat, norm_epsilon
        self.post_norm, self.norm_implementation = post_norm, norm_implementation
        check_implementation(self, "norm_implementation")
        if remat:
            check_recomputed(inner)
        self.norm = normalizer(norm, norm_epsilon, dtype=self.dtype_policy, name="norm")
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="dropout")
        self.supports_masking, self.input_spec = True, inner.input_spec

    def build(self, x_shape: tuple) -> None:
        self.width = width_of(self, x_shape)
        self.norm.build(x_shape)
        if not self.inner.built:  # a layer from a file is built already
            self.inner.build(x_shape)
        self.built = True

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
        given = {"padding_mask": padding_mask, "segment_ids": segment_ids, "positions": positions}
        given |= {} if prefix_mask is None else {"prefix_mask": prefix_mask}
        if training and self._runs_fused(tuple(x.shape), x.dtype):
            x, inputs = self._with_norm(x)
            return x + self.dropout(self.inner(inputs, **given, training=training), training=training)
        before = (lambda x: x) if self.post_norm else self.norm
        branch = lambda x: self.inner(before(x), **given, training=training)  # noqa: E731
        y = x + self.dropout(remat(branch)(x) if self.remat and training else branch(x), training=training)
        return self.norm(y) if self.post_norm else y

    def check_training(self, b: int, n: int) -> None:
        """Raises a ValueError if a training step over `[b, n]` tokens must run a fused norm, and cannot here."""
        if not self.built:
            raise ValueError("ResidualBlock.check_training needs a built block, got one without a width")
        self._runs_fused((b, n, self.width), self.compute_dtype)

    def _runs_fused(self, shape, dtype):
        """Whether fused kernels compute the norm of such an input; a ValueError if they must and cannot."""
        option = "ResidualBlock: norm_implementation"
        lacking = {
            "a norm before the branch, got post_norm true": self.post_norm,
            "remat false, got true": self.remat,
            f"a static shape, got {shape}": None in shape,
        }
        if said := next((said for said, given in lacking.items() if given), None):
            if self.norm_implementation == "pallas":
                raise ValueError(f"{option} 'pallas' needs {said}")
            return False
        sizes = lambda: fused.sizes(shape, dtype, **self._fused_options())  # noqa: E731
        return 0 not in shape and takes_fused(option, self.norm_implementation, fused, sizes)

    def _fused_options(self):
        centered = isinstance(self.norm, keras.layers.LayerNormalization)
        return {"centered": centered, "epsilon": getattr(self.norm, "epsilon", SIMPLE_EPSILON)}

    def _with_norm(self, x):
        """x, and its norm, with one backward pass for both."""
        gamma = getattr(self.norm, SCALES[self.kind]) if self.kind in SCALES else 1.0
        beta = getattr(self.norm, "beta", None)
        parameters = (ops.cast(one, "float32") for one in (gamma, 0.0 if beta is None else beta))
        gamma, beta = (ops.broadcast_to(one, (x.shape[-1],)) for one in parameters)
        return fused.with_norm(x, gamma, beta, **self._fused_options())

    def recomputed(self, call: Callable) -> Callable:
        check_recomputed(self.inner)
        self.remat = True
        return call

    def initial_state(self, batch: int, capacity: int | None = None, dtype: str | None = None) -> State:
        """State of `inner` before the first token; empty for a feed-forward layer. See `flash_tf.layers.mixers`."""
        return self.inner.initial_state(batch, capacity, dtype) if self._carries_state() else {}

    def extend(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
        precomputed: dict | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens of each row, `[b, k, d]` -> `([b, k, d], state)`; see `flash_tf.layers.mixers`."""
        x = ops.cast(x, self.compute_dtype)
        inputs = x if self.post_norm else normalized(self.norm, x)
        if self._carries_state():
            y, state = self.inner.extend(inputs, state, positions, valid, precomputed)
        else:
            y = self.inner(inputs)
        y = x + ops.cast(y, self.compute_dtype)
        return (normalized(self.norm, y) if self.post_norm else y), state

    def _carries_state(self):
        """Whether `inner` reads other tokens; a ValueError if it may, and cannot carry them in a state."""
        if hasattr(self.inner, "extend"):
            return True
        if getattr(self.inner, "tokenwise", False):
            return False
        needed = "initial_state and extend, or tokenwise = True if it reads each token alone"
        raise ValueError(f"ResidualBlock cannot stream: its layer needs {needed}, got {type(self.inner).__name__}")

    def get_config(self) -> dict[str, Any]:
        inner = keras.saving.serialize_keras_object(self.inner)
        inner.pop("build_config", None)  # the block builds it, under the path that it has now
        own = {"inner": inner, "norm": self.kind, "dropout": self.rate, "remat": self.remat}
        own |= {"norm_epsilon": self.norm_epsilon, "post_norm": self.post_norm}
        own |= {"norm_implementation": self.norm_implementation}
        return {**super().get_config(), **own, **quantized(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{**config, "inner": keras.saving.deserialize_keras_object(config["inner"])})


def _check_inner(inner):
    """Raises a ValueError unless the layer can be called with what a block passes on."""
    taken = inspect.signature(inner.call).parameters.values()
    missing = set(PASSED) - {one.name for one in taken}
    if missing and not any(one.kind == one.VAR_KEYWORD for one in taken):
        raise ValueError(
            f"ResidualBlock needs a layer whose call takes {', '.join(PASSED)}, as mixers and feed-forward layers do, "
            f"got {type(inner).__name__}"
        )
