"""Run tasks of lm-evaluation-harness on a trained causal model.

Examples:
  flash-tf lm-eval runs/lm --tasks lambada_openai,piqa
  flash-tf lm-eval runs/lm --tasks my_task --include-path tasks --num-fewshot 5
"""

import contextlib
import sys

from flash_tf.commands import gives_json, show, takes_model, whole


def add_arguments(parser) -> None:
    takes_model(parser)
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", required=True, metavar="NAMES", help="tasks, groups or tags, with commas between")
    tasks.add_argument("--include-path", metavar="DIR", help="a folder with task files of your own")
    tasks.add_argument("--num-fewshot", type=whole, metavar="K", help="examples before each question")
    tasks.add_argument("--limit", type=whole, metavar="N", help="read only the first N questions of a task")
    gives_json(parser)


def run(args, log) -> None:
    try:
        from flash_tf.harness import HarnessModel, evaluate
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "lm_eval":
            raise
        raise ImportError("lm-eval needs lm-evaluation-harness: pip install 'flash-tf[eval]'") from None
    from lm_eval.utils import make_table

    from flash_tf.scoring import default_window
    from flash_tf.training.restore import restore

    progress = log.progress()
    found = restore(args.model_dir, progress.line, args.checkpoint)
    model = HarnessModel(found.model, default_window(found.model, found.config.data.sequence_length))
    progress.status("evaluating")
    with contextlib.redirect_stdout(sys.stderr):  # the harness prints what it does; the command line has a log for it
        result = evaluate(model, args.tasks.split(","), args.include_path, args.num_fewshot, args.limit)
    progress.clear()
    show({"step": found.step, "results": result["results"]} if args.json else make_table(result), args.json)
