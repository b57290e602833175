"""The commands, one file each: its docstring is its help, `add_arguments` takes its parser, `run` its arguments."""

import json

NAMES = (
    "train",
    "evaluate",
    "fill-mask",
    "generate",
    "score",
    "export",
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
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a name that `flash-tf list` shows")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override an option, as data.sequence_length=1024; may be repeated",
    )


def takes_model(parser) -> None:
    """A trained model."""
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="where `train` left the run")


def gives_json(parser) -> None:
    """A switch for machines that read."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


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
