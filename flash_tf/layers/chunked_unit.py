"""A gated attention unit that attends in two sums, inside chunks and across them."""

from keras import ops

from flash_tf.layers.gated_attention_unit import GatedAttentionUnit
from flash_tf.layers.streaming import check_capacity, check_streams
from kernels_xla import mixed_chunk_stream
from kernels_xla.rotary import rotate, turns

KERNEL = {  # what kernels call the heads
    **{"quad_q": "q_quad", "quad_k": "k_quad", "lin_q": "q_lin", "lin_k": "k_lin"},
    **{"sum_q": "q_sum", "sum_k": "k_sum"},
}


class ChunkedUnit(GatedAttentionUnit):
    """What FLASH and its variant with weighted chunks share: a kernel's forms around the heads of one representation.

    A subclass has `spec`, that of its kernel; `stream`, the module of its stream form, with `step` and `close`;
    `_case`, what it passes to the kernel; and `grows`. It has at least these options, as attributes.

    Args:
      chunk_size: Tokens per chunk, c.
      causal: Whether position i may read only positions <= i.
    """

    def _check(self):
        super()._check()
        if self.chunk_size < 1:
            raise ValueError(f"{type(self).__name__} needs chunk_size >= 1, got {self.chunk_size}")

    @property
    def align(self) -> int:
        """Documents must start at multiples of the chunk."""
        return self.chunk_size

    def _named(self, heads):
        return {KERNEL[name]: head for name, head in heads.items()}

    def _sizes(self, b, n=None):
        return {"b": b, "n": n, "s": self.key_dim, "e": self.value_width}

    def attend(self, heads, v, a=None, b=None, padding_mask=None, segment_ids=None, offset=0):
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": offset}
        return self.spec.fast(**self._named(heads), v=v, a=a, b=b, **self._case, **masks)

    def flops(self, n: int) -> int:
        return self.projection_flops(n) + self.spec.flops(self._sizes(1, n), self._case)

    def state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        return None if self.obstacle else self.spec.state_bytes(self._sizes(1, n), self._case, itemsize)

    @property
    def obstacle(self) -> str | None:
        """Why it cannot stream, or None."""
        return None if self.causal else "it reads later tokens, being not causal"

    def initial_state(self, batch, capacity=None, dtype=None):
        """`capacity` is None where the state is constant in the text's length; see the stream form of the kernel."""
        check_streams(self, self.obstacle)
        check_capacity(self, capacity)
        return self.spec.stream.initial_state(self._sizes(batch, capacity), self._case, dtype or self.compute_dtype)

    def next_heads(self, z, positions, prepared):
        if prepared is None:
            return super().next_heads(z, positions, prepared)
        cos, sin = (ops.expand_dims(x, 2) for x in turns(positions, self.key_dim))
        return rotate(z[:, :, None] * prepared["scales"] + prepared["offsets"], cos, sin)  # [b, 1, h, s], all at once

    def attend_next(self, heads, v, state, valid, prepared):
        if prepared is None:
            given = {**self._named(heads), "v": v, **self.stream_bias()}
            return self.spec.stream.extend(state, **given, valid=valid, **self._case)
        case = {"chunk_size": self.chunk_size, "scale": self.scale}
        out, state = self.stream.step(state, heads[:, 0], v[:, 0], prepared.get("bias"), valid=valid, **case)
        return out[:, None], state

    def prepare(self, state):
        weights = {"scales": self.offset_scale.scales, "offsets": self.offset_scale.offsets}
        made = {k: ops.stack([ops.cast(w, self.compute_dtype) for w in of_heads]) for k, of_heads in weights.items()}
        if "quad_q" not in self.head_names:
            return made
        bias = self.stream_bias() or {"a": None, "b": None}
        case = {"chunk_size": self.chunk_size, "scale": self.scale}
        return {**made, "bias": mixed_chunk_stream.prepare(state, **bias, **case)}

    def close(self, states):
        return self.stream.close(states, self.chunk_size)
