"""Trains with an exported step on a token file. The host stays ahead: a loss is read once the next step is enqueued."""

import dataclasses
import math

import jax
import numpy as np

from benchmarks.compiled_data import Stream
from benchmarks.compiled_program import HELD, Compiled, initial_variables, numbers_of_step
from benchmarks.compiled_run import EVALUATIONS, LOSSES, RunFolder, Schedule, State
from flash_tf.compiling.manifest import Manifest
from flash_tf.training import weights
from flash_tf.training.progress import Clock, Progress, peak_flops, perplexity, training_parts

SHOWN_EVERY = 5.0  # seconds of training


class DivergenceError(ValueError):
    """The loss or its gradient is no number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How far a run goes, and what it does on the way.

    Attributes:
      steps: Steps after which it stops.
      save_every: Steps between two saved states.
      evaluate_every: Steps between two evaluations; None for the end alone.
      shard_bytes: The largest shard of the weights.
    """

    steps: int
    save_every: int
    evaluate_every: int | None
    shard_bytes: int


class Training:
    """A run: from its saved state, or the initial values, to the plan's last step.

    Args:
      manifest: Of the artifact.
      step: The compiled step.
      forward: The compiled evaluation, if there is a validation split.
      device: Where both run.
      rates: The learning rates.
      folder: Where the run is kept.
      progress: What the user sees.
    """

    def __init__(
        self,
        manifest: Manifest,
        step: Compiled,
        forward: Compiled | None,
        *,
        device: jax.Device,
        rates: Schedule,
        folder: RunFolder,
        progress: Progress,
    ):
        self._manifest, self._step, self._forward, self._device = manifest, step, forward, device
        self._rates, self._folder, self._progress = rates, folder, progress
        saved = folder.restore()
        if saved is None:
            first = initial_variables(manifest, step.program, device)
            self.state = State(step=0, seconds=0.0, variables=first)
        else:
            progress.line(f"going on from step {saved.step:,}")
            self.state = dataclasses.replace(saved, variables=self._put(saved.variables))
        self._losses = folder.records(LOSSES, self.state.step)
        self._evaluations = folder.records(EVALUATIONS, self.state.step)
        self._waiting: tuple[int, jax.Array] | None = None
        self._clock, self._shown = Clock(), (self.state.seconds, self.state.step)

    def _put(self, arrays):
        return {name: jax.device_put(array, self._device) for name, array in arrays.items()}

    def run(self, stream: Stream, validation: Stream | None, plan: Plan) -> dict:
        """Trains; returns the last evaluation, or the last record where there is no validation split.

        Raises:
          DivergenceError: When the loss is not a number; the state before stays.
        """
        self._last: dict = {}
        self._clock.lap()
        ahead = self._inputs(stream, self.state.step)
        for done in range(self.state.step, plan.steps):
            record = self._step(self.state.variables, ahead)
            ahead = self._inputs(stream, done + 1)
            self._read()
            self._waiting = done + 1, record
            due = done + 1 == plan.steps
            evaluates = due or (plan.evaluate_every and (done + 1) % plan.evaluate_every == 0)
            saves = due or (done + 1) % plan.save_every == 0
            if evaluates or saves:
                self._read()
            if evaluates and validation is not None:
                self._evaluate(validation)
            if saves:
                self._folder.save(self.state)
                self._clock.lap()
        self._keep_weights(plan)
        return self._last

    def _inputs(self, stream, done):
        batch = stream.batch(done * self._step.program.batch_size, self._step.program)
        return {**self._put(batch), **numbers_of_step(done, self._rates.rate(done), self._device)}

    def _read(self):
        """Waits for the record of the step before, and keeps it."""
        if self._waiting is None:
            return
        (step, record), self._waiting = self._waiting, None
        row = dict(zip(self._manifest.columns, np.asarray(record).tolist(), strict=True))
        if not (math.isfinite(row["loss"]) and math.isfinite(row["gradient_norm"])):
            raise DivergenceError(f"the loss or its gradient is not a number at step {step}; the saved state stays")
        self.state.step = step
        self.state.seconds += self._clock.lap()
        self._last = {"step": step, **row}
        self._losses.append({**self._last, "seconds": round(self.state.seconds, 3)})
        if self.state.seconds - self._shown[0] >= SHOWN_EVERY or step == self._rates.steps:
            self._show()

    def _show(self):
        seconds = (self.state.seconds - self._shown[0]) / (self.state.step - self._shown[1])
        self._shown = self.state.seconds, self.state.step
        program, precision = self._step.program, self._manifest.precision
        peak = peak_flops(self._device.device_kind, precision, 1)
        parts = training_parts(
            self._last,
            steps=self._rates.steps,
            tokens_per_second=program.tokens / seconds,
            mfu=program.flops / seconds / peak if peak else None,
            left=(self._rates.steps - self.state.step) * seconds,
        )
        self._progress.status(*parts, keep=self.state.step == self._rates.steps)

    def _evaluate(self, validation):
        """The validation split once, enqueued two batches at a time."""
        total, waiting = 0.0, None
        for batch in validation.once(self._forward.program):
            sums = self._forward(self.state.variables, self._put(batch))
            total = total if waiting is None else total + np.asarray(waiting, np.float64)
            waiting = sums
        total = total + np.asarray(waiting, np.float64)
        loss, tokens = float(total[0] / total[1:].sum()), int(total[1:].sum())
        self._last = {"step": self.state.step, "loss": loss, "perplexity": perplexity(loss), "tokens": tokens}
        self._evaluations.append({**self._last, "seconds": round(self.state.seconds, 3)})
        self._progress.line(f"step {self.state.step:,}  validation loss {loss:.4f}  ppl {perplexity(loss):,.2f}")
        self._clock.lap()

    def _keep_weights(self, plan):
        kept = {a.name for a in self._step.program.arguments if a.role == HELD[0]}
        host = ((name, np.asarray(x)) for name, x in self.state.variables.items() if name in kept)
        shards = weights.write(str(self._folder.path), self.state.step, host, plan.shard_bytes)
        where = f"{self._folder.path}/{weights.FOLDER}"
        self._progress.line(f"step {self.state.step:,}: the weights are in {where}, in {shards} files")
