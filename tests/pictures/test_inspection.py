"""What is said of a model and a text is true of both."""

import io
import re

import numpy as np
import pytest
from keras import ops
from matplotlib.image import imread

from flash_tf.models.causal_lm import CausalLM
from flash_tf.models.masked_lm import MaskedLM
from flash_tf.pictures import inspection, measures
from flash_tf.pictures.formulas import array
from flash_tf.pictures.overview import overview
from tests import backends, tiers
from tests.numerics import FLOAT32, FLOAT64, relative_error

VOCABULARY = 64
FLASH = {"type": "flash", "chunk_size": 8, "key_dim": 16}
MODELS = {
    "flash": (CausalLM, {"mixer": FLASH}),
    "masked flash": (MaskedLM, {"mixer": FLASH, "position_embedding": None}),
    "quad": (CausalLM, {"mixer": {"type": "gau", "key_dim": 16}, "norm": "layer_norm"}),
    "transformer": (
        MaskedLM,
        {
            "mixer": {"type": "self_attention", "heads": 4},
            "feedforward": {"type": "mlp"},
            "position_embedding": "learned",
            "max_length": 64,
        },
    ),
}


class Letters:
    """A token a letter: pieces that no axis can show as they are among them."""

    pieces = ("$x$", "日本", "▁", "_a", "▁supercalifragilisticexpialidocious", "<mask>", "")

    def piece(self, id):
        return self.pieces[id % len(self.pieces)]

    def encode(self, texts):
        return [np.array([ord(letter) % VOCABULARY for letter in text], "int32") for text in texts]

    def encode_with_masks(self, text):
        return self.encode([text])[0]


def model(name, **options):
    cls, more = MODELS[name]
    backends.seed(0)
    made = cls(VOCABULARY, **{"width": 32, "depth": 2, **more, **options})
    made.build()
    return made


IDS = np.arange(29, dtype="int32") * 7 % VOCABULARY


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_fed_what_the_model_feeds_them_and_reproduce_what_it_puts_out(name):
    looked = model(name)
    layers = list(inspection.look(looked, IDS))
    assert [layer.index for layer in layers] == [0, 1]
    assert all(layer.disagreement < FLOAT32 for layer in layers)


@pytest.mark.parametrize("options", [{}, {"norm": "layer_norm", "post_norm": True}], ids=["pre-norm", "post-norm"])
def test_what_layers_add_to_the_embedding_is_what_the_model_encodes(options):
    looked = model("flash", **options)
    x = array(looked.embed(IDS[None], np.arange(len(IDS))[None])[0])
    for layer, block in zip(inspection.look(looked, IDS), looked.blocks, strict=True):
        x = x + sum(part.output for part in layer.parts) + array(block.inner.out_projection.bias)
        x = array(block.norm(x[None].astype("float32"))[0]) if looked.post_norm else x
    encoded = ops.convert_to_numpy(looked.encode(IDS[None]))[0]
    assert relative_error(ops.convert_to_numpy(looked.final_norm(x[None].astype("float32")))[0], encoded) < FLOAT32


def test_shares_are_lengths_over_their_sum_and_add_up_to_one():
    for layer in inspection.look(model("flash"), IDS):
        shares, (local, far) = layer.shares(), layer.parts
        assert relative_error(shares.sum(axis=0), np.ones(len(IDS))) < FLOAT64
        assert not shares[1, :8].any() and shares[1, 8:].all()  # nothing is before the first chunk
        i = 20
        lengths = np.linalg.norm(local.output[i]), np.linalg.norm(far.output[i])
        assert shares[0, i] == pytest.approx(lengths[0] / sum(lengths))


