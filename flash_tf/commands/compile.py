"""Export a training step, or compile it for a TPU.

Examples:
  flash-tf compile quickstart --out artifacts/quickstart
  flash-tf compile lm_pg19/flash --topology v4:2x2x1
"""

import gc

from flash_tf.commands import gives_json, show, takes_config, whole


def add_arguments(parser) -> None:
    takes_config(parser)
    export = parser.add_argument_group("export")
    export.add_argument(
        "--check-tokens",
        type=whole,
        metavar="N",
        help="tokens of the step that checks a runner (default up to 1,024)",
    )
    export.add_argument(
        "--decode-batch", type=whole, metavar="N", help="texts that a causal model decodes together (default 1)"
    )
    tpu = parser.add_argument_group("TPU")
    tpu.add_argument(
        "--topology", metavar="T", help="compile for these TPUs, for example v4:2x2x1, and report time and memory"
    )
    gives_json(parser, "write the artifact here: a new folder, or an older artifact to replace")


def run(args, log) -> None:
    _check_out(args)
    import tensorflow as tf

    from flash_tf import config
    from flash_tf.compiling import artifact, tpu
    from flash_tf.compiling.programs import Experiment
    from kernels_xla.common.accelerator import tracing_for

    if args.topology is not None:
        tpu.find_device(args.topology)  # a name that means nothing is known before any work
    tf.config.set_visible_devices([], "GPU")  # what is exported, and its check, are a CPU's on every host
    progress, found, texts, problem = log.progress(), {}, [], ""
    experiment = Experiment(*artifact.resolve(config.load(args.config, args.set)))
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
        estimate = tpu.compile_for(serialized, args.topology)
        found, problem = {**found, **tpu.as_dict(estimate)}, estimate.problem
        texts.append(tpu.as_text(estimate))
    show(found if args.json else "\n\n".join(texts), args.json)
    if problem:
        what = "does not fit" if estimate.hbm_bytes else "cannot be compiled for"
        raise ValueError(f"the step {what} {args.topology}: {problem}")


def _check_out(args):
    """Refuses a bad `--out` before any work."""
    exported = [name for name in ("check_tokens", "decode_batch") if getattr(args, name) is not None]
    if args.out is not None:
        from flash_tf.compiling import artifact

        artifact.check_folder(args.out)
    elif args.topology is None:
        raise ValueError("compile needs --out, --topology or both")
    elif exported:
        option = exported[0].replace("_", "-")
        raise ValueError(f"--{option} needs --out: for a topology the training step alone is compiled")
