"""The command `flash-tf`: arguments in, text or one JSON object out. TensorFlow is imported late: --help is quick."""

import argparse
import gc
import json
import os
import sys
import tempfile
import traceback


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for bad input or a failed run, 128 + n after signal n."""
    args = _parser().parse_args(arguments)
    os.environ["KERAS_BACKEND"] = "tensorflow"  # noqa: TID251  the loop is TensorFlow's, whatever Keras is set to
    with _LibraryLog(f"{tempfile.gettempdir()}/flash-tf-{os.getuid()}.log") as log:
        try:
            args.run(args, log)
        except Exception as error:
            traceback.print_exc()  # into the log
            status, line = _explain(error, log.path)
            print(f"flash-tf: {line}", file=log.console)  # noqa: T201
            return status
        except KeyboardInterrupt:
            print("flash-tf: interrupted", file=log.console)  # noqa: T201
            return 130
    return 0


def program() -> None:
    """`main` as the console script: ends the process at once, before TensorFlow's farewell reaches the terminal."""
    status = main()
    sys.stdout.flush()
    os._exit(status)


def _explain(error: Exception, log: str) -> tuple[int, str]:
    """Exit status and one line for what went wrong. Traces of errors that are not the user's are in the log."""
    number = getattr(error, "number", None)
    if type(error).__name__ == "Interrupted":
        return 128 + number, f"stopped by {error}; the same command goes on from here"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError):
        return 1, text
    return 1, f"{type(error).__name__}: {text[:300]} (details in {log})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-tf", description="FLASH, GAU and Transformer language models in Keras: train, evaluate, describe."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _command(commands, "train", _train, "train a config, or go on with the run in the model directory")
    _takes_config(train)
    train.add_argument("--model-dir", metavar="DIR", help="where the run is kept; default runs/CONFIG")

    evaluate = _command(commands, "evaluate", _evaluate, "validation loss and perplexities of a trained model")
    evaluate.add_argument("model_dir", metavar="MODEL_DIR", help="where `train` left the run")
    evaluate.add_argument(
        "--checkpoint", choices=("best", "newest"), default="best", help="by validation loss, or by step"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")

    describe = _command(commands, "describe", _describe, "parameters, FLOPs and memory of a config")
    _takes_config(describe)
    describe.add_argument("--json", action="store_true", help="print one JSON object")

    compiles = _command(
        commands, "compile", _compile, "export training step and decoding, or compile the step for a TPU"
    )
    _takes_config(compiles)
    compiles.add_argument("--out", metavar="DIR", help="where the artifact goes: a new folder, or an older artifact's")
    compiles.add_argument(
        "--check-tokens", type=int, metavar="N", help="tokens of the step that proves a runner right (default ≤ 1,024)"
    )
    compiles.add_argument(
        "--decode-batch", type=int, metavar="N", help="texts that a causal model decodes together (default 1)"
    )
    compiles.add_argument("--topology", metavar="T", help="compile for TPUs, as v4:2x2x1, and say what it would cost")
    compiles.add_argument("--json", action="store_true", help="print one JSON object")

    listing = _command(commands, "list", _list, "the mixers, models, sources and configs that there are")
    listing.add_argument("--json", action="store_true", help="print one JSON object")

    fill = _command(commands, "fill-mask", _fill_mask, "the likeliest tokens at each <mask> of a text")
    fill.add_argument("model_dir", metavar="MODEL_DIR", help="where `train` left a masked model")
    fill.add_argument("text", metavar="TEXT", help="with <mask> where a token is asked")
    fill.add_argument("--top-k", type=int, default=5, metavar="K", help="tokens for each mask (default 5)")
    fill.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _command(commands, name, run, text):
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    return command


def _takes_config(command):
    command.add_argument("config", metavar="CONFIG", help="a YAML file, or a name that `flash-tf list` shows")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override an option, as data.sequence_length=1024; may be repeated",
    )


def _train(args, log):
    from flash_tf import config
    from flash_tf.training import loop

    experiment, progress = config.load(args.config, args.set), log.progress()
    model_dir = args.model_dir or f"runs/{args.config.removesuffix('.yaml').strip('./').replace('/', '-')}"
    if "://" not in model_dir:
        os.makedirs(model_dir, exist_ok=True)
        log.move(f"{model_dir}/log.txt")
    loop.train(experiment, model_dir, progress)
    progress.line(f"done; the run is in {model_dir}")


def _evaluate(args, log):
    from flash_tf.training import loop

    _print(loop.evaluate(args.model_dir, log.progress(), args.checkpoint), args.json)


