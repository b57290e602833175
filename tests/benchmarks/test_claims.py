"""The plan of the papers' claims: every training's config, the commands, the table, and a whole run at a tiny size."""

import inspect

import pytest

from benchmarks import claims, claims_plan, in_parallel, result_files
from benchmarks.claims_plan import CLAIMS, Case
from flash_tf import config
from flash_tf.layers.mixers import MIXERS
from flash_tf.registry import listed
from flash_tf.training import modelling
from tests.training import made_text

ROW = {"device": "a GPU", "commit": "abc", "claim": "title", "task": "lm", "length": 2048, "tokens": 90_000_000}
ROW |= {"change": None, "learning_rate": 0.001, "tokens_per_step": 1000, "steps": 400, "parameters": 30_000_000}


def parsed(*flags):
    return claims._checked(claims._parser().parse_args([*flags, "--table"]))


def trainings(claim):
    """The cases of a claim with seed 0 at their shortest length, and their runs."""
    args = parsed("out")
    cases = [case for case in claims_plan.planned(claim) if case.seed == 0]
    return {case: claims.training(case, args) for case in cases if case.length == CLAIMS[claim]["lengths"][0]}


def one(run):
    return config.load(run.config, run.overrides)


def with_defaults(model):
    """A model's options with the defaults of its mixers."""
    parameters = [inspect.signature(MIXERS.get(mixer["type"])).parameters for mixer in listed(model["mixer"])]
    defaults = [{name: p.default for name, p in found.items() if p.default is not p.empty} for found in parameters]
    mixers = [own | mixer for own, mixer in zip(defaults, listed(model["mixer"]), strict=True)]
    return {**model, "mixer": mixers}


def rows_of(system, perplexities, **more):
    curve = lambda last: [[100, 400.0], [200, 100.0], [400, last]]  # noqa: E731
    same = {**ROW, "system": system, "tokens_per_second": None, **more}
    return [{**same, "seed": seed, "perplexity": x, "curve": curve(x)} for seed, x in enumerate(perplexities)]


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_training_has_a_config_that_fits_and_a_change_changes_it(claim):
    runs = {case: one(run) for case, run in trainings(claim).items()}
    folders = [case.folder for case in (*claims_plan.choosing(claim), *claims_plan.planned(claim))]
    assert len({*folders}) == len(folders)
    for case, found in runs.items():
        found = modelling.with_masking(found)
        assert found.model["type"] == {"lm": "causal_lm", "mlm": "masked_lm"}[case.task]
        assert found.train.steps * found.train.tokens_per_step <= case.tokens
        assert 0 < found.optimizer.warmup_steps < found.train.steps / 2
        assert found.evaluation.windows * found.data.sequence_length == claims_plan.TABLE["validation_tokens"]
        if case.change is not None:
            base = runs[case._replace(change=None)]
            assert (with_defaults(found.model), found.optimizer, found.train, found.data) != (
                with_defaults(base.model),
                base.optimizer,
                base.train,
                base.data,
            ), case.name


def test_every_system_and_change_is_in_a_claim():
    used = {(case.system, case.change) for claim in CLAIMS for case in claims_plan.planned(claim)}
    assert {system for system, _ in used} == {*claims_plan.TABLE["systems"]}
    assert {change for _, change in used} - {None} == {*claims_plan.TABLE["changes"]}


WITNESSES = ("title-mlm-flash", "masked_learning-mlm-flash_quad-softmax", "length-lm-transnormer_t2")
SIZED = {
    f"{case.claim}-{case.task}-{case.name}": (case.claim, run)
    for claim in CLAIMS
    for case, run in trainings(claim).items()
}


@pytest.mark.parametrize(
    "name", [name if name in WITNESSES else pytest.param(name, marks=pytest.mark.full) for name in SIZED]
)
def test_every_training_has_a_model_of_its_size(name):
    claim, run = SIZED[name]
    parameters = in_parallel.described(run)["parameters"]
    if (size := CLAIMS[claim]["size"]) != "half":
        free = 12_300_000 if name.endswith("untied_head") else 0  # a second matrix
        # GPT-2's feed-forward layer is narrow, as in its config: 0.957. Without a gate, 1.23.
        assert 0.95 < (parameters - free) / (int(size.removesuffix("m")) * 1e6) < 1.24


