"""The commands, one file each. Its docstring is its help, `add_arguments` fills its parser, `run` does the work.

A docstring's first line says what the command is for. Two examples follow under "Examples:".
"""

import argparse
import json
import math
import re

from flash_tf.registry import MOST

NAMES = (
    "prepare",
    "train",
    "sweep",
    "evaluate",
    "predict",
    "average",
    "fill-mask",
    "generate",
    "score",
    "lm-eval",
    "export",
    "convert",
    "describe",
    "compile",
    "profile",
    "tune",
    "plot",
    "inspect",
    "list",
)


def takes_config(parser) -> None:
    """A config, and overrides of its options."""
    group = parser.add_argument_group("config")
    group.add_argument("config", metavar="CONFIG", help="a YAML file, or a name from `flash-tf list`")
    takes_overrides(group)


def takes_overrides(group) -> None:
    """Overrides of a config's options."""
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override an option, for example data.sequence_length=1024; may be repeated",
    )


def takes_model(parser) -> None:
    """A trained model, and which of its checkpoints."""
    group = parser.add_argument_group("model")
    group.add_argument("model_dir", metavar="RUN", help="the folder of the run")
    group.add_argument(
        "--checkpoint",
        type=_checkpoint,
        default="best",
        metavar="best|newest|STEP",
        help="the one with the lowest validation loss (default), the one with the most steps, or the one of STEP",
    )


def takes_threshold(parser) -> None:
    """The threshold of answers in place of the run's."""
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--no-answer-threshold",
        type=finite,
        metavar="SCORE",
        help="a question whose score is below it has no answer (default: the run's model.no_answer_threshold)",
    )


def threshold(args) -> list[str]:
    """The override of a run's config that `takes_threshold` asks for."""
    given = args.no_answer_threshold
    return [] if given is None else [f"model.no_answer_threshold={given!r}"]


def _checkpoint(text):
    if text in ("best", "newest"):
        return text
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"needs best, newest or the number of a step, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """A whole number of an option that counts. Its command says which numbers it takes."""
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or abs(int(text)) > MOST[int]:
        raise argparse.ArgumentTypeError(f"needs a whole number of at most {MOST[int]}, got {text!r}")
    return int(text)


def utf8(text: str) -> str:
    """A text for a model. Python gives bytes of an argument that are not UTF-8 as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"needs a text in UTF-8, got {text!r} with other bytes") from error
    return text


def finite(text: str) -> float:
    """A number of an option that measures."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= MOST[float]:
        raise argparse.ArgumentTypeError(f"needs a finite number, got {text!r}")
    return number


def gives_json(parser, out: str | None = None) -> None:
    """What the command prints or writes.

    Args:
      parser: The command's.
      out: Help for `--out`; None for a command that only prints.
    """
    group = parser.add_argument_group("output")
    if out is not None:
        group.add_argument("--out", metavar="DIR", help=out)
    group.add_argument("--json", action="store_true", help="print one JSON object")


def show(result: dict | str, as_json: bool) -> None:
    """Prints a command's result: a dictionary of numbers, or text."""
    if as_json:
        text = json.dumps(result)
    elif isinstance(result, dict):
        width = max(map(len, result)) + 2
        text = "\n".join(f"{k:<{width}}{f'{v:,.4f}' if isinstance(v, float) else f'{v:,}'}" for k, v in result.items())
    else:
        text = result
    print(text)  # noqa: T201
