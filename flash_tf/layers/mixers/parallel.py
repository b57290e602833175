"""Several mixers side by side in one block."""

import math

import keras

from flash_tf import renamed
from flash_tf.layers.masking import padding_of
from flash_tf.layers.mixer import Mixer
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.streaming import check_capacity, check_next, check_streams, joined, split
from kernels_xla.common.spec import State, Tensor


@MIXERS.register("parallel")
@keras.saving.register_keras_serializable("flash_tf")
class Parallel(Mixer):
    """`out = sum_i mixer_i(x)`, equal to one projection of the mixers' concatenated outputs.

    Source: TransNormer (arXiv:2210.10340), Table 12, which tries DiagAttention and NormAttention side by side in every
    layer and concatenates their outputs. Each mixer here has its own output projection, because
    `[a, b] [W_a; W_b] = a W_a + b W_b`. The layer has the weights and the cost of all its mixers.

    Args:
      mixers: `{"type": name, **options}` for each mixer, two or more, without `causal`.
      causal: Whether position i may read only positions <= i. It is set for every mixer.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: as in the mixers. Packed documents must start at multiples of every mixer's `align`.

    Example:
      >>> from keras import ops
      >>> kinds = [{"type": "diag_attention", "heads": 2, "chunk_size": 4}, {"type": "linear_attention", "heads": 2}]
      >>> Parallel(kinds, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    def __init__(self, mixers: list[dict], causal: bool = False, **kwargs):
        super().__init__(**kwargs)
        if len(mixers) < 2:
            raise ValueError(f"Parallel needs two mixers or more, got {len(mixers)}")
        self.mixers, self.causal = renamed.mixer(mixers), causal
        same = {"causal": causal, "dtype": self.dtype_policy}
        self.parts = [MIXERS.build(kind, name=f"mixer_{i}", **same) for i, kind in enumerate(self.mixers)]

    def build(self, x_shape: tuple) -> None:
        for part in self.parts:
            part.build(x_shape)
        self.built = True

    def call(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        padding_mask = padding_of(x, padding_mask, mask)
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "positions": positions}
        return sum(part(x, **masks, training=training) for part in self.parts)

    @property
    def longest(self) -> int | None:
        """The most tokens that every mixer reads."""
        return min((part.longest for part in self.parts if part.longest is not None), default=None)

    @property
    def align(self) -> int:
        """Documents must start at multiples of every mixer's `align`."""
        return math.lcm(*(part.align for part in self.parts))

    @property
    def packs(self) -> bool:
        """Whether every mixer takes packed documents where it is not causal."""
        return all(getattr(part, "packs", True) for part in self.parts)

    @property
    def grows(self) -> bool:
        """Whether the state of a mixer grows with the text."""
        return any(part.grows for part in self.parts)

    @property
    def obstacle(self) -> str | None:
        """Why a mixer cannot stream, or None."""
        return next((part.obstacle for part in self.parts if part.obstacle is not None), None)

    def flops(self, n: int) -> int:
        return sum(part.flops(n) for part in self.parts)

    def activations(self, n: int) -> int:
        return sum(part.activations(n) for part in self.parts)

    def state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        if self.obstacle:
            return None
        return sum(part.state_bytes(n, itemsize) for part in self.parts) - 4 * (len(self.parts) - 1)  # one position

    def initial_state(self, batch: int, capacity: int | None = None, dtype: str | None = None) -> State:
        """`mixer_0/<name>` and so on, and one shared `position`. The mixers that grow get `capacity`."""
        check_streams(self, self.obstacle)
        check_capacity(self, capacity)
        states = [part.initial_state(batch, capacity if part.grows else None, dtype) for part in self.parts]
        return joined("mixer", states)

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
        precomputed = [None] * len(self.parts) if precomputed is None else precomputed
        ends = [
            part.extend(x, own, positions, valid, made)
            for part, own, made in zip(self.parts, self._split(state), precomputed, strict=True)
        ]
        return sum(out for out, _ in ends), joined("mixer", [own for _, own in ends])

    def precompute(self, state: State) -> dict:
        return [part.precompute(own) for part, own in zip(self.parts, self._split(state), strict=True)]

    def flush(self, states: list[State]) -> list[State]:
        by_part = zip(*(self._split(state) for state in states), strict=True)
        closed = [part.flush(list(own)) for part, own in zip(self.parts, by_part, strict=True)]
        return [joined("mixer", own) for own in zip(*closed, strict=True)]

    def _split(self, state):
        return split("mixer", state, len(self.parts))
