"""What commands make of their options and of what they are told."""

import argparse
import sys

import pytest

from flash_tf import cli, commands
from flash_tf.commands import evaluate, export, generate, lm_eval, predict
from flash_tf.generation import GREEDY, BeamSearch, Sampler


@pytest.mark.parametrize(
    ("options", "sampler"),
    [
        ([], GREEDY),
        (["--temperature", "0.5"], Sampler(temperature=0.5)),
        (["--top-k", "3", "--top-p", "0.9"], Sampler(top_k=3, top_p=0.9)),
        (["--beam", "2"], BeamSearch(2)),
    ],
)
def test_generate_draws_as_it_is_told(options, sampler):
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    assert generate._sampler(parser.parse_args(["folder", "--prompt", "a", *options])) == sampler


def test_a_checkpoint_is_the_best_the_newest_or_one_by_its_step(capsys):
    parser = argparse.ArgumentParser()
    commands.takes_model(parser)
    words = (None, "best", "newest", "400")
    found = [parser.parse_args(["run", *(["--checkpoint", word] if word else [])]).checkpoint for word in words]
    assert found == ["best", "best", "newest", 400]
    with pytest.raises(SystemExit):
        parser.parse_args(["run", "--checkpoint", "first"])
    assert "--checkpoint: needs best, newest or the number of a step, got 'first'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [evaluate, export, predict])
def test_a_threshold_of_answers_takes_the_place_of_the_run_s(command, capsys):
    parser, more = argparse.ArgumentParser(), [] if command is evaluate else ["second"]
    command.add_arguments(parser)
    found = [
        commands.threshold(parser.parse_args(["run", *more, *given])) for given in ([], ["--no-answer-threshold=-1e-7"])
    ]
    assert found == [[], ["model.no_answer_threshold=-1e-07"]]
    with pytest.raises(SystemExit):
        parser.parse_args(["run", *more, "--no-answer-threshold", "inf"])
    assert "--no-answer-threshold: needs a finite number, got 'inf'" in capsys.readouterr().err


def test_a_missing_harness_is_named_with_its_extra_before_any_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "flash_tf.harness", raising=False)
    with pytest.raises(ImportError, match=r"^lm-eval needs lm-evaluation-harness: pip install 'flash-tf\[eval\]'$"):
        lm_eval.run(argparse.Namespace(), None)


@pytest.mark.parametrize(
    "command", [["generate", "run", "--prompt"], ["fill-mask", "run", "a"], ["inspect", "run", "--text"]]
)
def test_a_text_with_bytes_that_are_not_utf8_is_refused_by_the_parser(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "caf\udce9"])  # as Python gives the byte 0xe9 of an argument
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "needs a text in UTF-8, got 'caf\\udce9' with other bytes" in said
