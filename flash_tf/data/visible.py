"""Spells text in visible characters, so that SentencePiece keeps its white space, and reads it back.

SentencePiece splits text at "▁", and TF-Text's fast tokenizer drops newlines. So the text is spelled before it is
tokenized, like the bytes of GPT-2 (Radford et al. 2019):

- A byte of printable ASCII is itself; another byte b is the letter U+0100 + b. A newline reads Ċ, a blank Ġ.
- A single blank between words is "▁". The start of a text is "▁" too, so that its first word reads like any other.
- Any other run of blanks, tabs and newlines is a separate word: "▁ĊĠĠĠĠ▁". At the end of a text it has no last "▁".

Bytes and their characters are one to one, and none of them is "▁". A "▁" beside a run belongs to the run, the first of
a text to its start, and every other one is a blank. So `restored` inverts `visible` for all bytes.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf


BYTES = tuple(chr(b if 0x21 <= b <= 0x7E else 0x100 + b) for b in range(256))  # of each byte
SPACES = "ĠĊĉč"  # blank, newline, tab, carriage return
SPELLING = (
    (rf"([{SPACES}]+)", r"▁\1▁"),
    ("▁Ġ▁", "▁"),
    (r"\A(.)", r"▁\1"),
    (rf"\A▁▁([{SPACES}])", r"▁\1"),
    (rf"([{SPACES}])▁\z", r"\1"),
)
READING = ((r"\A▁", ""), (rf"▁?([{SPACES}]+)▁?", r"\1"), ("▁", "Ġ"))
WORD = re.compile("▁[^▁]*|[^▁]+")  # of a spelled text; no piece crosses "▁"
SENTENCE = re.compile(r"(?s).{1,1000}(?=▁|\Z)|.{1,1000}")


def visible(texts: "tf.Tensor") -> "tf.Tensor":
    """Texts of any bytes, string `[k]`, spelled in visible characters."""
    import tensorflow as tf

    ordinals = tf.strings.unicode_decode(texts, "ISO-8859-1")  # each byte is a character of this encoding
    spelled = tf.ragged.map_flat_values(lambda byte: tf.gather([ord(c) for c in BYTES], byte), ordinals)
    return _replaced(tf.strings.unicode_encode(spelled, "UTF-8"), SPELLING)


def restored(spelled: "tf.Tensor") -> "tf.Tensor":
    """The texts, string `[k]`, that `visible` spelled."""
    import tensorflow as tf

    ordinals = tf.strings.unicode_decode(_replaced(spelled, READING), "UTF-8")
    every_byte = tf.constant([bytes([b]) for b in range(256)])
    texts = tf.ragged.map_flat_values(lambda ordinal: tf.gather(every_byte, ordinal & 0xFF), ordinals)
    return tf.strings.reduce_join(texts, axis=-1)


def _replaced(texts, rules):
    import tensorflow as tf

    for pattern, replacement in rules:
        texts = tf.strings.regex_replace(texts, pattern, replacement)
    return texts
