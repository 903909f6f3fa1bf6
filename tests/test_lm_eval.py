"""lm-eval harness: log-likelihoods of the full forward and strings of greedy generation, for any batch."""

import copy
import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python
from test_import import chat_model, theirs

from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError
from dape_jax.pretrained.load import import_run
from dape_jax.tools.completion import Sampling, decoding_model, generate, generate_until

pytestmark = pytest.mark.extra

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402

from dape_jax.tools import lm_eval as module  # noqa: E402
from dape_jax.tools.lm_eval import (  # noqa: E402
    CHUNK,
    DapeLM,
    ScoredRow,
    make_batch,
    padded_width,
    read_generation_kwargs,
    score,
)

END = Bytes.end_of_document
SHORT = 24
LONGEST = 200  # widths are 64 (dense), 128 and 200 (blockwise; more than one chunk of positions)
UNTIL = {"until": ["\n", "F"], "max_gen_toks": 40}

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  cache_dir: {directory}/cache
  data_files: {{test: {directory}/words.jsonl}}
test_split: test
output_type: {kind}
"""
TASKS = {
    "words_choice": (
        "multiple_choice",
        'doc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        "metric_list:\n- {metric: acc, aggregation: mean, higher_is_better: true}\n",
    ),
    "words_rolling": (
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n- {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}\n",
    ),
    "words_until": (
        "generate_until",
        'doc_to_text: "{{context}} "\ndoc_to_target: "{{answers}}"\n'
        f"generation_kwargs: {json.dumps(UNTIL)}\n"
        "metric_list:\n- {metric: exact_match, aggregation: mean, higher_is_better: true}\n",
    ),
}


@pytest.fixture(scope="module")
def model(trained_run) -> DapeLM:
    """Return a model with perturbed parameters, so that the generated strings differ."""
    model = DapeLM(trained_run, max_length=LONGEST)
    run = model.info.run
    run = dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, blockwise_from=100))
    model.info = dataclasses.replace(model.info, run=run)
    draw = np.random.default_rng(0)
    model._params = jax.tree.map(
        lambda x: jax.device_put(np.asarray(x) + draw.normal(0, 0.2, x.shape).astype(x.dtype), x.sharding),
        model._params,
    )
    return model


def ids_of(length: int, seed: int = 0) -> list[int]:
    text = " ".join(np.random.default_rng((length, seed)).choice(tiny.WORDS, length // 2 + 1))
    return list(text.encode()[:length])


def requests_of(kind: str, *arguments: tuple) -> list:
    return [lm_eval.api.instance.Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def log_probs(model: DapeLM, tokens: list[int], num_scored: int) -> float:
    """Return the log-likelihood of the last tokens, from the full forward, in one program for all lengths."""
    rest = np.random.default_rng(0).integers(0, 256, LONGEST - len(tokens) + 1)
    inputs_BT = np.array([[*tokens[:-1], *rest]])
    logits_BTV = full_forward(model.info.run.model)(jax.device_get(model._params), inputs_BT)
    log_probs_TV = np.asarray(jax.nn.log_softmax(logits_BTV[0], axis=-1), np.float64)
    return log_probs_TV[np.arange(len(tokens) - 1), tokens[1:]][-num_scored:].sum()


def shortened(model: DapeLM, max_length: int) -> DapeLM:
    """Return the same model with another maximum length, without reading its parameters again."""
    other = copy.copy(model)
    other.max_length = max_length
    return other


@functools.cache
def full_forward(config):
    return jax.jit(lambda params, tokens_BT: decoding_model(config, params)(tokens_BT))


def greedy_ids(model: DapeLM, prompt: list[int], num: int) -> list[int]:
    """Return greedy ids directly from the library, one prompt at a time."""
    options = {"max_new_tokens": num, "sampling": Sampling(0.0), "num_ids": model._tokenizer.vocab_size}
    steps = generate(model.info.run.model, model._params, model._mesh, [np.array(prompt)], **options)
    return [int(token_B[0]) for token_B in steps]


def cut(text: str, stops: list[str]) -> str:
    """Cut a text at the first stop, as the harness does: stop by stop."""
    text = next((text[:end] for end in range(len(text)) if any(stop in text[:end] for stop in stops)), text)
    for stop in stops:
        text = text.split(stop)[0]
    return text


# ---- log-likelihood


def test_log_likelihoods_are_those_of_the_full_forward(model):
    """Test rows of every width, and continuations from one token to more than a chunk."""
    cases = [(1, 1), (30, 9), (63, 1), (64, 1), (5, 60), (90, 12), (1, 200), (120, CHUNK - 60), (40, CHUNK + 5)]
    requests = [(("", ""), ids_of(context), ids_of(scored, seed=1)) for context, scored in cases]
    widths = {padded_width(context + scored - 1, LONGEST) for context, scored in cases}
    assert widths == {64, 128, 200}
    found = model._loglikelihood_tokens(requests, disable_tqdm=True)
    order = np.random.default_rng(0).permutation(len(requests))[:5]  # other batches, with other padding
    again = model._loglikelihood_tokens([requests[i] for i in order], disable_tqdm=True)
    for index, (total, is_greedy) in zip(order, again, strict=True):
        assert total == pytest.approx(found[index][0], rel=1e-5, abs=1e-5)
        assert is_greedy == found[index][1]
    for (_, context, scored), (total, _) in zip(requests, found, strict=True):
        expected = log_probs(model, (context + scored)[-LONGEST - 1 :], len(scored))
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_padding_content_changes_nothing(model):
    """Pad with other tokens than zeros."""
    rows = [ScoredRow(ids_of(length), 3) for length in (9, 20, 33)]
    batch = make_batch((rows * 3)[:8], 64)
    padded = jax.tree.map(np.copy, batch)
    for line, stop in zip(padded["inputs"], batch["stop"], strict=True):
        line[stop:] = 77
    assert np.any(padded["inputs"] != batch["inputs"])
    config, params = model.info.run.model, model._params
    expected, found = (score(config, params, x, num_ids=257) for x in (batch, padded))
    np.testing.assert_array_equal(found[0], expected[0])


def test_greedy_agrees_with_generation(model, monkeypatch):
    """Generation draws only ids of the tokenizer, which here has fewer than the model."""
    monkeypatch.setattr(model, "_tokenizer", type("Fewer", (Bytes,), {"vocab_size": 60})())
    context = ids_of(17)
    greedy = greedy_ids(model, context, 6)
    assert max(greedy) < 60
    first, last = [greedy[0] ^ 1, *greedy[1:]], [*greedy[:-1], greedy[-1] ^ 1]
    requests = [(("", ""), context, continuation) for continuation in (greedy, greedy[:1], first, last)]
    answers = model._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [is_greedy for _, is_greedy in answers] == [True, True, False, False]


def test_contexts_as_the_harness_has_them(model):
    """Empty contexts are the end of a document; trailing spaces of a context belong to the continuation."""
    pairs = [("", "the text"), ("scores of", " a"), ("scores of ", "a"), ("  ", "rows"), ("ä", "ö")]
    found = [total for total, _ in model.loglikelihood(requests_of("loglikelihood", *pairs), disable_tqdm=True)]
    split = [("", "the text"), ("scores of", " a"), ("scores of", " a"), ("", "  rows"), ("ä", "ö")]
    for total, (context, continuation) in zip(found, split, strict=True):
        tokens = [*(context.encode() or [END]), *continuation.encode()]
        expected = log_probs(model, tokens, len(continuation.encode()))
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_long_contexts_lose_their_beginning_and_are_counted(model, caplog):
    model = shortened(model, SHORT)
    requests = [(("", ""), ids_of(length), ids_of(3)) for length in (5, SHORT - 2, SHORT - 1, 90)]
    found = model._loglikelihood_tokens(requests, disable_tqdm=True)
    (record,) = caplog.records
    assert "2 of 4 requests exceed max_length = 24 tokens" in record.getMessage()
    for (_, context, scored), (total, _) in zip(requests, found, strict=True):
        expected = log_probs(model, (context + scored)[-SHORT - 1 :], 3)
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-5)
    with pytest.raises(InputError, match="max_length = 24: must be at least 25, the tokens of one continuation"):
        model._loglikelihood_tokens([(("", ""), [1], ids_of(25))])
    with pytest.raises(InputError, match="continuation = '': must have at least one token"):
        model.loglikelihood(requests_of("loglikelihood", ("a", "")), disable_tqdm=True)


def own_windows(ids: list[int], longest: int) -> list[tuple[list[int], int]]:
    """Return tokens and the number of scored ones, with as many inputs as fit before each window's end."""
    whole, windows = [END, *ids], []
    for first in range(0, len(ids), longest):
        stop = min(first + longest, len(ids))
        windows.append((whole[max(0, stop - longest) : stop + 1], stop - first))
    return windows


