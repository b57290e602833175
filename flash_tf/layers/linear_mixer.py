"""The common part of multi-head mixers: projections into a kernel and out of it."""

from keras import ops

from flash_tf.layers.common import parts_of, projection
from flash_tf.layers.kernel_mixer import KernelMixer
from flash_tf.layers.lrpe import LRPE
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.positions import token_positions
from flash_tf.layers.streaming import check_next, next_positions
from kernels_xla.common.spec import State, Tensor


class LinearMixer(KernelMixer):
    """A mixer with projections before and after its kernel; see `flash_tf.layers.mixers`.

    A subclass has `heads` and, once built, `width`. It implements `enter` and `leave`.
    """

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict, list]:
        """`[b, n, d]` -> the kernel's inputs by name, and a list of further tensors for `leave`."""
        raise NotImplementedError

    def leave(self, out: Tensor, rest: list) -> Tensor:
        """The kernel's output `[b, n, h, e]` -> `[b, n, d]`."""
        raise NotImplementedError

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
        positions = token_positions(x, segment_ids, positions)
        inputs, rest = self.enter(x, positions)
        return self.leave(self.mix(inputs, training, padding_mask=padding_mask, segment_ids=segment_ids), rest)

    def mix(self, inputs: dict, training: bool | None, **masks: Tensor | None) -> Tensor:
        """Runs the kernel on its inputs by name, with `padding_mask` and `segment_ids`: -> `[b, n, h, e]`."""
        return self.spec.fast(**inputs, **self.case, **self.training_options(training), **masks)

    def build_heads(self, x_shape: tuple, multiple: int, use_bias: bool = True) -> None:
        """Builds one projection for queries, keys and values, the out-projection and, with `lrpe`, `turn`."""
        self.set_heads(x_shape, multiple)
        self.in_projection = projection(self, 3 * self.width, "in_projection", use_bias)
        self.out_projection = projection(self, self.width, "out_projection", use_bias)
        self.in_projection.build(x_shape)
        self.out_projection.build(x_shape)
        if self.lrpe:
            self.turn = LRPE(name="lrpe", dtype=self.dtype_policy)
            self.turn.build((*x_shape[:-1], self.heads, self.width // self.heads))

    def heads_of(self, x: Tensor) -> list:
        """`[b, n, d]` -> q, k and v, `[b, n, h, s]`."""
        return [self.split(part) for part in parts_of(self.in_projection, x, [self.width] * 3)]

    def split(self, x: Tensor) -> Tensor:
        """`[b, n, h s]` -> `[b, n, h, s]`."""
        return ops.reshape(x, (*ops.shape(x)[:2], self.heads, x.shape[-1] // self.heads))

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
        positions = next_positions(state["position"], ops.shape(x)[1]) if positions is None else positions
        inputs, rest = self.enter(x, positions)
        out, state = self.spec.stream.extend(state, **inputs, **self.case, valid=valid)
        return self.leave(out, rest), state


def check_causal(mixer: LinearMixer) -> None:
    """Raises a ValueError unless the mixer, which is always causal, was asked to be."""
    if not mixer.causal:
        raise ValueError(f"{type(mixer).__name__} is causal by definition: it needs causal true, got {mixer.causal}")


def check_epsilon(mixer: LinearMixer) -> None:
    """Raises a ValueError unless the epsilon of the mixer's norm is above 0."""
    if mixer.norm_epsilon <= 0:
        raise ValueError(f"{type(mixer).__name__} needs norm_epsilon > 0, got {mixer.norm_epsilon}")


def check_block_size(mixer: LinearMixer) -> None:
    """Raises a ValueError unless the mixer's block size is at least 1."""
    if mixer.block_size < 1:
        raise ValueError(f"{type(mixer).__name__} needs block_size >= 1, got {mixer.block_size}")
