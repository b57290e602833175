"""Lowers training steps for a TPU on a machine without one, and checks that a TPU has every operator.

Runs in the environment of requirements/tpu.txt: only `tensorflow-tpu` has the kernels for TPU. Lowering a step does not
run it: it tests neither libtpu's compiler nor sums over replicas.
"""

import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import tensorflow as tf

import flash_tf
import kernels_xla
from flash_tf import config, model_stats
from flash_tf.training import modelling, update
from flash_tf.training.evaluator import Evaluator
from flash_tf.training.objective import OBJECTIVES
from flash_tf.training.optimizer import AdamW
from flash_tf.training.trainer import TrainStep

LOCK = Path(__file__).parents[1] / "requirements" / "tpu.txt"
# Two blocks have the operators of all blocks; the widths stay. All configs are checked like this, and VARIANTS too.
REDUCED = ("model.depth=2", "train.precision=mixed_bfloat16")
VARIANTS = (
    ("mlm_c4/flash", ("data.packing=documents", "masking.whole_words=true", "model.dropout=0.1")),
    ("lm_wiki40b/flash", ("data.packing=documents", "optimizer.schedule=cosine", "train.accumulate=2")),
)
EXTRAS = ("jax", "jaxlib", "matplotlib")  # training on a TPU does not use modules that need these
MISSING = re.compile(r"(\w+) \(No registered '\1' OpKernel")


class TensorAdamW(AdamW):
    """AdamW that returns the new values in place of assigning them.

    Args:
      config, steps: See `AdamW`.
      weights, m, v: Name -> tensor.

    Attributes:
      updated: Name -> new weight, m and v, after a step.
    """

    def __init__(self, config, steps, weights, m, v):
        self.config, self.steps, self.variables, self.m, self.v = config, steps, weights, m, v

    def _apply(self, strategy, gradients, step, rate):
        corrections = update.corrections(self.config, step)
        self.updated = {
            name: update.updated(self.config, weight, gradient, self.m[name], self.v[name], corrections, rate)
            for (name, weight), gradient in zip(self.variables.items(), gradients, strict=True)
        }


class TensorStep(TrainStep):
    """The training step on tensors. A step on variables cannot be lowered for a TPU that is not there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._states, self.seeds = self.seeds, [_Seed(state) for state in self.seeds]

    def gradients(self, batch):
        seeds = [(state, seed.assigned) for state, seed in zip(self._states, self.seeds, strict=True)]
        with tf.GradientTape() as tape:
            tape.watch(self._variables)
            with with_values(self.model, self._variables, seeds):
                loss, tokens = self.objective.loss(self.model, batch)
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, self._variables)], loss, tokens


class _Seed:
    """Stands for a dropout's seed, and records the value that a step assigns."""

    def __init__(self, state):
        self.value, self.dtype = self, state.dtype

    def assign(self, tensor):
        self.assigned = tensor


def with_values(model, weights, others=()):
    """A scope in which the model's trainable variables have these values, and the others their initial values."""
    frozen = [(v, tf.cast(v._initializer(v.shape, v.dtype), v.dtype)) for v in model.non_trainable_weights]
    trained = zip(model.trainable_variables, weights, strict=True)
    return keras.StatelessScope(state_mapping=[*trained, *frozen, *others])


def train_and_evaluate(experiment: config.Config):
    """A function of tensors that trains one step and evaluates one batch, and the specs of its arguments."""
    with model_stats.without_weights():
        model = modelling.make_model(experiment)
    objective = OBJECTIVES[experiment.model["type"]](experiment, _tokenizer(experiment.model["vocabulary_size"]))
    evaluator = Evaluator(model=model, objective=objective, strategy=None, batches=None, counts_words=False)

    def run(batch, step, weights, m, v):
        optimizer = TensorAdamW(experiment.optimizer, experiment.train.steps, weights, m, v)
        record = TensorStep(model, objective, optimizer, experiment)(batch, step)
        with with_values(model, weights.values()):
            return record, optimizer.updated, evaluator.sums(batch)

    weights = {variable.path: tf.TensorSpec(variable.shape) for variable in model.trainable_variables}
    batch = _batch(experiment, objective.overlap)
    return run, (batch, tf.TensorSpec([], tf.int64), weights, weights, weights)


def _batch(experiment, overlap):
    count, width = experiment.batch_size, experiment.data.sequence_length + overlap
    shapes = {"tokens": [count, width], "window": [count, 2]}
    if experiment.data.packing == "documents":
        shapes["segment_ids"] = [count, width]
    return {name: tf.TensorSpec(shape, tf.int32) for name, shape in shapes.items()}


def _tokenizer(size):
    """The ids that an objective needs. The operators do not depend on their values."""
    starts = [i % 2 == 0 for i in range(size)]
    ids = {"pad_id": 0, "mask_id": 3, "special_ids": (0, 1, 3, 4)}
    return SimpleNamespace(vocabulary_size=size, starts_word=starts, **ids)


