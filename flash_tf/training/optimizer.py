"""AdamW under `tf.distribute`: the variables, and the slots that it updates."""

import functools

import tensorflow as tf

from flash_tf.config import OptimizerConfig
from flash_tf.layers.traced_once import function_attributes
from flash_tf.training import update

ALIKE = 8  # variables of one shape that one call of a function updates


class AdamW:
    """AdamW for some variables, with its slots. Make it under the strategy's scope.

    Args:
      config: The config's optimizer section.
      steps: Steps of the whole run, for the schedule.
      variables: Name -> `tf.Variable`.
      jit_compile: Whether XLA compiles the update of all variables into one program.
    """

    def __init__(
        self, config: OptimizerConfig, steps: int, variables: dict[str, tf.Variable], jit_compile: bool = False
    ):
        self.config, self.steps, self.variables = config, steps, variables
        zeros = lambda v: tf.Variable(tf.zeros(v.shape), trainable=False, name="slot")  # noqa: E731
        self.m = {name: zeros(v) for name, v in variables.items()}
        self.v = {name: zeros(v) for name, v in variables.items()}
        self._update = tf.function(self._updated, jit_compile=True, autograph=False) if jit_compile else self._updated
        self._functions = {}

    def state(self) -> dict[str, tf.Variable]:
        """The slots by name, for a checkpoint."""
        return {f"{slot}/{name}": v for slot in ("m", "v") for name, v in getattr(self, slot).items()}

    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """The learning rate of a step."""
        return update.learning_rate(self.config, self.steps, step)

    def apply(self, gradients: list[tf.Tensor], step: tf.Tensor, rate: tf.Tensor | None = None) -> None:
        """Updates every variable. Call it in replica context, with the same gradients on every replica.

        Args:
          gradients: One for each variable.
          step: Steps done before this one.
          rate: Learning rate; None for the schedule's.
        """
        context = tf.distribute.get_replica_context()
        context.merge_call(self._apply, args=(gradients, step, self.rate(step) if rate is None else rate))

    def _apply(self, strategy, gradients, step, rate):
        weights = list(self.variables.values())
        slots = [list(slot.values()) for slot in (self.m, self.v)]
        # The first weight only says where: on each of its devices once, with the values of that device.
        strategy.extended.update(
            weights[0], self._on_device, args=(weights, *slots, gradients, step, rate), group=False
        )

    def _on_device(self, _, *values):
        self._update(*values)

    def _updated(self, weights, ms, vs, gradients, step, rate):
        corrections, alike = update.corrections(self.config, step), {}
        for one in zip(weights, ms, vs, gradients, strict=True):
            alike.setdefault(tuple(one[0].shape), []).append(one)
        for group in alike.values():
            for some in (group[i : i + ALIKE] for i in range(0, len(group), ALIKE)):
                self._of_one_shape(some, corrections, rate)

    @property
    def _of_one_shape(self):
        """Updates variables of a shape: traced and lowered once, because all updates are most operators of a step."""
        attributes = function_attributes()
        if str(attributes) not in self._functions:
            called = functools.partial(tf.function, autograph=False, experimental_attributes=attributes)
            one = called(functools.partial(update.updated, self.config))
            self._functions[str(attributes)] = called(functools.partial(_all_updated, one))
        return self._functions[str(attributes)]


def _all_updated(one, some, corrections, rate):
    for *variables, gradient in some:
        weight, m, v = (variable.read_value() for variable in variables)
        for variable, value in zip(variables, one(weight, gradient, m, v, corrections, rate), strict=True):
            variable.assign(value)