def test_a_training_is_a_command_with_every_option_that_differs_from_the_config():
    case = Case("masked_learning", "mlm", "flash", "global_only", 1024, 28_600_000, 1e-3)
    run = claims.training(case, parsed("out", "--set", "train.precision=float32"))
    assert (run.config, str(run.folder)) == (
        "wikipedia_mlm/flash",
        "out/masked_learning-mlm-flash-global_only-1024-28.6M-0.001-0",
    )
    source = '{"type": "text_files", "documents": "key", "key": "text", "train": ["wikipedia/train.jsonl.xz"]'
    assert list(run.overrides) == [
        "model.width=384",
        "model.depth=20",
        "optimizer.warmup_steps=201",
        "train.steps=872",
        "train.checkpoint_every=218",
        "evaluation.every=109",
        "evaluation.windows=512",
        "model.vocabulary_size=32000",
        "optimizer.betas=[0.9, 0.98]",
        "optimizer.weight_decay=0.1",
        'optimizer.clip={"scope": "global", "norm": 1.0}',
        'train.precision="mixed_bfloat16"',
        "train.steps_per_loop=50",
        "train.keep=1",
        "data.sequence_length=1024",
        "optimizer.learning_rate=0.001",
        "train.seed=0",
        "train.tokens_per_step=32768",
        'model.mixer.scale="normalized"',
        'model.mixer.bias_start="normal"',
        'model.mixer.parts="global"',
        "model.mixer.chunk_size=64",
        "model.mixer.relative_bias=false",
        f'data.source={source}, "validation": "wikipedia/valid.jsonl.xz"}}',
        'data.tokenizer="wikipedia/sentencepiece.model"',
        'data.cache="out/tokens"',
        "train.precision=float32",
    ]


def test_heads_and_hidden_widths_follow_the_width_and_a_model_without_feed_forward_layers_is_twice_as_deep():
    found = {case.system: one(run).model for case, run in trainings("length").items()}
    assert {name: model["depth"] for name, model in found.items()} == {
        **dict.fromkeys(found, 10),
        "flash": 20,
        "mamba": 20,
    }
    assert (found["transformer_plus_plus"]["mixer"]["heads"], found["gla"]["mixer"]["heads"]) == (6, 4)
    assert found["retnet"]["feedforward"]["hidden"] == 513  # 171 at width 128
    ladder = {case.system: one(run).model for case, run in trainings("frontier").items()}
    assert [ladder["mhsa_24"][name] for name in ("width", "depth")] == [512, 24]
    assert ladder["mhsa_24"]["mixer"]["heads"] == 8


def test_the_best_rate_of_the_short_runs_is_taken_and_the_longest_texts_are_left_out_where_they_do_not_fit():
    short = claims_plan.choosing("title")
    assert {(case.length, case.tokens, case.seed) for case in short} == {(2048, 9_000_000, 0)}
    losses = {7e-4: 90.0, 1.4e-3: 80.0, 2.8e-3: 85.0}
    runs = {case: claims.training(case, parsed("out")) for case in short if case.system != "flash_quad"}
    rows = [{**claims.about(case, run), "perplexity": losses[case.rate]} for case, run in runs.items()]
    rows.append({**rows[0], "tokens": 86_000_000, "perplexity": 1.0})
    pairs = [(task, system) for task in ("lm", "mlm") for system in ("flash", "transformer_plus_plus")]
    assert claims._chosen("title", rows) == dict.fromkeys(pairs, 1.4e-3)
    assert rows[0]["system"] == "transformer_plus_plus"  # without this row its rates are not compared
    assert claims._chosen("title", rows[1:-1]) == dict.fromkeys(pairs[:1] + pairs[2:], 1.4e-3)
    at_all = {("lm", "transformer_plus_plus", rate) for rate in losses}
    assert claims._chosen("title", rows[1:-1], at_all) == dict.fromkeys(pairs, 1.4e-3)
    without = [row for row in rows if row["system"] == "flash"]
    assert claims._chosen("title", without, at_all) == dict.fromkeys(pairs[::2], 1.4e-3)  # all of its rates diverged
    planned = claims_plan.planned("title")
    assert {case.length for case in planned if case.system == "flash_quad"} == {512, 2048, 8192}
    assert {(case.system, case.length) for case in planned if case.seed} == {
        ("flash", 2048),
        ("transformer_plus_plus", 2048),
    }


