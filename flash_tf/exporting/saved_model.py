"""Writes a trained model as a SavedModel, with its config and its origin."""

import dataclasses
import json
import os
from collections.abc import Callable

import keras
import tensorflow as tf

from flash_tf import config as configs
from flash_tf import owned_files
from flash_tf.exporting import lite
from flash_tf.exporting.readers import IdReader, TextReader
from flash_tf.exporting.signatures import Limits, Served, ServedCausalLM, ServedMaskedLM, signature, spelled
from flash_tf.exporting.tasks import SERVED
from flash_tf.layers.traced_once import forward_only
from flash_tf.registry import mixer_name
from flash_tf.training import run_directory
from flash_tf.training.restore import Trained
from kernels_xla.common.accelerator import tracing_for

WRITER = "flash-tf export"
EXTRA, ABOUT, LITE = "assets.extra", "export.json", "model.tflite"
PRECISIONS = ("float32", "mixed_bfloat16", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an export.

    Attributes:
      ids_only: Whether all signatures take ids and none takes text; then a server needs no TF-Text.
      precision: float32, mixed_bfloat16 (weights in float32, products in bfloat16) or bfloat16 (weights too, in half
        the space); None for the precision of the training.
      longest: The most tokens of a text; None for the config's sequence length.
      new_tokens: The most tokens that `generate` adds; None for 64, or for half of `longest` where that is less.
      top_k: Candidates of `fill_mask` for each mask.
      licence: Licence of the vocabulary; None states its origin instead.
      lite: Whether to write a TensorFlow Lite file too.
      jit_compile: Whether XLA compiles `generate` and `decode_step` of a causal model, for servers with a GPU.
    """

    ids_only: bool = False
    precision: str | None = None
    longest: int | None = None
    new_tokens: int | None = None
    top_k: int = 5
    licence: str | None = None
    lite: bool = False
    jit_compile: bool = False

    def __post_init__(self):
        counts = {"--max-length": self.longest, "--max-new-tokens": self.new_tokens, "--top-k": self.top_k}
        for option, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"an export needs {option} of 1 or more, got {value}")


def export(run: Trained, out: str, options: Options, report: Callable[[str], None]) -> dict:
    """Writes the model of a restored run.

    Args:
      run: See `training.restore`.
      out: A folder that is new, empty or an older export, which is replaced once the new one is whole.
      options: See `Options`.
      report: Called with a line at each stage.

    Returns:
      The content of `assets.extra/export.json`: the signatures with arguments and results, and the model's origin.

    Raises:
      ValueError: The folder holds something else, the options do not fit the model, or TensorFlow Lite lacks an
        operator.
    """
    # A server may have another accelerator than this machine, so the program has no kernels of this one.
    with tracing_for("gpu"), owned_files.replacing(os.path.expanduser(out), WRITER, _older) as folder:
        return _write(run, folder, options, report)


def check_folder(out: str) -> None:
    """Raises a ValueError if the folder `out` holds anything except an older export."""
    owned_files.check_folder(os.path.expanduser(out), WRITER, _older)


def check_generates(model: keras.Model, option: str) -> None:
    """Raises a ValueError, which names an option that needs it, unless the model can generate."""
    if model.obstacle is not None:
        raise ValueError(f"{option} is for models that generate, and this one does not: {model.obstacle}")


def _older(folder):
    """The files of an export from before there were manifests, by the names that it gave."""
    about = owned_files.json_of(f"{folder}/{EXTRA}/{ABOUT}")
    return about["files"] if "signatures" in about and isinstance(about.get("files"), list) else ()


def served(run: Trained, options: Options) -> Served:
    """The model with its signatures, in the precision of the options."""
    longest = _longest(run, options)
    new_tokens = max(1, min(64, longest // 2)) if options.new_tokens is None else options.new_tokens
    limits = Limits(longest, new_tokens, options.top_k)
    if options.top_k > run.tokenizer.vocabulary_size:
        raise ValueError(f"top-k must be at most the vocabulary's {run.tokenizer.vocabulary_size}, got {options.top_k}")
    if options.jit_compile:
        check_generates(run.model, "--jit-compile")
    model = in_precision(run.model, options.precision or run.config.train.precision)
    reader = IdReader(run.tokenizer, limits.longest)
    if not options.ids_only:
        reader = TextReader(run.tokenizer, limits.longest)
    made = _served_class(run.config.model["type"])(model, run.tokenizer, reader, limits, options.jit_compile)
    made.names = run.config.data.labels
    if "generate" in made.endpoints() and made.bounded and limits.new_tokens >= limits.longest:
        raise ValueError(
            f"{limits.new_tokens} new tokens and a prompt do not fit {limits.longest} tokens: "
            "raise --max-length or lower --max-new-tokens"
        )
    return made


def _served_class(kind):
    return {"causal_lm": ServedCausalLM, "masked_lm": ServedMaskedLM, **SERVED}[kind]


def _longest(run, options):
    longest, most = options.longest or run.config.data.sequence_length, run.model.longest
    if most is not None and longest > most:
        raise ValueError(f"the model reads at most {most} tokens, got a max length of {longest}")
    return longest


def in_precision(model: keras.Model, precision: str) -> keras.Model:
    """A copy of a model under another dtype policy, with its weights rounded to that precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    copy = type(model).from_config({**model.get_config(), "dtype": precision})
    copy.build()
    for new, old in zip(copy.weights, model.weights, strict=True):
        new.assign(keras.ops.copy(old))
    return copy


def _write(run, folder, options, report):
    made = served(run, options)
    extra = folder / EXTRA
    signatures = {}
    for name, (function, specs) in made.endpoints().items():
        report(f"tracing {name}")
        with forward_only():
            signatures[name] = signature(name, function, specs)
    default = next(iter(signatures))
    report(f"writing {len(signatures)} signatures")
    signed = {"serving_default": signatures[default], **signatures}
    forward = tf.saved_model.SaveOptions(experimental_custom_gradients=False)  # a server takes no gradients
    tf.saved_model.save(made, str(folder), signatures=signed, options=forward)
    extra.mkdir()
    (extra / run_directory.CONFIG).write_text(configs.dump(run.config))
    (extra / run_directory.VERSIONS).write_text(json.dumps(run_directory.versions(), indent=2) + "\n")
    run.tokenizer.save(str(extra / run.tokenizer.file))
    if options.lite:
        report("converting to TensorFlow Lite")
        (folder / LITE).write_bytes(
            lite.convert(served(run, dataclasses.replace(options, precision="float32", ids_only=True)))
        )
    about = _about(run, made, options, signatures)
    files = (path for path in folder.rglob("*") if path.is_file())
    about["files"] = sorted([f"{EXTRA}/{ABOUT}", *(str(path.relative_to(folder)) for path in files)])
    (extra / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return about


def _about(run, made, options, signatures):
    tokenizer, source = run.tokenizer, run.config.data
    if not isinstance(source.tokenizer, str):
        came_from = f"trained on the training split of {source.source['type']}: its text decides the licence"
    else:
        came_from = f"not stated; the vocabulary is {source.tokenizer}"
    return {
        "model": run.config.model["type"],
        "mixer": mixer_name(run.config.model["mixer"]),
        "step": run.step,
        "precision": options.precision or run.config.train.precision,
        "reads": "ids" if options.ids_only else "text",
        "jit_compile": options.jit_compile,
        "max_length": made.limits.longest,
        "max_new_tokens": made.limits.new_tokens if "generate" in signatures else None,
        "top_k": made.limits.top_k if "fill_mask" in signatures else None,
        "vocabulary_licence": options.licence or came_from,
        "special_ids": {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "eos", "unk", "mask", "cls")},
        "signatures": {name: _described(function, made) for name, function in signatures.items()},
    }


def _described(function, made):
    given = {spec.name: spelled(spec) for spec in tf.nest.flatten(function.structured_input_signature)}
    return {"takes": given, "gives": {name: spelled(x) for name, x in function.structured_outputs.items()}}


def as_text(about: dict, out: str) -> str:
    """The result of `export` for people."""
    width = max(map(len, about["signatures"])) + 2
    lines = [
        f"{name:<{width}}{', '.join(of['takes'])} -> {', '.join(_short(of['gives']))}"
        for name, of in about["signatures"].items()
        if name != "serving_default"
    ]
    return "\n".join([*lines, f"{about['model']} of step {about['step']:,}, {about['precision']}, in {out}"])


def _short(names):
    """Names, with "the state" for all entries of a state."""
    found = dict.fromkeys("the state" if name.startswith("block_") or name == "position" else name for name in names)
    return list(found)