def test_rolling_log_likelihood_is_that_of_our_own_windows(model):
    model = shortened(model, SHORT)
    texts = [bytes(ids_of(length)).decode() for length in (1, SHORT - 1, SHORT, SHORT + 1, 3 * SHORT, 3 * SHORT + 5)]
    found = model.loglikelihood_rolling(requests_of("loglikelihood_rolling", *((t,) for t in texts)), disable_tqdm=True)
    for text, total in zip(texts, found, strict=True):
        windows = own_windows(list(text.encode()), SHORT)
        assert sum(num for _, num in windows) == len(text)
        expected = sum(log_probs(model, tokens, num) for tokens, num in windows)
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ---- generation


def greedy_text(model: DapeLM, context: str, num: int) -> str:
    """Return the greedy continuation, which stops only at the end of the document."""
    room = model.max_length - num
    ids = np.array(greedy_ids(model, (list(context.encode()) or [END])[-room:], num))
    ids = ids[: np.flatnonzero(ids == END)[0]] if END in ids else ids
    return Bytes().decode(ids).decode("utf-8", "replace")


def test_texts_are_those_of_greedy_generation_cut_at_the_stop(model):
    """Test ragged contexts, an empty and a too long one; stops of several tokens, in a list, alone, and none."""
    contexts = ["the", "scores of a ", "", "rows and columns " * 20]
    arguments, expected = [], []
    for context in contexts:
        text = greedy_text(model, context, 40)
        assert len(set(text)) > 3
        for until in ([text[30:33], text[11:14]], text[20:22]):
            arguments.append((context, {"until": until, "max_gen_toks": 40}))
            expected.append(cut(text, [until] if isinstance(until, str) else until))
            assert len(expected[-1]) < len(text)
        arguments.append((context, {"until": [], "max_gen_toks": 40, "do_sample": False}))
        expected.append(text)
    assert model.generate_until(requests_of("generate_until", *arguments), disable_tqdm=True) == expected