def test_a_plain_file_is_taken_before_a_packed_one(tmp_path):
    assert claims.text_file(str(tmp_path), "train") == f"{tmp_path}/train.jsonl.xz"
    (tmp_path / "train.jsonl").touch()
    assert claims.text_file(str(tmp_path), "train") == f"{tmp_path}/train.jsonl"


def test_gaps_are_in_units_of_the_spread():
    rows = rows_of("flash", [61.0, 63.0]) + rows_of("flash_quad", [65.0]) + rows_of("transformer_plus_plus", [59.0, 61])
    head, columns, first, *others = claims.as_text(rows).splitlines()
    assert head == "title, lm, n = 2,048, 90 M tokens, on a GPU"
    assert columns.split()[:4] == ["system", "parameters", "rate", "seeds"]
    assert first.split()[:7] == ["transformer_plus_plus", "30,000,000", "0.001", "2", "60.00", "1.41", "–"]
    assert others[0].split()[4:] == ["62.00", "1.41", "+2.00", "+1.4,", "within", "–", "–", "–"]
    assert others[1].split()[3:8] == ["1", "65.00", "–", "+5.00", "+3.5"]
    newer = [{**rows[0], "perplexity": 63.0}]
    assert claims.as_text(rows + newer).splitlines()[3].split()[4:6] == ["63.00", "0.00"]


def test_the_speed_up_is_the_time_to_the_worst_final_perplexity():
    rows = rows_of("transformer_plus_plus", [50.0], tokens_per_second=1000.0)
    rows += rows_of("flash", [25.0], tokens_per_second=2000.0)
    assert claims.seconds_to(rows[0], 50.0) == pytest.approx(400)
    assert claims.seconds_to(rows[1], 50.0) == pytest.approx(150)  # halfway from step 200 to 400, in the logarithm
    assert claims.seconds_to(rows[1], 400.0) == 50
    assert claims.seconds_to(rows[1], 24.0) is None
    lines = claims.as_text(rows).splitlines()[2:]
    assert [line.split()[-3:] for line in lines] == [["1.0", "0.111", "1.00"], ["2.0", "0.056", "2.67"]]
    assert claims.as_text([*rows, *rows_of("flash", [60.0], change="x")]).count("–") > 3  # not timed


def test_wrong_arguments_are_said_in_a_line(tmp_path):
    for flags, message in (
        (["out", "--claims", "titel"], "no claim is called 'titel'; did you mean 'title'"),
        (["out", "--claims", "gates", "--of", "gla-gate_none"], "no variant is called 'gla-gate_none'; did you mean"),
        ([], "OUT is needed"),
        (["out", "--steps", "0"], "--steps must be 1 or more, got 0"),
        (["out", "--wikipedia", str(tmp_path)], "needs .*more.jsonl.xz, and there is none"),
    ):
        with pytest.raises(ValueError, match=message):
            claims.main(flags)


