"""Pictures of runs and of models, for people: PNG files, and all of them in one HTML file.

`curves` draws what runs recorded, and `records` reads it without TensorFlow. `inspection` runs a text through a model,
`attention_maps` computes its mixers' weights in float64, and `attention` draws them. `style` sets the look, and `page`
writes the files.
"""

import importlib.util


def check_matplotlib() -> None:
    """Raises a ValueError unless matplotlib is there, which an installation without dependencies may lack."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib, which is not installed: pip install 'flash-tf[tensorflow]'")
