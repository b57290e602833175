"""Draw loss, perplexity, throughput and gradient norm of runs.

Examples:
  flash-tf plot runs/quickstart
  flash-tf plot FLASH=runs/flash GAU=runs/gau --out pictures/comparison
"""

from flash_tf.commands import gives_json, show


def add_arguments(parser) -> None:
    runs = parser.add_argument_group("runs")
    runs.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run; LABEL=RUN names its curve")
    gives_json(parser, "write the pictures here (default RUN/pictures, for several runs ./pictures)")


def run(args, log) -> None:
    from flash_tf import owned_files, pictures

    pictures.check_matplotlib()
    from flash_tf.pictures import curves, page, records

    runs = records.read_all(args.runs)
    out = args.out or ("pictures" if len(runs) > 1 else f"{runs[0].folder}/pictures")
    out = str(owned_files.local(out, "flash-tf plot"))
    drawn, rows = curves.pictures(runs), curves.rows(runs)
    tables = [page.Table("Runs", curves.HEAD, rows), *curves.evaluations(runs)]
    html = page.html("Training runs", {}, tables, drawn, curves.NOTES)
    files = page.write(out, "plot", html, drawn)
    text = "\n".join([page.as_text(curves.HEAD, rows), "", *files])
    show({"runs": [curves.summary(run) for run in runs], "files": files} if args.json else text, args.json)
