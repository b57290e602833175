"""Made-up text with as many different words as any config's vocabulary needs, where the configs look for theirs."""

import io
import json
import lzma
import random
from pathlib import Path

import sentencepiece

from tests.data import tfds_fixture

SYLLABLES = [
    first + vowel + last for first in "bcdfghklmnprstvz" for vowel in "aeiou" for last in ("", "l", "n", "r", "s")
]
SPLITS = {"train": "train", "valid": "validation"}


def documents(count: int, seed: int) -> list[str]:
    """Articles in WikiText's form: `count` different words once, and the commonest of them again and again."""
    draw = random.Random(seed)
    words = {}
    while len(words) < count:
        words.setdefault("".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))))
    words = list(words)
    common = words[: count // 5]
    text = [*words, *draw.choices(common, [1 / (i + 10) for i in range(len(common))], k=count)]
    draw.shuffle(text)
    lines = [f" {' '.join(text[i : i + 20])} . \n" for i in range(0, len(text), 20)]
    return [f" = {lines[i].strip()[:20]} = \n \n{''.join(lines[i : i + 40])}" for i in range(0, len(lines), 40)]


def write(folder: Path, count: int) -> None:
    """The files of WikiText-2 and -103, Wikipedia with its vocabulary, and TFDS's sets in `folder/tfds`."""
    texts = {"train": documents(count, 0), "valid": documents(max(count // 100, 100), 1)}
    for name in ("wikitext-2", "wikitext-103", "wikipedia"):
        (folder / name).mkdir()
    for split, found in texts.items():
        for name in ("wikitext-2", "wikitext-103"):
            (folder / name / f"{split}.txt").write_text("".join(found))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in found)
        (folder / f"wikipedia/{split}.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=0))
    for name in tfds_fixture.FEATURES:
        tfds_fixture.store(name, folder / "tfds", {SPLITS[split]: found for split, found in texts.items()})


def write_vocabulary(folder: Path, size: int) -> None:
    """A vocabulary like T5's for Wikipedia, without masks."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((folder / "wikitext-2/train.txt").read_text().splitlines()),
        model_writer=model,
        vocab_size=size,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "wikipedia/sentencepiece.model").write_bytes(model.getvalue())
