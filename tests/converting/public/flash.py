"""lucidrains' FLASH, in the environment of flash.txt."""

from types import SimpleNamespace

from common import randomized, write
from flash_pytorch import FLASHTransformer

SIZES = {"num_tokens": 61, "dim": 32, "depth": 2, "group_size": 8, "expansion_factor": 2.0, "causal": True}
MODELS = {"flash_pytorch": {**SIZES, "query_key_dim": 40}, "flash_pytorch_small": {**SIZES, "query_key_dim": 16}}


class WithLogits:
    """The library's model with an output that has `logits`, and without what its rotation keeps."""

    def __init__(self, model):
        self._model = model

    def __call__(self, ids):
        return SimpleNamespace(logits=self._model(ids))

    def state_dict(self):
        return {name: x for name, x in self._model.state_dict().items() if "rotary" not in name}


for name, sizes in MODELS.items():
    options = {**sizes, "shift_tokens": name == "flash_pytorch"}
    model = WithLogits(randomized(FLASHTransformer(**options)))
    write(name, model, {"model_type": "flash_pytorch", "architectures": ["FLASHTransformer"], **options}, 61)
