"""Passes the records of a run on: to Weights & Biases, and to a function of the user's own."""

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator

from flash_tf import config as configs
from flash_tf import owned_files
from flash_tf.data import stored

ID = "wandb.txt"  # holds the run's id there, so that a resumed run goes on in the same place
Mirror = Callable[[str, list[dict]], None]  # takes the kind of some records, "train" or "validation", and the records


def check(config: configs.Config) -> None:
    """Raises a ValueError if the records are to be mirrored and the library is not there."""
    if config.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb needs the package of this name: pip install 'flash-tf[wandb]', or set wandb=null")


@contextlib.contextmanager
def mirrored(
    config: configs.Config, model_dir: str, chief: bool, report: Callable[[str], None], callback: Mirror | None = None
) -> Iterator[Mirror]:
    """A function that copies records to the project `config.wandb`, if there is one, and to `callback`.

    The library's own settings say whether it is online: `WANDB_MODE=offline` keeps all in the model directory, until
    `wandb sync`.

    Args:
      config: The experiment.
      model_dir: The model directory.
      chief: Whether this process writes records.
      report: Called with a line that says where the copies are.
      callback: Gets copies too.
    """

    def called(kind, records):
        if callback is not None and chief:
            callback(kind, [dict(record) for record in records])

    if config.wandb is None or not chief:
        yield called
        return
    import wandb  # slow

    local = {"dir": model_dir} if owned_files.is_local(model_dir) else {}
    settings = wandb.Settings(silent=True, console="off")
    about = {"name": os.path.basename(model_dir.rstrip("/")), "config": configs.to_mapping(config), **local}
    try:
        run = wandb.init(project=config.wandb, id=_id(model_dir), resume="allow", settings=settings, **about)
    except wandb.errors.Error as error:
        raise ValueError(f"wandb {config.wandb!r}: {' '.join(str(error).split())}") from None
    report(f"mirroring the records to {run.url or run.dir}")

    def mirror(kind, records):
        for record in records:
            run.log({f"{kind}/{name}": value for name, value in record.items() if name != "step"}, step=record["step"])
        called(kind, records)

    with run:
        yield mirror


def _id(model_dir):
    path = f"{model_dir}/{ID}"
    if stored.read(path) is None:
        stored.write(path, uuid.uuid4().hex.encode())
    return stored.read(path).decode().strip()