def test_drawn_texts_repeat_and_requests_that_are_the_same_do_not_share_them(model):
    kind = {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 2.0}
    requests = requests_of("generate_until", *[("the ", dict(kind))] * 20)
    found = model.generate_until(requests, disable_tqdm=True)
    assert found == model.generate_until(requests, disable_tqdm=True)
    assert len(set(found)) == len(found)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.sampled_from("ab é\n"), max_size=30), min_size=1, max_size=3), st.data())
def test_no_step_is_taken_after_the_last_stop(texts, data):
    """Stops are found at their last byte, and neither they nor the text after them is kept."""
    stops = data.draw(st.lists(st.text(st.sampled_from("ab é\n"), min_size=1, max_size=3), max_size=3))
    needed = max(steps_needed(text, stops) for text in texts)
    columns = [[*text.encode(), *[END] * 40] for text in texts]
    taken = []

    def steps():
        for token_B in np.array([column[: 30 * 2] + [END] * (60 - len(column[:60])) for column in columns]).T:
            taken.append(token_B)
            yield token_B

    prompts = [np.zeros(0, int)] * len(texts)
    assert generate_until(steps(), prompts, Bytes(), [END], stops) == [cut(text, stops) for text in texts]
    assert len(taken) == needed


def steps_needed(text: str, stops: list[str]) -> int:
    """Return the length in bytes of the shortest prefix with a stop, or of all bytes and the end."""
    found = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    return len(text[: found[0]].encode()) if found else len(text.encode()) + 1


