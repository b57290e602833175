"""Pictures of runs and of models, for people: PNG files, and all of them in one HTML file.

`curves` draws what runs recorded, read by `records`; it needs no TensorFlow. `attention` draws what a model's mixers
do with a text, which `inspection` takes from the model and `maps` computes again, in plain float64. `style` is how
pictures look, `page` how they are written.
"""

import importlib.util


def check_matplotlib() -> None:
    """Raises a ValueError unless matplotlib is there, which an installation without dependencies may lack."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib, which is not installed: pip install matplotlib")
