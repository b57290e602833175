"""Filling masks in a sentence."""

from typing import Any

import keras
import numpy as np


def fill_mask(
    model: keras.Model, tokenizer: Any, text: str, *, top_k: int = 5, max_tokens: int | None = None
) -> list[list[dict]]:
    """The likeliest tokens at each `<mask>` of a text.

    Args:
      model: A masked language model.
      tokenizer: The model's `flash_tf.data.tokenizer.Tokenizer`.
      text: With `<mask>` wherever a token is asked.
      top_k: How many tokens for each mask.
      max_tokens: The longest sequence that the model was trained on; None for any.

    Returns:
      For each mask, in order, a list of `{"token", "probability", "text"}`, likeliest first; `text` is the whole text
      with this mask filled.

    Raises:
      ValueError: The model is not masked, the text has no mask, or is too long.
    """
    if model.causal or not model.predicts_tokens:
        raise ValueError(f"fill-mask needs a masked language model, got {type(model).__name__}")
    ids = tokenizer.encode_with_masks(text)
    masks = np.flatnonzero(ids == tokenizer.mask_id)
    if not len(masks):
        raise ValueError(f"the text needs a <mask>, got {text!r}")
    if max_tokens is not None and len(ids) > max_tokens:
        raise ValueError(f"the text has {len(ids)} tokens, the model takes {max_tokens}")
    if not 1 <= top_k <= tokenizer.vocabulary_size:
        raise ValueError(f"top-k must be between 1 and the vocabulary's {tokenizer.vocabulary_size}, got {top_k}")
    logits = model(np.array(ids, np.int32)[None], masked_positions=masks[None].astype(np.int32))
    logits = keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32"))[0]
    logits[:, list(tokenizer.special_ids)] = -np.inf
    return [_candidates(tokenizer, ids, at, row, top_k) for at, row in zip(masks, logits, strict=True)]


def _candidates(tokenizer, ids, at, logits, top_k):
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    candidates = []
    for token in np.argsort(-logits, kind="stable")[:top_k].tolist():
        filled = [*ids[:at], token, *ids[at + 1 :]]
        candidates.append(
            {
                "token": tokenizer.piece(token),
                "probability": float(probabilities[token]),
                "text": tokenizer.decode(filled),
            }
        )
    return candidates