@pytest.mark.parametrize(
    ("gen_kwargs", "expected"),
    [
        ({"until": ["\n\n"]}, (("\n\n",), 256, Sampling(0.0))),
        ({"until": "a", "max_gen_toks": 7, "temperature": 0.0}, (("a",), 7, Sampling(0.0))),
        ({"until": ["a", ""], "do_sample": False, "temperature": 0.7}, (("a",), 256, Sampling(0.0))),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0, "num_beams": 1}, ((), 256, Sampling(0.7))),
        ({"num_beams": 4}, r"generation_kwargs = \{'num_beams': 4\}: not supported"),
        ({"max_gen_toks": 0}, "generation_kwargs.max_gen_toks = 0"),
        ({"max_gen_toks": 1000}, "max_gen_toks = 1000: must be below max_length = 1000"),
        ({"do_sample": True, "temperature": -1.0}, "temperature = -1.0"),
    ],
)
def test_generation_kwargs_are_read(gen_kwargs, expected):
    if not isinstance(expected, str):
        assert read_generation_kwargs(gen_kwargs, 1000) == expected
        return
    with pytest.raises(InputError, match=expected):
        read_generation_kwargs(gen_kwargs, 1000)


# ---- the harness


@pytest.fixture(scope="module")
def tasks(model, tmp_path_factory) -> Path:
    """Write task files and their data; half of the answers of `words_until` are the model's own."""
    directory = tmp_path_factory.mktemp("tasks")
    draw = np.random.default_rng(3)
    documents = []
    for index in range(6):
        *words, a, b, c = draw.choice(tiny.WORDS, 7, replace=False).tolist()
        context = " ".join(words)
        generated = cut(greedy_text(model, f"{context} ", UNTIL["max_gen_toks"]), UNTIL["until"])
        answers = generated if index % 2 else "no string that a model gives"
        text = " ".join(draw.choice(tiny.WORDS, 80))
        documents.append({"context": context, "choices": [a, b, c], "answer": 0, "text": text, "answers": answers})
    (directory / "words.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, (kind, rest) in TASKS.items():
        (directory / f"{name}.yaml").write_text(TASK.format(name=name, directory=directory, kind=kind) + rest)
    return directory


def test_tasks_of_three_kinds_give_the_figures_of_the_full_forward(model, tasks):
    from lm_eval.tasks import TaskManager  # reads thousands of files of the harness

    manager = TaskManager(include_path=tasks, include_defaults=False)
    evaluated = lm_eval.simple_evaluate(model, tasks=list(TASKS), task_manager=manager, log_samples=False)
    results = evaluated["results"]
    documents = [json.loads(line) for line in (tasks / "words.jsonl").read_text().splitlines()]
    num_right = bits = num_bytes = 0
    for document in documents:
        context = list(document["context"].encode())
        choices = [list(f" {choice}".encode()) for choice in document["choices"]]
        totals = [log_probs(model, context + scored, len(scored)) for scored in choices]
        num_right += int(np.argmax(totals)) == document["answer"]
        for tokens, num in own_windows(list(document["text"].encode()), LONGEST):
            bits -= log_probs(model, tokens, num) / math.log(2)
        num_bytes += len(document["text"])
    assert results["words_choice"]["acc,none"] == pytest.approx(num_right / 6)
    assert results["words_rolling"]["bits_per_byte,none"] == pytest.approx(bits / num_bytes, rel=1e-5)
    assert results["words_until"]["exact_match,none"] == 0.5
    about = evaluated["config"]
    assert (about["workdir"], about["step"], about["max_length"]) == (str(model.info.workdir), 4, LONGEST)
    assert {"commit", "device", "versions"} < set(about)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workdir": "nothing"}, "workdir = 'nothing': must be a directory written by dape-train"),
        ({"step": "5"}, "step = '5': .*'newest', 'best'"),
        ({"max_length": 0}, "max_length = 0"),
        ({"batch_size": 0}, "batch_size = 0: .*auto"),
        ({"prefix_token_id": 257}, "prefix_token_id = 257: must be an id"),
        ({"add_bos_token": True}, "add_bos_token = True: must be False"),
        ({"pretrained": "gpt2"}, r"model_args = \['pretrained'\]: .*workdir, step, max_length"),
    ],
)
def test_bad_arguments_are_named_before_any_parameter_is_read(trained_run, monkeypatch, changes, words):
    monkeypatch.setattr(module, "restore", None)  # calling it would be a TypeError
    with pytest.raises(InputError, match=words):
        DapeLM(**{"workdir": str(trained_run)} | changes)


