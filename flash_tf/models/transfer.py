"""The weights of one model as the start of another."""

import re
from typing import NamedTuple

import keras

from flash_tf.layers.mixers.parallel import Parallel

OF_BLOCKS = r"(mixer|feedforward)_\d+/|positions/"  # weights, by their path below the model's name
MOST_NAMES = 6  # in a line
OF_THE_FUNCTION = ("norm", "norm_epsilon", "post_norm", "embedding_norm", "position_embedding")  # options of models
# Options of layers that leave the function as it is, the model's kind, and mixers that are compared one by one.
UNSAID = {"name", "dtype", "trainable", "implementation", "norm_implementation", "bias_start", "causal", "mixers"}


class Transfer(NamedTuple):
    """What became of each weight, by its path below the model's name.

    Attributes:
      loaded: Weights that both models have.
      fresh: Weights of the new model alone, which stay as they were.
      left: Weights of the source alone.
      options: Options of the models, and of their layers of one type, that differ, with the values of the source and of
        the new model. The new model computes another function with the same weights.
    """

    loaded: list[str]
    fresh: list[str]
    left: list[str]
    options: dict[str, tuple[object, object]]

    def __str__(self):
        fresh = f"; not loaded: {_listed(self.fresh)}" if self.fresh else ""
        left = f"; left behind: {_listed(self.left)}" if self.left else ""
        differ = [f"{name} ({theirs} there, {ours} here)" for name, (theirs, ours) in self.options.items()]
        options = f"; the models differ in {', '.join(differ)}" if differ else ""
        return f"{len(self.loaded)} weights loaded{fresh}{left}{options}"


def transfer(source: keras.Model, model: keras.Model) -> Transfer:
    """Assigns the weights of `source` to `model`. They may differ in their heads.

    If their mixers are of other types, as softmax and linear attention, blocks and position embeddings take what fits
    by name and shape, and the rest stays fresh.

    Args:
      source: A built language model or classifier.
      model: Another one of the same stack, built.

    Raises:
      ValueError: The stacks differ. The message names a weight, and what fits. Nothing was assigned.
    """
    theirs, ours = ({v.path.partition("/")[2]: v for v in one.weights} for one in (source, model))
    kinds = [{type(mixer) for mixer in one.mixers} for one in (source, model)]
    free = re.compile(OF_BLOCKS if kinds[0] != kinds[1] else r"(?!)")  # the latter matches no name
    may_differ = lambda name: free.match(name) or _of_head(name, model)  # noqa: E731
    common = [n for n in ours if n in theirs and (ours[n].shape == theirs[n].shape or not may_differ(n))]
    fresh, left = ([name for name in one if name not in common] for one in (ours, theirs))
    done = Transfer(common, fresh, left, _options(source, model))
    start = f"a {type(model).__name__} cannot start from this {type(source).__name__}"
    if unfit := [name for name in done.loaded if ours[name].shape != theirs[name].shape]:
        shapes = f"needs shape {tuple(ours[unfit[0]].shape)}, got {tuple(theirs[unfit[0]].shape)}"
        more = f", and {len(unfit) - 1} more weights do not fit" if len(unfit) > 1 else ""
        fit = _listed([name for name in done.loaded if name not in unfit]) or "nothing"
        raise ValueError(f"{start}: {unfit[0]} {shapes}{more}; what fits: {fit}")
    if lacking := _of_stack(done.fresh, model, free):
        raise ValueError(f"{start}: it needs {lacking}, which is not there")
    if more := _of_stack(done.left, source, free):
        raise ValueError(f"{start}: it has no place for {more}")
    for name in done.loaded:
        ours[name].assign(keras.ops.copy(theirs[name]))  # on JAX, fit would take the other model's array with its own
    return done


def _options(source, model):
    """The options of function in which models and their layers of one type differ, each with its values."""
    values = {name: (getattr(source, name), getattr(model, name)) for name in OF_THE_FUNCTION}
    found = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    for theirs, ours in zip(_layers(source), _layers(model), strict=False):
        if type(theirs) is type(ours):
            configs = theirs.get_config(), ours.get_config()
            names = [name for name in configs[1] if name not in UNSAID and configs[0][name] != configs[1][name]]
            found |= {name: (configs[0][name], configs[1][name]) for name in names}
    return found


def _layers(model):
    """The mixers and feed-forward layers of a model, in their order."""
    inside = [block.inner for block in model.blocks]
    return [part for one in inside for part in (one.parts if isinstance(one, Parallel) else [one])]


def _listed(names):
    """Names for a line, with one in place of the same weight of each block, and of a layer's if there are many."""
    short = dict.fromkeys(re.sub(r"_\d+/", "_*/", name) for name in names)
    if len(short) > MOST_NAMES:
        short = dict.fromkeys(re.sub(r"^([^/]+/[^/]+)/.*", r"\1/*", name) for name in short)
    return ", ".join(short)


def _of_head(name, model):
    return bool({name, name.partition("/")[0]} & set(model.HEAD))


def _of_stack(names, model, free):
    """Names the first of some weights outside a model's head, and counts the others; empty if there is none."""
    stack = [n for n in names if not _of_head(n, model) and not free.match(n)]
    return " and ".join([*stack[:1], *([f"{len(stack) - 1} more"] if len(stack) > 1 else [])])
