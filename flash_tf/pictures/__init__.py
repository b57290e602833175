"""Pictures of runs and of models, for people: PNG files, and all of them in one HTML file.

`records` reads runs and `curves` draws them; neither needs TensorFlow. `inspection` draws a model's mixers at work on
a text, with weights that `attention_maps` computes again in plain float64. `style` sets the look, `page` writes the
files.
"""

import importlib.util


def check_matplotlib() -> None:
    """Raises a ValueError unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib, which is not installed: pip install 'flash-tf[tensorflow]'")
