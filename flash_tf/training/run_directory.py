"""The files of a model directory, except tokens, tokenizer and checkpoints."""

import contextlib
import importlib.metadata
import itertools
import json
import platform
from collections.abc import Callable, Iterable, Iterator

from etils import epath

from flash_tf import config as configs
from flash_tf import config_merge, owned_files, strict_yaml
from flash_tf.data import stored
from flash_tf.data.sources import SOURCES
from flash_tf.owned_files import TOKENIZERS

CONFIG, METRICS, EVALUATIONS, VERSIONS = "config.yaml", "metrics.jsonl", "evaluations.jsonl", "versions.json"
RUN, LOG = "run.json", "log.txt"
PACKAGES = (
    *("flash-tf", "tensorflow", "keras", "tensorflow-text", "tensorflow-datasets", "tf-models-official"),
    *("jax", "orbax-checkpoint", "numpy"),
)
MAY_CHANGE = (  # options that may differ between two starts of one run
    "train.steps_per_loop",
    "train.deterministic",
    "train.checkpoint_every",
    "train.keep",
    "train.jit_compile",
    "train.loss_implementation",
    "evaluation.every",
    "evaluation.patience",
    "strategy.",
    "data.cache",
    "model.no_answer_threshold",
    "model.norm_implementation",
    "model.mixer.implementation",
    "model.feedforward.implementation",
    "profile",
    "paper",
    "wandb",
)
EXTENDED = ("train.steps", "optimizer.schedule_steps", "optimizer.constant_after")  # options that --extend changes


def load_config(model_dir: str, overrides: Iterable[str] = ()) -> configs.Config:
    """The resolved config of a model directory, with overrides as in `config.load`."""
    path = f"{owned_files.place(model_dir)}/{CONFIG}"
    if (text := stored.read(path)) is None:
        raise ValueError(f"{model_dir} is not a model directory: it has no {CONFIG}, which `flash-tf train` writes")
    values = strict_yaml.load(text, path)
    config = configs.from_mapping(configs.Config, values, where=path)
    if not overrides:
        return config
    values = configs.to_mapping(config)
    for override in overrides:
        config_merge.set_option(values, override)
    return configs.from_mapping(configs.Config, values, where=path)


def claim(model_dir: str, config: configs.Config, extends: bool = False) -> None:
    """Marks a directory as ours, unless it holds another run or files that no run wrote.

    Args:
      model_dir: The model directory.
      config: The experiment.
      extends: Whether the options that `--extend` changes may differ.

    Raises:
      ValueError: The directory holds something else. The message names an option or a file. Nothing was changed.
    """
    run = recorded(model_dir)
    if run:
        _compare(model_dir, run, _fingerprint(config), extends)
    checkpoints = f"{model_dir}/checkpoints"
    for folder in (model_dir, *(f"{checkpoints}/{name}" for name in stored.names(checkpoints))):
        stored.remove_partial(folder)  # of a process that was killed
    if run:
        return
    epath.Path(model_dir).mkdir(parents=True, exist_ok=True)
    _write(f"{model_dir}/{RUN}", "{}\n")
    for name in TOKENIZERS:
        stored.remove(f"{model_dir}/{name}")  # a first try left it, perhaps from other text


@contextlib.contextmanager
def begun(model_dir: str, config: configs.Config, tokenizer: str) -> Iterator[None]:
    """Writes the run's fingerprint, its resolved config and the packages' versions before the first step.

    From here on the directory takes no other run. If an error or a signal ends the first try before a step is done, it
    does again.

    Args:
      model_dir: A directory that is claimed.
      config: The experiment.
      tokenizer: The fingerprint of its tokenizer.

    Raises:
      ValueError: The tokenizer is another than the run's.
    """
    _compare(model_dir, recorded(model_dir), {"tokenizer": tokenizer})
    _write(f"{model_dir}/{RUN}", json.dumps({**_fingerprint(config), "tokenizer": tokenizer}, indent=2) + "\n")
    _write(f"{model_dir}/{CONFIG}", configs.dump(config))
    _write(f"{model_dir}/{VERSIONS}", json.dumps(versions(), indent=2) + "\n")
    try:
        yield
    except BaseException:  # a signal too
        if not _trained(model_dir):
            _write(f"{model_dir}/{RUN}", "{}\n")
        raise


