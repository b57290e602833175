"""The weights of one model as the start of another."""

from typing import NamedTuple

import keras


class Transfer(NamedTuple):
    """What became of each weight, by its path below the model's name.

    Attributes:
      loaded: Weights that both models have.
      fresh: Weights of the new model alone, which stay as they were.
      left: Weights of the source alone.
    """

    loaded: list[str]
    fresh: list[str]
    left: list[str]

    def __str__(self):
        fresh = f"; not loaded: {', '.join(self.fresh)}" if self.fresh else ""
        left = f"; left behind: {', '.join(self.left)}" if self.left else ""
        return f"{len(self.loaded)} weights loaded{fresh}{left}"


def transfer(source: keras.Model, model: keras.Model) -> Transfer:
    """Assigns the weights of `source` to `model`. They may differ in their heads alone.

    Args:
      source: A built language model or classifier.
      model: Another one of the same stack, built.

    Raises:
      ValueError: The stacks differ. The message names a weight. Nothing was assigned.
    """
    theirs, ours = ({v.path.partition("/")[2]: v for v in one.weights} for one in (source, model))
    done = Transfer(
        loaded=[name for name in ours if name in theirs],
        fresh=[name for name in ours if name not in theirs],
        left=[name for name in theirs if name not in ours],
    )
    start = f"a {type(model).__name__} cannot start from this {type(source).__name__}"
    for name in done.loaded:
        if ours[name].shape != theirs[name].shape:
            shapes = f"needs shape {tuple(ours[name].shape)}, got {tuple(theirs[name].shape)}"
            raise ValueError(f"{start}: {name} {shapes}")
    if lacking := _of_stack(done.fresh, model):
        raise ValueError(f"{start}: it needs {lacking}, which is not there")
    if more := _of_stack(done.left, source):
        raise ValueError(f"{start}: it has no place for {more}")
    for name in done.loaded:
        ours[name].assign(theirs[name])
    return done


def _of_stack(names, model):
    """Names the first of some weights outside a model's head, and counts the others; empty if there is none."""
    stack = [name for name in names if not {name, name.partition("/")[0]} & set(model.HEAD)]
    return " and ".join([*stack[:1], *([f"{len(stack) - 1} more"] if len(stack) > 1 else [])])