def _describe(args, log):
    from flash_tf import config, describing
    from flash_tf.training import build

    experiment = build.with_masking(config.load(args.config, args.set))
    with describing.without_weights():
        model = build.make_model(experiment)
        described = describing.describe(experiment, model, build.predicted(experiment))
    _print(described if args.json else describing.as_text(described), args.json)


def _compile(args, log):
    if args.out is None and args.topology is None:
        raise ValueError("compile needs --out, --topology or both")
    if args.out is None and args.decode_batch is not None:
        raise ValueError("--decode-batch needs --out: decoding is exported, not compiled for a topology")
    from flash_tf import config
    from flash_tf.compiling import artifact, topology, tpu_chips
    from flash_tf.compiling.programs import Experiment
    from kernels_xla.accelerator import tracing_for

    if args.topology is not None:
        tpu_chips.device(args.topology)  # a name that means nothing is known before any work
    progress, found, texts, problem = log.progress(), {}, [], ""
    experiment = Experiment(*artifact.prepare(config.load(args.config, args.set)))
    if args.out is not None:
        sizes = {"check_tokens": args.check_tokens, "decode_batch": args.decode_batch}
        found = artifact.export(args.config, experiment, args.out, report=progress.line, **sizes)
        texts.append(artifact.as_text(found))
    if args.topology is not None:
        rows, n = experiment.config.batch_size, experiment.config.data.sequence_length
        progress.line(f"tracing the training step for a TPU, {rows:,} x {n:,} tokens")
        with tracing_for("tpu"):
            serialized = experiment.trace_step(rows, n).serialized
        del experiment
        gc.collect()  # graphs refer to themselves; the compiler needs the memory
        progress.line(f"compiling it for {args.topology}")
        report = topology.compile_for(serialized, args.topology)
        found["topology"], problem = topology.as_dict(report), report.problem
        texts.append(topology.as_text(report))
    _print(found if args.json else "\n\n".join(texts), args.json)
    if problem:
        raise ValueError(f"the step does not fit {args.topology}: {problem}")


def _list(args, log):
    from flash_tf import config
    from flash_tf.data.sources import SOURCES
    from flash_tf.layers.feedforward import FEEDFORWARDS
    from flash_tf.layers.mixers import MIXERS
    from flash_tf.models import MODELS

    parts = {"mixers": MIXERS, "feedforwards": FEEDFORWARDS, "models": MODELS, "sources": SOURCES}
    found = {name: registry.names() for name, registry in parts.items()} | {"configs": config.names()}
    text = "\n".join(f"{name:<14}{f'{chr(10)}{14 * chr(32)}'.join(names)}" for name, names in found.items())
    _print(found if args.json else text, args.json)


def _fill_mask(args, log):
    from flash_tf.filling import fill_mask
    from flash_tf.training import loop

    run, _ = loop.restore(args.model_dir, log.progress())
    longest = run.config.data.sequence_length
    masks = fill_mask(run.model, run.tokenizer, args.text, top_k=args.top_k, max_tokens=longest)
    rows = [f"{c['probability']:6.1%}  {c['token']:<16}{c['text']}" for mask in masks for c in mask]
    _print({"masks": masks} if args.json else "\n".join(rows), args.json)


def _print(result, as_json: bool) -> None:
    if as_json:
        text = json.dumps(result)
    elif isinstance(result, dict):
        width = max(map(len, result)) + 2
        text = "\n".join(f"{k:<{width}}{f'{v:,.4f}' if isinstance(v, float) else f'{v:,}'}" for k, v in result.items())
    else:
        text = result
    print(text)  # noqa: T201


class _LibraryLog:
    """Sends all that libraries write to standard error, from Python or from C++, to a file.

    Attributes:
      console: The user's standard error.
      path: The file.
    """

    def __init__(self, path: str):
        self.path = path

    def __enter__(self):
        sys.stderr.flush()
        self._python = sys.stderr
        self.console = os.fdopen(os.dup(2), "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        self.move(self.path)
        return self

    def __exit__(self, *_):
        sys.stderr.flush()
        os.dup2(self.console.fileno(), 2)
        sys.stderr = self._python
        self.console.close()

    def move(self, path: str) -> None:
        """Goes on in another file."""
        self.path = path
        with open(path, "a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 2)

    def progress(self):
        """The user's progress line."""
        from flash_tf.training.progress import Progress

        return Progress(self.console)


if __name__ == "__main__":
    program()
