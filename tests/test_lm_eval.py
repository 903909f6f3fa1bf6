"""lm-eval harness: the figures of the harness's own model for Hugging Face, and strings of greedy generation."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from processes import run_python
from test_export import exported, modules  # noqa: F401  # fixtures
from test_import import chat_model, theirs

from dape_jax.data.tokenizers import Bytes
from dape_jax.errors import InputError
from dape_jax.pretrained.load import import_run
from dape_jax.pretrained.options import ImportFlags
from dape_jax.tools.completion import Sampling, generate, generate_until

pytestmark = [pytest.mark.hf, pytest.mark.extra]

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402

from dape_jax.tools import lm_eval as module  # noqa: E402
from dape_jax.tools.lm_eval import CHUNK, DapeLM, padded_width, read_generation_kwargs  # noqa: E402

END = Bytes.end_of_document
SHORT = 24
LONGEST = 200  # widths are 64 (dense), 128 and 200 (blockwise; more than one chunk of positions)
UNTIL = {"until": ["\n", "F"], "max_gen_toks": 40}


def task_of(kind: str, text: str, target: str, metric: str, aggregation: str = "mean", **more: Any) -> dict[str, Any]:
    """Return the content of a task's file, which is JSON and therefore YAML."""
    metrics = [{"metric": metric, "aggregation": aggregation, "higher_is_better": metric != "bits_per_byte"}]
    return {"output_type": kind, "doc_to_text": text, "doc_to_target": target, "metric_list": metrics} | more


TASKS = {
    "words_choice": task_of("multiple_choice", "{{context}}", "answer", "acc", doc_to_choice="{{choices}}"),
    "words_rolling": task_of("loglikelihood_rolling", "", "{{text}}", "bits_per_byte", "bits_per_byte"),
    "words_until": task_of("generate_until", "{{context}} ", "{{answers}}", "exact_match", generation_kwargs=UNTIL),
}


@pytest.fixture(scope="module")
def model(exported) -> DapeLM:  # noqa: F811
    """Return a run with random parameters."""
    model = DapeLM(exported("llama")[0], max_length=LONGEST)
    run = model.info.run
    run = dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, blockwise_from=100))
    model.info = dataclasses.replace(model.info, run=run)
    return model


@pytest.fixture
def hf(exported) -> HFLM:  # noqa: F811
    """Return the same model as the harness reads it."""
    return HFLM(str(exported("llama")[1]), trust_remote_code=True, device="cpu", max_length=LONGEST)


