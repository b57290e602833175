"""Public models to presets, and models of ours to public folders."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import keras
import numpy as np
from safetensors.numpy import save_file

from flash_tf import owned_files, presets
from flash_tf.converting import families
from flash_tf.converting.entries import to_ours, to_public
from flash_tf.converting.tensor_file import CONFIG, TENSORS, check_tensors, open_tensors, read_config
from flash_tf.layers.common import options as options_of
from flash_tf.model_stats import without_weights
from flash_tf.models.language_model import LanguageModel
from flash_tf.registry import check_options, mixer_name

WRITER = "convert"
EMBEDDING = "embedding/embeddings"
# They change no output, or are compared with all options of their own.
UNSEEN = (
    *("causal", "block_size", "implementation", "norm_implementation", "dropout", "attention_dropout"),
    *("remat", "mixer", "feedforward"),
)
SAME = {"swish": "silu"}  # activations with two names


def is_public(folder: str) -> bool:
    """Whether a folder's config.json is a public one: it has a `model_type`."""
    return "model_type" in owned_files.json_of(f"{folder}/{CONFIG}")


def from_public(folder: str) -> LanguageModel:
    """The model of a public folder with config.json and model.safetensors, or several files with an index.

    Raises:
      ValueError: The folder lacks a file; the architecture or an option of it is not one of ours; or tensors are
        missing, too many or of other shapes.
    """
    public = read_config(folder)
    family = families.get(public.get("model_type"))
    where = f"{folder}/{CONFIG}"
    _check_fixed(family, public, where)
    try:
        options = family.options(public)
    except KeyError as error:
        raise ValueError(f"{where} needs {error.args[0]}, which is not there") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{where}: {error}") from error
    check_options(family.MODEL, options, where=where)
    model = family.MODEL(**options)
    model.build()
    with open_tensors(folder, family.PREFIX, family.HEAD) as tensors:
        _assign(model, family, tensors, folder)
    model.tokenizer = _tokenizer(folder, model.vocabulary_size)
    return model


def _tokenizer(folder, vocabulary_size):
    """The tokenizer in a folder, or None if it has none that is read here and has no ids outside the vocabulary."""
    try:
        found = presets.read_tokenizer(folder, vocabulary_size)
    except ValueError:
        return None
    return None if found is None or found.vocabulary_size > vocabulary_size else found


def _check_fixed(family, public, where):
    for name, needed in family.FIXED.items():
        if (got := public.get(name, needed)) != needed:
            raise ValueError(f"{where}: {name} is not supported: it must be {json.dumps(needed)}, got {got!r}")


def _assign(model, family, tensors, folder):
    variables, found = _variables(model), tensors.shapes()
    entries = list(family.entries(model))
    shaped = lambda name: np.broadcast_to(np.zeros((), "int8"), tuple(variables[name].shape))  # noqa: E731
    needed = {name: x.shape for name, x in to_public(entries, shaped).items()}
    head = family.HEAD
    if head in found and head not in needed:
        table = next(entry.theirs[0] for entry in entries if entry.ours == EMBEDDING)
        if table not in found or not np.array_equal(tensors[head], tensors[table]):
            raise ValueError(f"{folder}: {head} must equal {table}, because tie_word_embeddings is true; it does not")
        del found[head]
    check_tensors(needed, found, family.IGNORED, folder)
    for entry in entries:
        variables[entry.ours].assign(to_ours(entry, tuple(variables[entry.ours].shape), tensors.__getitem__))


def _variables(model):
    return {variable.path.partition("/")[2]: variable for variable in model.weights}


def to_tensors(model: LanguageModel, family: ModuleType) -> dict[str, np.ndarray]:
    """The public tensors of a model that a family can compute, float32."""
    variables = _variables(model)
    value_of = lambda name: keras.ops.convert_to_numpy(variables[name].value).astype("float32")  # noqa: E731
    return to_public(family.entries(model), value_of)


