"""`flash-tf compile` on the command line."""

import json

import pytest

from flash_tf import owned_files
from flash_tf.compiling import manifest
from tests.training import runs


def command(folder, *arguments):
    model = {"type": "causal_lm", "depth": 1}
    return runs.command(folder, "compile", runs.write(folder, model=model), *arguments)


@pytest.mark.full
def test_compile_writes_an_artifact_says_what_comes_next_and_ends_with_a_table(tmp_path):
    status, out, err = command(
        tmp_path, "--out", tmp_path / "artifact", "--check-tokens", 64, "--decode-batch", 2, "--set", "train.seed=3"
    )
    assert status == 0, err
    lines = err.splitlines()
    assert lines[0] == "tracing the training step, 4 x 32 tokens" and "tracing the check, 2 x 32 tokens" in lines
    assert "tracing decoding, 2 x 64 tokens" in lines
    assert lines[-1] == "TensorFlow's step 3 of 3 of the check" and len(lines) == 7
    table = dict(line.split("  ", 1) for line in out.splitlines())
    assert table["tokens a step"].strip() == "128" and "step.hlo.pb" in table
    made = manifest.read(str(tmp_path / "artifact"))
    assert made.seed == 3 and made.programs["check"].tokens == 64 and made.programs["decode"].batch_size == 2

    status, out, err = command(tmp_path, "--out", tmp_path / "artifact", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["tokens_per_step"] == 128 and len(found["check_losses"]) == 3
    assert {*found["files"], owned_files.MANIFEST} == {path.name for path in (tmp_path / "artifact").iterdir()}
    assert manifest.read(str(tmp_path / "artifact")).seed == 0


@pytest.mark.full
def test_compile_for_a_topology_reports_what_the_step_would_cost_and_needs_no_folder(tmp_path):
    pytest.importorskip("libtpu")
    status, out, err = command(tmp_path, "--topology", "v5e:1x1", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["compiles"] and report["fits"] and report["flops"] > 0 and report["topology"] == "v5e:1x1"
    assert err.splitlines() == ["tracing the training step for a TPU, 4 x 32 tokens", "compiling it for v5e:1x1"]


@pytest.mark.full
def test_a_step_too_large_for_a_chip_is_reported_named_and_status_1(tmp_path):
    pytest.importorskip("libtpu")
    n = 2**16  # 4 heads' float32 scores, in strips of a quarter of the queries: 16 GiB for the last
    sizes = [f"data.sequence_length={n}", f"train.tokens_per_step={n}", "model.mixer={type: self_attention, heads: 4}"]
    options = [text for size in sizes for text in ("--set", size)]
    status, out, err = command(tmp_path, "--topology", "v5e:1x1", "--json", *options)
    report = json.loads(out)
    assert status == 1 and not report["fits"] and report["hbm_bytes"] > 2 * report["hbm_limit_bytes"]
    assert err.splitlines()[-1].startswith("flash-tf: the step does not fit v5e:1x1: ")
    assert f"[4,{n // 4},{n}]" in err.splitlines()[-1]  # the tensor that it names


@pytest.mark.full
def test_bad_input_is_one_line_and_status_1(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("mine")
    out, masked = ["--out", tmp_path / "artifact"], ["--set", "model.type=masked_lm"]
    for arguments, line in [
        ([], "flash-tf: compile needs --out, --topology or both"),
        (["--topology", "v9:1x1"], "flash-tf: there is no TPU topology 'v9:1x1'"),
        ([*out, "--check-tokens", "48"], "flash-tf: --check-tokens must be a multiple of data.sequence_length (32)"),
        (["--topology", "v5e:1x1", "--decode-batch", 2], "flash-tf: --decode-batch needs --out"),
        (["--topology", "v5e:1x1", "--check-tokens", 64], "flash-tf: --check-tokens needs --out"),
        ([*out, "--decode-batch", 0], "flash-tf: --decode-batch must be positive, got 0"),
        (
            [*out, "--decode-batch", 2, *masked],
            "flash-tf: --decode-batch needs a model that decodes, masked_lm does not",
        ),
        (["--out", tmp_path / "other"], f"flash-tf: {tmp_path}/other holds mine.txt, which flash-tf compile"),
        ([*out, "--set", "train.tokens_per_step=33"], "train.tokens_per_step (33) must be a multiple of"),
        ([*out, "--set", "data.tokenizer=nowhere.model"], "flash-tf: tokenizer model nowhere.model cannot be read"),
        ([*out, "--set", "model.mixer.type=nothing"], "no mixer is called 'nothing'"),
    ]:
        status, printed, err = command(tmp_path, *arguments)
        assert (status, printed) == (1, "") and err.count("\n") == 1
        assert line in err
    assert not (tmp_path / "artifact").exists()
