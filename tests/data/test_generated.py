"""Made-up tasks: each label follows from the words, worked out here in another way."""

import statistics

import numpy as np
import pytest

from flash_tf.data.generated import FIRST, NONE, SHARD_EXAMPLES, Draws
from flash_tf.data.sources import SOURCES, list_ops
from flash_tf.data.tokenizers import word_level

pytestmark = pytest.mark.one_backend
TASKS = {
    "mqar": {"type": "mqar", "length": 64, "pairs": 8, "vocabulary": 512},
    "mqar among random words": {
        "type": "mqar",
        "length": 40,
        "pairs": 10,
        "vocabulary": 64,
        "random_non_queries": True,
    },
    "induction": {"type": "induction", "length": 40, "vocabulary": 7},
    "copying": {"type": "copying", "length": 30, "tokens": 9, "vocabulary": 5},
    "selective copying": {"type": "copying", "length": 30, "tokens": 9, "vocabulary": 5, "selective": True},
    "list_ops": {"type": "list_ops", "min_length": 10, "max_length": 60, "depth": 4, "arguments": 5},
}
each_task = pytest.mark.parametrize("task", TASKS)


def build(task, **options):
    return SOURCES.build({"train": 300, "validation": 200, **TASKS.get(task, {"type": task}), **options})


def read(source, split="train"):
    """The words of each example, and its labels as a dictionary from places to words."""
    known = source.words
    for shard in source.shards(split):
        for example in source.examples(split, shard):
            places = np.flatnonzero(example["labels"] != NONE).tolist()
            labels = {i: known[example["labels"][i] - FIRST] for i in places}
            yield [known[i - FIRST] for i in example["token_ids"]], labels


def recalled(words, source):
    """The value of each key after the pairs, and whether a place may be a query."""
    pairs, rest = words[: 2 * source.pairs], range(2 * source.pairs, len(words))
    value = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return {i: value[words[i]] for i in rest if words[i] in value}


def induced(words, source):
    return {len(words) - 1: words[words.index("!") + 1]}


def copied(words, source):
    kept = [word for word in words if word not in ".?"]
    return dict(enumerate(kept, words.index("?")))


def evaluated(words, source):
    names = {"[MIN": "min", "[MAX": "max", "[MED": "median", "[SM": "total"}
    spelled = "".join({**{k: f"{v}([" for k, v in names.items()}, "]": "]),"}.get(word, f"{word},") for word in words)
    known = {"median": lambda x: int(statistics.median(x)), "total": lambda x: sum(x) % 10, "min": min, "max": max}
    return {len(words) - 1: str(eval(f"({spelled})", known)[0])}


SOLVERS = {"mqar": recalled, "induction": induced, "copying": copied, "list_ops": evaluated}


@each_task
def test_each_label_follows_from_the_words(task):
    source, count = build(task), 0
    for count, (words, labels) in enumerate(read(source), 1):  # noqa: B007
        want = SOLVERS[TASKS[task]["type"]](words, source)
        if "random" in task:  # a random word may be a key
            assert labels.items() <= want.items() and len(set(map(words.__getitem__, labels))) == source.pairs
        else:
            assert labels == want
    assert count == 300


@each_task
def test_a_seed_decides_the_examples_and_each_split_has_its_own(task):
    found = {seed: list(map(str, read(build(task, seed=seed)))) for seed in (1, 2)}
    assert found[1] == list(map(str, read(build(task, seed=1))))
    assert not set(found[1]) & set(found[2])
    validation = list(map(str, read(build(task, seed=1), "validation")))
    assert not set(found[1]) & set(validation) and len(set(validation)) == 200
    assert build(task, seed=1).identity() == build(task, seed=1).identity() != build(task, seed=2).identity()


def test_a_shard_is_made_alone():
    source = build("induction", train=SHARD_EXAMPLES + 5)
    first, second = source.shards("train")
    assert len(list(source.examples("train", first))) == SHARD_EXAMPLES
    (again, *_), others = source.examples("train", second), list(read(source))
    assert len(others) == SHARD_EXAMPLES + 5
    assert [source.words[i - FIRST] for i in again["token_ids"]] == others[SHARD_EXAMPLES][0]


def test_keys_and_values_are_different_words_of_their_own_halves():
    for words, _ in read(build("mqar")):
        keys, values = ([int(word) for word in words[start:16:2]] for start in (0, 1))
        assert len(set(keys)) == len(set(values)) == 8
        assert 1 <= min(keys) <= max(keys) < 256 <= min(values) <= max(values) < 512
        assert sorted(int(word) for word in words[16:] if word != "0") == sorted(keys)


