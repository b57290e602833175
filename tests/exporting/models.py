"""Tiny models as runs leave them, and their exports."""

import dataclasses
from pathlib import Path

import numpy as np
import yaml

from flash_tf import config
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.exporting import saved_model
from flash_tf.layers.mixers import MIXERS
from flash_tf.training import modelling
from flash_tf.training.checkpoints import Checkpoints
from flash_tf.training.restore import Trained, restore
from tests.contracts.test_mixers import SMALL, causal_only, defaults, never_causal
from tests.training import runs

LENGTH, NEW = 40, 5
PAPER = ("transformer", "transformer_plus", "transformer_plus_plus", "flash_quad", "flash")
TASKS = {"masked": "mlm_c4", "causal": "lm_wiki40b"}
STEP = 7


def small(mixer):
    """A mixer's section at a size for tests."""
    options = {k: v for k, v in SMALL.items() if k in defaults(MIXERS.get(mixer["type"]))}
    return {**mixer, **options}


def sections():
    """Model sections by name: the paper's models, masked and causal, and each mixer that is in none of them."""
    found = {}
    for kind, task in TASKS.items():
        for name in PAPER:
            found[f"{kind}-{name}"] = config.load(f"{task}/{name}").model
        known = {found[f"{kind}-{name}"]["mixer"]["type"] for name in PAPER}
        for mixer in sorted(set(MIXERS.names()) - known):
            if (causal_only if kind == "masked" else never_causal)(MIXERS.get(mixer)):
                continue
            feedforward = None if MIXERS.get(mixer).gated_unit else {"type": "glu"}
            found[f"{kind}-{mixer}"] = {"type": f"{kind}_lm", "mixer": {"type": mixer}, "feedforward": feedforward}
    sizes = {"vocabulary_size": runs.VOCABULARY, "width": 16, "depth": 1}
    return {name: {**section, **sizes, "mixer": small(section["mixer"])} for name, section in found.items()}


def directory(folder, section, **data):
    """A model directory with a checkpoint of weights that make every model say something."""
    folder.mkdir(parents=True, exist_ok=True)
    runs.corpus(folder)
    path = runs.write(folder, data={"sequence_length": LENGTH, **data}, train={"tokens_per_step": LENGTH})
    values = {**yaml.safe_load(Path(path).read_text()), "model": section}
    made = modelling.with_masking(config.from_mapping(config.Config, values, where="test"))
    model_dir = folder / "model"
    model_dir.mkdir()
    (model_dir / "config.yaml").write_text(config.dump(made))
    Tokenizer.train(iter((folder / "train.txt").read_text().splitlines()), runs.VOCABULARY).save(
        str(model_dir / "tokenizer.model")
    )
    rng = np.random.default_rng(6)
    model = modelling.make_model(made)
    for weight in model.trainable_variables:
        weight.assign((np.round(weight.numpy()) + 0.3 * rng.normal(size=weight.shape)).astype("float32"))
    Checkpoints(f"{model_dir}/checkpoints").save({w.path: w.value for w in model.weights}, {"step": STEP})
    return model_dir


def restored(model_dir):
    return restore(str(model_dir))


def exported(model_dir, out, **options):
    """The run, and what its export says."""
    run = restored(model_dir)
    options = saved_model.Options(**{"new_tokens": NEW, "top_k": 3, **options})
    return run, saved_model.export(run, str(out), options, lambda line: None)


@dataclasses.dataclass
class Export:
    """An export, the Python model that it was made of, and the answers that another process got of it."""

    name: str
    folder: Path
    run: Trained
    about: dict
    answers: dict

    def __getitem__(self, request):
        return self.answers[request]
