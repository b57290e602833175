"""The log-likelihood of texts under a causal language model: of documents, and of continuations of prefixes."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import keras
import numpy as np
from keras import ops

from flash_tf.data.tokenizer import Tokenizer
from flash_tf.generation.generator import Programs, rounded_up

BLOCK = 512  # tokens of a row that the model reads at a time
BATCH_TOKENS = 4096  # their logits are in memory together
LOT_CHARACTERS = 1 << 20  # documents that are tokenized and sorted by length together

Request = tuple[np.ndarray, int]


class Scorer:
    """Scores texts with a causal language model, and keeps the compiled programs.

    Each text follows an end-of-document token, as in training on concatenated documents. So the likelihood of a
    document is the product over its prefix and the rest. Texts of similar lengths are read together, padded to one of
    few lengths; padding changes no score.

    Without a window, a text of any length is read from its first token: in constant memory, if the model's state has a
    constant size. With a window, the model reads at most `window` tokens together, each time from an empty state:

    - A continuation of up to `stride` tokens is read in the one window that ends with it.
    - Anything longer is read in windows. The first begins with the text, each next one ends `stride` tokens later, and
      the last ends with the text. A window scores the tokens that no window before it has scored, so a token has at
      least `window - stride` tokens of context, or all.

    These are the rules of lm-evaluation-harness, whose stride is the window.

    Args:
      model: A causal language model that can stream.
      tokenizer: For texts; None for the model's own.
      window: The most tokens that the model reads together; None for all.
      stride: Tokens from one window to the next, at most `window`; None for `window`.

    Raises:
      ValueError: The model is not causal or cannot stream, or window and stride do not fit it.
    """

    def __init__(
        self,
        model: keras.Model,
        tokenizer: Tokenizer | None = None,
        window: int | None = None,
        stride: int | None = None,
    ):
        if not model.causal:
            raise ValueError(f"scoring needs a causal language model, got {type(model).__name__}")
        if stride is not None and window is None:
            raise ValueError(f"a stride belongs to a window, got stride {stride} without one")
        if window is not None and window < 1:
            raise ValueError(f"score needs a window of 1 token or more, got {window}")
        if stride is not None and not 1 <= stride <= window:
            raise ValueError(f"score needs 1 <= stride <= window, got stride {stride} and window {window}")
        if model.longest is not None and window is not None and window > model.longest:
            raise ValueError(f"{model.name} reads at most {model.longest} tokens, got window {window}")
        self.model, self._tokenizer = model, tokenizer or model.tokenizer
        self._window, self._stride = window, stride or window
        self._programs = Programs(self.model)

    def documents(self, texts: Iterable[str]) -> Iterator[dict]:
        """Scores documents from the first token to the end-of-document token after the last.

        Args:
          texts: The documents.

        Yields:
          For each document `log_likelihood` in nats; `tokens`, the number of predicted tokens; and its size in
          `words` between blanks, `characters` and UTF-8 `bytes`. See `perplexities`.

        Raises:
          ValueError: A document has no token.
        """
        end, number = [self._tokenizer.eos_id], 0
        for lot in _lots(texts):
            requests = []
            for text, ids in zip(lot, self._tokenizer.encode(lot), strict=True):
                number += 1
                if not len(ids):
                    raise ValueError(f"document {number} has no tokens: {text[:40]!r}")
                requests.append((np.concatenate([end, ids, end]), len(ids) + 1))
            for text, request, (found, _) in zip(lot, requests, self.log_likelihoods(requests), strict=True):
                size = {"words": len(text.split()), "characters": len(text), "bytes": len(text.encode())}
                yield {"log_likelihood": found, "tokens": request[1], **size}

    def continuations(self, pairs: Iterable[tuple[str, str]]) -> list[dict]:
        """Scores each continuation after its prefix.

        The whole text is tokenized. The continuation begins at the first token that is not also one
        of the prefix alone: where a token reaches over the border, it belongs to the continuation.

        Args:
          pairs: Prefix and continuation; a blank between them belongs to either. The prefix may be empty.

        Returns:
          For each pair `log_likelihood` in nats; `tokens`, the number of scored tokens; and `greedy`, whether each of
          them is the likeliest one at its place.

        Raises:
          ValueError: A continuation has no token.
        """
        prefixes, wholes = [], []
        for prefix, continuation in pairs:
            prefixes.append(prefix)
            wholes.append(prefix + continuation)
        requests = []
        found = zip(self._tokenizer.encode(prefixes), self._tokenizer.encode(wholes), strict=True)
        for number, (prefix, whole) in enumerate(found, 1):
            shared = min(len(prefix), len(whole))
            shared = int(np.cumprod(prefix[:shared] == whole[:shared]).sum())
            if shared == len(whole):
                raise ValueError(f"continuation {number} adds no tokens to its prefix")
            requests.append((np.concatenate([[self._tokenizer.eos_id], whole]), len(whole) - shared))
        scored = zip(requests, self.log_likelihoods(requests), strict=True)
        return [{"log_likelihood": x, "tokens": count, "greedy": greedy} for (_, count), (x, greedy) in scored]

    def log_likelihoods(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Scores the ends of rows of ids.

        Args:
          requests: For each row its ids, integers `[length]`, and how many of its last tokens to score, fewer than
            all.

        Returns:
          For each row the log-likelihood of these tokens, in nats, and whether each is the likeliest one at its place.
        """
        self._programs.drop_stale()
        pieces = [
            (number, *piece)
            for number, (ids, scored) in enumerate(requests)
            for piece in windows(ids, scored, self._window, self._stride)
        ]
        pieces.sort(key=lambda piece: len(piece[1]))
        found, greedy = [0.0] * len(requests), [True] * len(requests)
        for sizes, alike in itertools.groupby(pieces, key=lambda piece: self._sizes(len(piece[1]) - 1)):
            for batch in _batches(alike, max(1, BATCH_TOKENS // sizes[0])):
                sums, right = self._read([piece[1:] for piece in batch], *sizes)
                for (number, *_), total, all_right in zip(batch, sums.tolist(), right.tolist(), strict=True):
                    found[number] += total
                    greedy[number] &= all_right
        return list(zip(found, greedy, strict=True))

    def _sizes(self, tokens):
        """The number of tokens to read at a time, and the capacity of the state, for rows of so many tokens."""
        most = self.model.longest
        if most is not None and tokens > most:
            raise ValueError(f"{self.model.name} reads at most {most} tokens, got {tokens}: score needs a window")
        room = min(size for size in (rounded_up(tokens), most, self._window) if size is not None)
        # A position beyond the learned ones cannot be looked up, not even for padding.
        block = min(room, BLOCK) if most is None else room
        return block, room if self.model.grows else None

    def _read(self, rows, block, capacity):
        """Sums over the scored tokens of rows, float64 `[rows]`, and whether they are the likeliest, bool `[rows]`."""
        count = 1 << (len(rows) - 1).bit_length()  # few sizes, few programs
        lengths = np.array([len(ids) - 1 for ids, _ in rows] + [0] * (count - len(rows)))
        begins = np.array([len(ids) - 1 - scored for ids, scored in rows] + [0] * (count - len(rows)))
        longest = -(-lengths.max() // block) * block
        ids = np.stack([np.pad(row, (0, longest + 1 - len(row))) for row, _ in rows])
        ids = np.pad(ids, ((0, count - len(rows)), (0, 0)))
        state, sums, right = self.model.initial_state(count, capacity), np.zeros(count), np.ones(count, bool)
        for start in range(0, longest, block):
            inputs, labels = ids[:, start : start + block], ids[:, start + 1 : start + block + 1]
            bounds = (np.clip(x - start, 0, block) for x in (begins, lengths))
            arrays = [ops.convert_to_tensor(x, "int32") for x in (inputs, labels, *bounds)]
            found, likeliest, state = self._programs.run((count, block, capacity), self._sum, *arrays, state)
            sums += ops.convert_to_numpy(found)
            right &= ops.convert_to_numpy(likeliest)
        return sums[: len(rows)], right[: len(rows)]

    def _sum(self, ids, labels, begins, ends, state):
        """Reads `ids [b, k]`, real up to `ends [b]`, and scores `labels [b, k]` from `begins [b]` on."""
        logits, state = self.model.extend(ids, state, ends)
        logits = ops.cast(logits, "float32")
        found = ops.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] - ops.logsumexp(logits, axis=-1)
        at = ops.arange(ids.shape[1], dtype="int32")
        scored = (at >= begins[:, None]) & (at < ends[:, None])
        right = ops.cast(ops.argmax(logits, axis=-1), "int32") == labels
        return ops.sum(ops.where(scored, found, 0.0), axis=1), ops.all(right | ~scored, axis=1), state


def windows(ids: np.ndarray, scored: int, window: int | None, stride: int | None) -> Iterator[Request]:
    """Cuts a row of ids, with its last `scored` tokens to score, into such rows of `window + 1` ids; see `Scorer`."""
    last = len(ids) - 1
    done, end = last - scored, last
    if window is not None and scored > stride:
        end = min(last, window if done < window else done + stride)
    while done < last:
        yield ids[0 if window is None else max(0, end - window) : end + 1], end - done
        done, end = end, last if window is None else min(last, end + stride)


def perplexities(row: dict) -> dict[str, float]:
    """Perplexities of one likelihood: of a document of `Scorer.documents`, or of the sums over several.

    Returns:
      `perplexity` per token, `word_perplexity`, `byte_perplexity`, `bits_per_byte` and `bits_per_character`: the last
      four are per unit of the text, whatever the tokenizer, and infinite for a text without such units.
    """
    nats = -row["log_likelihood"]
    each = {n: nats / row[n] if row[n] else math.inf for n in ("tokens", "words", "bytes", "characters")}
    exp = {name: math.inf if x == math.inf else math.exp(min(700.0, x)) for name, x in each.items()}
    return {
        "perplexity": exp["tokens"],
        "word_perplexity": exp["words"],
        "byte_perplexity": exp["bytes"],
        "bits_per_byte": each["bytes"] / math.log(2),
        "bits_per_character": each["characters"] / math.log(2),
    }


def default_window(model: keras.Model, sequence_length: int) -> int | None:
    """The window of a model: its training length if a cache or its longest text bounds it, else None."""
    return sequence_length if model.grows or model.longest is not None else None


def _batches(pieces, most):
    """Lists of at most `most` pieces."""
    pieces = iter(pieces)
    while batch := list(itertools.islice(pieces, most)):
        yield batch


def _lots(texts):
    """Lists of texts with about `LOT_CHARACTERS` in each."""
    lot, size = [], 0
    for text in texts:
        lot.append(text)
        size += len(text)
        if size >= LOT_CHARACTERS:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot
