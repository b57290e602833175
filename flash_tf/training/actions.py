"""The actions between two loops of steps: metrics, progress, checkpoints, signals, a profile."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from flash_tf.config import ProfileConfig, TrainConfig
from flash_tf.training.mirror import Mirror
from flash_tf.training.progress import Clock, Progress, lasting, perplexity, training_parts
from flash_tf.training.run_directory import Records
from flash_tf.training.update import COLUMNS

if TYPE_CHECKING:
    from flash_tf.profiling.capture import Capture


class Interrupted(Exception):
    """A signal asked the run to end. Its state is saved."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class CheckFinite:
    """Stops the run at the first loss that is not a number, before anything is written."""

    def __init__(self, trainer: Any, step: Any, diverged: Callable[[str], Exception]):
        self._trainer, self._step, self._diverged = trainer, step, diverged

    def __call__(self, output):
        bad = np.flatnonzero(~np.isfinite(self._trainer.history[:, : COLUMNS.index("learning_rate")]).all(axis=1))
        if len(bad):
            step = int(self._step.numpy()) - len(self._trainer.history) + int(bad[0]) + 1
            raise self._diverged(f"the loss or its gradient is not a number at step {step}")


class Metrics:
    """Writes each step's record to metrics.jsonl, and shows the last one. Every so many steps the line stays.

    Args:
      trainer: The trainer of the records.
      step: Steps done.
      records: The file metrics.jsonl.
      progress: Shows the line.
      config: The run's train section.
      flops_per_step: Model FLOPs of a step.
      peak: FLOP/s of the devices; None if unknown.
      mirror: Gets a copy of the records.
    """

    def __init__(
        self,
        trainer: Any,
        step: Any,
        records: Records,
        progress: Progress,
        *,
        config: TrainConfig,
        flops_per_step: int,
        peak: float | None,
        mirror: Mirror,
    ):
        self._trainer, self._step, self._records, self._progress = trainer, step, records, progress
        self._mirror = mirror
        self._steps, self._tokens_per_step = config.steps, config.tokens_per_step
        self._flops_per_step, self._peak, self._clock = flops_per_step, peak, Clock()
        self._of_tokens = trainer.model.predicts_tokens
        self._stays = lasting(config.steps)

    def begin(self) -> None:
        """Shows that the first step is compiling, before there are figures."""
        if (done := int(self._step.numpy())) < self._steps:
            self._progress.status(f"step {done:,}/{self._steps:,}", "compiling the training step")

    def restart_clock(self) -> None:
        """Leaves the time since the last loop, for example an evaluation, out of the rate."""
        self._clock.lap()

    def __call__(self, output):
        history, seconds = self._trainer.history, self._clock.lap()
        last, rate = int(self._step.numpy()), self._tokens_per_step * len(history) / seconds
        lines = []
        for step, row in enumerate(history.tolist(), start=last - len(history) + 1):
            record = {"step": step, **dict(zip(COLUMNS, row, strict=True))}
            of_tokens = {"perplexity": perplexity(record["loss"])} if self._of_tokens else {}
            lines.append({**record, **of_tokens, "tokens_per_second": round(rate, 1)})
        self._records.append(lines)
        self._mirror("train", lines)
        mfu = self._flops_per_step * len(history) / seconds / self._peak if self._peak else None
        left = (self._steps - last) * seconds / len(history)
        line = {"tokens_per_second": rate, "mfu": mfu, "left": left, "waiting": self._trainer.waiting}
        stays = last // self._stays > (last - len(history)) // self._stays or last == self._steps
        self._progress.status(*training_parts(lines[-1], steps=self._steps, **line), keep=stays)


class Save:
    """Saves a checkpoint when the steps are a multiple of `every`. A loop must not go beyond `steps_until`."""

    def __init__(self, save: Callable[[], None], step: Any, every: int):
        self._save, self._step, self._every = save, step, every
        self._last = int(step.numpy())

    def __call__(self, output):
        step = int(self._step.numpy())
        if step // self._every > self._last // self._every:
            self._save()
        self._last = step

    def steps_until(self, done: int) -> int:
        """Steps from here to the next multiple."""
        return self._every - done % self._every


class Profiler:
    """Captures some steps with TensorFlow's profiler. The capture does not change the steps.

    Args:
      config: The steps to capture; None for no capture.
      trainer: The trainer of the steps.
      step: Steps done.
      folder: The folder for the trace and its figures; None in a process that writes nothing.
      finish: Called with the capture after its last step.
    """

    def __init__(
        self,
        config: ProfileConfig | None,
        trainer: Any,
        step: Any,
        folder: str | None,
        finish: Callable[["Capture"], None],
    ):
        if config is not None and folder is not None:
            from flash_tf.profiling import latency  # it brings TensorFlow

            latency.check_folder(folder)
        self._config, self._trainer, self._step, self._folder = config, trainer, step, folder
        self._finish, self._capture = finish, None

    def steps_per_loop(self, done: int, usual: int) -> int:
        """The number of steps in the next loop: up to the first captured step, then one at a time while capturing."""
        if self._config is None or done >= self._config.last:
            return usual
        return min(usual, self._config.start - 1 - done) if done < self._config.start - 1 else 1

    def __enter__(self):
        self._begin(int(self._step.numpy()))
        return self

    def __call__(self, output):
        done = int(self._step.numpy())
        if self._capture is None:
            self._begin(done)
        elif done >= self._config.last:
            capture, self._capture, self._trainer.around = self._capture, None, contextlib.nullcontext
            self._finish(capture)

    def _begin(self, done):
        if (
            self._config is not None
            and self._folder is not None
            and self._config.start <= done + 1 <= self._config.last
        ):
            from flash_tf.profiling.capture import Capture

            self._capture = Capture(self._folder, "train")
            self._trainer.around = lambda: self._capture.step(int(self._step.numpy()) + 1)

    def __exit__(self, *_):
        if self._capture is not None:
            self._capture.discard()


class Signals:
    """SIGTERM, SIGINT and SIGHUP save and end the run after the current loop. A second one does not wait for the save.

    An error of an evaluation saves the run too, as its steps are done. Outside the main thread it hears no signals.

    Python runs its handlers when TensorFlow returns, after the loop. The system's own handler wakes a thread at once.
    That thread tells the user that a signal has come, and stops the wait for data, which may last until all text is
    tokenized. Of several workers, all stop at the step at which one of them has received a signal.

    Args:
      save: Saves the run.
      stop_data: Makes a wait for data end with an error.
      trainer: The trainer, whose wait for data may be stopped.
      progress: Shows the line.
    """

    def __init__(self, save: Callable[[], None], stop_data: Callable[[], None], trainer: Any, progress: Progress):
        self._save, self._stop_data, self._trainer, self._progress = save, stop_data, trainer, progress
        self._received, self._saved, self._evaluating = 0, False, False

    def __enter__(self):
        self._takes = threading.current_thread() is threading.main_thread()  # Python gives signals to no other
        if not self._takes:
            return self
        asked = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        self._heard, told = socket.socketpair()
        told.setblocking(False)
        self._told, self._woken = told, signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._receive) for number in asked}  # from here on all are told
        self._teller = threading.Thread(target=self._tell, daemon=True)
        self._teller.start()
        return self

    def __exit__(self, kind, error, _):
        if self._takes:
            self._give_back()
            self._told.close()  # which ends the thread
            self._teller.join()
        if isinstance(error, Exception) and not self._saved and (self._received or self._evaluating):
            between_steps = self._trainer.reading or self._evaluating
            if between_steps and int(self._trainer.global_step.numpy()):
                self._save()
            if self._received:
                raise Interrupted(self._received) from error

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within it, a signal ends the run at once: no step is lost. Several workers end after the next loop."""
        self._evaluating = not self._trainer.several
        yield
        self._evaluating = False

    def _give_back(self):
        signal.set_wakeup_fd(self._woken)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _tell(self):
        then = "saving after this loop of steps"
        with self._heard:
            while number := self._heard.recv(1):
                if number[0] in self._before:
                    self._progress.line(f"{signal.Signals(number[0]).name}: {then}")
                    then = "ending after this loop of steps, without waiting for a save"
                    if self._trainer.reading or not int(self._trainer.global_step.numpy()):
                        self._stop_data()

    def _receive(self, number, _):
        if self._received:
            self._give_back()
            signal.raise_signal(number)
            return
        self._received = number
        if self._evaluating:
            raise Interrupted(number)

    def __call__(self, output):
        received = int(self._trainer.largest(self._received))
        if received:  # of this worker or another
            self._received = received
            self._save()
            self._trainer.largest(0)  # the first worker has saved before another leaves
            self._saved = True
            raise Interrupted(self._received)
