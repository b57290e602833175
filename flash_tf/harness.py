"""The model of EleutherAI's lm-evaluation-harness, over a causal language model of this package."""

import json
from collections.abc import Sequence
from itertools import count, groupby, islice

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from flash_tf.generation import GREEDY, Sampler
from flash_tf.models.causal_lm import CausalLM
from flash_tf.scoring import Scorer

ROWS = 32  # prompts that are continued together


class HarnessModel(LM):
    """What the harness asks of a model, in batches of similar lengths.

    A context follows an end-of-document token, for scores and for generation. So a continuation is greedy exactly if
    generation writes it.

    Args:
      model: A causal language model that can stream, with its tokenizer.
      window: The most tokens that it reads together; see `Scorer`. Longer contexts lose their beginning. A generated
        text takes up to half of the window, whatever a task allows.

    Raises:
      ValueError: The model is not causal, cannot stream, or has no tokenizer.
    """

    def __init__(self, model: CausalLM, window: int | None = None):
        super().__init__()
        if model.tokenizer is None:
            raise ValueError(f"{model.name} takes token ids: the harness needs a tokenizer for texts")
        self.model, self.window, self.scorer = model, window, Scorer(model, window=window)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether it is the greedy one."""
        found = self.scorer.continuations(request.args for request in requests)
        return [(row["log_likelihood"], row["greedy"]) for row in found]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-likelihood of each text as a whole."""
        found = self.scorer.continuations(("", *request.args) for request in requests)
        return [row["log_likelihood"] for row in found]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The continuation of each context up to the first of its stop sequences, the end of the document, or a limit.

        Raises:
          ValueError: A task sets an option that generation does not have.
        """
        end = self.model.tokenizer.eos_id
        rows = [[end, *ids] for ids in self.model.tokenizer.encode([request.args[0] for request in requests])]
        wanted = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        order = iter(sorted(range(len(rows)), key=lambda i: (wanted[i], len(rows[i]))))
        found, seeds = [""] * len(rows), count()  # each batch draws anew: a task may repeat a question
        for options, alike in groupby(order, key=lambda i: wanted[i]):
            sampler, most, until = _options(json.loads(options))
            while batch := list(islice(alike, ROWS)):
                texts = self._continued([rows[i] for i in batch], sampler, most, until, next(seeds))
                for i, text in zip(batch, texts, strict=True):
                    found[i] = text
        return found

    def _continued(self, rows, sampler, most, until, seed):
        """The texts that follow rows of ids."""
        if self.window is not None:
            most = min(most, max(1, self.window // 2))
            rows = [row[-max(1, self.window - most) :] for row in rows]
        decode, end = self.model.tokenizer.decode, self.model.tokenizer.eos_id
        before, added, texts = [len(decode(row)) for row in rows], [[] for _ in rows], [""] * len(rows)
        for tokens in self.model.stream(rows, most, sampler, seed, stop_tokens=(end,)):
            for i, token in enumerate(tokens):
                if token is not None:
                    added[i].append(token)
                    texts[i] = decode([*rows[i], *added[i]])[before[i] :]
            if all(token is None or _stopped(text, until) for token, text in zip(tokens, texts, strict=True)):
                break
        return [postprocess_generated_text(text, until, None) for text in texts]


def evaluate(
    model: HarnessModel,
    tasks: Sequence[str],
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict:
    """Runs tasks of the harness.

    Args:
      model: The model.
      tasks: Names of tasks, groups or tags, which may be globs.
      include_path: A folder with task files of your own. The harness' own are read only if a name is not among them.
      num_fewshot: Examples before each question; None for each task's own.
      limit: Questions of each task; None for all.

    Returns:
      What `lm_eval.simple_evaluate` returns; `results` has the metrics of each task.

    Raises:
      ValueError: There is no such task.
    """
    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    if include_path is not None and _missing(manager, tasks):
        manager = TaskManager(include_path=include_path)
    if missing := _missing(manager, tasks):
        where = "lm-evaluation-harness" + (f" or in {include_path}" if include_path else "")
        raise ValueError(f"no task {missing[0]!r} in {where}")
    names = sorted({name for task in tasks for name in manager.match_tasks([task])})
    return simple_evaluate(
        model, tasks=names, num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
    )


def _missing(manager, tasks):
    return [task for task in tasks if not manager.match_tasks([task])]


def _options(given):
    """The sampler, the most tokens and the stop sequences of a task's options."""
    options = normalize_gen_kwargs(given)
    until, most = options.pop("until", []), options.pop("max_gen_toks")
    draws, temperature = options.pop("do_sample"), options.pop("temperature", 1.0)
    if unknown := options.keys() - {"top_k", "top_p"}:
        raise ValueError(f"generation has the options temperature, top_k and top_p, a task sets {min(unknown)}")
    return Sampler(temperature=temperature, **options) if draws else GREEDY, most, until


def _stopped(text, until):
    return any(stop and stop in text for stop in until)
