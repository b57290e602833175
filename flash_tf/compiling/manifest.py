"""What an artifact of `flash-tf compile` says about itself. The standard library alone: its readers lack TensorFlow."""

import dataclasses
import json
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST, CONFIG, TOKENIZER = "manifest.json", "config.yaml", "tokenizer.model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a program.

    Attributes:
      name: The variable's path, or what the argument is: `tokens`, `window`, `segment_ids`, `step`, `rate`,
        `token`, or the name of a state's entry.
      role: "batch", "step" (steps done before, int64), "rate" (the learning rate), "weight", "slot" (a mean that AdamW
        keeps of a weight's gradient: `m/` and the weight's name, or `v/`), "seed" (of dropout; the step sets it),
        "token" (the last of each row, which the state has not seen), or "state" (an entry of a decoder's).
      shape: Its shape.
      dtype: NumPy's name of its type.
      initialiser: What a weight, slot, seed or state is made of, see `values.initial`; None of others.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    initialiser: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One exported program: its arguments are a batch, then numbers of the step, then variables.

    Attributes:
      file: Serialized HLO.
      stablehlo: The same as text; None where it is not kept.
      arguments: In their order.
      results: What comes first among the results: `record` (the step's, float32 [columns]), `sums` (float32 [1 + V]:
        the summed negative log-likelihood, then how often each token was to be predicted), or `chosen` (int32 [batch,
        tokens of a call], what was decoded). New variables follow.
      replaces: Number of a result -> number of the argument whose next value it is.
      batch_size: Sequences.
      sequence_length: n; of decoding, the tokens that a call adds to each row.
      tokens: Of a batch.
      flops: Model FLOPs of a training step; None of a program that does not train.
      capacity: The most tokens of a row that is decoded; None where nothing bounds it, and of what does not decode.
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
    """What TensorFlow got of the program `check`, from the initial values, on the batch `values.made_up` every time.

    Attributes:
      losses: Of the first steps.
      rate: The learning rate of each.
      device: The processor.
    """

    losses: tuple[float, ...]
    rate: float
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a program's runner must know.

    Attributes:
      name: The config's, as it was asked for.
      config: The resolved config.
      versions: Of the packages that exported it.
      task: The model's type.
      vocabulary_size: V.
      parameters: How many trainable numbers.
      ids: The token ids `pad`, `eos` and `cls`.
      overlap: 1 where a batch's rows are n + 1 tokens, of which n are predicted; else 0.
      align: Where packed documents may start in a row.
      columns: What a step's record is.
      seed: Of the initial values, the masks, dropout and the order of windows.
      numbers: `values.fingerprint` of that seed.
      programs: `step`, `forward`, `check`, and `decode` where the model can.
      check: What the program `check` must give.
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
    """Writes it into an artifact's directory; what stands there is whole or the one before."""
    path = Path(directory, MANIFEST)
    partial = path.with_name(f"{MANIFEST}.partial")
    partial.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, indent=1) + "\n")
    partial.replace(path)


def read(directory: str) -> Manifest:
    """The manifest of an artifact.

    Raises:
      ValueError: When there is none, it is of another format, or it is damaged.
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
        raise ValueError(f"{path} is of format {found!r}, this program reads format {FORMAT}: export it again")
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
