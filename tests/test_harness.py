"""Tasks of lm-evaluation-harness on local files, without a network, against their metrics worked out by hand."""

import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from keras import ops

import flash_tf as ft
from tests import backends, numerics
from tests.backends import to_numpy
from tests.exporting import models
from tests.training import runs

pytestmark = [pytest.mark.one_backend, pytest.mark.full]
SHOTS = 2


def write_task(folder, name, rows, **options):
    """A task file with its questions, and the same ones as examples for prompts."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        **options,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return rows


def mean(*metrics):
    return [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A run, its model, and a folder with tasks on words that it knows."""
    folder = tmp_path_factory.mktemp("harness")
    run = models.directory(folder / "run", models.sections()["causal-flash"])
    words = (folder / "run" / "train.txt").read_text().split()
    tasks = folder / "tasks"
    tasks.mkdir()
    texts = [" ".join(words[8 * i : 8 * i + 8]) for i in range(20)]
    found = {
        "last_word": write_task(
            tasks,
            "last_word",
            [{"text": text} for text in texts],
            output_type="loglikelihood",
            doc_to_text="{{text.split(' ')[:-1]|join(' ')}}",
            doc_to_target="{{' '+text.split(' ')[-1]}}",
            metric_list=[
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                *mean("acc"),
            ],
        ),
        "choice": write_task(
            tasks,
            "choice",
            [{"q": text, "choices": words[3 * i : 3 * i + 3], "answer": i % 3} for i, text in enumerate(texts)],
            output_type="multiple_choice",
            doc_to_text="{{q}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{answer}}",
            metric_list=mean("acc", "acc_norm"),
        ),
        "shots": write_task(
            tasks,
            "shots",
            [{"q": text, "a": words[i]} for i, text in enumerate(texts[:6])],
            output_type="generate_until",
            doc_to_text="Q {{q}} A",
            doc_to_target="{{a}}",
            fewshot_split="test",
            fewshot_config={"sampler": "first_n"},
            num_fewshot=SHOTS,
            generation_kwargs={"until": [" "], "max_gen_toks": 5, "do_sample": False},
            metric_list=mean("exact_match"),
        ),
        "whole": write_task(
            tasks,
            "whole",
            [{"text": text} for text in texts[:5]],
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[
                {"metric": "word_perplexity"},
                {"metric": "bits_per_byte"},
            ],
        ),
    }
    return run, ft.load(run), tasks, found


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments):
        raise OSError("a network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def alone(model, prefix, continuation):
    """The log-likelihood of a continuation whose first letter begins a token, and whether it is the greedy one."""
    encode = lambda text: model.tokenizer.encode([text])[0].tolist()  # noqa: E731
    scored = len(encode(prefix + continuation)) - len(encode(prefix)) if prefix else len(encode(continuation))
    ids = [model.tokenizer.eos_id, *encode(prefix + continuation)]
    logits = to_numpy(model(ops.convert_to_tensor([ids[:-1]])))[0].astype(np.float64)[-scored:]
    logits -= logits.max(-1, keepdims=True)
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return each[np.arange(scored), ids[-scored:]].sum(), each.argmax(-1).tolist() == ids[-scored:]


def written(model, prompt, most):
    """The greedy continuation, by one pass over the whole text for each token."""
    ids = [model.tokenizer.eos_id, *model.tokenizer.encode([prompt])[0].tolist()]
    before = len(model.tokenizer.decode(ids))
    for _ in range(most):
        token = int(to_numpy(model(ops.convert_to_tensor([ids])))[0, -1].argmax())
        if token == model.tokenizer.eos_id:
            break
        ids.append(token)
    return model.tokenizer.decode(ids)[before:]


def test_local_tasks_run_without_a_network_or_torch_and_give_their_metrics(case, no_network):
    from flash_tf.harness import HarnessModel, evaluate

    _, model, tasks, rows = case
    results = evaluate(HarnessModel(model), list(rows), str(tasks))["results"]
    assert not {"torch", "transformers"} & set(sys.modules)

    pairs = [row["text"].rsplit(" ", 1) for row in rows["last_word"]]
    scored = [alone(model, prefix, f" {word}") for prefix, word in pairs]
    assert results["last_word"]["acc,none"] == np.mean([greedy for _, greedy in scored])
    want = np.exp(-np.mean([x for x, _ in scored]))
    assert results["last_word"]["perplexity,none"] == pytest.approx(want, rel=100 * numerics.FLOAT32)

    each = [[alone(model, row["q"], f" {choice}")[0] for choice in row["choices"]] for row in rows["choice"]]
    lengths = [[len(choice) for choice in row["choices"]] for row in rows["choice"]]
    answers = [row["answer"] for row in rows["choice"]]
    assert results["choice"]["acc,none"] == np.mean(np.argmax(each, 1) == answers)
    assert results["choice"]["acc_norm,none"] == np.mean(np.argmax(np.array(each) / lengths, 1) == answers)

    nats = sum(alone(model, "", row["text"])[0] for row in rows["whole"])
    counted = sum(len(row["text"].split()) for row in rows["whole"])
    want = np.exp(-nats / counted)
    assert results["whole"]["word_perplexity,none"] == pytest.approx(want, rel=100 * numerics.FLOAT32)

    right = []
    for row in rows["shots"]:
        others = [other for other in rows["shots"] if other != row][:SHOTS]
        prompt = "\n\n".join([*(f"Q {other['q']} A {other['a']}" for other in others), f"Q {row['q']} A"])
        right.append(written(model, prompt, 5).split(" ")[0] == row["a"])
    assert results["shots"]["exact_match,none"] == np.mean(right)


def request(*arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)


def test_a_continuation_is_greedy_if_generation_writes_it(case):
    from flash_tf.harness import HarnessModel

    model, texts = HarnessModel(case[1]), [row["q"] for row in case[3]["choice"]]
    options = {"max_gen_toks": 3, "until": []}
    found = model.generate_until([request(text, options) for text in texts])
    assert found == [written(model.model, text, 3) for text in texts]
    pairs = [(text, tail) for text, tail in zip(texts, found, strict=True) if tail.strip()]
    again = model.model.tokenizer
    whole = [again.encode([a + b])[0].tolist() for a, b in pairs]
    kept = [i for i, (a, b) in enumerate(pairs) if again.decode(whole[i]).endswith(b)]
    greedy = [alone(model.model, *pair)[1] for pair in pairs]
    assert [g for _, g in model.loglikelihood([request(*pair) for pair in pairs])] == greedy
    assert kept and any(greedy)


def test_a_question_that_is_asked_again_is_drawn_anew(case, monkeypatch):
    from flash_tf import harness

    monkeypatch.setattr(harness, "ROWS", 2)  # the same questions are in several batches
    model, text = harness.HarnessModel(case[1]), case[3]["choice"][0]["q"]
    asked = [request(text, {"max_gen_toks": 8, "do_sample": True, "temperature": 3.0})] * 6
    found = model.generate_until(asked)
    assert len(set(found)) == 6 and found == model.generate_until(asked)


def test_generation_ends_before_the_first_stop_sequence_of_each_task(case):
    from flash_tf.harness import HarnessModel

    model, text = HarnessModel(case[1]), case[3]["choice"][0]["q"]
    (whole,) = model.generate_until([request(text, {"max_gen_toks": 6})])
    stop = whole[2:4]
    found = model.generate_until(
        [request(text, {"max_gen_toks": 6, "until": stop}), request(text, {"max_gen_toks": 6, "until": ["@", "!"]})]
    )
    assert found == [whole.split(stop)[0], whole]
    with pytest.raises(ValueError, match="a task sets num_beams"):
        model.generate_until([request(text, {"num_beams": 3})])


@pytest.mark.parametrize(("most", "kept_of_window"), [(4, 20), (256, 12)])  # 256 is the harness' own default
def test_a_context_longer_than_the_window_loses_its_beginning(case, most, kept_of_window):
    from flash_tf.harness import HarnessModel

    backends.seed(2)
    mixer = {"type": "self_attention", "heads": 2}
    model = ft.models.CausalLM(
        runs.VOCABULARY, width=16, depth=1, mixer=mixer, position_embedding="learned", max_length=24
    )
    model.tokenizer = case[1].tokenizer
    text = " ".join(row["q"] for row in case[3]["choice"])
    ids = model.tokenizer.encode([text])[0].tolist()
    found = HarnessModel(model, 24).generate_until([request(text, {"max_gen_toks": most})])
    read = ids[-kept_of_window:]
    (want,) = model.generate([read], 24 - kept_of_window, stop_tokens=(model.tokenizer.eos_id,))
    assert found == [model.tokenizer.decode([*read, *want])[len(model.tokenizer.decode(read)) :]]


def test_the_command_prints_the_metrics_and_names_a_task_that_is_not_there(case, tmp_path):
    run, model, tasks, rows = case
    command = ("lm-eval", run, "--include-path", tasks)
    status, out, err = runs.command(tmp_path, *command, "--tasks", "last_word,cho*", "--limit", 5, "--json")
    assert status == 0, err
    found = json.loads(out)["results"]
    assert set(found) == {"last_word", "choice"}
    pairs = [row["text"].rsplit(" ", 1) for row in rows["last_word"]][:5]
    assert found["last_word"]["acc,none"] == np.mean([alone(model, a, f" {b}")[1] for a, b in pairs])
    status, out, err = runs.command(tmp_path, *command, "--tasks", "last_word", "--limit", 5)
    assert status == 0 and "|last_word|" in out.replace(" ", "")
    status, out, err = runs.command(tmp_path, *command, "--tasks", "no_such_task")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == f"flash-tf: no task 'no_such_task' in lm-evaluation-harness or in {Path(tasks)}"
