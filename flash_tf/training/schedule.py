"""The learning rate schedule, for both NumPy and `keras.ops`. Imports neither."""

import math
from typing import Any

from flash_tf.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int, done: Any, xp: Any) -> Any:
    """The learning rate of a step, float32.

    It rises linearly over `warmup_steps` steps. Then it falls to the final rate at `steps`, linearly or by a cosine, or
    it falls by the inverse square root. A run shorter than its warm-up ends while the rate rises. A run may plan for
    other steps than it has (`schedule_steps`), and keep the rate of one step from there on (`constant_after`).

    Args:
      config: The config's optimizer section, or any object with the same schedule attributes.
      steps: Steps of the whole run.
      done: Steps done before this one, a float32 scalar of `xp`.
      xp: `numpy` or `keras.ops`: the functions used here have the same names in both.
    """
    warmup, peak, final = float(config.warmup_steps), config.learning_rate, config.final_learning_rate
    steps = config.schedule_steps or steps
    if config.constant_after is not None:
        done = xp.minimum(done, config.constant_after - 1.0)
    rising = peak * (done + 1) / max(warmup, 1.0)
    if config.schedule == "inverse_sqrt":
        falling = peak * xp.sqrt(max(warmup, 1.0) / (done + 1))
    else:
        share = xp.minimum(xp.maximum((done - warmup) / max(steps - warmup, 1.0), 0.0), 1.0)
        left = 1 - share if config.schedule == "linear" else 0.5 * (1 + xp.cos(math.pi * share))
        falling = final + (peak - final) * left
    return xp.where(done < warmup, rising, falling)
