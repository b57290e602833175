"""Traces training and decoding to HLO, with the same functions that `flash-tf train` calls."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from flash_tf import model_stats
from flash_tf.compiling import values
from flash_tf.compiling.manifest import Argument
from flash_tf.config import Config
from flash_tf.generation import greedy
from flash_tf.training import modelling
from flash_tf.training.objective import OBJECTIVES
from flash_tf.training.optimizer import AdamW
from flash_tf.training.preflight import check_kernels
from flash_tf.training.trainer import TrainStep

STEP = (Argument(name="step", role="step", shape=(), dtype="int64"),)
RATE = (Argument(name="rate", role="rate", shape=(), dtype="float32"),)
ZERO = {"kind": "constant", "value": 0.0}


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """The ids that an objective needs, for an experiment without a tokenizer."""

    vocabulary_size: int
    pad_id: int = 0  # as in every tokenizer that `Tokenizer.train` makes; so are the other ids
    eos_id: int = 1
    mask_id: int = 3
    cls_id: int = 4
    starts_word: None = None

    @property
    def special_ids(self) -> tuple[int, int, int, int]:
        return self.pad_id, self.eos_id, self.mask_id, self.cls_id


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced program.

    Attributes:
      serialized: HLO.
      stablehlo: The same program as text; None if the caller did not ask for it.
      arguments: The arguments, in order.
      replaces: Number of a result -> number of the argument whose next value it is.
    """

    serialized: bytes
    stablehlo: str | None
    arguments: tuple[Argument, ...]
    replaces: dict[int, int]


class Experiment:
    """A config's model, objective and step on one replica, which takes the whole global batch.

    Args:
      config: The experiment, with its masking written out; see `artifact.resolve`.
      tokenizer: A `Tokenizer`, or `TokenIds`.

    Attributes:
      model: The model with its weights.
      objective: The training objective.
      optimizer: The optimizer of the model's weights.

    Raises:
      ValueError: The config needs fused kernels that cannot run here.
    """

    def __init__(self, config: Config, tokenizer):
        self.config, self.tokenizer, initializers = config, tokenizer, _initializers(config)
        self.model = modelling.make_model(config)
        check_kernels(config, self.model)
        self.objective = OBJECTIVES[config.model["type"]](config, tokenizer)
        trained = {v.path: v.value for v in self.model.trainable_variables}
        self.optimizer = AdamW(config.optimizer, config.train.steps, trained)
        self._step = TrainStep(self.model, self.objective, self.optimizer, config)
        weights = {v.path: v.value for v in self.model.weights}  # some are not trainable
        self._held = [(v, _held(v, path, "weight", initializers[path])) for path, v in weights.items()]
        self._held += [(v, _held(v, path, "slot", ZERO)) for path, v in self.optimizer.state().items()]
        seeds = enumerate(state.value for state in self._step.seeds)
        self._held += [(v, _held(v, f"seed/{i}", "seed", ZERO)) for i, v in seeds]

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(v.shape.num_elements() for v in self.optimizer.variables.values())

    @property
    def capacity(self) -> int | None:
        """The most tokens of a decoded text; None if neither its state nor its longest text is bounded."""
        bounded = self.model.grows or self.model.longest is not None
        return self.config.data.sequence_length if bounded else None

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers. Masks are hashes and do not count."""
        return bool(self._step.seeds)

    def batch(self, batch_size: int, length: int) -> tuple[Argument, ...]:
        """The arguments that make a batch of `batch_size` sequences of `length` tokens."""
        shapes = {"tokens": (batch_size, length + self.objective.overlap)}
        if self.config.data.packing == "documents":
            shapes["segment_ids"] = shapes["tokens"]
        if self.config.masking is not None:
            shapes["window"] = (batch_size, 2)
        return tuple(Argument(name=n, role="batch", shape=s, dtype="int32") for n, s in shapes.items())

    def train_step(self, batch: dict[str, tf.Tensor], step: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Runs one step. Returns its record, float32 `[COLUMNS]`."""
        return self._step(batch, step, rate)

    def trace_step(self, batch_size: int, length: int, stablehlo: bool = False) -> Traced:
        """Traces the step, with clipping and update, for a batch of this size; with `stablehlo` as text too."""
        return self._trace(*self._flat_step(batch_size, length), stablehlo)

    def compiled_step(self, batch_size: int, length: int) -> bytes:
        """Compiles the step of `trace_step` for this machine's device. Returns a serialized `HloProto`."""
        step, arguments = self._flat_step(batch_size, length)
        compiled = tf.function(step, jit_compile=True, autograph=False)
        ir = compiled.experimental_get_compiler_ir(*(tf.TensorSpec(a.shape, a.dtype) for a in arguments))
        return ir(stage="optimized_hlo_proto_serialized")

    def _flat_step(self, batch_size, length):
        """The step as a function of tensors, and its arguments."""
        batch = self.batch(batch_size, length)
        names = [argument.name for argument in batch]
        step = lambda *given: self.train_step(dict(zip(names, given[:-2], strict=True)), *given[-2:])  # noqa: E731
        return step, batch + STEP + RATE

    def trace_decode(self, batch_size: int, steps: int) -> Traced:
        """Traces greedy decoding of `steps` tokens; see `flash_tf.generation.greedy`.

        The arguments are the last token of each text, int32 `[batch_size]`, the state by name, and the weights. The
        results are the chosen tokens, int32 `[batch_size, steps]`, and the state, each entry in its argument's buffer.
        """
        capacity = self.capacity if self.model.grows else None
        empty = tf.function(lambda: self.model.initial_state(batch_size, capacity), autograph=False)
        state = sorted(empty.get_concrete_function().structured_outputs.items())  # traced only: it may be large
        arguments = [Argument(name="token", role="token", shape=(batch_size,), dtype="int32")]
        arguments += [_held(x, name, "state", ZERO) for name, x in state]

        def decode(token, *given):
            held = {name: x for (name, _), x in zip(state, given, strict=True)}
            chosen, held = greedy(self.model, token, held, steps)
            return chosen, *(held[name] for name, _ in state)

        traced = self._trace(decode, tuple(arguments), False)
        replaces = {i: i for i in range(1, len(arguments))}
        return dataclasses.replace(traced, serialized=_in_place(traced.serialized, replaces), replaces=replaces)

    def assign_initial_values(self) -> None:
        """Gives every variable the value that a runner of the programs starts from, one variable at a time."""
        for variable, argument in self._held:
            value = values.initial(argument.name, argument.shape, argument.initializer, self.config.train.seed)
            variable.assign(tf.cast(value, variable.dtype))

    def _trace(self, function: Callable[..., tf.Tensor], arguments: tuple[Argument, ...], stablehlo: bool) -> Traced:
        compiled = tf.function(function, jit_compile=True, autograph=False)
        specs = [tf.TensorSpec(argument.shape, argument.dtype, argument.name) for argument in arguments]
        held = {id(variable.handle): argument for variable, argument in self._held}
        captured = compiled.get_concrete_function(*specs).captured_inputs
        if unknown := [handle for handle in captured if id(handle) not in held]:
            raise ValueError(f"the program reads {unknown[0]}, which is no weight, slot or seed of the model")
        ir = compiled.experimental_get_compiler_ir(*specs)
        serialized = ir(stage="hlo_serialized")
        aliases = hlo_pb2.HloModuleProto.FromString(serialized).input_output_alias.entries
        return Traced(
            serialized=serialized,
            stablehlo=ir(stage="stablehlo") if stablehlo else None,
            arguments=arguments + tuple(held[id(handle)] for handle in captured),
            replaces={alias.output_shape_index[0]: alias.parameter_number for alias in aliases},
        )