def ids_of(length: int, seed: int = 0) -> list[int]:
    return list(" ".join(np.random.default_rng((length, seed)).choice(tiny.WORDS, length // 2 + 1)).encode()[:length])


def requests_of(kind: str, *arguments: tuple) -> list:
    return [lm_eval.api.instance.Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def shortened(model: DapeLM, max_length: int) -> DapeLM:
    """Return the same model with another maximum length, without reading its parameters again."""
    other = copy.copy(model)
    other.max_length = max_length
    return other


def greedy_ids(model: DapeLM, prompt: list[int], num: int) -> list[int]:
    """Return greedy ids directly from the library, one prompt at a time."""
    options = {"max_new_tokens": num, "sampling": Sampling(0.0), "num_ids": model._tokenizer.vocab_size}
    steps = generate(model.info.run.model, model._params, model._mesh, [np.array(prompt)], **options)
    return [int(token_B[0]) for token_B in steps]


def texts_of(model: DapeLM | HFLM, *arguments: tuple[str, dict[str, Any]]) -> list[str]:
    return model.generate_until(requests_of("generate_until", *copy.deepcopy(arguments)), disable_tqdm=True)


# ---- log-likelihood


def compare(ours: DapeLM, hf: HFLM, max_length: int) -> None:
    """Compare log-likelihoods of contexts and of whole documents; the longest ones have several windows."""
    ours, hf._max_length = shortened(ours, max_length), max_length
    assert (ours.max_length, ours.prefix_token_id) == (hf.max_length, hf.prefix_token_id)
    # Empty contexts are the end of a document; trailing spaces of a context belong to the continuation.
    pairs = [("", "the text"), ("scores of", " a"), ("scores of ", "a"), ("ä", "ö"), ("a " * 99, "b")]
    lengths = (1, max_length - 1, max_length, max_length + 1, 3 * max_length, 3 * max_length + 5)
    texts = [(bytes(ids_of(length)).decode(),) for length in lengths]
    for name, arguments in (("loglikelihood", pairs), ("loglikelihood_rolling", texts)):
        found, expected = (getattr(each, name)(requests_of(name, *arguments), disable_tqdm=True) for each in (ours, hf))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_log_likelihoods_are_those_of_the_harness_on_pytorch(model, hf):
    """Test rows of every width, and continuations from one token to more than a chunk."""
    cases = [(1, 1), (30, 9), (63, 1), (64, 1), (5, 60), (90, 12), (1, 200), (120, CHUNK - 60), (40, CHUNK + 5)]
    requests = [(("", ""), ids_of(context), ids_of(scored, seed=1)) for context, scored in cases]
    greedy = greedy_ids(model, ids_of(17), 6)
    requests += [(("", ""), ids_of(17), continuation) for continuation in (greedy, greedy[:1], [1, *greedy[1:]])]
    widths = {padded_width(context + scored - 1, LONGEST) for context, scored in cases}
    assert widths == {64, 128, 200}
    found, expected = (each._loglikelihood_tokens(requests, disable_tqdm=True) for each in (model, hf))
    assert [is_greedy for _, is_greedy in found[-3:]] == [True, True, False]
    order = np.random.default_rng(0).permutation(len(requests))[:5]  # other batches, with other padding
    again = model._loglikelihood_tokens([requests[i] for i in order], disable_tqdm=True)
    for answers, others in ((found, expected), ([found[i] for i in order], again)):
        assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in others]
        np.testing.assert_allclose([total for total, _ in answers], [total for total, _ in others], rtol=1e-5)


def test_contexts_and_documents_are_those_of_the_harness_on_pytorch(model, hf):
    compare(model, hf, LONGEST)
    compare(model, hf, SHORT)
    spaces = requests_of("loglikelihood", ("  ", "rows"), ("", "  rows"))  # the harness's model refuses them
    first, second = model.loglikelihood(spaces, disable_tqdm=True)
    assert first == pytest.approx(second, rel=1e-5)
    merged = [(("Ans", "wer"), list(b"Ans"), ids) for ids in ([], list(b"wer"))]  # the harness gives none if they merge
    first, second = model._loglikelihood_tokens(merged, disable_tqdm=True)
    assert first == second


def test_only_ids_of_the_tokenizer_are_greedy(model, monkeypatch):
    """The tokenizer may have fewer than the model."""
    monkeypatch.setattr(model, "_tokenizer", type("Fewer", (Bytes,), {"vocab_size": 60})())
    context = ids_of(17)
    greedy = greedy_ids(model, context, 6)
    assert max(greedy) < 60
    ((_, is_greedy),) = model._loglikelihood_tokens([(("", ""), context, greedy)], disable_tqdm=True)
    assert is_greedy


def test_long_contexts_are_counted_and_long_continuations_refused(model, caplog):
    model = shortened(model, SHORT)
    requests = [(("", ""), ids_of(length), ids_of(3)) for length in (5, SHORT - 2, SHORT - 1, 90)]
    model._loglikelihood_tokens(requests, disable_tqdm=True)
    (record,) = caplog.records
    assert "2 of 4 requests exceed max_length = 24 tokens" in record.getMessage()
    for continuation, words in (("a" * 25, "max_length = 24: must be at least 25"), ("", "continuation = ''")):
        with pytest.raises(InputError, match=words):
            model.loglikelihood(requests_of("loglikelihood", ("", continuation)), disable_tqdm=True)


# ---- generation


def test_texts_are_those_of_the_harness_on_pytorch(model, hf):
    """Test ragged contexts, of which one is too long; stops of several tokens, in a list, alone, and none."""
    free = {"until": [], "max_gen_toks": 40, "do_sample": False}
    arguments = [(context, free) for context in ("the", "scores of a ", "rows and columns " * 20)]
    texts = texts_of(model, *arguments)
    for (context, _), text in zip(arguments[:3], texts, strict=True):
        arguments += [(context, free | {"until": until}) for until in ([text[30:33], text[11:14]], text[20:22])]
    found = texts_of(model, *arguments)
    assert found == texts_of(hf, *arguments)
    assert max(map(len, found[3:])) < min(map(len, texts))
    (text,) = texts_of(model, ("", free))  # the harness's model refuses it
    assert text == Bytes().decode(np.array(greedy_ids(model, [END], 40))).decode("utf-8", "replace")


def test_drawn_texts_repeat_and_requests_that_are_the_same_do_not_share_them(model):
    requests = [("the ", {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 2.0})] * 20
    found = texts_of(model, *requests)
    assert found == texts_of(model, *requests)
    assert len(set(found)) == len(found)


def test_no_step_is_taken_after_the_last_stop():
    """Stops are found at their last byte, and neither they nor the text after them is kept."""
    texts = ["ab é\nb", "b", "é é"]  # 7, 1 and 5 bytes
    columns, prompts = [[*text.encode(), *[END] * 20][:20] for text in texts], [np.zeros(0, int)] * 3
    for stops, expected, num_steps in (
        ([], texts, 8),
        (["\n"], ["ab é", "b", "é é"], 6),
        ([" é"], ["ab", "b", "é"], 5),
        (["é", "b"], ["a", "", ""], 2),
    ):
        steps = iter(np.array(columns).T)
        assert generate_until(steps, prompts, Bytes(), [END], stops) == expected
        assert len([*steps]) == 20 - num_steps


@pytest.mark.parametrize(
    ("gen_kwargs", "expected"),
    [
        ({"until": ["\n\n"], "top_k": None}, (("\n\n",), 256, Sampling(0.0))),
        ({"until": "a", "max_gen_toks": 7, "temperature": 0.0}, (("a",), 7, Sampling(0.0))),
        ({"until": ["a", "", 5, None], "do_sample": False, "temperature": 0.7}, (("a", "5"), 256, Sampling(0.0))),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0, "num_beams": 1}, ((), 256, Sampling(0.7))),
    ],
)
def test_generation_kwargs_are_read(gen_kwargs, expected):
    assert read_generation_kwargs(gen_kwargs, 1000) == expected


@pytest.mark.parametrize(
    ("gen_kwargs", "words"),
    [
        ({"num_beams": 4}, "generation_kwargs = {'num_beams': 4}"),
        ({"max_gen_toks": 0}, "generation_kwargs.max_gen_toks = 0"),
        ({"max_gen_toks": 1000}, "generation_kwargs.max_gen_toks = 1000"),
        ({"do_sample": True, "temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": "a"}, "generation_kwargs = \"{'temperature': 'a'}\": cannot be read: ValueError"),
    ],
)
def test_bad_generation_kwargs_are_named(gen_kwargs, words):
    with pytest.raises(InputError, match=re.escape(words)):
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
        (generated,) = texts_of(model, (f"{context} ", UNTIL))
        answers = generated if index % 2 else "no string that a model gives"
        text = " ".join(draw.choice(tiny.WORDS, 80))
        documents.append({"context": context, "choices": [a, b, c], "answer": 0, "text": text, "answers": answers})
    (directory / "words.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    data = {"dataset_path": "json", "test_split": "test"}
    data["dataset_kwargs"] = {"cache_dir": f"{directory}/cache", "data_files": {"test": f"{directory}/words.jsonl"}}
    for name, task in TASKS.items():
        (directory / f"{name}.yaml").write_text(json.dumps({"task": name} | data | task))
    return directory


def test_tasks_of_three_kinds_give_the_figures_of_the_harness_on_pytorch(model, hf, tasks):
    from lm_eval.tasks import TaskManager  # reads thousands of files of the harness

    manager = TaskManager(include_path=tasks, include_defaults=False)
    options = {"tasks": list(TASKS), "task_manager": manager, "log_samples": False}
    evaluated, expected = (lm_eval.simple_evaluate(each, **options) for each in (model, hf))
    for task, metric in (("choice", "acc"), ("rolling", "bits_per_byte"), ("until", "exact_match")):
        found, other = (each["results"][f"words_{task}"][f"{metric},none"] for each in (evaluated, expected))
        assert found == pytest.approx(other, rel=1e-5)
    assert evaluated["results"]["words_until"]["exact_match,none"] == 0.5
    about = evaluated["config"]
    assert (about["workdir"], about["step"], about["max_length"]) == (str(model.info.workdir), 0, LONGEST)
    assert {"commit", "device", "versions"} < set(about)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workdir": ""}, "model_args.workdir = '': must be a run directory"),
        ({"max_length": 0}, "max_length = 0"),
        ({"max_length": "1k"}, "max_length = '1k': must be a positive number"),
        ({"batch_size": 0}, "batch_size = 0: .*auto"),
        ({"prefix_token_id": 257}, "prefix_token_id = 257: must be an id"),
        ({"prefix_token_id": "a"}, "prefix_token_id = 'a': must be an id"),
        ({"add_bos_token": True}, "add_bos_token = True: must be False"),
        ({"pretrained": "gpt2"}, r"model_args = \['pretrained'\]: .*workdir, step, max_length"),
    ],
)
def test_bad_arguments_are_named_before_any_parameter_is_read(model, monkeypatch, changes, words):
    monkeypatch.setattr(module, "restore", None)  # calling it would be a TypeError
    with pytest.raises(InputError, match=words):
        DapeLM(**{"workdir": str(model.info.workdir)} | changes)