def lower(function, specs) -> int:
    """Lowers a function of tensors for one TPU core. Returns its number of different operators.

    Raises:
      ValueError: It cannot be lowered. The message names the operators that a TPU lacks, or gives another reason.
    """
    flat = tf.nest.flatten(specs)
    traced = tf.function(
        lambda *tensors: function(*tf.nest.pack_sequence_as(specs, tensors)), jit_compile=True, autograph=False
    )
    try:
        traced.experimental_get_compiler_ir(*flat)(stage="stablehlo", platform_name="TPU")
    except (ValueError, tf.errors.OpError) as error:
        missing = sorted(set(MISSING.findall(str(error))))
        reason = f"a TPU lacks {', '.join(missing)}" if missing else " ".join(str(error).split())[:300]
        raise ValueError(reason) from error
    graph = traced.get_concrete_function(*flat).graph.as_graph_def()
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    return len({node.op for nodes in bodies for node in nodes})


def check_stack() -> str:
    """The main versions. Exits unless the environment matches the lock and has no other TensorFlow."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))
    found = {re.sub("[-_.]+", "-", d.name).lower(): d.version for d in importlib.metadata.distributions()}
    got = {name: found.get(name, "nothing") for name in pinned}
    wrong = [f"{name} {version} (got {got[name]})" for name, version in pinned.items() if got[name] != version]
    if "tensorflow" in found:
        wrong.append(f"no tensorflow beside tensorflow-tpu (got {found['tensorflow']})")
    if wrong:
        sys.exit(f"{sys.prefix} must hold {', '.join(wrong)}: remove it and run `make tpu-check`")
    return ", ".join(f"{name} {found[name]}" for name in ("tensorflow-tpu", "libtpu", "keras"))


def check_imports() -> tuple[int, list[str]]:
    """Imports all modules. Returns their number, and the modules that need a library of an extra."""
    packages = (kernels_xla, flash_tf)
    names = [m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]
    left_out = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            left_out.append(name)
    return len(names) - len(left_out), left_out


def check_that_it_can_fail() -> list[str]:
    """Lowers operators that no TPU has. Returns their names, and exits if one is not refused by name."""
    bad = {
        "AsString": lambda x: tf.strings.as_string(x),
        "EagerPyFunc": lambda x: tf.py_function(lambda x: x, [x], tf.float32),
        "StringFormat": lambda x: [tf.print(x), x][1],
    }
    for operator, function in bad.items():
        try:
            lower(function, [tf.TensorSpec([2])])
        except ValueError as error:
            if operator in str(error):
                continue
        sys.exit(f"tpu-check checks nothing here: {operator} was not refused by name")
    return list(bad)


def check_configs() -> list[str]:
    """Lowers every config and prints a line for it. Returns the configs that a TPU cannot run, with the reason."""
    failed = []
    for name, overrides in [*((name, ()) for name in config.names()), *VARIANTS]:
        begin, label = time.perf_counter(), " ".join((name, *overrides))
        try:
            experiment = modelling.with_masking(config.load(name, (*REDUCED, *overrides)))
            result = f"{lower(*train_and_evaluate(experiment))} different operators"
        except ValueError as error:
            result = str(error)
            failed.append(f"{label}: {error}")
        say(f"{name:<36}  {result}  {time.perf_counter() - begin:.1f} s  {' '.join(overrides)}".rstrip())
    return failed


def check_training() -> None:
    """Trains and evaluates on this machine's CPU with the command line: data, tokenizer, Orbit and checkpoints."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{sys.prefix}/bin/flash-tf", "train", "quickstart", "--model-dir", f"{folder}/run"]
        for option in ("train.steps=2", "train.steps_per_loop=1", "evaluation.windows=8"):
            command += ["--set", option]
        done = subprocess.run(command, stdout=sys.stderr, stderr=sys.stderr)
        if done.returncode:
            log = Path(folder, "run", "log.txt")
            print(log.read_text() if log.exists() else "", file=sys.stderr)  # noqa: T201
            sys.exit(f"`flash-tf train quickstart` ended on the CPU with status {done.returncode}")
    say(f"flash-tf train quickstart, 2 steps on the CPU: {time.perf_counter() - begin:.1f} s")


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)  # noqa: T201


def main() -> None:
    say(f"{check_stack()}, Python {sys.version.split()[0]}")
    count, left_out = check_imports()
    say(f"{count} modules import" + (f"; {', '.join(left_out)} left out: of an extra" if left_out else ""))
    say(f"refused, as on a TPU: {', '.join(check_that_it_can_fail())}")
    if failed := check_configs():
        sys.exit(f"a TPU cannot run {len(failed)}: {'; '.join(failed)}")
    check_training()


if __name__ == "__main__":
    main()
