"""Images as texts: a word for each pixel, its grey value, row by row, as in the Long-Range Arena (arXiv:2011.04006)."""

import numpy as np

WORDS = [str(value) for value in range(256)]
LUMA = (0.2989, 0.5870, 0.1140)  # of red, green and blue; TensorFlow's `rgb_to_grayscale`, which the arena uses


def as_text(image: np.ndarray) -> str:
    """A uint8 image `[h, w]`, `[h, w, 1]` or, in colour, `[h, w, 3]` as words between blanks."""
    if image.ndim == 3 and image.shape[-1] == 3:
        image = (image @ np.array(LUMA)).astype("uint8")
    return " ".join(map(str, image.ravel().tolist()))