@pytest.mark.usefixtures("unsaved")
def test_a_layer_whose_bias_silences_every_pair_is_dead_and_said_to_be():
    looked = model("masked flash")
    bias = looked.mixers[1].bias
    slow = np.zeros(bias.width)
    slow[bias.width // 2 - 1] = 30.0  # of the slowest wave: the same at all distances
    bias.a.assign(slow)
    bias.b.assign(-slow)
    found = inspection.read(looked, Letters(), "twenty letters or so", longest=64)
    dead = [one["parts"]["local"]["dead_rows"] for one in found.summaries]
    assert dead[0] < 1 and dead[1] == 1
    assert found.summaries[1]["parts"]["local"]["distance"] is None
    assert "All weights are zero: local attention of layer 1." in found.notes
    assert "100.0%" in found.text()


def test_dead_rows_are_those_of_live_queries_alone():
    weights = np.array([[[0, 0, 0], [1, 0, 0], [0, 0, 0.0]]])
    part = inspection.Part("attention", weights, np.tri(3, k=-1, dtype=bool), np.zeros((3, 2)))
    assert measures.dead(part).tolist() == [[False, False, True]]  # the first sees nothing
    assert measures.distance(part) == 1


def scores_of(weights):
    return measures.accumulated(inspection.Part("attention", weights, np.ones([10, 10], bool), np.zeros((10, 2))))


def test_accumulated_scores_are_the_weights_on_the_tokens_around_a_query():
    assert scores_of(np.ones([2, 10, 10])) == pytest.approx(measures.RATIOS)
    assert scores_of(np.eye(10)[None]) == [1.0] * 10
    one = np.zeros([1, 10, 10])
    one[0, 5, 8] = -2.0  # the only weight; token 8 is among the seven tokens around 5, 2 to 8
    assert scores_of(one) == [0.0] * 6 + [1.0] * 4
    assert scores_of(np.zeros([1, 10, 10])) is None
    without = np.ones([1, 10, 10]) * (np.arange(10) > 4)[:, None]  # queries without weights do not count
    assert scores_of(without) == pytest.approx(measures.RATIOS)


@pytest.mark.full
def test_layers_of_different_mixers_are_in_one_table_and_picture():
    both = [FLASH, {"type": "diag_attention", "heads": 2, "chunk_size": 8}]
    found = inspection.read(model("flash", mixer=both), Letters(), "abcdefghijkl" * 5, longest=64)
    head, *rows = (line.split("  ") for line in found.text().splitlines())
    assert "local within 10%" in [one.strip() for one in head] and "attention within 10%" in [
        one.strip() for one in head
    ]
    assert [set(one["parts"]) for one in found.summaries] == [{"local", "global"}, {"attention"}]


@pytest.mark.usefixtures("unsaved")
def test_a_layer_that_a_short_text_leaves_blind_is_said_to_be_so_whatever_follows_it():
    mixed = model("flash", mixer=[FLASH, {"type": "gau", "key_dim": 16}])
    found = inspection.read(mixed, Letters(), "a", longest=64)
    assert any("The global part sees nothing" in note for note in found.notes)


def row_sums_of_layers(*sums):
    """The panel of the overview for layers with such row sums."""
    parts = {"attention": {"share": 1.0, "dead_rows": 0.0, "accumulated": None}}
    summaries = [{"layer": i, "parts": parts} for i in range(len(sums))]
    return overview(summaries, [np.array([one]) for one in sums], "a text").axes[0]


@pytest.mark.parametrize(
    ("sums", "crosses", "scale"),
    [
        ([[-3, -2, -1], [0, 0, 0], [1, 20, 30]], [1], "linear"),
        ([[0, 0, 0, 5], [1, 1, 1, 1]], [], "linear"),
        ([[1, 1], [20, 20]], [], "log"),
        ([[1, 1], [20, 20], [0, 0]], [2], "log"),
    ],
)
def test_only_layers_whose_row_sums_are_all_zero_get_a_cross(sums, crosses, scale):
    axes = row_sums_of_layers(*sums)
    dots, *_ = axes.lines
    marked = [x for line in axes.lines if line.get_marker() == "x" for x in line.get_xdata()]
    assert marked == crosses and sorted([*dots.get_xdata(), *marked]) == list(range(len(sums)))
    assert axes.get_yscale() == scale
    assert scale == "log" or axes.get_ylim()[0] == min(0, *(np.quantile(one, 0.1) for one in sums))


@pytest.mark.parametrize("name", tiers.thinned(list(MODELS), "flash"))
@pytest.mark.parametrize("letters", tiers.thinned([1, 60], 60))
def test_every_picture_is_drawn_whatever_the_tokens_and_their_number(name, letters):
    found = inspection.read(model(name), Letters(), ("abcdefghijkl" * 5)[:letters], longest=64, layers=[0])
    assert [one.name for one in found.pictures] == ["inspect_overview", "inspect_layer_00"]
    assert all(len(np.unique(imread(io.BytesIO(one.png)))) > 2 for one in found.pictures)
    blind = any("The global part sees nothing" in note for note in found.notes)
    assert blind == (name == "flash" and letters == 1)  # a causal text within its first chunk


def test_maps_name_the_tokens_of_the_window_and_show_the_weights_of_its_pairs():
    (layer,) = inspection.look(model("flash"), IDS, [1])
    named = inspection.window([str(i) for i in IDS], IDS.tolist(), 5, 10)
    axes = inspection.layer_figure(layer, named, "a text").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(i) for i in IDS[5:15]]
    shown, local = axes.images[0].get_array(), layer.parts[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key (token)", "query (token)")
    assert (shown.mask == ~local.seen[5:15, 5:15]).all()
    assert (shown.filled(0) == local.weights[0, 5:15, 5:15]).all()


@pytest.mark.parametrize("name", ["flash", "transformer"])
def test_colours_are_linear_in_the_weight_and_the_scale_says_what_they_are(name):
    (layer,) = inspection.look(model(name), IDS, [0])
    drawn = inspection.layer_figure(layer, inspection.window([""] * 29, IDS.tolist(), 0, 29), "some $text$")
    images = [image for axes in drawn.axes for image in axes.get_images()]
    scales = [axes for axes in drawn.axes if axes.get_ylabel() == "attention weight"]
    assert len(scales) == len(layer.parts) + (name == "transformer")  # and one for the heads together
    for image in images:
        low, high = image.norm.vmin, image.norm.vmax
        assert low in (0, -high) and image.norm((low + 3 * high) / 4) == pytest.approx(0.75)
    assert abs(images[0].norm.vmax) == pytest.approx(np.abs(layer.parts[0].weights.mean(axis=0)).max())
    assert [text.get_text() for text in drawn.texts] == ["Layer 0", r"text: some \$text\$"]


@pytest.mark.parametrize(
    ("name", "tokens"), [("flash", 40), pytest.param("quad", 20, marks=pytest.mark.full), ("transformer", 40)]
)
def test_nothing_reaches_beyond_the_picture(name, tokens):
    (layer,) = inspection.look(model(name), np.tile(IDS, 2), [0])
    named = inspection.window([Letters.pieces[4]] * 58, [4] * 58, 0, tokens)
    drawn = inspection.layer_figure(layer, named, "a text")
    drawn.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in drawn.axes]
    assert min(box.x0 for box in boxes) >= 0 and min(box.y0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= drawn.bbox.x1 and max(box.y1 for box in boxes) <= drawn.bbox.y1


def test_tokens_are_shown_as_they_are_or_by_number_and_never_as_formulas():
    named = inspection.window(Letters.pieces[:5], [10, 11, 12, 13, 14], 0, None)
    assert named.labels == [r"\$x\$", "#11", "▁", " _a", "▁super…docious"]


@pytest.mark.usefixtures("unsaved")
def test_what_is_left_out_of_a_long_text_is_said():
    found = inspection.read(model("flash"), Letters(), "abcd" * 30, longest=64, layers=[0])
    assert len(found.pieces) == 64
    assert (
        found.notes[0] == "The text has 120 tokens; the first 64 were read, the length of the model's training texts."
    )
    assert found.notes[1] == "Maps name tokens 0 to 31 of 64; --start and --tokens choose others."


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, "the text needs a token or more, got none of ''"),
        ("abc", {"start": 3}, "--start must be between 0 and the text's last token, 2, got 3"),
        ("abc", {"start": -1}, "--start must be between 0 and the text's last token, 2, got -1"),
        ("abc", {"tokens": 0}, "--tokens must be between 1 and 40, which a map can name, got 0"),
        ("abc", {"tokens": 41}, "--tokens must be between 1 and 40, which a map can name, got 41"),
        ("abc", {"layers": [2]}, "the model has layers 0 to 1, got 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(text, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        inspection.read(model("flash"), Letters(), text, longest=64, **options)


def test_weights_that_are_no_numbers_are_refused():
    looked = model("flash")
    kernel = looked.mixers[1].out_projection.kernel
    kernel.assign(kernel * np.nan)
    with pytest.raises(ValueError, match="layer 1 puts out what is not a number"):
        list(inspection.look(looked, IDS))
