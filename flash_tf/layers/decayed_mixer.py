"""The common part of linear attention with decay, whose kernels are fused."""

from collections.abc import Callable

from flash_tf.layers.fused import runs_fused
from flash_tf.layers.linear_mixer import LinearMixer
from kernels_pallas import decayed
from kernels_xla.common.spec import Tensor


class DecayedMixer(LinearMixer):
    """A mixer whose training step may run fused kernels, by its `implementation`.

    A subclass has `implementation`. It sets `fused`, a function of `kernels_pallas.decayed` as a static method, and
    `shared`, whether all channels of a head share one decay.
    """

    fused: Callable[..., Tensor]
    shared: bool

    @property
    def fusible(self) -> bool:
        """Whether the fused kernels have all that its options ask for."""
        return True

    def mix(self, inputs: dict, training: bool | None, **masks: Tensor | None) -> Tensor:
        v = inputs["v"]
        if training and self._runs_fused(tuple(v.shape[:2]), v.dtype):
            return self.fused(**inputs, **masks)
        return super().mix(inputs, training, **masks)

    def check_training(self, b: int, n: int) -> None:
        """Raises a ValueError if a training step over `[b, n]` tokens must run fused kernels, and cannot here."""
        self._runs_fused((b, n), self.compute_dtype)

    def _runs_fused(self, lead, dtype):
        own = self.sizes()
        sizes = lambda: decayed.sizes((*lead, own["h"], own["e"]), own["s"], self.shared, dtype)  # noqa: E731
        return self.fusible and runs_fused(self, lead, decayed, sizes)
