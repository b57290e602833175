"""One experiment as frozen dataclasses, and the functions that read it from YAML."""

import copy
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from flash_tf import config_merge, renamed, strict_yaml
from flash_tf.registry import check_options, fits, hint

FOLDER = Path(__file__).parent / "configs"


def _positive(config, where, *fields):
    for name in fields:
        if getattr(config, name) <= 0:
            raise ValueError(f"{where}.{name} must be positive, got {getattr(config, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer that is trained on the training split, of the model's vocabulary size."""

    train: Literal["unigram", "bpe", "word"] = "unigram"  # SentencePiece's; of bytes, as GPT-2's; whole words
    byte_fallback: bool = False  # for bpe: of characters, which spells rare ones by bytes, as Llama's

    def __post_init__(self):
        if self.byte_fallback and self.train != "bpe":
            raise ValueError(f"data.tokenizer.byte_fallback belongs to train: bpe, got train: {self.train}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, its tokens and their windows."""

    source: dict  # `type` names a file in flash_tf/data/sources; the rest are its options
    sequence_length: int = 512
    packing: Literal["concatenate", "documents"] = "concatenate"  # as in the papers; or documents apart, by segment_ids
    tokenizer: str | TokenizerConfig | None = (
        None  # a file, a run or a preset; or how to train one; null: a unigram one
    )
    whitespace: Literal["collapse", "keep"] = "collapse"  # of a tokenizer that is trained; a given one has its own
    cache: str | None = None  # the folder of the tokens; null: in the model directory
    columns: dict | None = None  # of labelled examples: a part, as `text` or `label` -> its key in the source's records
    labels: list[str] | None = None  # the names of a classifier's classes, in the order of their numbers
    answerless_rows: float = 1.0  # of questions: the share of rows without an answer that training reads

    def __post_init__(self):
        _positive(self, "data", "sequence_length")
        if not 0 <= self.answerless_rows <= 1:
            raise ValueError(f"data.answerless_rows must be from 0 to 1, got {self.answerless_rows}")
        if "://" in (self.cache or ""):
            raise ValueError(f"data.cache must be a local folder, got {self.cache}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """BERT's masking: 80 % of the chosen tokens become <mask>, 10 % a random token, 10 % stay."""

    rate: float = 0.15
    whole_words: bool = False

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise ValueError(f"masking.rate must be between 0 and 1, got {self.rate}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Gradient clipping by norm."""

    scope: Literal["replica", "global", "layer"]  # each replica's mean gradient before the sum; the sum; its layers
    norm: float

    def __post_init__(self):
        _positive(self, "optimizer.clip", "norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up. The paper uses these defaults in all three tasks."""

    learning_rate: float = 7e-4  # peak
    schedule: Literal["linear", "cosine", "inverse_sqrt"] = "linear"
    warmup_steps: int = 10_000
    final_learning_rate: float = 0.0  # of the linear and cosine schedules
    schedule_steps: int | None = None  # the steps that these plan for; null: train.steps
    constant_after: int | None = None  # the step whose learning rate all later ones take; null: none
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-6
    weight_decay: float = 0.01  # for matrices only: norms, biases, scales and offsets never decay
    clip: ClipConfig | None = None

    def __post_init__(self):
        _positive(self, "optimizer", "learning_rate", "epsilon")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {list(self.betas)}")
        for name in ("schedule_steps", "constant_after"):
            if getattr(self, name) is not None:
                _positive(self, "optimizer", name)
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.final_learning_rate < 0:
            raise ValueError(
                "optimizer.warmup_steps, weight_decay and final_learning_rate must not be negative, "
                f"got {self.warmup_steps}, {self.weight_decay} and {self.final_learning_rate}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of a run, and how it computes."""

    steps: int = 125_000
    tokens_per_step: int = 2**18  # of all replicas together
    steps_per_loop: int = 100  # the most steps between returns to Python, which shows progress, saves and hears signals
    seed: int = 0
    precision: Literal["float32", "mixed_bfloat16"] = "mixed_bfloat16"
    accumulate: int = 1  # micro-batches in one step
    jit_compile: Literal["auto"] | bool = "auto"  # XLA for forward and backward; auto: if it is faster
    loss_implementation: Literal["auto", "xla", "pallas"] = "auto"  # of the head: einsums, or fused kernels
    deterministic: bool = False  # the same bits in every run on a GPU too, more slowly; a CPU has them always
    checkpoint_every: int = 1_000  # steps
    keep: int = 3  # number of the newest checkpoints to keep, beside the best

    def __post_init__(self):
        _positive(self, "train", "steps", "tokens_per_step", "steps_per_loop", "accumulate", "checkpoint_every", "keep")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"train.seed must be from 0 to 2**32 - 1, got {self.seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation during training, and by `flash-tf evaluate`."""

    every: int | None = 5_000  # steps; null: at the end only
    windows: int | None = None  # number of windows of the validation split; null: all
    metric: str = "loss"  # marks the best checkpoint: the lowest loss, or the highest value of a task's metric
    patience: int | None = None  # evaluations in a row without a better `metric` that end the run; null: none do

    def __post_init__(self):
        for name in ("every", "windows", "patience"):
            if getattr(self, name) is not None:
                _positive(self, "evaluation", name)
        if self.patience is not None and self.every is None:
            raise ValueError(f"evaluation.patience ({self.patience}) needs evaluation.every, got null")


def _is_address(text):
    host_and_port = re.fullmatch(r"[^\s/]+:([0-9]{1,5})", text)
    return host_and_port is not None and 0 < int(host_and_port[1]) < 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """The devices that share the work."""

    type: Literal["one_device", "mirrored", "multi_worker", "tpu", "jax"] = "one_device"
    tpu: str = "local"  # TPU name; "local" on a TPU VM
    devices: list[str] | None = None  # for mirrored; null: all GPUs, or the CPUs
    mesh: dict | None = None  # for jax: devices on the axes data, fsdp, model and sequence; null: all on data
    # For multi_worker and jax: host:port of each worker; null: from TF_CONFIG, or for jax one process.
    workers: list[str] | Literal["auto"] | None = None  # auto, for jax: as a TPU pod or Slurm says
    index: int = 0  # for multi_worker and jax: the number of this worker
    join_timeout: int = 600  # for multi_worker and jax: seconds to wait for the others

    def __post_init__(self):
        owners = {"tpu": ("tpu",), "devices": ("mirrored",), "mesh": ("jax",)}
        owners |= dict.fromkeys(("workers", "index", "join_timeout"), ("multi_worker", "jax"))
        for name, some in owners.items():
            if getattr(self, name) != getattr(StrategyConfig, name) and self.type not in some:
                raise ValueError(f"strategy.{name} belongs to strategy.type {' or '.join(some)}, got type {self.type}")
        for name in ("devices", "workers"):
            listed = getattr(self, name)
            if isinstance(listed, list) and (not listed or len(set(listed)) < len(listed)):
                raise ValueError(f"strategy.{name} needs one or more entries, each another, or null, got {listed}")
        self._check_workers()
        axes = ("data", "fsdp", "model", "sequence")
        if not all(axis in axes and type(n) is int and n > 0 for axis, n in (self.mesh or {}).items()):
            raise ValueError(f"strategy.mesh needs numbers of devices for any of {', '.join(axes)}, got {self.mesh}")
        _positive(self, "strategy", "join_timeout")

    def _check_workers(self):
        if self.workers == "auto":
            if self.type != "jax" or self.index:
                raise ValueError("strategy.workers auto belongs to strategy.type jax, without strategy.index")
            return
        if not all(map(_is_address, self.workers or [])):
            raise ValueError(f"strategy.workers must each be host:port with a port up to 65535, got {self.workers}")
        if self.workers is None and self.index:
            raise ValueError(f"strategy.index is a place in strategy.workers, which is null, got {self.index}")
        if self.workers is not None and not 0 <= self.index < len(self.workers):
            raise ValueError(f"strategy.index must be from 0 to {len(self.workers) - 1}, got {self.index}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The training steps that TensorFlow's profiler captures. The capture does not change the run."""

    start: int = 10  # the first step to capture; step 1 also traces and compiles
    steps: int = 10  # number of steps to capture; TensorBoard is slow with many more

    def __post_init__(self):
        _positive(self, "profile", "start", "steps")

    @property
    def last(self) -> int:
        return self.start + self.steps - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run. Two runs with equal configs differ only in hardware."""

    model: dict  # `type` names a file in flash_tf/models; the rest are its constructor's options
    data: DataConfig
    masking: MaskingConfig | None = None  # only for masked models; null: the default masking
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    strategy: StrategyConfig = StrategyConfig()
    profile: ProfileConfig | None = None  # null: no profile
    wandb: str | None = None  # the project of Weights & Biases that gets a copy of the records; null: none does
    init_from: str | None = None  # a run or a preset with the weights to start from; null: new weights
    paper: str | None = None  # the source of the system, for `flash-tf list`

    def __post_init__(self):
        if "mixer" in self.model:
            object.__setattr__(self, "model", {**self.model, "mixer": renamed.mixer(self.model["mixer"])})
        n, tokens = self.data.sequence_length, self.train.tokens_per_step
        if tokens % (n * self.train.accumulate):
            raise ValueError(
                f"train.tokens_per_step ({tokens}) must be a multiple of data.sequence_length ({n})"
                f" x train.accumulate ({self.train.accumulate})"
            )
        if self.profile is not None:
            self._check_profile(self.profile, self.evaluation.every or self.train.steps)

    def _check_profile(self, profile, every):
        late, crosses = profile.last > self.train.steps, (profile.start - 1) // every != (profile.last - 1) // every
        if late or crosses:
            end = f"the last, train.steps {self.train.steps}" if late else f"an evaluation, one every {every} steps"
            raise ValueError(f"profile's steps {profile.start} to {profile.last} must not go beyond {end}")

    @property
    def batch_size(self) -> int:
        """Sequences of a step, over all replicas."""
        return self.train.tokens_per_step // self.data.sequence_length


def names() -> list[str]:
    """The configs of the package, for example `mlm_c4/flash`."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml"))


def load(name: str, overrides: Iterable[str] = ()) -> Config:
    """Reads a config.

    A file with `base: NAME` lists its differences from that config; see `flash_tf.config_merge.merge`.

    Args:
      name: Path of a YAML file, or the name of a config of the package.
      overrides: Strings `key.of.option=value`, with a value in YAML.

    Raises:
      ValueError: The config is not valid. The message names the file, the option, the need and the finding.
    """
    path, values = _read(name)
    for override in overrides:
        config_merge.set_option(values, override)
    return from_mapping(Config, values, where=str(path))


def _read(name, before=()):
    """Path and values of a config file, with the values of its base that it does not set."""
    path = _path(name)
    if path in before:
        raise ValueError(f"{path}: its base leads back to this file")
    values = copy.deepcopy(_values(path.read_bytes(), str(path)))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a config must be a mapping with model, data, …, got {type(values).__name__}")
    if "base" not in values:
        return path, values
    if not isinstance(base := values.pop("base"), str):
        raise ValueError(f"{path}: base must be the name of a config, got {base!r}")
    return path, config_merge.merge(_read(base, (*before, path))[1], values)


_values = functools.lru_cache(maxsize=512)(strict_yaml.load)  # many configs have one base


def _path(name):
    for path in (Path(name), FOLDER / f"{name}.yaml"):
        if path.is_file():
            return path
    if (Path(name) / "config.yaml").is_file():
        raise ValueError(f"{name!r} is a run, not a config: its config is {Path(name) / 'config.yaml'}")
    raise ValueError(f"no config file {name!r}, and no config of this name in the package{hint(name, names())}")


def from_mapping(cls: type, values: Any, *, where: str) -> Any:
    """Builds the dataclass `cls` from nested mappings; ValueError for an unknown, missing or mistyped key."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a mapping, got {values!r}")
    hints, built = get_type_hints(cls), {}
    for name, value in values.items():
        nested = _dataclass_in(hints.get(name))
        if nested is not None and not fits(value, hints[name]):
            value = from_mapping(nested, value, where=f"{where}: {name}")
        built[name] = tuple(value) if isinstance(value, list) and get_origin(hints.get(name)) is tuple else value
    check_options(cls, built, where=where)
    try:
        return cls(**built)
    except ValueError as error:  # it names its section itself
        raise ValueError(f"{where.partition(': ')[0]}: {error}") from None


def _dataclass_in(annotation):
    """The dataclass in an annotation, alone or beside null."""
    options = get_args(annotation) if get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)
    return next((one for one in options if dataclasses.is_dataclass(one)), None)


def to_mapping(config: Config) -> dict:
    """The resolved config as plain YAML values, with every default written out."""
    return yaml.safe_load(yaml.safe_dump(dataclasses.asdict(config, dict_factory=_plain)))


def _plain(items):
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def dump(config: Config) -> str:
    """The resolved config as YAML text."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False)
