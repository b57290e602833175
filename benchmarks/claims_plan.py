"""The trainings of `benchmarks/claims.yaml`: which there are for a claim, and the options of each."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

TABLE = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text("utf-8"))
CLAIMS = TABLE["claims"]
CHECKPOINTS = 4  # of a run


class Case(NamedTuple):
    """A training.

    Attributes:
      claim: Its name in the plan.
      task: "lm" or "mlm".
      system: Its name in the plan.
      change: The one difference from the system, or None.
      length: Tokens of a sequence, n, unless the change says otherwise.
      tokens: Tokens to train on, rounded down to whole steps.
      rate: The peak learning rate, unless the change says otherwise.
      seed: Of weights, order and masks.
    """

    claim: str
    task: str
    system: str
    change: str | None
    length: int
    tokens: int
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of system and change."""
        return self.system if self.change is None else f"{self.system}-{self.change}"

    @property
    def config(self) -> str:
        """The config that the options change."""
        return TABLE["systems"][self.system]["config"].format(task=self.task)

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        parts = (self.claim, self.task, self.name, self.length, f"{self.tokens / 1e6:g}M", f"{self.rate:g}", self.seed)
        return "-".join(map(str, parts))


def names(claim: str) -> list[str]:
    """The systems of a claim, each followed by its changes, as `Case.name` has them."""
    return [case.name for case in _cases(claim, "", 0, 0, 0.0)]


def choosing(claim: str) -> list[Case]:
    """The short runs whose perplexities choose the rates of a claim; none if it has one rate."""
    plan = CLAIMS[claim]
    if "choose" not in plan:
        return []
    length, tokens = plan["choose"]["length"], plan["choose"]["tokens"]
    systems = [(task, system) for task in plan["tasks"] for system in plan["systems"]]
    return [Case(claim, *one, None, length, tokens, rate) for one in systems for rate in plan["rates"]]


def planned(claim: str) -> list[Case]:
    """The runs of a claim: all systems and changes with seed 0, then those that are repeated with their seeds.

    The rate is the first of the plan. If there are several, the caller replaces it.
    """
    plan = CLAIMS[claim]
    cases = [
        case
        for task in plan["tasks"]
        for length in plan["lengths"]
        for case in _cases(claim, task, length, plan["tokens"], plan["rates"][0])
    ]
    again = []
    for some in plan.get("repeat", ()):
        tasks, lengths = some.get("tasks", plan["tasks"]), some.get("lengths", plan["lengths"])
        kept = [c for c in cases if c.name in some["systems"] and c.task in tasks and c.length in lengths]
        again += [case._replace(seed=seed) for seed in some["seeds"] for case in kept]
    return cases + again


def _cases(claim, task, length, tokens, rate):
    for system, changes in CLAIMS[claim]["systems"].items():
        yield from (Case(claim, task, system, one, length, tokens, rate) for one in (None, *_flat(changes)))


def _flat(changes: Iterable) -> Iterator[str]:
    for one in changes:
        yield from [one] if isinstance(one, str) else one


def options(case: Case, steps: int | None = None) -> dict[str, Any]:
    """The options of a case by their dotted names, except those that say where its files are.

    Args:
      case: The training.
      steps: In place of the plan's.
    """
    plan = CLAIMS[case.claim]
    system = {**TABLE["systems"][case.system], **plan.get("options", {}).get(case.system, {})}
    del system["config"]
    given = {"data.sequence_length": case.length, "optimizer.learning_rate": case.rate, "train.seed": case.seed}
    given = {**TABLE["set"], **given, **plan["set"], **system, **TABLE["changes"].get(case.change, {})}
    steps = steps or case.tokens // given["train.tokens_per_step"]
    if "at_once" in plan:
        given["train.accumulate"] = given["train.tokens_per_step"] // max(
            plan["at_once"], given["data.sequence_length"]
        )
    made = {
        "optimizer.warmup_steps": round(plan.get("warmup", TABLE["warmup"]) * steps),
        "train.steps": steps,
        "train.checkpoint_every": -(-steps // CHECKPOINTS),
        "evaluation.every": -(-steps // plan["evaluations"]),
        "evaluation.windows": max(1, TABLE["validation_tokens"] // given["data.sequence_length"]),
    }
    return {**_size(TABLE["sizes"][plan["size"]], case.config, given), **made, **given}


def _size(size, config, given):
    """Width and depth. Heads and the width of a feed-forward layer follow the width, as in the config."""
    model = _model(config)
    width = model["width"] // 2 if size["width"] == "half" else size["width"]
    scaled = lambda number: max(1, round(number * width / model["width"]))  # noqa: E731
    found = {"model.width": width}
    if "depth" in size:
        found["model.depth"] = size["depth"] * (2 if model.get("feedforward") is None else 1)
    mixer, feedforward = model["mixer"], model.get("feedforward") or {}
    if isinstance(mixer, dict) and "heads" in mixer:  # the mixers of a list keep theirs
        found["model.mixer.heads"] = scaled(mixer["heads"])
    if "hidden" in feedforward:
        found["model.feedforward.hidden"] = scaled(feedforward["hidden"])
    return {name: value for name, value in found.items() if name not in given}


@cache
def _model(config):
    from flash_tf import config as configs

    return configs.load(config).model


def as_overrides(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Options as `flash-tf train --set` takes them."""
    return tuple(f"{name}={json.dumps(value)}" for name, value in found.items())
