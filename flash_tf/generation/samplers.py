"""Samplers: they choose the next token from its logits."""

import dataclasses
import numbers

from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import Tensor

COLDEST = 1e-6  # a lower temperature would draw the likeliest token too, from quotients that overflow


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws a token by its probability, after temperature, top-k and top-p, in this order.

    Args:
      temperature: Divides the logits. 0 is greedy: the likeliest token.
      top_k: Keeps only the k likeliest tokens; None keeps all.
      top_p: Keeps the likeliest tokens until their probabilities reach p, nucleus sampling (Holtzman et al.,
        arXiv:1904.09751); None keeps all.

    Raises:
      ValueError: A temperature below 0, a `top_k` that is no integer of 1 or more, or a `top_p` that is not in (0, 1].

    Example:
      >>> from keras import ops
      >>> Sampler(top_k=2)(ops.log([[0.1, 0.6, 0.3]]), ops.convert_to_tensor([0.7])).numpy()
      array([2], dtype=int32)
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0, for the likeliest token, or more, got {self.temperature}")
        if self.top_k is not None:
            if not isinstance(self.top_k, numbers.Integral) or self.top_k < 1:
                raise ValueError(f"top_k must be an integer of 1 or more, got {self.top_k!r}")
            object.__setattr__(self, "top_k", int(self.top_k))  # it may be NumPy's, which JAX's top_k does not take
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Logits `[b, V]` and a uniform number in [0, 1) for each row, `[b]` -> tokens, int32 `[b]`."""
        if self.temperature < COLDEST or self.top_k == 1:
            return ops.cast(ops.argmax(logits, axis=-1), "int32")
        logits = ops.cast(logits, sum_dtype(logits)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return _drawn(ops.softmax(logits), draws)
        size = logits.shape[-1]
        logits, order = ops.top_k(logits, size if self.top_k is None else min(self.top_k, size))
        probabilities = ops.softmax(logits)
        if self.top_p is not None:
            before = ops.cumsum(probabilities, axis=-1) - probabilities
            probabilities = ops.where(before < self.top_p, probabilities, 0.0)
        rank = _drawn(probabilities, draws)
        return ops.cast(ops.take_along_axis(order, rank[:, None], axis=-1)[:, 0], "int32")


GREEDY = Sampler(temperature=0.0)


def _drawn(weights, draws):
    """The first index at which the running sum of `weights [b, m]` exceeds the share `draws [b]` of their sum."""
    sums = ops.cumsum(weights, axis=-1)
    reached = ops.cast(draws, sums.dtype)[:, None] * sums[:, -1:]
    passed = ops.sum(ops.cast(sums <= reached, "int32"), axis=-1)
    return ops.minimum(passed, weights.shape[-1] - 1)