def family_of(model: keras.Model) -> tuple[str, ModuleType, dict[str, Any]]:
    """The `model_type`, the family and the public config that compute the same as a model.

    Raises:
      ValueError: There is none. The message says what the nearest one would need.
    """
    faults = {}
    for name in families.names():
        family = families.get(name)
        if type(model) is not family.MODEL:
            continue
        with contextlib.suppress(AttributeError, IndexError, ValueError):  # its layers or positions are of other kinds
            config = family.public(model)
            faults[name] = _differences(model, family.MODEL, family.options(config))
            if not faults[name]:
                return name, family, config
    if not faults:
        raise ValueError(
            f"no public architecture has the layers of this model, {mixer_name(model.mixer)}: there are "
            + ", ".join(families.names())
        )
    name = min(faults, key=lambda name: len(faults[name]))
    needed = ", ".join(f"{option} {needed!r}, got {got!r}" for option, needed, got in faults[name])
    raise ValueError(f"no public architecture computes this model: the nearest, {name}, needs {needed}")


def _differences(model, cls, needed):
    """`(option, what a family needs, what the model has)` for each option in which they differ."""
    with without_weights():
        again = cls(**needed)
        again.build()
    ours, theirs = _described(model), _described(again)
    return [(k, theirs.get(k), ours.get(k)) for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]


def _described(model):
    """Every option that changes what a built model computes, by name."""
    stack = {**options_of(model), "head_norm": model.head_norm or model.norm}
    stack["head_norm_epsilon"] = model.norm_epsilon if model.head_norm_epsilon is None else model.head_norm_epsilon
    inner = {}
    for i, block in enumerate(model.blocks):
        own = {**options_of(block.inner), "type": type(block.inner).__name__}
        own |= {"hidden": block.inner.inner} if "hidden" in own else {}
        own |= {"dt_rank": block.inner.rank} if "dt_rank" in own else {}
        own |= {"kv_heads": own["kv_heads"] or own["heads"]} if "kv_heads" in own else {}
        own |= {"activation": SAME.get(own["activation"], own["activation"])} if "activation" in own else {}
        inner |= {f"layer {i} {name}": value for name, value in own.items() if name not in UNSEEN}
    return {**{name: value for name, value in stack.items() if name not in UNSEEN}, **inner}


def _tokenizer_config(tokenizer, config):
    """What `transformers` reads beside tokenizer.json: its class, and the special pieces that the file has."""
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "mask")}
    ids |= {name: config[f"{name}_token_id"] for name in ("bos", "eos")}
    known = lambda id: isinstance(id, int) and 0 <= id < tokenizer.file_pieces and id not in tokenizer.lost  # noqa: E731
    there = {name: id for name, id in ids.items() if known(id)}
    named = {f"{name}_token": tokenizer.piece(id) for name, id in there.items()}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}


def save_public(model: LanguageModel, out: str, kept: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Writes config.json and model.safetensors under public names.

    Args:
      model: A model that a public architecture computes.
      out: A new folder, or an older one of ours.
      kept: The public config that the model was made from. What it says beside the weights stays.
      files: Further files, name -> text.

    Returns:
      The name of the architecture.
    """
    name, family, config = family_of(model)
    tensors = to_tensors(model, family)
    kept = kept if kept.get("model_type") == name else {}
    unchanged = kept and family.options(kept) == family.options(config)  # the same, whatever names it uses
    whole = {"architectures": [family.ARCHITECTURE], "model_type": name, **family.FIXED, **kept}
    whole |= {"dtype": "float32", **({} if unchanged else config)}
    if model.tokenizer is not None:  # else the library takes ids of its own
        ids = {"bos": model.tokenizer.eos_id, "eos": model.tokenizer.eos_id, "pad": model.tokenizer.pad_id}
        lost = model.tokenizer.lost if kept else ()  # in a public file such an id is a piece of text
        whole = {**{f"{name}_token_id": id for name, id in ids.items() if id not in lost}, **whole}
    with owned_files.replacing(out, WRITER, lambda folder: ()) as folder:
        (folder / CONFIG).write_text(json.dumps(whole, indent=2) + "\n", "utf-8")
        save_file(tensors, folder / TENSORS, metadata={"format": "pt"})  # which `transformers` asks for
        shutil.copymode(folder / CONFIG, folder / TENSORS)  # the library writes it for its owner alone
        if model.tokenizer is not None:
            model.tokenizer.save(str(folder / model.tokenizer.file))
            if model.tokenizer.file == "tokenizer.json":
                settings = _tokenizer_config(model.tokenizer, whole)
                (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        for file, text in files.items():
            (folder / file).write_text(text, "utf-8")
    return name
