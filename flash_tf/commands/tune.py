"""Find the fastest block size, and write it into the config.

Examples:
  flash-tf tune my.yaml
  flash-tf tune lm_pg19/flash --sizes 64 128 256 --steps 10
"""

from pathlib import Path

from flash_tf.commands import gives_json, show, takes_config, whole


def add_arguments(parser) -> None:
    takes_config(parser)
    timing = parser.add_argument_group("timing")
    timing.add_argument("--steps", type=whole, default=5, metavar="N", help="steps to time for each size (default 5)")
    timing.add_argument(
        "--sizes",
        type=whole,
        nargs="+",
        metavar="N",
        help="default: powers of two from 16 to 512 or the length",
    )
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf import config
    from flash_tf.compiling import tuning

    progress = log.progress()
    found = tuning.tune(config.load(args.config, args.set), args.sizes, args.steps, progress.line)
    show(found if args.json else tuning.as_text(found), args.json)
    if found["option"] != tuning.BLOCK:
        progress.line(f"a model's {found['option']} is a part of its function: nothing was changed")
    elif found["fastest"] == (now := found["now"]):
        progress.line(f"no block_size is faster than {now} beyond the spread of its steps: nothing was changed")
    elif args.set:
        progress.line(f"block_size {found['fastest']} is faster than {now}; with --set nothing is written")
    elif Path(args.config).is_file():
        tuning.write(args.config, found["fastest"])
        progress.line(f"{args.config}: block_size {found['fastest']} in place of {now}")
    else:
        progress.line(
            f"{args.config} comes with the package and stays: put block_size {found['fastest']} into its mixer"
        )
