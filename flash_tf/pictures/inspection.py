"""What the mixers of a language model do with a text, layer by layer."""

import dataclasses
from collections.abc import Collection, Iterator

import keras
import numpy as np

from flash_tf.pictures import attention_maps
from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, bias_of

LONGEST = 1024  # tokens: the maps of more would take gigabytes, and no eye


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer at work.

    Attributes:
      index: Of the mixer, from 0.
      parts: The sums that its output is made of.
      strength: Root mean square of its output over that of the residual stream that it is added to.
      disagreement: Relative root-mean-square error of the parts' sum to the layer's own output: how far to believe the
        maps. Some 1e-7 in float32, 1e-2 in bfloat16.
    """

    index: int
    parts: list[Part]
    strength: float
    disagreement: float

    def shares(self) -> np.ndarray:
        """Each part's share of the output of each token, `[parts, n]`: its length over the sum of the lengths."""
        lengths = np.stack([np.linalg.norm(part.output, axis=-1) for part in self.parts])
        total = lengths.sum(axis=0)
        return lengths / np.where(total > 0, total, 1)


def row_sums(part: Part) -> np.ndarray:
    """The sum of each query's weights, `[h, n]`."""
    return part.weights.sum(axis=-1)


def dead(part: Part) -> np.ndarray:
    """Queries `[h, n]` that see tokens and take nothing of any."""
    return (part.weights == 0).all(axis=-1) & part.seen.any(axis=-1)


def distance(part: Part) -> float | None:
    """How many tokens away it looks: the mean of |i - j|, weighted by the absolute weights; None without any."""
    at, weights = np.arange(len(part.seen)), np.abs(part.weights).sum(axis=0)
    total = weights.sum()
    return float((weights * np.abs(at[:, None] - at)).sum() / total) if total > 0 else None


def encode(tokenizer, text: str, *, masks: bool, longest: int) -> tuple[np.ndarray, int]:
    """The ids of a text, at most `longest` and `LONGEST`, and how many it has in all.

    Args:
      tokenizer: The model's.
      text: The text.
      masks: Whether `<mask>` in it is a mask, as it is for masked models.
      longest: The longest sequence that the model was trained on.

    Raises:
      ValueError: When it has no token.
    """
    ids = tokenizer.encode_with_masks(text) if masks else tokenizer.encode([text])[0]
    if not len(ids):
        raise ValueError(f"the text needs a token or more, got none of {text!r}")
    return ids[: min(longest, LONGEST)], len(ids)


def look(model: keras.Model, ids: np.ndarray, layers: Collection[int] = ()) -> Iterator[Layer]:
    """Runs a text through a model, and yields each of its mixers at work; the next overwrites nothing, but is large.

    What a mixer is called with is the model's own, in its own precision; from there on all is float64.

    Args:
      model: A built language model.
      ids: Of the text, `[n]`.
      layers: The mixers wanted, from 0; none for all.

    Raises:
      ValueError: When the model's mixer has no maps, it has no such layer, or its weights are no numbers.
    """
    parts_of = [attention_maps.of(kind["type"]) for kind in model.kinds]
    if wrong := [i for i in layers if not 0 <= i < model.depth]:
        raise ValueError(f"the model has layers 0 to {model.depth - 1}, got {wrong[0]}")
    positions = keras.ops.arange(len(ids), dtype="int32")[None]
    x, mixers = model.embed(keras.ops.convert_to_tensor(ids[None], "int32"), positions), model.mixers
    for block in model.blocks:
        index = next((i for i, mixer in enumerate(mixers) if mixer is block.inner), None)
        if index is not None and (not layers or index in layers):
            seen = block.norm(x)
            yield _layer(index, parts_of[index], block.inner, array(seen[0]), block.inner(seen, positions=positions), x)
        x = block(x, positions=positions)


def _layer(index, parts_of, mixer, seen, output, residual):
    output, residual = array(output[0]), array(residual[0])
    if not (np.isfinite(output).all() and np.isfinite(seen).all()):
        raise ValueError(f"layer {index} puts out what is not a number: the weights are of a run that diverged")
    parts = parts_of(mixer, seen)
    leaving = getattr(mixer, "out_projection", None)
    total = sum(part.output for part in parts) + (0 if leaving is None else bias_of(leaving))
    return Layer(
        index=index,
        parts=parts,
        strength=_over(output, residual),
        disagreement=_over(total - output, output),
    )


def _over(a, b):
    return float(np.linalg.norm(a) / max(np.linalg.norm(b), 1e-30))


def summary(layer: Layer) -> dict:
    """A layer in figures: by part, and as a whole; see `flash_tf.pictures.attention.NOTES`."""
    means = layer.shares().mean(axis=1)
    return {
        "layer": layer.index,
        "parts": {
            part.name: {
                "share": float(share),
                "row_sum": float(np.median(row_sums(part))),
                "dead_rows": float(dead(part).mean()),
                "distance": distance(part),
            }
            for part, share in zip(layer.parts, means, strict=True)
        },
        "output_over_input": layer.strength,
        "disagreement": layer.disagreement,
    }
