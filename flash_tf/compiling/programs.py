"""Traces decoding, and the training step and its companions, by the very functions that `train` calls, to HLO."""

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
from flash_tf.training.evaluator import Evaluator
from flash_tf.training.objective import OBJECTIVES
from flash_tf.training.optimizer import AdamW
from flash_tf.training.step import TrainStep

STEP = (Argument(name="step", role="step", shape=(), dtype="int64"),)
RATE = (Argument(name="rate", role="rate", shape=(), dtype="float32"),)
ZERO = {"kind": "constant", "value": 0.0}


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """What an objective asks a tokenizer: `Tokenizer` where there is one, this where there is none."""

    vocabulary_size: int
    pad_id: int = 0  # the ids are those of a tokenizer that `Tokenizer.train` makes
    eos_id: int = 1
    mask_id: int = 3
    cls_id: int = 4
    starts_word: None = None

    @property
    def special_ids(self) -> tuple[int, int, int, int]:
        return self.pad_id, self.eos_id, self.mask_id, self.cls_id


@dataclasses.dataclass(frozen=True)
class Traced:
    """A program, and what its arguments are.

    Attributes:
      serialized: HLO.
      stablehlo: The same as text, where it was asked for.
      arguments: In their order.
      replaces: Number of a result -> number of the argument whose next value it is.
    """

    serialized: bytes
    stablehlo: str | None
    arguments: tuple[Argument, ...]
    replaces: dict[int, int]


class Experiment:
    """A config's model, objective and step on one replica, which takes the whole global batch.

    Args:
      config: The experiment, with its masking written out.
      tokenizer: A `Tokenizer`, or `TokenIds`.

    Attributes:
      model: With its weights.
      objective: What the model is asked.
      optimizer: Updates the model's weights.
    """

    def __init__(self, config: Config, tokenizer):
        self.config, self.tokenizer, initialisers = config, tokenizer, _initialisers(config)
        self.model = modelling.make_model(config)
        self.objective = OBJECTIVES[config.model["type"]](config, tokenizer)
        trained = {v.path: v.value for v in self.model.trainable_variables}
        self.optimizer = AdamW(config.optimizer, config.train.steps, trained)
        self._step = TrainStep(self.model, self.objective, self.optimizer, config)
        self._evaluator = Evaluator(
            model=self.model,
            objective=self.objective,
            strategy=tf.distribute.get_strategy(),
            batches=lambda: None,
            counts_words=False,
        )
        weights = {v.path: v.value for v in self.model.weights}  # of which some are not trained
        self._held = [(v, _held(v, path, "weight", initialisers[path])) for path, v in weights.items()]
        self._held += [(v, _held(v, path, "slot", ZERO)) for path, v in self.optimizer.state().items()]
        seeds = enumerate(state.value for state in self._step.seeds)
        self._held += [(v, _held(v, f"seed/{i}", "seed", ZERO)) for i, v in seeds]

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(v.shape.num_elements() for v in self.optimizer.variables.values())

    @property
    def capacity(self) -> int | None:
        """The most tokens of a row that is decoded; None where neither the state nor learned positions bound it."""
        bounded = self.model.grows or self.model.max_length is not None
        return self.config.data.sequence_length if bounded else None

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers beside the masks, which are hashes."""
        return bool(self._step.seeds)

    def batch(self, rows: int, length: int) -> tuple[Argument, ...]:
        """The arguments that are a batch of `rows` sequences of `length` tokens."""
        shapes = {"tokens": (rows, length + self.objective.overlap)}
        if self.config.data.packing == "documents":
            shapes["segment_ids"] = shapes["tokens"]
        if self.config.masking is not None:
            shapes["window"] = (rows, 2)
        return tuple(Argument(name=n, role="batch", shape=s, dtype="int32") for n, s in shapes.items())

    def train_step(self, batch: dict[str, tf.Tensor], step: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """One step; returns its record, float32 `[COLUMNS]`."""
        return self._step(batch, step, rate)

    def trace_step(self, rows: int, length: int, stablehlo: bool = False) -> Traced:
        """The step, clipping and update with it, of a batch of that size; as text too if asked."""
        return self._trace(*self._flat_step(rows, length), stablehlo)

    def compiled_step(self, rows: int, length: int) -> bytes:
        """The step of `trace_step` as XLA compiles it for the device at hand, a serialized `HloProto`."""
        step, arguments = self._flat_step(rows, length)
        compiled = tf.function(step, jit_compile=True, autograph=False)
        ir = compiled.experimental_get_compiler_ir(*(tf.TensorSpec(a.shape, a.dtype) for a in arguments))
        return ir(stage="optimized_hlo_proto_serialized")

    def _flat_step(self, rows, length):
        """The step as a function of tensors, and those."""
        batch = self.batch(rows, length)
        names = [argument.name for argument in batch]
        step = lambda *given: self.train_step(dict(zip(names, given[:-2], strict=True)), *given[-2:])  # noqa: E731
        return step, batch + STEP + RATE

    def trace_forward(self, rows: int, length: int) -> Traced:
        """The evaluator's sums over a batch of that size, float32 `[1 + V]`."""
        batch = self.batch(rows, length)
        names = [argument.name for argument in batch]
        return self._trace(lambda *given: self._evaluator.sums(dict(zip(names, given, strict=True))), batch, False)

    def trace_decode(self, rows: int, steps: int) -> Traced:
        """Greedy decoding of `steps` tokens; see `flash_tf.generation.decode`.

        Its arguments are the last token of each row, int32 `[rows]`, the state by name, and weights; its results the
        chosen tokens, int32 `[rows, steps]`, and the state, each entry in its argument's place.
        """
        capacity = self.capacity if self.model.grows else None
        empty = tf.function(lambda: self.model.initial_state(rows, capacity), autograph=False)
        state = sorted(empty.get_concrete_function().structured_outputs.items())  # traced, not made: it may be large
        arguments = [Argument(name="token", role="token", shape=(rows,), dtype="int32")]
        arguments += [_held(x, name, "state", ZERO) for name, x in state]

        def decode(token, *given):
            held = {name: x for (name, _), x in zip(state, given, strict=True)}
            chosen, held = greedy(self.model, token, held, steps)
            return chosen, *(held[name] for name, _ in state)

        traced = self._trace(decode, tuple(arguments), False)
        replaces = {i: i for i in range(1, len(arguments))}
        return dataclasses.replace(traced, serialized=_in_place(traced.serialized, replaces), replaces=replaces)

    def assign_initial_values(self) -> None:
        """Gives every variable the value that whoever runs the programs starts from; one at a time is held twice."""
        for variable, argument in self._held:
            value = values.initial(argument.name, argument.shape, argument.initialiser, self.config.train.seed)
            variable.assign(tf.cast(value, variable.dtype))

    def _trace(self, function: Callable[..., tf.Tensor], arguments: tuple[Argument, ...], stablehlo: bool) -> Traced:
        compiled = tf.function(function, jit_compile=True, autograph=False)
        specs = [tf.TensorSpec(argument.shape, argument.dtype, argument.name) for argument in arguments]
        held = {id(variable.handle): argument for variable, argument in self._held}
        captured = compiled.get_concrete_function(*specs).captured_inputs
        if unknown := [handle for handle in captured if id(handle) not in held]:
            raise ValueError(f"the program reads {unknown[0]}, which is none of the model's weights, slots and seeds")
        ir = compiled.experimental_get_compiler_ir(*specs)
        serialized = ir(stage="hlo_serialized")
        aliases = hlo_pb2.HloModuleProto.FromString(serialized).input_output_alias.entries
        return Traced(
            serialized=serialized,
            stablehlo=ir(stage="stablehlo") if stablehlo else None,
            arguments=arguments + tuple(held[id(handle)] for handle in captured),
            replaces={alias.output_shape_index[0]: alias.parameter_number for alias in aliases},
        )