def test_a_model_in_which_later_tokens_matter_is_refused(model, monkeypatch):
    run = model.info.run
    processor = dataclasses.replace(run.model.processor, leak=True)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, processor=processor))
    monkeypatch.setattr(module, "read_trained", lambda *_: dataclasses.replace(model.info, run=run))
    with pytest.raises(InputError, match=r"model.processor.leak = True: .*cannot generate"):
        DapeLM(model.info.workdir)


def test_an_imported_model_has_the_figures_of_the_harness_on_hugging_face(tmp_path):
    """By default texts begin with BOS, and windows have the train length."""
    tokenizer = chat_model(tmp_path / "source")
    import_run(ImportFlags(str(tmp_path / "source"), str(tmp_path / "run")))
    ours, hf = DapeLM(tmp_path / "run"), HFLM(theirs("llama"), tokenizer=tokenizer, device="cpu", batch_size=2)
    assert ours.max_length == hf.max_length == 64
    compare(ours, hf, 64)
    plain = DapeLM(tmp_path / "run", add_bos_token=False, prefix_token_id=9, tokenizer="somewhere")
    assert (plain.tok_encode("a"), plain.prefix_token_id, ours.tok_encode("a")) == ([97], 9, [256, 97])
    messages = [{"role": "user", "content": "a"}]
    text = plain.apply_chat_template(messages)
    assert text == hf.apply_chat_template(messages)
    assert ours.tokenizer_name.startswith(f"{ours._tokenizer.name}-")  # read where cached requests have the template
    expected = tokenizer(text, add_special_tokens=False).input_ids
    assert plain.tok_encode(text) == ours.tok_encode(text, add_special_tokens=False) == expected