def test_training_examples_have_several_numbers_of_pairs_in_turn_and_validation_has_one():
    source = build("mqar", length=24, pairs=6, train_pairs=[1, 3, 6], train=100, validation=50)
    for split, want in (("train", [1, 3, 6]), ("validation", [6])):
        for i, (words, labels) in enumerate(read(source, split)):
            pairs = want[i % len(want)]
            value = dict(zip(words[: 2 * pairs : 2], words[1 : 2 * pairs : 2], strict=True))
            assert len(labels) == len(value) == pairs
            assert labels == {at: value[words[at]] for at in range(2 * pairs, 24) if words[at] in value}
        assert i == {"train": 99, "validation": 49}[split]
    # The option changes nothing where it names the pairs that are the default.
    assert list(map(str, read(build("mqar")))) == list(map(str, read(build("mqar", train_pairs=[8]))))


def test_a_query_is_nearer_by_a_power_law():
    source = build("mqar", length=12, pairs=1, power=-1.0, train=4096)
    places = np.array([next(iter(labels)) for _, labels in read(source)])
    weights = np.arange(1, 6) ** -2.0
    want = 4096 * weights / weights.sum()
    found = np.bincount((places - 2) // 2, minlength=5)
    assert (places % 2 == 0).all() and (np.abs(found - want) < 5 * np.sqrt(want)).all()


def test_expressions_are_of_the_grammar():
    levels, arguments, lengths = set(), set(), set()
    for words, _ in read(build("list_ops")):
        lengths.add(len(words))
        open_lists = []
        for word in words:
            if word == "]":
                arguments.add(open_lists.pop())
            elif open_lists:
                open_lists[-1] += 1
            if word.startswith("["):
                open_lists.append(0)
            levels.add(len(open_lists))
        assert not open_lists
    assert arguments == {2, 3, 4, 5} and levels == {0, 1, 2, 3}
    assert 10 < min(lengths) < 15 and 40 < max(lengths) < 60


def test_selected_words_stand_anywhere_and_the_others_at_the_beginning():
    where = {}
    for task in ("copying", "selective copying"):
        where[task] = {i for words, _ in read(build(task)) for i in range(30) if words[i] != "."}
    assert where == {"copying": set(range(9)), "selective copying": set(range(30))}


def test_draws_are_the_same_with_every_version_of_numpy():
    draws = Draws(3, 1)
    assert draws.integers(0, 1000, 5).tolist() == [253, 407, 341, 427, 538]
    assert draws.distinct(2, 6, 2, 4).tolist() == [[5, 4, 3, 2], [3, 4, 5, 2]]


def test_ids_leave_room_for_the_special_ones():
    assert len(word_level.SPECIAL) == FIRST


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "mqar", "length": 63}, "an even length of at least 4 x pairs, got 63 and 4 pairs"),
        ({"type": "mqar", "length": 14}, "an even length of at least 4 x pairs, got 14"),
        ({"type": "mqar", "vocabulary": 8}, "an even vocabulary of more than 2 x pairs, got 8"),
        ({"type": "mqar", "train": 0}, "mqar needs train of 1 or more, got 0"),
        ({"type": "mqar", "train_pairs": [4, 17]}, "an even length of at least 4 x pairs, got 64 and 17 pairs"),
        ({"type": "mqar", "train_pairs": [4, 0]}, "mqar needs train_pairs of 1 or more, got 0"),
        ({"type": "mqar", "train_pairs": []}, "mqar needs numbers of pairs in train_pairs, got none"),
        ({"type": "induction", "length": 2}, "a length of 3 or more, got 2"),
        ({"type": "induction", "seed": -1}, "a seed of 0 or more, got -1"),
        ({"type": "copying", "length": 4, "tokens": 5}, "at least its tokens, got 4 and 5"),
        ({"type": "list_ops", "min_length": 9, "max_length": 10}, "min_length 9, max_length 10"),
        ({"type": "list_ops", "depth": 3, "arguments": 4}, "expressions of up to 26 words"),
        ({"type": "list_ops", "min_length": 0, "arguments": 1}, "list_ops needs arguments of 2 or more, got 1"),
    ],
)
def test_options_without_an_example_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SOURCES.build(options)


def test_expressions_that_are_hardly_ever_long_enough_end_in_one_line(monkeypatch):
    monkeypatch.setattr(list_ops, "DRAWN", 100)
    source = SOURCES.build({"type": "list_ops", "depth": 4, "train": 1, "validation": 1})
    with pytest.raises(ValueError, match="no expression of more than 500 and fewer than 2000 words among 100: set"):
        list(source.examples("train", source.shards("train")[0]))
