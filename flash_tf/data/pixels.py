"""Images as texts: a word for each pixel, its grey value, row by row, as in the Long-Range Arena (arXiv:2011.04006)."""

import numpy as np

WORDS = [str(value) for value in range(256)]
GREY = "rgb_to_grayscale"  # TensorFlow's rule for colours, which the arena uses; cached rows name it
LUMA = np.array([0.2989, 0.5870, 0.1140], "float32")  # of red, green and blue


def as_text(image: np.ndarray) -> str:
    """A uint8 image `[h, w]`, `[h, w, 1]` or, in colour, `[h, w, 3]` as words between blanks."""
    if image.ndim == 3 and image.shape[-1] == 3:
        grey = (image * np.float32(1 / 255) * LUMA).sum(-1)  # in TensorFlow's order: every colour is the same
        image = (grey * np.float32(255.5)).astype("uint8")
    return " ".join(map(str, image.ravel().tolist()))