def recorded(model_dir: str) -> dict:
    """The fingerprint of the run in a directory; empty if it has not begun."""
    if (text := stored.read(path := f"{model_dir}/{RUN}")) is not None:
        try:
            run = json.loads(text)
            before = run == {} and not _trained(model_dir)  # its first step
            return {} if before else {**run, "config": _resolved(run["config"], path)}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: it is not the fingerprint of a run ({error})") from error
    if _trained(model_dir):  # by a version that wrote no fingerprint
        if not epath.Path(f"{model_dir}/{CONFIG}").exists():
            raise ValueError(f"{model_dir} has checkpoints or records but no {CONFIG}: use another --model-dir")
        return {"config": configs.to_mapping(load_config(model_dir))}
    for name in (CONFIG, VERSIONS, EVALUATIONS, LOG, *TOKENIZERS):
        if epath.Path(f"{model_dir}/{name}").exists():
            raise ValueError(f"{model_dir} has a {name} that no run wrote: use another --model-dir")
    return {}


def _resolved(values, where):
    """A config's values with options that came later at their defaults."""
    return configs.to_mapping(configs.from_mapping(configs.Config, values, where=where))


def _trained(model_dir):
    """Whether a directory holds steps of a run."""
    return bool(stored.names(f"{model_dir}/checkpoints")) or epath.Path(f"{model_dir}/{METRICS}").exists()


def _fingerprint(config):
    """What a run keeps from its first step to its last, beside its tokenizer."""
    source = SOURCES.build(config.data.source)
    found = {"config": configs.to_mapping(config), "text": json.loads(json.dumps(source.identity()))}
    if hasattr(source, "checksums"):  # a label that is edited changes no size
        found["checksums"] = {
            split: dict(zip(source.shards(split), source.checksums(split), strict=True))
            for split in ("train", "validation")
        }
    return found


def _compare(model_dir, run, now, extends=False):
    """Raises a ValueError if the directory's run, as far as it is known, differs from this one."""
    both = run.keys() & now.keys()
    found = config_merge.differences(*({name: one[name] for name in both} for one in (run, now)))
    changed = [(key.removeprefix("config."), *values) for key, *values in found]
    changed = [one for one in changed if not one[0].startswith(MAY_CHANGE + (EXTENDED if extends else ()))]
    if changed:
        key, old, new = changed[0]
        longer = key == "train.steps" and new > old
        command = f"`flash-tf train {model_dir}"
        instead = f"{command} --extend STEPS` to train it longer" if longer else f"{command}` to continue it"
        instead = "put its files back as they were" if key.startswith(("text", "checksums")) else instead
        raise ValueError(
            f"{model_dir} holds a run with {key} = {_short(old)}, this one has {_short(new)}"
            f"{f' (and {len(changed) - 1} more options differ)' if len(changed) > 1 else ''}; "
            f"use another --model-dir, or {instead}"
        )


def _short(value):
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            found[name] = "not installed"
    return found


class Records:
    """A file of JSON lines, one for each step. A resumed run continues it without gaps or repeated steps.

    What is cut off is kept beside the file, as `metrics.jsonl.1`.

    Args:
      path: The file, local or gs://; None to write nothing.
      step: Cuts off lines of later steps. A run that died after writing them writes them again.
      report: Called with a line about what is cut off.
    """

    def __init__(self, path: str | None, step: int, report: Callable[[str], None] = lambda line: None):
        self._path = path
        there = None if path is None else stored.read(path)
        if there is None:
            return
        lines = [line for line in there.split(b"\n") if line]
        last = {number: i for i, line in enumerate(lines) if (number := _step(line)) <= step}  # a line for each step
        last.pop(DAMAGED, None)
        kept = [lines[last[number]] for number in sorted(last)]
        if cut := [line for i, line in enumerate(lines) if i not in last.values()]:
            beside = aside(path)
            _write(beside, _joined(cut))
            what = "that are damaged, repeated or"
            report(f"{path}: {len(cut):,} lines {what} after step {step:,} are now in {beside}")
        if _joined(kept) != there:
            _write(path, _joined(kept))

    def append(self, lines: list[dict]) -> None:
        """Adds records. They are on disk when it returns."""
        if self._path is not None:
            with epath.Path(self._path).open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))


DAMAGED = -1


def _step(line):
    """The step of a record."""
    try:
        record = json.loads(line)
    except ValueError:  # the process died while it wrote this line
        return DAMAGED
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) and step > 0 else DAMAGED


def aside(path: str) -> str:
    """A free name for what is cut off from a file or folder: `path.1`, then `path.2`."""
    return next(name for i in itertools.count(1) if not epath.Path(name := f"{path}.{i}").exists())


def _joined(lines):
    return b"".join(line + b"\n" for line in lines)


def _write(path, text):
    stored.write(path, text.encode() if isinstance(text, str) else text)
