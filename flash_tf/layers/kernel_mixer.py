"""The base class of mixers around one kernel: cost, state and streaming come from the kernel's `SPEC`."""

import functools

import keras

from flash_tf.layers.common import width_of
from flash_tf.layers.mixer import Mixer
from flash_tf.layers.streaming import check_capacity, check_streams, kept_dtype
from kernels_xla.common.spec import KernelSpec, State


class KernelMixer(Mixer):
    """A mixer around one kernel; `flash_tf.layers.mixers` describes the members.

    A subclass has `causal` and implements `spec`, `case`, `sizes`, `projection_flops`, `activations`, `call` and, if
    it can stream, `extend`. A subclass whose state grows with the text sets `grows = True`.
    """

    align = 1
    most_heads = 12  # by default
    grows = False
    attention_dropout = 0.0

    @property
    def spec(self) -> KernelSpec:
        """The `SPEC` of the kernel."""
        raise NotImplementedError

    @property
    def case(self) -> dict:
        """The options of the kernel."""
        return {"causal": self.causal}

    def sizes(self, b: int = 1, n: int | None = None) -> dict:
        """Lengths of the kernel's axes, by letter."""
        raise NotImplementedError

    def set_heads(self, x_shape: tuple, multiple: int = 1) -> None:
        """Sets the width, and the heads if they are None.

        Raises:
          ValueError: The heads do not divide the width into multiples of `multiple`.
        """
        self.width, heads = width_of(self, x_shape), self.heads or self.most_heads
        if self.heads is None and self.width % (multiple * heads):
            heads = next((h for h in range(heads, 1, -1) if self.width % (2 * h) == 0), 1)
        if self.width % (multiple * heads):
            parts = "" if multiple == 1 else f" into multiples of {multiple}"
            got = f"got heads {self.heads}, width {self.width}"
            raise ValueError(f"{type(self).__name__}: heads must divide the width{parts}, {got}")
        self.heads = heads

    def set_dropout(self, rate: float) -> None:
        """Drops attention weights at that rate in training, by a layer `dropout`."""
        if not 0 <= rate < 1:
            raise ValueError(f"{type(self).__name__} needs 0 <= attention_dropout < 1, got {rate}")
        self.attention_dropout = rate
        self.dropout = keras.layers.Dropout(rate, dtype=self.dtype_policy, name="attention_dropout")

    def training_options(self, training: bool | None) -> dict:
        """Options of the kernel beside `case`, for training alone."""
        if not (training and self.attention_dropout):
            return {}
        return {"dropout": functools.partial(self.dropout, training=True)}

    def projection_flops(self) -> int:
        """FLOPs of all products with weights, for one token."""
        raise NotImplementedError

    def flops(self, n: int) -> int:
        return n * self.projection_flops() + self.spec.flops(self.sizes(n=n), self.case)

    def state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        return None if self.obstacle else self.spec.state_bytes(self.sizes(n=n), self.case, itemsize)

    @property
    def obstacle(self) -> str | None:
        """Why it cannot stream, or None."""
        return None if self.causal else "it is not causal and reads later tokens"

    def initial_state(self, batch: int, capacity: int | None = None, dtype: str | None = None) -> State:
        """The state before the first token; see `flash_tf.layers.mixers`. Tokens beyond `capacity` are not kept."""
        check_streams(self, self.obstacle)
        check_capacity(self, capacity)
        return self.spec.stream.initial_state(self.sizes(batch, capacity), self.case, kept_dtype(self, dtype))

    def precompute(self, state: State) -> dict:
        return {}  # nothing to precompute

    def flush(self, states: list[State]) -> list[State]:
        return states  # nothing is deferred
