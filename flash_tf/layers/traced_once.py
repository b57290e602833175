"""Layers that are alike, traced once by TensorFlow.

Tracing a program is Python, operator by operator, and takes most of the time before the first result of a deep model.
Copying a graph is not Python. A copy has the operators that tracing would give, so the program is the same. But it has
no gradient where TensorFlow keeps an operator's gradient as a Python function.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

FEW = 2  # layers that are traced as soon as copied
_FORWARD_ONLY = contextvars.ContextVar("forward_only", default=False)


@contextlib.contextmanager
def forward_only() -> Iterator[None]:
    """Says that no gradient is taken through the programs that are traced inside, so that they may have copies."""
    before = _FORWARD_ONLY.set(True)
    try:
        yield
    finally:
        _FORWARD_ONLY.reset(before)


class TracedOnce:
    """Calls a function of layers that are alike. In a program of TensorFlow it traces the first ones alone.

    It calls the function each time where a copy would not do: with JAX, outside `forward_only`, where the function
    changes a variable, for layers that are not like the first ones, and for tensors with Keras' mask.

    Args:
      call: `(layers, *arguments) -> result`, of nested tensors and None.
      of: The layers of each call to come, built.
    """

    def __init__(self, call: Callable, of: Sequence[Sequence[keras.layers.Layer]]):
        self._call, self._first, self._graphs = call, of[0], {}
        self._copies = len(of) > FEW and _is_traced()

    def __call__(self, layers: Sequence[keras.layers.Layer], *arguments: Any) -> Any:
        if not self._copies or _kinds(layers) != _kinds(self._first):
            return self._call(layers, *arguments)
        import tensorflow as tf

        if any(getattr(x, "_keras_mask", None) is not None for x in tf.nest.flatten(arguments)):
            return self._call(layers, *arguments)
        given = [v.value for v in _variables(layers)], *arguments
        like = tf.nest.map_structure(lambda x: x if x is None else tf.TensorSpec(x.shape, x.dtype), given)
        if str(like) not in self._graphs:
            self._graphs[str(like)] = _Graph(self._from_values, *given)
        return self._graphs[str(like)](*given) if self._copies else self._call(layers, *arguments)

    def _from_values(self, values, *arguments):
        """The function of the first layers with the values of others."""
        variables = _variables(self._first)
        with keras.StatelessScope(initialize_variables=False) as scope:
            for update in zip(variables, values, strict=True):
                scope.add_update(update)  # keeps the dtype of a value that is cast already
            result = self._call(self._first, *arguments)
        self._copies = all(scope.get_current_value(v) is x for v, x in zip(variables, values, strict=True))
        return result


class _Graph:
    """The operators of a function, which each call copies into the graph that is being traced.

    Args:
      function: Of nested tensors and None.
      *arguments: An example, with tensors or variables.
    """

    def __init__(self, function: Callable, *arguments: Any):
        import tensorflow as tf
        from tensorflow.python.framework.func_graph import FuncGraph

        placeholder = lambda x: x if x is None else tf.compat.v1.placeholder(x.dtype, x.shape)  # noqa: E731
        graph = FuncGraph("traced_once")
        with graph.as_default():
            inputs = tf.nest.map_structure(placeholder, arguments)
            self._result = function(*inputs)
        self._captured = [outer for outer, _ in graph.captures]
        self._inputs = [*tf.nest.flatten(inputs), *(inner for _, inner in graph.captures)]
        self._nodes = graph.as_graph_def()
        read = {name.split(":")[0] for node in self._nodes.node for name in node.input}
        self._read = {i: x.op.name for i, x in enumerate(self._inputs) if x is not None and x.op.name in read}
        for node in [node for node in self._nodes.node if node.op == "Placeholder"]:
            self._nodes.node.remove(node)

    def __call__(self, *arguments: Any) -> Any:
        import tensorflow as tf

        given, graph = [*tf.nest.flatten(arguments), *self._captured], tf.compat.v1.get_default_graph()
        found = {x.name: y for x, y in zip(self._inputs, given, strict=True) if x is not None}
        made = [x for x in tf.nest.flatten(self._result) if x.name not in found]
        inputs = {f"{name}:0": _in(graph, given[i]) for i, name in self._read.items()}
        names = [x.name for x in made]
        copies = tf.graph_util.import_graph_def(self._nodes, inputs, names, name="copy")
        for x, copy in zip(made, copies, strict=True):
            copy.set_shape(x.shape)
            found[x.name] = copy
        return tf.nest.map_structure(lambda x: found[x.name], self._result)


def _in(graph, x):
    """A tensor or variable as a tensor of a graph."""
    import tensorflow as tf

    x = tf.convert_to_tensor(x)
    return x if getattr(x, "graph", None) is graph else graph.capture(x)


def _is_traced():
    """Whether TensorFlow traces a program that has no gradients."""
    if not _FORWARD_ONLY.get() or keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return tf.inside_function()


def _variables(layers):
    return [v for layer in layers for v in layer.variables]


def _kinds(layers):
    """What decides the operators of layers with the same options."""
    own = [(type(part), part.compute_dtype) for layer in layers for part in layer._flatten_layers()]
    return own, [(v.shape, v.dtype) for v in _variables(layers)]