def test_a_model_in_which_later_tokens_matter_is_refused(model, monkeypatch):
    run = model.info.run
    processor = dataclasses.replace(run.model.processor, leak=True)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, processor=processor))
    monkeypatch.setattr(module, "read_trained", lambda *_: dataclasses.replace(model.info, run=run))
    with pytest.raises(InputError, match=r"model.processor.leak = True: .*cannot generate"):
        DapeLM(model.info.workdir)


@pytest.mark.hf
@pytest.mark.extra
def test_an_imported_model_has_the_figures_of_the_harness_on_hugging_face(tmp_path):
    """By default texts begin with BOS, and windows have the train length."""
    tokenizer = chat_model(tmp_path / "source", [257])
    import_run(tmp_path / "source", tmp_path / "run")
    ours, hf = DapeLM(tmp_path / "run"), HFLM(theirs("llama"), tokenizer=tokenizer, device="cpu", batch_size=2)
    assert (ours.max_length, ours.prefix_token_id) == (hf.max_length, hf.prefix_token_id) == (64, 256)
    pairs = requests_of("loglikelihood", ("the key", " of a row"), ("", "the"), ("rows " * 40, "and"))
    found, expected = (each.loglikelihood(pairs, disable_tqdm=True) for each in (ours, hf))
    np.testing.assert_allclose([pair[0] for pair in found], [pair[0] for pair in expected], rtol=1e-5)
    texts = requests_of("loglikelihood_rolling", ("a short text",), ("a longer text " * 12,))
    found, expected = (each.loglikelihood_rolling(texts, disable_tqdm=True) for each in (ours, hf))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    plain = DapeLM(tmp_path / "run", add_bos_token=False, prefix_token_id=9, tokenizer="somewhere")
    assert (plain.tok_encode("a"), plain.prefix_token_id, ours.tok_encode("a")) == ([97], 9, [256, 97])
    messages = [{"role": "user", "content": "a"}]
    text = plain.apply_chat_template(messages)
    assert text == hf.apply_chat_template(messages)
    assert plain.tok_encode(text) == tokenizer(text, add_special_tokens=False).input_ids


# ---- the command line


@pytest.mark.slow
def test_without_the_extra_it_is_one_line():
    program = (
        "import runpy, sys; sys.modules['lm_eval'] = None; "
        "runpy.run_module('dape_jax.tools.lm_eval', run_name='__main__')"
    )
    done = run_python("-c", program)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "not installed; pip install 'lm-eval>=" in line


@pytest.mark.slow
def test_the_command_line_runs_tasks(trained_run, tasks, tmp_path):
    def command(workdir: Path) -> list[str]:
        arguments = ["-m", "dape_jax.tools.lm_eval", "run", "--model=dape_jax", f"--tasks={','.join(TASKS)}"]
        arguments += [f"--model_args=workdir={workdir},max_length=100", f"--include_path={tasks}"]
        return [*arguments, "--batch_size=4", f"--output_path={tmp_path}/out"]

    done = run_python(*command(trained_run))
    assert done.returncode == 0, done.stderr
    assert "|words_until " in done.stdout
    assert "fork" not in done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    content = json.loads(file.read_text())
    assert set(content["results"]) == set(TASKS)
    assert content["config"]["workdir"] == str(trained_run)
    assert content["config"]["commit"]
    done = run_python(*command(tmp_path / "nothing"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: workdir = '{tmp_path}/nothing'")
