"""The manifest of an artifact of `flash-tf compile`. Needs the standard library alone: its readers lack TensorFlow."""

import dataclasses
import json
from pathlib import Path
from typing import Any

FORMAT = 2
MANIFEST, CONFIG, TOKENIZER = "manifest.json", "config.yaml", "tokenizer.model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a program.

    Attributes:
      name: The variable's path, the name of an entry of the decoder's state, or one of `tokens`, `window`,
        `segment_ids`, `step`, `rate` and `token`.
      role: "batch"; "step" (steps done before, int64); "rate" (the learning rate); "weight"; "slot" (a running mean of
        AdamW, called `m/` or `v/` and the weight's name); "seed" (of dropout; the step sets it); "token" (the last
        token of each text, which the state has not seen); "state" (an entry of the decoder's state).
      shape: Its shape.
      dtype: NumPy's name of its type.
      initializer: How a weight, slot, seed or state begins, see `values.initial`; None for other roles.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    initializer: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One exported program. Its arguments are a batch, then numbers of the step, then variables.

    Attributes:
      file: Name of the file with serialized HLO.
      stablehlo: Name of the file with the same program as text; None if there is none.
      arguments: The arguments, in order.
      results: The first result: `record` (float32 [columns], the step's metrics) or `chosen` (int32 [batch, tokens of a
        call], the decoded tokens). New values of variables follow.
      replaces: Number of a result -> number of the argument whose next value it is.
      batch_size: Sequences of a batch.
      sequence_length: n. For decoding, the tokens that a call adds to each text.
      tokens: Tokens of a batch.
      flops: Model FLOPs of a training step; None for other programs.
      capacity: The most tokens of a decoded text; None if nothing bounds it, and for other programs.
    """

    file: str
    stablehlo: str | None
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    replaces: dict[int, int]
    batch_size: int
    sequence_length: int
    tokens: int
    flops: int | None
    capacity: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """TensorFlow's results of the program `check`. Every step trains on the batch `values.made_up`.

    Attributes:
      losses: Losses of the first steps, from the initial values.
      rate: The learning rate of every step.
      device: The processor that computed them.
    """

    losses: tuple[float, ...]
    rate: float
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a runner of the programs must know.

    Attributes:
      name: Name of the config, as the caller gave it.
      config: The resolved config.
      versions: Versions of the packages that exported it.
      task: The model's type.
      vocabulary_size: V.
      parameters: Number of trainable parameters.
      ids: The token ids `pad`, `eos` and `cls`.
      overlap: 1 if a window has n + 1 tokens and the model predicts the last n; else 0.
      align: Packed documents start at multiples of this position.
      columns: Names of the metrics in a step's record.
      seed: Seed of the initial values, the masks, dropout and the order of windows.
      numbers: `values.fingerprint` of the seed.
      programs: `step`, `check`, and `decode` if the model decodes.
      check: The expected results of the program `check`.
    """

    name: str
    config: dict[str, Any]
    versions: dict[str, str]
    task: str
    vocabulary_size: int
    parameters: int
    ids: dict[str, int]
    overlap: int
    align: int
    columns: tuple[str, ...]
    seed: int
    numbers: str
    programs: dict[str, Program]
    check: Check

    @property
    def precision(self) -> str:
        return self.config["train"]["precision"]


def write(manifest: Manifest, directory: str) -> None:
    """Writes the manifest into an artifact's directory. A reader finds the new one or the old one, both whole."""
    path = Path(directory, MANIFEST)
    partial = path.with_name(f"{MANIFEST}.partial")
    partial.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, indent=1) + "\n")
    partial.replace(path)


def read(directory: str) -> Manifest:
    """Reads the manifest of an artifact.

    Raises:
      ValueError: There is no manifest, it has another format, or it is damaged.
    """
    path = Path(directory, MANIFEST)
    if not path.is_file():
        raise ValueError(f"{directory} is no artifact: it has no {MANIFEST}, which `flash-tf compile --out` writes")
    try:
        values = json.loads(path.read_text())
        found = values.pop("format")
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: it is not a JSON object with a format") from error
    if found != FORMAT:
        raise ValueError(f"{path} has format {found!r}, but this program reads format {FORMAT}: export it again")
    try:
        values["programs"] = {name: _program(one) for name, one in values["programs"].items()}
        values["check"] = Check(**{**values["check"], "losses": tuple(map(float, values["check"]["losses"]))})
        return Manifest(**{**values, "columns": tuple(values["columns"])})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _program(values):
    arguments = tuple(Argument(**{**a, "shape": tuple(a["shape"])}) for a in values["arguments"])
    replaces = {int(result): argument for result, argument in values["replaces"].items()}
    results = tuple(values["results"])
    return Program(**{**values, "arguments": arguments, "results": results, "replaces": replaces})
