"""Combiner: attention to the token's own chunk and to summaries of other chunks."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.common import check_counts, projection
from flash_tf.layers.linear_mixer import LinearMixer
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero, token_positions
from flash_tf.layers.streaming import check_next, kept_dtype, next_positions
from kernels_xla import diag_attention as diag
from kernels_xla.combiner import axial, fixed
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import KernelSpec, State, Tensor
from kernels_xla.common.streaming import append, emptied, filled, leave_grid, on_grid, slice_tokens, when_full

OPEN = ("q", "x", "positions")  # kept for the open chunk: axial summaries need them besides keys and values
SUMS = ("k_sum", "v_sum")


@MIXERS.register("combiner")
@keras.saving.register_keras_serializable("flash_tf")
class Combiner(LinearMixer):
    """`out = W_o concat_h(attend(q_h, [k_h, k'_h], [v_h, v'_h]))`, where k' and v' are summaries of other chunks.

    Source: Ren et al., "Combiner", arXiv:2107.05768, and its authors' code; a baseline of FLASH. Two variants:

    - "axial", row-major, is the variant in FLASH's comparison. Each token has a summary of its whole chunk. Tokens in
      the same column, at the same place in other chunks, read it. `v' = R` is the token's attention over its whole
      chunk; `k' = W_2 norm(x + W_1 R + b_1) + b_2`, in heads. The layer norm has no weights, because W_2 would repeat
      them. The state keeps one summary for every token.
    - "fixed": each chunk has one summary, without weights; see `kernels_xla.combiner.fixed`. The state keeps one
      summary for every chunk.

    Two choices are ours. Rotary, which FLASH added: q, k and the axial k' are rotated at their token's position, and
    the fixed variant takes maxima of rotated values. Without `causal`, a token sees the summaries of other chunks only;
    the authors' code adds its own chunk's summary, although the token already sees those tokens.

    Args:
      heads: h; must divide the width d, with `rotary` into even parts. None for 12, or fewer if 12 do not divide it.
      chunk_size: Tokens of a chunk, c. Part of the function: 256 in FLASH's comparison, 512 for PG-19.
      causal: Whether position i may read only positions <= i.
      rotary: Whether queries, keys and axial summaries are rotated by position.
      summaries: "axial" or "fixed".
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read and has no summary. A packed document gives the same output as alone if it starts on a
    multiple of `chunk_size`.

    Example:
      >>> Combiner(heads=2, chunk_size=4, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    grows = True
    lrpe = False

    def __init__(
        self,
        heads: int | None = None,
        chunk_size: int = 256,
        causal: bool = False,
        rotary: bool = True,
        summaries: str = "axial",
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_counts(self, heads=heads, chunk_size=chunk_size)
        if summaries not in ("axial", "fixed"):
            raise ValueError(f"Combiner: summaries must be 'axial' or 'fixed', got {summaries!r}")
        self.heads, self.chunk_size, self.causal, self.rotary = heads, chunk_size, causal, rotary
        self.summaries = summaries

    def build(self, x_shape: tuple) -> None:
        self.build_heads(x_shape, multiple=2 if self.rotary else 1)
        if self.summaries == "axial":
            self.summary_in = projection(self, self.width, "summary_in")
            self.summary_norm = keras.layers.LayerNormalization(
                epsilon=1e-5, center=False, scale=False, dtype=self.dtype_policy, name="summary_norm"
            )
            self.summary_out = projection(self, self.width, "summary_out")
            for layer in (self.summary_in, self.summary_norm, self.summary_out):
                layer.build(x_shape)
        self.built = True

    @property
    def align(self) -> int:
        """Documents must start at multiples of the chunk."""
        return self.chunk_size

    @property
    def spec(self) -> KernelSpec:
        return axial.SPEC if self.summaries == "axial" else fixed.SPEC

    @property
    def case(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "causal": self.causal}

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        s = self.width // self.heads
        return {"b": b, "n": n, "h": self.heads, "s": s, "e": s}

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
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": runtime_zero(positions)}
        inputs, _ = self.enter(x, positions)
        if self.summaries == "axial":
            inputs |= self._summaries(x, positions, inputs, masks)
        return self.leave(self.spec.fast(**inputs, **self.case, **masks), [])

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        q, k, v = self.heads_of(x)
        q, k = (rotary(part, positions) for part in (q, k)) if self.rotary else (q, k)
        return {"q": q, "k": k, "v": v}, []

    def _summaries(self, x, positions, inputs, masks):
        """Keys and values of the axial summaries of all tokens `x [b, n, d]`, `[b, n, h, s]`."""
        v_sum = diag.diag_attention(**inputs, chunk_size=self.chunk_size, **masks)
        mixed = ops.reshape(v_sum, (*ops.shape(v_sum)[:2], self.width))
        k_sum = self.split(self.summary_out(self.summary_norm(x + self.summary_in(mixed))))
        return {"k_sum": rotary(k_sum, positions) if self.rotary else k_sum, "v_sum": v_sum}

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        return self.out_projection(ops.reshape(out, (*ops.shape(out)[:2], self.width)))

    def projection_flops(self) -> int:
        return (12 if self.summaries == "axial" else 8) * self.width**2

    def flops(self, n: int) -> int:
        if self.summaries == "fixed":
            return super().flops(n)
        return super().flops(n) + diag.SPEC.flops(self.sizes(n=n), {**self.case, "causal": False})

    def activations(self, n: int) -> int:
        c = min(n, self.chunk_size)
        near, summaries = (2, 7 * self.width) if self.summaries == "axial" else (1, 0)
        return 9 * self.width + summaries + 3 * (near * c + n // c) * self.heads  # float32 scores count twice

    def state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        kept = super().state_bytes(n, itemsize)
        if kept is None or self.summaries == "fixed":
            return kept
        return kept + self.chunk_size * (2 * self.width * itemsize + 4)

    def initial_state(self, batch: int, capacity: int | None = None, dtype: str | None = None) -> State:
        """Summaries of up to `capacity` tokens a row, and the open chunk. Later tokens are not kept."""
        state = super().initial_state(batch, capacity, dtype)
        if self.summaries == "fixed":
            return state
        c, s, dtype = self.chunk_size, self.width // self.heads, kept_dtype(self, dtype)
        chunk = {"q": ops.zeros((batch, c, self.heads, s), dtype), "x": ops.zeros((batch, c, self.width), dtype)}
        return {**state, **chunk, "positions": ops.zeros((batch, c), "int32")}

    def extend(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
        precomputed: dict | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens of each row; see `flash_tf.layers.mixers`."""
        if self.summaries == "fixed":
            return super().extend(x, state, positions, valid)
        valid = check_next(self, self.obstacle, x, state, valid)
        positions = next_positions(state["position"], ops.shape(x)[1]) if positions is None else positions
        inputs, _ = self.enter(x, positions)
        new = {"q": inputs["q"], "x": x, "positions": ops.broadcast_to(positions, ops.shape(x)[:2])}
        read = self._step if x.shape[1] == 1 else self._extend
        out, state = read(state, inputs, new, valid)
        return self.leave(out, []), state

    def _step(self, state, inputs, new, valid):
        """One token. A full chunk gets its summaries."""
        before, c = state["position"], self.chunk_size
        out, state = axial.step(state, **inputs, chunk_size=c, valid=valid)
        state |= {name: append(state[name], new[name], before % c, valid) for name in OPEN}
        chunk = ("k", "v", *OPEN)

        def close(full, k_sum, v_sum, *kept):
            made, written = self._of_chunks(dict(zip(chunk, kept, strict=True)), None), ops.cast(full, "int32") * c
            cached = ((k_sum, made["k_sum"]), (v_sum, made["v_sum"]))
            return (*(append(x, one, before - before % c, written) for x, one in cached), *emptied(full, *kept))

        kept = when_full(filled(before, state["position"], c), close, *(state[name] for name in (*SUMS, *chunk)))
        return out, {**state, **dict(zip((*SUMS, *chunk), kept, strict=True))}

    def _extend(self, state, inputs, new, valid):
        """Several tokens. The chunks that they finish get their summaries first, because later tokens read them."""
        position, c, tokens = state["position"], self.chunk_size, ops.shape(new["x"])[1]
        valid = ops.full_like(position, tokens) if valid is None else valid
        fill, until = position % c, position % c + valid
        grid = {n: on_grid(state[n], t, fill, valid) for n, t in {**new, "k": inputs["k"], "v": inputs["v"]}.items()}
        slots = ops.arange(ops.shape(grid["x"])[1], dtype="int32")[None]
        made = self._of_chunks(grid, slots < until[:, None])
        made = {name: zero_outside(x, (slots < (until // c * c)[:, None])[..., None, None]) for name, x in made.items()}
        state = {**state, **{n: append(state[n], x[:, :c], position - fill, fill) for n, x in made.items()}}
        sums = {name: slice_tokens(x, fill, tokens) for name, x in made.items()}
        out, state = self.spec.stream.extend(state, **inputs, **sums, **self.case, valid=valid)
        return out, {**state, **{name: leave_grid(grid[name], until, c) for name in OPEN}}

    def _of_chunks(self, kept, padding_mask):
        """The summaries of whole chunks, from the kept tokens."""
        x, q, k, v = (ops.cast(kept[name], self.compute_dtype) for name in ("x", "q", "k", "v"))
        return self._summaries(x, kept["positions"], {"q": q, "k": k, "v": v}, {"padding_mask": padding_mask})
