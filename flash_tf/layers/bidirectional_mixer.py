"""The common part of mixers that read the whole text."""

from typing import Any

from keras import ops

from flash_tf.layers.common import check_counts
from flash_tf.layers.linear_mixer import LinearMixer
from flash_tf.layers.masking import zero_padding
from kernels_xla.common.spec import Tensor


class BidirectionalMixer(LinearMixer):
    """A multi-head mixer around a kernel that is not causal; see `LinearMixer`.

    A subclass passes its options to `set_options`, under the kernel's names, and implements `spec` and `seen`. It lists
    the options that its kernel takes in `kernel_options`. A subclass that also has a causal kernel sets
    `never_causal = False`.
    """

    kernel_options: tuple[str, ...] = ()
    never_causal = True
    packs = False
    lrpe = False

    def set_options(self, causal: bool, seed: int | None = None, **counts: int | None) -> None:
        """Sets the options as attributes.

        Raises:
          ValueError: `causal` is true for a mixer that is never causal, or a count is below 1.
        """
        name = type(self).__name__
        if causal and self.never_causal:
            raise ValueError(f"{name} reads the whole text: it needs causal false, got {causal}")
        check_counts(self, **counts)
        for option, value in counts.items():
            setattr(self, option, value)
        if seed is not None:
            if seed < 0:
                raise ValueError(f"{name} needs seed >= 0, got {seed}")
            self.seed = seed
        self.causal = causal

    def build(self, x_shape: tuple) -> None:
        self.build_heads(x_shape, multiple=1)
        self.built = True

    @property
    def case(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kernel_options}

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
        masks = {"padding_mask": padding_mask}
        if segment_ids is not None:
            if not (self.packs or self.causal):
                raise ValueError(
                    f"{type(self).__name__} reads a row as one text: it needs segment_ids None, got packed documents"
                )
            masks["segment_ids"] = segment_ids
        inputs, rest = self.enter(x, positions)
        return self.leave(self.spec.fast(**inputs, **self.case, **masks), rest)

    def enter(self, x: Tensor, positions: Tensor | None) -> tuple[dict[str, Tensor], list[Tensor]]:
        q, k, v = self.heads_of(x)
        return {"q": q, "k": k, "v": v}, []

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        return self.out_projection(ops.reshape(out, (*ops.shape(out)[:2], self.width)))

    def projection_flops(self) -> int:
        return 8 * self.width**2

    def seen(self, n: int) -> int:
        """Number of scores for each token and head, in a text of n tokens."""
        raise NotImplementedError

    def activations(self, n: int) -> int:
        return 9 * self.width + 3 * self.seen(n) * self.heads  # float32 scores count twice
