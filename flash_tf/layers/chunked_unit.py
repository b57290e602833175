"""A gated attention unit that attends in two sums, inside chunks and across them."""

from keras import ops

from flash_tf.layers.gated_attention_unit import GatedAttentionUnit
from kernels_xla.common.rotary import rotate, turns
from kernels_xla.flash import decode


class ChunkedUnit(GatedAttentionUnit):
    """What FLASH and its variant with weighted chunks share: a kernel's forms around the heads of one representation.

    A subclass has `spec` and `case`, and `stream`, the module of the kernel's stream form, with `step` and `close`. It
    has at least these options, as attributes.

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

    def sizes(self, b=1, n=None):
        return {"b": b, "n": n, "s": self.key_dim, "e": self.value_width}

    def rows(self, b, n):
        """See `parts_of`: values come back in chunks, where these divide a row; of a single row XLA drops the axis."""
        whole = isinstance(n, int) and n % self.chunk_size == 0
        row = (-1,) if isinstance(b, int) and b == 1 else (b, n)
        return [row] * self.gated + [(b, -1, self.chunk_size) if whole else (b, n), row]

    def attend(self, heads, v, a=None, b=None, padding_mask=None, segment_ids=None, offset=0):
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": offset}
        return self.spec.fast(**heads, v=v, a=a, b=b, **self.case, **masks)

    def next_heads(self, z, positions, prepared):
        if prepared is None:
            return super().next_heads(z, positions, prepared)
        cos, sin = (ops.expand_dims(x, 2) for x in turns(positions, self.key_dim))
        return rotate(z[:, :, None] * prepared["scales"] + prepared["offsets"], cos, sin)  # [b, 1, h, s], all at once

    def attend_next(self, heads, v, state, valid, prepared):
        if prepared is None:
            given = {**heads, "v": v, **self.stream_bias()}
            return self.spec.stream.extend(state, **given, valid=valid, **self.case)
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
        return {**made, "bias": decode.prepare(state, **bias, **case)}

    def close(self, states):
        return self.stream.close(states, self.chunk_size)