def _held(variable, name, role, initializer):
    """A variable, or an entry of a state, as an argument."""
    shape, dtype = tuple(variable.shape.as_list()), variable.dtype.name
    return Argument(name=name, role=role, shape=shape, dtype=dtype, initializer=initializer)


def _in_place(serialized, replaces):
    """Lets a decoder's results take over the memory of arguments. A trace arranges this for variables alone."""
    module = hlo_pb2.HloModuleProto.FromString(serialized)
    for result, argument in replaces.items():
        module.input_output_alias.entries.add(
            output_shape_index=[result], parameter_number=argument, kind=hlo_pb2.MAY_ALIAS
        )
    # A scatter in decoding writes each row of the state once. A trace does not say so. With this flag a GPU uses plain
    # stores instead of atomic ones.
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "scatter":
                instruction.unique_indices = True
    return module.SerializeToString()


def _initializers(config: Config) -> dict[str, dict]:
    """How each weight begins. A Keras variable with a value has forgotten it, so we ask a model without values."""
    with model_stats.without_weights():
        found = [(v.path, v.shape, v._initializer) for v in modelling.make_model(config).weights]
    return {path: _plain(path, shape, initializer) for path, shape, initializer in found}


def _plain(path: str, shape: tuple[int, ...], initializer: Callable) -> dict:
    """An initializer as plain values. A layer's own function draws nothing, so its numbers stand for it.

    Raises:
      ValueError: It is an initializer of Keras that an artifact does not know.
    """
    kinds = keras.initializers
    if type(initializer) is kinds.RandomNormal:
        return {"kind": "normal", "mean": float(initializer.mean), "stddev": float(initializer.stddev)}
    if type(initializer) is kinds.RandomUniform:
        return {"kind": "uniform", "low": float(initializer.minval), "high": float(initializer.maxval)}
    constants = {kinds.Zeros: 0.0, kinds.Ones: 1.0}
    if type(initializer) in constants:
        return {"kind": "constant", "value": constants[type(initializer)]}
    if type(initializer) is kinds.Constant and np.ndim(initializer.value) == 0:
        return {"kind": "constant", "value": float(initializer.value)}
    if not isinstance(initializer, kinds.Initializer):
        return values.given(np.asarray(initializer(shape, "float32")))
    known = "RandomNormal, RandomUniform and constants"
    raise ValueError(f"{path} needs an initializer that an artifact knows ({known}), got {type(initializer).__name__}")
