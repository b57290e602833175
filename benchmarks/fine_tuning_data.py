"""The files of two tasks of text from the data as it is published: film reviews, and questions."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

SPLITS = ("train", "validation", "test")
FOLDS = {"train": range(800), "validation": range(800, 900), "test": range(900, 1000)}
CLASSES = ("neg", "pos")
FEWEST = 16  # articles, two of them in each split
OWN_TO_OTHER = 3  # questions of an article for each one that it cannot answer


def film_reviews(folder: str, out: Path) -> dict[str, Path]:
    """Pang and Lee's reviews by fold: `cv000` to `cv799` train, `cv800` to `cv899` validation, the others test.

    Args:
      folder: Holds `neg/cvNNN_*.txt` and `pos/cvNNN_*.txt`.
      out: The folder for `train.jsonl`, `validation.jsonl` and `test.jsonl`, with `text` and `label` on each line.

    Returns:
      The file of each split.

    Raises:
      ValueError: A split lacks one of the classes.
    """
    rows = {split: [] for split in SPLITS}
    for label in CLASSES:
        for file in sorted(Path(folder, label).glob("cv[0-9][0-9][0-9]*.txt")):
            fold = int(file.name[2:5])
            split = next(split for split, folds in FOLDS.items() if fold in folds)
            rows[split].append({"text": file.read_text("latin-1"), "label": label})
    for split, found in rows.items():
        if {row["label"] for row in found} != {*CLASSES}:
            raise ValueError(f"{folder} needs neg/cvNNN_*.txt and pos/cvNNN_*.txt of each split, got none for {split}")
    return _written(out, {f"{split}.jsonl": map(json.dumps, found) for split, found in rows.items()})


def questions(file: str, out: Path) -> dict[str, Path]:
    """The articles of a file in SQuAD's layout, each joined to one document, with questions that it cannot answer.

    The articles are shuffled with seed 0: three quarters train, an eighth each validation and test. For every three
    questions of its own, a document gets one of the next article in its split, which has no answer in it.

    Args:
      file: For example XQuAD's `xquad.en.json`: 48 articles of five paragraphs.
      out: The folder for `train.json`, `validation.json` and `test.json`, in the same layout.

    Returns:
      The file of each split.

    Raises:
      ValueError: The file has another layout or too few articles, or an answer does not stand at its place.
    """
    try:
        documents = [_document(article) for article in json.loads(Path(file).read_text("utf-8"))["data"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} needs the layout of SQuAD's files, got {type(error).__name__}: {error}") from None
    if len(documents) < FEWEST:
        raise ValueError(f"{file} needs at least {FEWEST} articles, got {len(documents)}")
    eighth = len(documents) // 8
    ends = np.cumsum([len(documents) - 2 * eighth, eighth])
    parts = np.split(np.random.default_rng(0).permutation(len(documents)), ends)
    splits = {split: _with_others([documents[i] for i in part]) for split, part in zip(SPLITS, parts, strict=True)}
    return _written(out, {f"{split}.json": [json.dumps({"data": found})] for split, found in splits.items()})


def _document(article):
    """An article with its paragraphs joined to one, and the answers' places moved."""
    text, asked = "", []
    for paragraph in article["paragraphs"]:
        start = len(text)
        text += paragraph["context"] + "\n\n"
        for one in paragraph["qas"]:
            answers = [{**answer, "answer_start": answer["answer_start"] + start} for answer in one["answers"]]
            asked.append({**one, "answers": answers})
    for one in asked:
        for answer in one["answers"]:
            place, words = answer["answer_start"], answer["text"]
            if text[place : place + len(words)] != words:
                raise ValueError(f"question {one['id']} needs {words!r} at {place} of its article")
    return {"title": article.get("title", ""), "paragraphs": [{"context": text.rstrip("\n"), "qas": asked}]}


def _with_others(documents):
    """The documents, each with questions of the next one, spread over it."""
    asked = [document["paragraphs"][0]["qas"] for document in documents]
    found = []
    for i, document in enumerate(documents):
        (paragraph,), other = document["paragraphs"], asked[(i + 1) % len(asked)]
        many = min(len(asked[i]) // OWN_TO_OTHER, len(other))
        chosen = [other[len(other) * k // many] for k in range(many)]
        none = [{**one, "id": f"{one['id']}-none", "answers": []} for one in chosen]
        found.append({**document, "paragraphs": [{**paragraph, "qas": [*asked[i], *none]}]})
    return found


def _written(out: Path, files: dict[str, Iterable[str]]):
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (out / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return {split: out / name for split, name in zip(SPLITS, files, strict=True)}


PREPARE = {"film_reviews": film_reviews, "questions": questions}
