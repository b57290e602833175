"""What the maps of several mixers share, in plain NumPy of one text: no batch, no mask, no chunks, float64.

Written from the formulas, not from the kernels: what a picture shows must not be wrong where a kernel is.
"""

from collections.abc import Sequence

import keras
import numpy as np


def array(weight) -> np.ndarray:
    """A weight as float64."""
    return keras.ops.convert_to_numpy(weight).astype("float64")


def dense(layer: keras.layers.Dense, x: np.ndarray) -> np.ndarray:
    """`[n, d]` -> `[n, w]`, with the bias if it has one."""
    return x @ array(layer.kernel) + bias_of(layer)


def bias_of(layer: keras.layers.Dense) -> np.ndarray | float:
    """The bias `[w]` as float64, or 0 of a layer without one."""
    return 0.0 if layer.bias is None else array(layer.bias)


def cut(x: np.ndarray, widths: Sequence[int]) -> list[np.ndarray]:
    """Parts of `x [n, w]`, one of each width."""
    return np.split(x, np.cumsum(widths)[:-1], axis=-1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-np.clip(x, -500, None)))


def heads(x: np.ndarray, h: int) -> np.ndarray:
    """`[n, h s]` -> `[h, n, s]`."""
    return np.moveaxis(x.reshape(len(x), h, -1), 1, 0)


def together(x: np.ndarray) -> np.ndarray:
    """`[h, n, s]` -> `[n, h s]`."""
    return np.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def rotated(x: np.ndarray, base: float = 10_000.0, turning: int | None = None) -> np.ndarray:
    """Every token of `x [..., n, s]` turned by its position: channels i and i + s/2 as one complex number."""
    half, of_pairs = x.shape[-1] // 2, _frequencies((turning or x.shape[-1]) // 2, base)
    return turned(x, np.pad(of_pairs, [0, half - len(of_pairs)]))


def turned(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """`rotated` at other frequencies, `[s / 2]`."""
    half = x.shape[-1] // 2
    found = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(np.arange(x.shape[-2]), frequencies))
    return np.concatenate([found.real, found.imag], axis=-1)


def learned(turn: keras.layers.Layer, x: np.ndarray) -> np.ndarray:
    """What an `LRPE` makes of heads `[h, n, s]`: reflected, and turned at its own frequencies."""
    reflected = x - 2 * (x @ turn.direction)[..., None] * turn.direction
    return turned(reflected, array(turn.theta))


def bias_of_distance(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """The relative bias `[i, j]`: Re sum_f a_f conj(b_f) exp(1j (i - j) theta_f), a and b as complex numbers."""
    half = len(a) // 2
    product = (a[:half] + 1j * a[half:]) * np.conj(b[:half] + 1j * b[half:])
    distances = np.arange(1 - n, n)
    by_distance = (product * np.exp(1j * np.outer(distances, _frequencies(half)))).sum(axis=1).real
    at = np.arange(n)
    return by_distance[at[:, None] - at[None, :] + n - 1]


def _frequencies(half, base=10_000.0):
    return base ** (-np.arange(half) / half)


def visible(n: int, causal: bool) -> np.ndarray:
    """Whether token i sees token j of a text of n, `[i, j]`."""
    return np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)


def squared_relu(q: np.ndarray, k: np.ndarray, bias, divisor, scale: str) -> np.ndarray:
    """relu(q k / sqrt(s) + bias)^2 / divisor, or relu(q k / divisor + bias)^2 if the scale is "paper_appendix".

    Args:
      q: `[h, n, s]`.
      k: `[h, n, s]`.
      bias: `[n, n]`, or 0.
      divisor: A number, or one a query `[n, 1]`.
      scale: As the mixers name it.
    """
    content = q @ np.swapaxes(k, -1, -2)
    if scale == "paper_appendix":
        return np.maximum(content / divisor + bias, 0) ** 2
    return np.maximum(content / np.sqrt(q.shape[-1]) + bias, 0) ** 2 / divisor


def sharpened(q: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Queries `[h, n, s]` times log(N) / log(512), N being the number of tokens that each sees, as GAU-alpha has it."""
    return q * np.log(seen.sum(axis=1, keepdims=True)) / np.log(512)


def softmax(q: np.ndarray, k: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """exp(q k / sqrt(s)) over its sum, of the pairs that are seen."""
    scores = np.where(seen, q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _bias(layer, n):
    """The relative bias `[i, j]`; of pairs that are farther apart than T5's window, any."""
    if not hasattr(layer, "table"):
        return bias_of_distance(array(layer.a), array(layer.b), n)
    by_distance, at = layer.scale * array(layer.table)[layer.buckets()], np.arange(n)
    return by_distance[np.clip(layer.window + at[:, None] - at, 0, 2 * layer.window - 1)]


class GatedUnit:
    """What a gated attention unit makes of its input before and after it attends.

    Args:
      unit: The layer, a `GatedAttentionUnit`.
      x: What it is called with, `[n, d]`.

    Attributes:
      v: Values, `[n, e]`.
      bias: Of distances, `[n, n]`, or 0.
    """

    def __init__(self, unit, x: np.ndarray):
        self._unit, n = unit, len(x)
        if getattr(unit, "token_shift", False):
            half = -(-x.shape[1] // 2)
            x = np.concatenate([np.pad(x[:-1, :half], [[1, 0], [0, 0]]), x[:, half:]], axis=1)
        widths = [unit.value_width] * (1 + unit.gated) + [unit.key_dim]
        *gate, self.v, self._z = cut(silu(dense(unit.in_projection, x)), widths)
        self._gate = gate[0] if gate else 1.0
        self.bias = 0.0 if unit.bias is None else _bias(unit.bias, n)

    def head(self, name: str) -> np.ndarray:
        """A head before rotation, `[n, s]`."""
        made = self._unit.offset_scale
        i = made.heads.index(name)
        return self._z * array(made.scales[i]) + (array(made.offsets[i]) if made.use_bias else 0.0)

    def leave(self, attended: np.ndarray) -> np.ndarray:
        """`[n, e]` -> `[n, d]`, without the output's bias."""
        return (self._gate * attended) @ array(self._unit.out_projection.kernel)


def gaussian(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """exp(-|q - k|^2 / (2 sqrt(s))) of `[h, i, s]` and `[h, j, s]`."""
    squares = ((q[:, :, None] - k[:, None]) ** 2).sum(axis=-1)
    return np.exp(-squares / (2 * np.sqrt(q.shape[-1])))


def nearly_inverse(matrix: np.ndarray) -> np.ndarray:
    """Six steps of the iteration that Nystromformer and Skyformer take for the inverse of `[h, t, t]`."""
    one, size = np.eye(matrix.shape[-1]), np.abs(matrix)
    scale = size.sum(axis=-1).max(axis=-1) * size.sum(axis=-2).max(axis=-1)
    found = np.swapaxes(matrix, -1, -2) / scale[:, None, None]
    for _ in range(6):
        product = matrix @ found
        found = found @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return found
