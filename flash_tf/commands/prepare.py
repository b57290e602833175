"""Tokenize and pack the text of a config beforehand, in parallel.

Examples:
  flash-tf prepare quickstart --out prepared/quickstart
  flash-tf prepare mlm_c4/flash --out gs://B/c4 --beam --runner=DataflowRunner
"""

import argparse
import functools
import os

from flash_tf.commands import gives_json, show, takes_config, whole


def add_arguments(parser) -> None:
    takes_config(parser)
    gives_json(parser, out="the folder of the prepared text, local or gs://; the same command goes on with it")
    group = parser.add_argument_group("work")
    group.add_argument(
        "--processes", type=whole, metavar="N", help="processes on this machine (default: one for each processor)"
    )
    group.add_argument(
        "--beam", nargs=argparse.REMAINDER, default=[], metavar="FLAG", help="all that follows is for Apache Beam"
    )


def run(args, log) -> None:
    if args.out is None:
        raise ValueError("prepare needs --out DIR, the folder of the prepared text")
    if args.processes is not None and (args.beam or args.processes < 1):
        raise ValueError("--processes must be at least 1, and goes without flags of Apache Beam, which has its own")
    from flash_tf import config

    experiment, progress = config.load(args.config, args.set), log.progress()
    try:
        from flash_tf.preparing import pipeline
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "apache_beam":
            raise
        raise ImportError("prepare needs Apache Beam: pip install 'flash-tf[prepare]'") from None
    from flash_tf.preparing.prepare import prepare

    pipeline.check(args.beam)
    do = functools.partial(pipeline.run, flags=args.beam, processes=args.processes or os.cpu_count())
    found = prepare(experiment, args.out, progress, do)
    progress.line(f"done; the prepared text is in {args.out}")
    show(found, args.json)
