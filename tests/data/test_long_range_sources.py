"""The Long-Range Arena's tasks: Pathfinder's pictures, and the readers of the official files."""

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.data import pixels
from flash_tf.data.encoders import ClassLabel, TextEncoder
from flash_tf.data.generated import FIRST
from flash_tf.data.sources import SOURCES
from flash_tf.data.tokenizers import word_level

pytestmark = pytest.mark.one_backend


def read(split="train", **options):
    source = SOURCES.build(options)
    return [example for shard in source.shards(split) for example in source.examples(split, shard)]


def pathfinder(**options):
    return read(**{"type": "pathfinder", "train": 12, "validation": 4, "distractors": 0, **options})


def components(image):
    """The connected parts of what is lit in an image, as sets of places: dashes touch once each is a little wider."""
    lit = {(y, x) for y, x in np.argwhere(image > 0).tolist()}
    found = []
    while lit:
        part, front = set(), [lit.pop()]
        while front:
            y, x = front.pop()
            part.add((y, x))
            near = {(y + i, x + j) for i in range(-4, 5) for j in range(-4, 5) if i * i + j * j <= 16} & lit
            lit -= near
            front += near
        found.append(part)
    return found


def markers(image):
    """The middles of the two round spots: the lightest place of a mean over a disc, and the next one far from it."""
    size, r = len(image), 4
    means = np.array(
        [[image[y - r : y + r + 1, x - r : x + r + 1].mean() for x in range(r, size - r)] for y in range(r, size - r)]
    )
    first = np.unravel_index(means.argmax(), means.shape)
    y, x = np.ogrid[: means.shape[0], : means.shape[1]]
    means[(y - first[0]) ** 2 + (x - first[1]) ** 2 < 64] = 0
    second = np.unravel_index(means.argmax(), means.shape)
    return [(one[0] + r, one[1] + r) for one in (first, second)]


def test_the_markers_of_a_picture_are_ends_of_one_path_if_and_only_if_the_label_says_so():
    told = {0: 0, 1: 0}
    for example in pathfinder(size=128, contour_length=6, train=24):
        parts, ends = components(example["text"]), markers(example["text"])
        if len(parts) != 2:
            continue  # paths so near each other that they touch
        where = [next(i for i, part in enumerate(parts) if (y, x) in part) for y, x in ends]
        assert (where[0] == where[1]) == bool(example["label"])
        told[example["label"]] += 1
    assert min(told.values()) >= 3


def test_pictures_follow_from_seed_and_split_and_have_the_size_that_was_asked_for():
    images = lambda **options: np.stack([one["text"] for one in pathfinder(**options)])  # noqa: E731
    first = images()
    assert first.shape == (12, 32, 32) and first.dtype == np.uint8 and first.max() == 255
    assert np.array_equal(first, images(train=14)[:12]) and not np.array_equal(first, images(seed=1))
    assert not np.array_equal(first[:4], images(split="validation"))
    assert images(size=48, train=2).shape == (2, 48, 48)
    assert (images(distractors=4) > 0).mean() > 1.2 * (first > 0).mean()
    labels = [one["label"] for one in pathfinder(train=60)]
    assert 15 < sum(labels) < 45
    with pytest.raises(ValueError, match="pathfinder needs a size of 16 or more, .* got 8, 14 and 4"):
        SOURCES.build({"type": "pathfinder", "size": 8})


def test_an_image_is_read_as_the_words_of_its_grey_pixels():
    grey = np.random.default_rng(0).integers(0, 256, [5, 4]).astype("uint8")
    assert pixels.as_text(grey) == pixels.as_text(grey[..., None]) == " ".join(map(str, grey.ravel()))
    tokenizer = word_level.of_pieces([*word_level.SPECIAL, *pixels.WORDS], 264)
    (row,) = TextEncoder(tokenizer, 22, None, ClassLabel(2, None)).rows([("here", {"text": grey, "label": 1})])
    assert row["tokens"].tolist() == [tokenizer.cls_id, *(grey.ravel().astype(int) + FIRST), tokenizer.eos_id]


def test_colours_become_the_greys_of_tensorflow():
    colours = np.random.default_rng(0).integers(0, 256, [100, 100, 3]).astype("uint8")
    greys = np.repeat(np.arange(256, dtype="uint8"), 3).reshape(16, 16, 3)
    for image in (colours, greys):
        assert pixels.as_text(image) == pixels.as_text(tf.image.rgb_to_grayscale(image).numpy())
    assert pixels.as_text(greys).split() == pixels.WORDS


