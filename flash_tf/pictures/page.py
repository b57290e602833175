"""Files of pictures: PNG, and one HTML file that holds all of them and opens without a network."""

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from flash_tf import owned_files

HEAD = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1250px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; }
p.note { color: #666; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .8em; }
"""


class Picture(NamedTuple):
    """A picture, and what stands beside it in the page.

    Attributes:
      name: Of its file, without ending.
      title: Its heading.
      caption: What it shows.
      png: The file's bytes.
    """

    name: str
    title: str
    caption: str
    png: bytes


class Table(NamedTuple):
    """Rows of text under a heading each; `folded` tables open when asked."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


def picture(name: str, title: str, caption: str, drawn: Figure) -> Picture:
    """Draws a figure."""
    file = io.BytesIO()
    drawn.savefig(file, format="png")
    return Picture(name, title, caption, file.getvalue())


def write(out: str, name: str, html: str, pictures: Sequence[Picture]) -> list[str]:
    """Writes `NAME.html` and a PNG file for each picture into a local folder; returns their paths, the page's first.

    Pictures of an earlier page of this name go.

    Raises:
      ValueError: The folder holds a file of such a name that is not the command's.
      OSError: When it cannot be written.
    """
    files = {f"{name}.html": html.encode("utf-8", "replace")} | {f"{one.name}.png": one.png for one in pictures}
    writer, older = f"flash-tf {name}", functools.partial(_older, name)
    stale = owned_files.own(out, writer, older) - files.keys()  # of another text, or of other layers or runs
    owned_files.write(out, files, writer, older)
    owned_files.remove(out, stale, writer)
    return [str(Path(out, file)) for file in files]


def _older(name, out):
    """The page in a folder from before there were manifests, and the files of the pictures that it holds."""
    path = Path(out, f"{name}.html")
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    if not text.startswith(HEAD) or STYLE not in text:
        return []
    pictures = (file for file in Path(out).glob("*.png") if file.is_file())
    return [path.name, *(file.name for file in pictures if base64.b64encode(file.read_bytes()).decode() in text)]


def html(title: str, facts: Mapping[str, str], tables: Sequence[Table], pictures: Sequence[Picture], notes: str) -> str:
    """The page: `facts` by their names, then tables, pictures and small print. All text is escaped."""
    said = "".join(f"<p><b>{escape(name)}:</b> {escape(text)}</p>\n" for name, text in facts.items())
    drawn = "".join(map(_picture, pictures))
    return (
        f"{HEAD}<title>{escape(title)}</title>"
        f"<style>{STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n{said}"
        f'{"".join(map(_table, tables))}{drawn}<p class="note">{escape(notes)}</p>\n</body></html>\n'
    )


def _picture(one):
    data = base64.b64encode(one.png).decode()
    image = f'<img alt="{escape(one.title)}" src="data:image/png;base64,{data}">'
    return f"<h2>{escape(one.title)}</h2>\n<p>{escape(one.caption)}</p>\n{image}\n"


def _table(one):
    cells = lambda tag, row: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in one.rows)
    table = f"<table>\n<tr>{cells('th', one.head)}</tr>\n{body}</table>\n"
    if one.folded:
        return f"<details><summary>{escape(one.title)}</summary>\n{table}</details>\n"
    return f"<h2>{escape(one.title)}</h2>\n{table}"


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = zip(row[1:], widths[1:], strict=True)
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in cells)]).rstrip())
    return "\n".join(lines)
