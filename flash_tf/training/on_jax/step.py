"""The training step on a mesh, as one program; and the first state, which no host holds as a whole."""

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flash_tf.config import Config
from flash_tf.training import update
from flash_tf.training.evaluation import token_sums
from flash_tf.training.on_jax.mesh import DATA, FSDP, ROWS, SEQUENCE, of_rows, of_weight
from kernels_xla.common.sharding import divided

# Sums with one order. XLA then tries no tiles for its own products and takes small ones; cuBLAS chooses well untried.
ONE_ORDER = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}

State = dict[str, jax.Array]  # the weights by their paths, and the optimizer's slots `m/PATH` and `v/PATH`


class Step:
    """One step over a mesh.

    Every index on the axis `data` is a replica: `shard_map` gives it its rows, and it clips and draws as a replica of
    `tf.distribute` does. Inside a replica, XLA divides the work along the other axes.

    Args:
      model: A language model whose weights need not exist; see `model_stats.without_weights`.
      objective: Gives the negative log-likelihoods.
      config: The experiment.
      mesh: The devices.

    Attributes:
      shardings: How each array of the state lies on the mesh.
      rows: How a batch lies on it.
      run: `(state, batch, step) -> (state, record)`, compiled; it takes the memory of the state that it gets. `step` is
        the number of steps done, uint32; `record` is float32 `[COLUMNS]`.
      sums: `(state, batch) -> evaluation.token_sums`, compiled.
      outputs: `(state, batch) -> objective.outputs`, compiled, for tasks.
    """

    def __init__(self, model: keras.Model, objective: Any, config: Config, mesh: Mesh):
        self.model, self.objective, self.config, self.mesh = model, objective, config, mesh
        self._trained = {v.path: v for v in model.trainable_variables}
        self._seeds = [layer.seed_generator.state for layer in update.dropouts(model)]
        shapes = {v.path: tuple(v.shape) for v in model.weights}
        shapes |= {f"{slot}/{name}": shapes[name] for slot in ("m", "v") for name in self._trained}
        self.shapes = shapes
        self.shardings = {name: of_weight(mesh, shape) for name, shape in shapes.items()}
        self.rows = of_rows(mesh)
        everywhere = PartitionSpec()
        replica = self._replica
        if mesh.shape[DATA] > 1:  # XLA's partitioner refuses a sum over an axis of one device
            replica = jax.shard_map(
                replica,
                mesh=mesh,
                in_specs=(everywhere, PartitionSpec(DATA), everywhere),
                out_specs=(everywhere, everywhere),
                axis_names={DATA},
                check_vma=False,
            )
        options = {"compiler_options": ONE_ORDER if config.train.deterministic else None}
        given = {**options, "in_shardings": (self.shardings, self.rows, None)}
        self.run = jax.jit(replica, donate_argnums=0, out_shardings=(self.shardings, None), **given)
        given = {**options, "in_shardings": (self.shardings, self.rows)}
        self.sums = jax.jit(self._with_weights(functools.partial(token_sums, self._divided(ROWS), model)), **given)
        outputs = lambda batch: objective.outputs(model, batch, training=False)  # noqa: E731
        self.outputs = jax.jit(self._with_weights(outputs), **given)
        self._program = None

    def program(self, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        """`run` as XLA's program for batches of one shape. The first call compiles it."""
        if self._program is None:
            self._program = self.run.lower(self.state, batch, np.uint32(0)).compile()
        return self._program

    @property
    def state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The state's shapes and shardings."""
        dtypes = {v.path: v.dtype for v in self.model.weights}
        return {
            name: jax.ShapeDtypeStruct(shape, dtypes.get(name, "float32"), sharding=self.shardings[name])
            for name, shape in self.shapes.items()
        }

    def first_state(self) -> State:
        """New weights and empty slots. Each device makes its own part of them."""

        def make():
            weights = {v.path: v._initializer(v.shape, dtype=v.dtype) for v in self.model.weights}  # what Keras calls
            slots = {name: jnp.zeros(shape, jnp.float32) for name, shape in self.shapes.items() if name not in weights}
            return {**weights, **slots}

        return jax.jit(make, out_shardings=self.shardings)()

    def _place(self, *axes):
        """The sharding of an array whose axes the mesh's axes divide. In `shard_map` only its own mesh is known."""
        spec = PartitionSpec(*axes)
        return NamedSharding(self.mesh, spec) if jax.sharding.get_abstract_mesh().empty else spec

    def _divided(self, rows):
        """The objective, with tokens that the axis `sequence` divides; `rows` are the axes that divide the rows."""
        size = self.mesh.shape[SEQUENCE]
        if size == 1:
            return self.objective

        def place(x):
            divides = x.ndim > 1 and x.shape[1] % size == 0
            return jax.lax.with_sharding_constraint(x, self._place(rows, *[SEQUENCE] * divides))

        objective = copy.copy(self.objective)
        objective.examples = lambda *given, **options: jax.tree.map(place, self.objective.examples(*given, **options))
        return objective

    @contextlib.contextmanager
    def _scope(self, values: Mapping[str, jax.Array], seeds: Sequence[jax.Array] = ()) -> Iterator[None]:
        """A scope in which the model's variables have these values."""
        mapping = [(v, values[v.path]) for v in self.model.weights]
        mapping += list(zip(self._seeds, seeds, strict=False))
        scope = keras.StatelessScope(state_mapping=mapping, initialize_variables=False)
        rows, tokens = self.mesh.shape[FSDP], self.mesh.shape[SEQUENCE]
        with scope, divided(rows, tokens, gather=self._gathered if rows > 1 else None):
            yield

    def _gathered(self, weight):
        """The weight, whole along `fsdp`; its gradient in parts. Else XLA may send activations, which are more."""
        part = of_weight(self.mesh, weight.shape).spec
        if FSDP not in part:
            return weight
        place = jax.lax.with_sharding_constraint
        parts, whole = self._place(*part), self._place(*[None if axis == FSDP else axis for axis in part])

        @jax.custom_vjp
        def gather(x):
            return place(x, whole)

        gather.defvjp(lambda x: (gather(x), None), lambda _, gradient: (place(gradient, parts),))
        return gather(weight)

    def _with_weights(self, function):
        def call(state, batch):
            with self._scope(state):
                return function(batch)

        return call

    def _replica(self, state, batch, step):
        """The step on one replica."""
        optimizer, train, replicas = self.config.optimizer, self.config.train, self.mesh.shape[DATA]
        several = replicas > 1
        replica = jax.lax.axis_index(DATA).astype(jnp.uint32) if several else jnp.uint32(0)
        draws = (step * replicas + replica) * train.accumulate
        zeros = [jnp.zeros_like(state[name]) for name in self._trained], jnp.zeros([]), jnp.zeros([])
        gradients_of = lambda part, i: self._gradients(state, part, draws + i)  # noqa: E731
        sums = update.accumulated(gradients_of, batch, train.accumulate, zeros)
        total = lambda values: jax.lax.psum(values, DATA) if several else values  # noqa: E731
        gradients, norm, loss, tokens = update.clipped_mean(
            optimizer.clip, *sums, total=total, norm_of=_norm, replicas=replicas, names=list(self._trained)
        )
        rate = update.learning_rate(optimizer, train.steps, step)
        new, corrections = dict(state), update.corrections(optimizer, step)
        for name, gradient in zip(self._trained, gradients, strict=True):
            names = (name, f"m/{name}", f"v/{name}")
            weight, m, v = (state[one] for one in names)
            new |= zip(names, update.updated(optimizer, weight, gradient, m, v, corrections, rate), strict=True)
        return new, jnp.stack([loss / jnp.maximum(tokens, 1), norm, rate, tokens])

    def _gradients(self, state, batch, draws):
        """Gradients of the summed loss, the summed loss, and the number of predicted tokens."""
        rows = FSDP if self.mesh.shape[DATA] > 1 else ROWS  # `shard_map` has divided them along `data`
        batch, objective = jax.lax.with_sharding_constraint(batch, self._place(rows)), self._divided(rows)
        seeds = [
            update.dropout_seed(self.config.train.seed, i, draws).astype(v.dtype) for i, v in enumerate(self._seeds)
        ]

        def loss_of(trained):
            with self._scope({**state, **dict(zip(self._trained, trained, strict=True))}, seeds):
                return objective.loss(self.model, batch)

        trained = [state[name] for name in self._trained]
        (loss, tokens), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        return gradients, loss, tokens


def _norm(arrays):
    """The norm of some arrays together."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in arrays))
