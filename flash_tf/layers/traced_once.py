"""Layers that are alike, traced once by TensorFlow, and called.

Tracing a program is Python, operator by operator, and took most of the time before the first result of a deep model.
Here the first layers are traced as two functions, forward and backward, which every layer calls with its own weights.
XLA compiles what the calls stand for, so the program is the same.

The two functions TensorFlow makes by itself would not do. Their backward one takes shapes and other constants from the
forward one, where XLA does not know them when it compiles. Here each function has its own, and what does not depend on
the layer is computed once for all.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

FEW = 2  # layers that are traced as soon as called
NAME = "gradient_tape"  # of what gives gradients, as TensorFlow names it elsewhere
PLAIN = (bool, int, float, str, type(None))
SHAPES = {"Shape", "ShapeN", "Size", "Rank"}  # operators whose results XLA knows when it compiles
_FORWARD_ONLY = contextvars.ContextVar("forward_only", default=False)
_BY_LAYER = contextvars.ContextVar("by_layer", default=False)


@contextlib.contextmanager
def forward_only(by_layer: bool = False) -> Iterator[None]:
    """Says that no gradient is taken through the programs that are traced inside: they need no backward pass.

    Args:
      by_layer: Whether XLA compiles every layer as a program of its own, and layers that are alike once. The programs
        around them must be TensorFlow's. A program that XLA compiles as a whole has a copy of each layer: it runs
        faster, and takes far longer to compile.
    """
    before = _FORWARD_ONLY.set(True), _BY_LAYER.set(by_layer)
    try:
        yield
    finally:
        _FORWARD_ONLY.reset(before[0])
        _BY_LAYER.reset(before[1])


def function_attributes() -> dict[str, bool]:
    """For `experimental_attributes` of a `tf.function` that the program being traced calls often.

    XLA lowers it once for all calls in a loop. Without XLA, operators of one program run a little faster.
    """
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    return {"_noinline": True} if control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()) else {}


def apart(function: Callable) -> Callable:
    """The function as a program of its own, which XLA compiles, within `forward_only(by_layer=True)`; else itself.

    Each operator that TensorFlow runs by itself on a GPU loads a kernel at its first use, which takes up to half a
    second.
    """
    if not _BY_LAYER.get():
        return function
    import tensorflow as tf

    return tf.function(function, autograph=False, jit_compile=True)


class TracedOnce:
    """Calls a function of layers that are alike. In a program of TensorFlow it traces the first ones alone.

    It traces each where that would not do: with JAX, where neither a gradient tape is active nor `forward_only`, for
    layers that are not like the first ones, for tensors with Keras' mask, under a `tf.autodiff.ForwardAccumulator`,
    where a layer adds a loss, and where a gradient would go to variables that are not the layers' own.

    Args:
      call: `(layers, *arguments) -> result`, of nested tensors and None.
      of: The layers of each call to come, built.
    """

    def __init__(self, call: Callable, of: Sequence[Sequence[keras.layers.Layer]]):
        self._call, self._first, self._functions = call, of[0], {}
        self._alike = len(of) > FEW and _is_traced()
        self._kind = _kinds(of[0]) if self._alike else None

    def __call__(self, layers: Sequence[keras.layers.Layer], *arguments: Any) -> Any:
        if not self._alike or _kinds(layers) != self._kind:
            return self._alone(layers, *arguments)
        import tensorflow as tf

        given = [v.value for v in _variables(layers)], *arguments
        given = tf.nest.map_structure(lambda x: x if x is None else tf.convert_to_tensor(x), given)
        if _carry_more(arguments, given):
            return self._alone(layers, *arguments)
        like = str(tf.nest.map_structure(lambda x: x if x is None else tf.TensorSpec(x.shape, x.dtype), given))
        if like not in self._functions:
            self._functions[like] = _Function(self._from_values, given, with_gradient=not _FORWARD_ONLY.get())
            self._alike = self._alike and self._functions[like].is_whole
        if not self._alike:
            return self._alone(layers, *arguments)
        result, changed = self._functions[like](given)
        for v, value in zip(_variables(layers), changed, strict=True):
            if value is not None:
                v.assign(value)
        return result

    def _alone(self, layers, *arguments):
        """The result of layers that are traced for themselves."""
        return apart(functools.partial(self._call, layers))(*arguments)

    def _from_values(self, values, *arguments):
        """The function of the first layers with the values of others, and what it changes of these values."""
        variables = _variables(self._first)
        with keras.StatelessScope(collect_losses=True, initialize_variables=False) as scope:
            for update in zip(variables, values, strict=True):
                scope.add_update(update)  # keeps the dtype of a value that is cast already
            result = self._call(self._first, *arguments)
        self._alike = self._alike and not scope.losses
        after = [scope.get_current_value(v) for v in variables]
        return result, [None if x is value else x for x, value in zip(after, values, strict=True)]


class _Function:
    """A function of nested tensors and None, in parts: what all calls have in common, forward, and backward.

    Args:
      function: The function.
      arguments: An example, with tensors or variables.
      with_gradient: Whether calls have a gradient.

    Attributes:
      is_whole: Whether the gradient goes to nothing but arguments and captured tensors.
    """

    def __init__(self, function: Callable, arguments: Any, with_gradient: bool):
        import tensorflow as tf
        from tensorflow.python.framework.func_graph import FuncGraph

        placeholder = lambda x: x if x is None else tf.compat.v1.placeholder(x.dtype, x.shape)  # noqa: E731
        graph = FuncGraph("traced_once")
        graph._add_control_dependencies = True  # so that a branch of `tf.cond` keeps what it prints and asserts
        with graph.as_default():
            given = tf.nest.map_structure(placeholder, arguments)
            self._result = function(*given)
            self._outputs = _tensors(self._result)
            forward = {op.name for op in graph.get_operations()}
            inputs = [*_tensors(given), *(inner for _, inner in graph.captures)]
            numbers = _floats(self._outputs) if with_gradient else []
            self._output_gradients = [placeholder(y) for y in numbers]
            self._input_gradients = _gradients(numbers, inputs, self._output_gradients) if numbers else []
        self._function, self._arguments, self._common_in = function, arguments, {}
        self._captured = [outer for outer, _ in graph.captures]
        self._inputs = [*_tensors(given), *(inner for _, inner in graph.captures)]
        later = self._inputs[len(self._input_gradients) :]  # captured by the gradient alone
        self._input_gradients += [None for _ in later]
        self.is_whole = not (self._output_gradients and any(x.dtype == tf.resource for x in self._captured))
        own = [*_tensors(given), *self._output_gradients]
        self._common, self._forward, self._backward = _parts(graph, own, forward, self._outputs, self._input_gradients)

    def __call__(self, arguments: Any) -> Any:
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        given = [_in(graph, x) for x in (*_tensors(arguments), *self._captured)]
        run = tf.custom_gradient(self._run) if self._output_gradients else lambda *given: self._run(*given)[0]
        return _filled(self._result, run(*given))

    def _run(self, *given):
        """The outputs, and the function that gives the gradient."""
        from tensorflow.python.eager import record

        known = {**dict(zip(_names(self._inputs), given, strict=True)), **self._in_common()}
        known |= self._forward(known)

        def gradient(*output_gradients):
            if record.could_possibly_record():  # the gradient may itself be differentiated
                return self._traced(given, output_gradients)
            found = dict(zip(_names(self._output_gradients), _floats(output_gradients), strict=True))
            found = {**known, **found, **self._in_common()}
            found |= self._backward(found)
            return [x if x is None else found[x.name] for x in self._input_gradients]

        return [known[name] for name in _names(self._outputs)], gradient

    def _in_common(self):
        """What all calls have in common, in the graph that is being traced."""
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        if graph not in self._common_in:
            captured = self._inputs[len(self._inputs) - len(self._captured) :]
            self._common_in[graph] = self._common(dict(zip(_names(captured), self._captured, strict=True)))
        return self._common_in[graph]

    def _traced(self, given, output_gradients):
        """The gradient, traced once more."""
        import tensorflow as tf

        sources = [*given[: len(given) - len(self._captured)], *self._captured]
        with tf.GradientTape() as tape:
            tape.watch(_floats(sources))
            outputs = _tensors(self._function(*_filled(self._arguments, sources)))
        return tape.gradient(outputs, sources, output_gradients)


class _Part:
    """A part of a graph as a function, which TensorFlow and XLA call.

    Args:
      graph: The graph.
      library: A `GraphDef` with the functions that its operators call.
      names: The names of the part's operators.
      results: The names of the tensors that the function gives.

    Attributes:
      reads: The names of the tensors that the function takes.
    """

    def __init__(self, graph: Any, library: Any, names: set[str], results: list[str]):
        import tensorflow as tf

        self._graph, self._library, self._results = graph, library, results
        self._ops = [op for op in graph.get_operations() if op.name in names]
        self.reads = sorted({x.name for op in self._ops for x in op.inputs if x.op.name not in names})
        given = [graph.get_tensor_by_name(name) for name in self.reads]
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in given]
        options = {"jit_compile": True} if _BY_LAYER.get() else {"experimental_attributes": function_attributes()}
        function = tf.function(self._copied, autograph=False, **options)
        self._function = function.get_concrete_function(*specs) if results else None

    def __call__(self, known: dict[str, Any]) -> dict[str, Any]:
        """The results, by name, in the graph that is being traced.

        Args:
          known: The tensors that the function takes, by name, and others.
        """
        import tensorflow as tf
        from tensorflow.python.eager import record

        if self._function is None:
            return {}
        graph = tf.compat.v1.get_default_graph()
        with record.stop_recording():  # a gradient by the operators would not know the functions of custom ones
            found = self._function(*(_in(graph, known[name]) for name in self.reads))
        return dict(zip(self._results, found, strict=True))

    def _copied(self, *given):
        """The results of a copy of the operators."""
        import tensorflow as tf

        own, part = {op.name for op in self._ops}, tf.compat.v1.GraphDef()
        part.CopyFrom(self._library)
        for op in self._ops:
            node = part.node.add()
            node.CopyFrom(op.node_def)
            node.attr.pop("_class", None)  # names of neighbours, on whatever device
            node.attr.pop("_gradient_op_type", None)  # of a custom gradient, which nobody takes through the copy
            inputs = [name for name in node.input if not name.startswith("^") or name[1:] in own]
            del node.input[:]
            node.input.extend(inputs)
        inputs = dict(zip(self.reads, given, strict=True))
        copies = tf.graph_util.import_graph_def(part, inputs, self._results, name="")
        for name, copy in zip(self._results, copies, strict=True):
            copy.set_shape(self._graph.get_tensor_by_name(name).shape)
        return copies


def _parts(graph, own, forward, outputs, gradients):
    """Three parts of a graph: what all calls have in common, its function, and the function's gradient.

    XLA must know some tensors when it compiles, as shapes. They may not be arguments, so each part has its own.

    Args:
      graph: The graph, whose inputs are placeholders.
      own: The inputs that differ from call to call.
      forward: The names of the function's operators. A gradient may have given them further inputs.
      outputs: What the function gives.
      gradients: What its gradient gives, and None.
    """
    library, ops = graph.as_graph_def(), {op.name: op for op in graph.get_operations()}
    del library.node[:]
    inputs = {op.name for op in ops.values() if op.type == "Placeholder"}
    stateful = {op.name for op in ops.values() if op.op_def.is_stateful}
    outputs, gradients = _names(outputs), _names(x for x in gradients if x is not None)
    named = lambda names: {name.split(":")[0] for name in names}  # noqa: E731
    follow = lambda names, following: _reached([ops[name] for name in names], following)  # noqa: E731

    computed = follow(inputs | stateful, lambda op: [] if op.type in SHAPES else _users(op))
    static = {name for name in ops if name not in computed or ops[name].type in SHAPES}
    forward = follow(forward, _sources)
    needed = forward | follow(named(gradients), _sources)
    common = needed - static - inputs - follow(named(x.name for x in own) | stateful, _users)
    forward, backward = (some - static - inputs - common for some in (forward, needed - forward))

    def part(names, results):
        results = list(dict.fromkeys(results))
        names = names | named(results)
        names |= follow(names, lambda op: [x for x in _sources(op) if x.name in static])
        return _Part(graph, library, names, results)

    of = lambda wanted, names: [name for name in wanted if name.split(":")[0] in names]  # noqa: E731
    of_backward = part(backward, of(gradients, backward | static))
    kept = of([*of_backward.reads, *gradients], forward)
    of_forward = part(forward, [*of(outputs, forward | static), *kept])
    read = [*of_forward.reads, *of_backward.reads, *outputs, *gradients]
    return part(common, of(read, common)), of_forward, of_backward


def _users(op):
    return [*(user for x in op.outputs for user in x.consumers()), *op._control_outputs]


def _sources(op):
    return [*(x.op for x in op.inputs), *op.control_inputs]


def _reached(ops, following):
    """The names of operators and of all that follow, by `op -> ops`."""
    found, left = {op.name for op in ops}, list(ops)
    while left:
        new = {op.name: op for op in following(left.pop()) if op.name not in found}
        found |= set(new)
        left.extend(new.values())
    return found


def _gradients(outputs, inputs, output_gradients):
    """The gradients for inputs, None for a tensor that is not a number or does not matter."""
    import tensorflow as tf

    sources = _floats(inputs)
    gradients = tf.gradients(outputs, sources, output_gradients, NAME)
    found = {x.ref(): g for x, g in zip(sources, gradients, strict=True)}
    gradients = [found.get(x.ref()) for x in inputs]
    return [g if g is None else tf.convert_to_tensor(g) for g in gradients]


def _tensors(nested):
    import tensorflow as tf

    return [x for x in tf.nest.flatten(nested) if x is not None]


def _floats(tensors):
    return [x for x in tensors if x.dtype.is_floating or x.dtype.is_complex]


def _names(tensors):
    return [x.name for x in tensors]


def _filled(nested, tensors):
    """A nested structure with other tensors in place of its own."""
    import tensorflow as tf

    left = iter(tensors)
    return tf.nest.map_structure(lambda x: x if x is None else next(left), nested)


def _in(graph, x):
    """A tensor or variable as a tensor of a graph."""
    import tensorflow as tf

    x = tf.convert_to_tensor(x)
    return x if getattr(x, "graph", None) is graph else graph.capture(x)


def _is_traced():
    """Whether TensorFlow traces a program that has no gradients, or takes them by a tape."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf
    from tensorflow.python.eager import record

    return tf.inside_function() and (_FORWARD_ONLY.get() or record.could_possibly_record())


def _carry_more(arguments, given):
    """Whether a mask of Keras or a derivative in forward mode comes with tensors."""
    import tensorflow as tf
    from tensorflow.python.eager import forwardprop_util

    masked = any(getattr(x, "_keras_mask", None) is not None for x in tf.nest.flatten(arguments))
    return masked or bool(forwardprop_util.pack_tangents(_tensors(given)).tangents)


def _variables(layers):
    return [v for layer in layers for v in layer.variables]


def _kinds(layers):
    """What decides the operators of layers."""
    parts = [part for layer in layers for part in layer._flatten_layers()]
    own = [(type(part), part.compute_dtype, part.trainable, _options(part)) for part in parts]
    return own, [(v.shape, v.dtype) for v in _variables(layers)]


def _options(layer):
    """The options that a layer has as numbers or names, which people may set later, and its activation."""
    own = {name: value for name, value in vars(layer).items() if name != "name" and not name.startswith("_")}
    return {name: value for name, value in own.items() if isinstance(value, PLAIN) or name == "activation"}