def _held(variable, name, role, initialiser):
    """A variable, or a tensor that is handed on like one, as an argument."""
    shape, dtype = tuple(variable.shape.as_list()), variable.dtype.name
    return Argument(name=name, role=role, shape=shape, dtype=dtype, initialiser=initialiser)


def _in_place(serialized, replaces):
    """A decoder whose results take over arguments' memory, which a trace arranges for variables alone."""
    module = hlo_pb2.HloModuleProto.FromString(serialized)
    for result, argument in replaces.items():
        module.input_output_alias.entries.add(
            output_shape_index=[result], parameter_number=argument, kind=hlo_pb2.MAY_ALIAS
        )
    # A scatter of decoding writes each row of the state once. A trace does not say so; a GPU that is told takes plain
    # stores instead of atomic ones.
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "scatter":
                instruction.unique_indices = True
    return module.SerializeToString()


def _initialisers(config: Config) -> dict[str, dict]:
    """How each weight begins. Keras forgets it of a variable that has its value, so a model without any is asked."""
    with model_stats.without_weights():
        found = [(v.path, v.shape, v._initializer) for v in modelling.make_model(config).weights]
    return {path: _plain(path, shape, initialiser) for path, shape, initialiser in found}


def _plain(path: str, shape: tuple[int, ...], initialiser: Callable) -> dict:
    """An initialiser in words; one that is a function of a layer's own, which draws nothing, as its numbers.

    Raises:
      ValueError: When it is another of Keras'.
    """
    kinds = keras.initializers
    if type(initialiser) is kinds.RandomNormal:
        return {"kind": "normal", "mean": float(initialiser.mean), "stddev": float(initialiser.stddev)}
    if type(initialiser) is kinds.RandomUniform:
        return {"kind": "uniform", "low": float(initialiser.minval), "high": float(initialiser.maxval)}
    constants = {kinds.Zeros: 0.0, kinds.Ones: 1.0}
    if type(initialiser) in constants:
        return {"kind": "constant", "value": constants[type(initialiser)]}
    if type(initialiser) is kinds.Constant and np.ndim(initialiser.value) == 0:
        return {"kind": "constant", "value": float(initialiser.value)}
    if not isinstance(initialiser, kinds.Initializer):
        return values.given(np.asarray(initialiser(shape, "float32")))
    known = "RandomNormal, RandomUniform and constants"
    raise ValueError(f"{path} begins by {type(initialiser).__name__}; an artifact knows {known}")