@pytest.mark.full
def test_variants_are_trained_once_on_text_that_is_tokenized_once(tmp_path, capsys):
    made_text.write(tmp_path, 3_000)
    made_text.write_vocabulary(tmp_path, 1200)
    out, file, text = tmp_path / "out", tmp_path / "found.jsonl", tmp_path / "wikipedia"
    (text / "more.jsonl.xz").write_bytes((text / "valid.jsonl.xz").read_bytes())
    flags = [str(out), "--wikipedia", str(text), "--results", str(file), "--commit", "here", "--parallel", "2"]
    flags += ["--set", "model.vocabulary_size=1200"]
    with pytest.raises(ValueError, match=r"title reads no token twice: at n = 2,048 it needs 8,978,432 tokens, got"):
        claims.main([*flags, "--claims", "title", "--of", "flash"])

    tiny = {"model.width": 32, "model.depth": 2, "train.tokens_per_step": 2048, "train.steps_per_loop": 1}
    tiny |= {"evaluation.windows": 2, "train.precision": "float32", "train.checkpoint_every": 3}
    flags += ["--steps", "3", *(text for key, value in tiny.items() for text in ("--set", f"{key}={value}"))]
    flags += ["--claims", "masked_learning", "causal_learning", "length", "--of", "flash-n_256", "gla"]
    assert claims.main(flags) == 0
    rows = result_files.read(file)
    learning = ["masked_learning", "causal_learning"]
    assert [row["claim"] for row in rows] == [*learning, *["length"] * 3]
    for row in rows:
        assert row["perplexity"] == row["curve"][-1][1] and row["curve"][-1][0] == row["steps"] == 3
        assert row["parameters"] > 0 and row["seconds"] > 0 and row["tokens_per_second"] is None
        assert row["n"] == (2048 if row["claim"] == "length" else 256) and "3 steps" in row["variant"]
    first, second, chosen = rows[2:]
    assert chosen["learning_rate"] == min((first, second), key=lambda row: row["perplexity"])["learning_rate"]
    folders = [path.name.partition("-")[0] for path in (out / "tokens").iterdir()]
    assert sorted(folders) == ["train", "train", "validation", "validation"]  # with more.jsonl.xz and without
    assert {path.parent.name.partition("-")[0] for path in out.glob("*/checkpoints")} == {"length"}
    capsys.readouterr()
    assert claims.main(flags) == 0
    assert result_files.read(file) == rows
    assert "flash, n_256" in capsys.readouterr().out


@pytest.mark.full
def test_a_rate_that_diverges_is_not_taken_and_does_not_stop_the_others(tmp_path, monkeypatch):
    made_text.write(tmp_path, 3_000)
    made_text.write_vocabulary(tmp_path, 1200)
    text = tmp_path / "wikipedia"
    (text / "more.jsonl.xz").write_bytes((text / "valid.jsonl.xz").read_bytes())
    monkeypatch.setitem(claims_plan.CLAIMS["length"], "rates", [1e-3, 1e30])
    file = tmp_path / "found.jsonl"
    tiny = {"model.width": 32, "model.depth": 2, "train.tokens_per_step": 2048, "train.steps_per_loop": 1}
    tiny |= {"evaluation.windows": 2, "train.precision": "float32", "model.vocabulary_size": 1200}
    flags = [
        str(tmp_path / "out"),
        "--wikipedia",
        str(text),
        "--results",
        str(file),
        "--commit",
        "here",
        "--steps",
        "3",
    ]
    flags += ["--claims", "length", "--of", "gla", *(x for k, v in tiny.items() for x in ("--set", f"{k}={v}"))]
    assert claims.main(flags) == 0
    assert [row["learning_rate"] for row in result_files.read(file)] == [1e-3, 1e-3]
    (log,) = (tmp_path / "out").glob("*1e+30*.log")
    assert "not a number" in log.read_text()


def test_a_table_has_the_rows_that_are_asked_for(capsys):
    flags = ["--table", "--claims", "masked_learning", "--of", "flash_quad", "flash-appendix_scale"]
    assert claims.main(flags) == 0
    tables = capsys.readouterr().out.split("\n\n")  # of an H100 and of H200s, which trained FLASH-Quad again
    found = [[line.split("  ")[0] for line in table.splitlines()[2:]] for table in tables]
    assert found == [["flash, appendix_scale", "flash_quad"], ["flash_quad"]]
    assert claims.main([*flags, "--tasks", "lm"]) == 0 and not capsys.readouterr().out.strip()
