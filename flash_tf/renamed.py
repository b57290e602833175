"""Names that changed. Configs, checkpoints and saved models with the old ones stay readable."""

from collections.abc import Mapping
from typing import Any

MIXERS = {
    "mixed_chunk": "flash",
    "weighted_chunks": "flash_weighted",
    "quadratic": "gau",
    "mixed_chunk_self_attention": "mc_tfm",
    "gated_linear_attention": "gla",
}
OPTIONS = {"tile": "block_size"}  # of mixers
VARIABLES = {  # today's ending of a variable's path -> the ending in old checkpoints
    f"{kind}_lin_{head}": f"{kind}_{head}_lin" for kind in ("gamma", "beta") for head in "qk"
}


def old_variable(path: str) -> str:
    """The path that a variable has in old checkpoints."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + VARIABLES.get(name, name)


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """A mixer's options by today's names."""
    return {OPTIONS.get(name, name): value for name, value in given.items()}


def mixer(given: Any) -> Any:
    """`{"type": name, **options}` of a mixer, or a list of them, by today's names; anything else as it is."""
    if isinstance(given, list | tuple):
        return [mixer(one) for one in given]
    if not isinstance(given, Mapping):
        return given
    current = options(given)
    if isinstance(current.get("type"), str):
        current["type"] = MIXERS.get(current["type"], current["type"])
    if "mixers" in current:  # side by side in one block
        current["mixers"] = mixer(current["mixers"])
    return current