# ---- the command line


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "import runpy; runpy.run_module('dape_jax.tools.lm_eval', run_name='__main__')",
        "sys.argv = ['/usr/bin/dape-lm-eval']; from dape_jax.tools.lm_eval import command",
    ],
)
def test_without_the_extra_it_is_one_line(start):
    done = run_python("-c", f"import sys; sys.modules['lm_eval'] = None; {start}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "not installed; pip install 'lm-eval>=" in line


# The command line without the thousands of tasks of the harness, whose files take a quarter of a minute to read.
OWN_TASKS = """
import functools, runpy
from lm_eval import tasks
tasks.TaskManager = functools.partial(tasks.TaskManager, include_defaults=False)
runpy.run_module("dape_jax.tools.lm_eval", run_name="__main__")
"""


@pytest.mark.slow
def test_the_command_line_runs_tasks(model, tasks, tmp_path):
    def command(workdir: Path) -> list[str]:
        arguments = ["run", "--model=dape_jax", f"--tasks={','.join(TASKS)}"]
        arguments += [f"--model_args=workdir={workdir},max_length=100", f"--include_path={tasks}"]
        return [*arguments, "--batch_size=4", f"--output_path={tmp_path}/out", "--trust_remote_code"]  # of data

    done = run_python("-c", OWN_TASKS, *command(model.info.workdir))
    assert done.returncode == 0, done.stderr
    assert "|words_until " in done.stdout
    assert "fork" not in done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    content = json.loads(file.read_text())
    assert (set(content["results"]), content["config"]["workdir"]) == (set(TASKS), str(model.info.workdir))
    assert content["config"]["commit"]
    done = run_python("-c", OWN_TASKS, *command(tmp_path / "nothing"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: workdir = '{tmp_path}/nothing'")
