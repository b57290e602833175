"""Turn public weights into a preset, or a model into weights under public names.

Examples:
  flash-tf convert downloads/gpt2 presets/gpt2
  flash-tf convert runs/llama public --to safetensors --licence cc-by-sa-4.0
"""

from flash_tf.commands import gives_json, show


def add_arguments(parser) -> None:
    group = parser.add_argument_group("folders")
    group.add_argument(
        "source", metavar="SOURCE", help="a folder with a public config.json and model.safetensors, a preset, or a run"
    )
    group.add_argument("out", metavar="OUT", help="a new folder, or an older one of this command")
    group.add_argument(
        "--to",
        choices=("preset", "safetensors"),
        default="preset",
        help="a preset (default), or config.json and model.safetensors as the public library reads them",
    )
    group.add_argument(
        "--licence", metavar="TEXT", help="for the model card (default: what the model card of SOURCE says)"
    )
    gives_json(parser)


def run(args, log) -> None:
    from flash_tf.converting import commands

    done = commands.convert(args.source, args.out, args.to, args.licence, log.progress().line)
    show(done if args.json else f"weights for {done['model']} of {done['library']} are in {done['out']}", args.json)