def test_the_arenas_list_ops_are_read_without_parentheses_as_the_generators_own(tmp_path):
    (tmp_path / "basic_train.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n( ( [SM 7 ) 8 ) ]\t5\n")
    one, two = read(type="list_ops_files", train=str(tmp_path / "*train.tsv"), validation="")
    assert (one["text"], one["label"], two["text"], two["label"]) == ("[MAX 2 9 ]", 9, "[SM 7 8 ]", 5)
    own = read(type="list_ops", min_length=3, max_length=40, depth=3, arguments=4, train=50, validation=1)
    assert {len(example["text"].split()) for example in own} != {1}
    known = SOURCES.build({"type": "list_ops"}).words
    for example in (one, two, *own):
        assert [known[i - FIRST] for i in example["token_ids"]] == example["text"].split()
        assert known[example["labels"][-1] - FIRST] == str(example["label"])
    (tmp_path / "bad_train.tsv").write_text("Source\tTarget\n[MUL 2 ]\t3\n")
    with pytest.raises(ValueError, match=r"bad_train.tsv, line 2 needs the words of ListOps, got '\[MUL'"):
        read(type="list_ops_files", train=str(tmp_path / "bad*"), validation="")
    (tmp_path / "bad_train.tsv").write_text("source\tlabel\n")
    assert read(type="list_ops_files", train=str(tmp_path / "bad*"), validation="") == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("\t3", "an expression as Source and a digit as Target, got '' and '3'"),
        ("[MIN 2 3 ]\t[MIN", r"an expression as Source and a digit as Target, got '\[MIN 2 3 \]' and '\[MIN'"),
        ("[MUL 2 ]\t3", r"the words of ListOps, got '\[MUL'"),
    ],
)
def test_a_line_that_is_no_example_of_list_ops_is_named_with_its_number(tmp_path, line, said):
    (tmp_path / "a.tsv").write_text(f"Source\tTarget\n[MIN 2 3 ]\t2\n\n{line}\n")
    with pytest.raises(ValueError, match=f"a.tsv, line 4 needs {said}$"):
        read(type="list_ops_files", train=str(tmp_path / "a.tsv"), validation="")


def test_a_table_without_keys_in_its_first_line_takes_the_configs(tmp_path):
    (tmp_path / "pairs.tsv").write_text("1.0\ta\tb\t" + "x" * 200_000 + "\tsecond\n0.0\tc\td\tthird\tfourth\n")
    keys = ["label", "id1", "id2", "text1", "text2"]
    one, two = read(type="example_files", train=str(tmp_path / "*"), validation="", keys=keys)
    assert one["label"] == "1.0" and len(one["text1"]) == 200_000 and two["text2"] == "fourth"


def test_a_first_line_of_the_configs_keys_is_one_though_a_column_lacks(tmp_path):
    (tmp_path / "new.tsv").write_text("text2\ttext1\nb\ta\n")
    keys = ["label", "text1", "text2"]
    assert read(type="example_files", train=str(tmp_path / "*"), validation="", keys=keys) == [
        {"text1": "a", "text2": "b"}
    ]


def release(folder, count=10):
    """A folder as the release's, with two images on each of its lists."""
    level = folder / "curv_contour_length_14"
    for i in range(count):
        images = level / "imgs" / str(i)
        images.mkdir(parents=True)
        (level / "metadata").mkdir(exist_ok=True)
        lines = []
        for j in range(2):
            (images / f"sample_{j}.png").write_bytes(tf.io.encode_png(np.full([4, 4, 1], 10 * i + j, "uint8")).numpy())
            lines.append(f"imgs/{i} sample_{j}.png {j} {j} 1.8 6 2.0 5 1.0 4 14 1\n")
        (level / "metadata" / f"{i}.npy").write_text("".join(lines))
    return level


def test_the_releases_pathfinder_is_read_by_its_lists_in_the_arenas_parts(tmp_path):
    level = release(tmp_path)
    found = {split: read(split, type="pathfinder_files", data_dir=str(tmp_path)) for split in ("train", "validation")}
    values = {split: [(int(one["text"][0, 0]), one["label"]) for one in rows] for split, rows in found.items()}
    assert values["train"] == [(10 * i + j, j) for i in range(8) for j in range(2)]
    assert values["validation"] == [(80, 0), (81, 1)] and found["train"][0]["text"].shape == (4, 4)
    (level / "imgs/0/sample_0.png").write_bytes(b"")
    assert len(read(type="pathfinder_files", data_dir=str(tmp_path))) == 15
    (level / "imgs/0/sample_1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="sample_1.png is not a whole PNG file"):
        read(type="pathfinder_files", data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="needs lists of images for train in .*metadata, got 0 in all"):
        read(type="pathfinder_files", data_dir=str(tmp_path), level="curv_baseline")
    (level / "metadata/0.npy").write_text("imgs/0 sample_0.png\n")
    with pytest.raises(ValueError, match="0.npy, line 1 needs a folder, a name, a number and a label"):
        read(type="pathfinder_files", data_dir=str(tmp_path))
