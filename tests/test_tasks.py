"""Algorithmic tasks: golden examples, format and frequencies of samples, and answers by independent methods."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax.errors import InputError
from dape_jax.tasks import CHE as TASKS
from dape_jax.tasks.associative_recall import ASSOCIATIVE_RECALL, NUM_KEYS, NUM_VALUES
from dape_jax.tasks.tapes import TaskConfig, draw_tapes

RECALL = ASSOCIATIVE_RECALL["associative_recall"]

FOLDERS = [Path(__file__).parent / "golden" / "che"]
if "DAPE_GOLDEN_DIR" in os.environ:
    FOLDERS.append(Path(os.environ["DAPE_GOLDEN_DIR"]) / "che")
NOT_TASKS = {"full_inputs", "protocol", "sampler_stats"}
LEVELS = {"regular": "regular", "dcf": "context-free", "cs": "context-sensitive"}

FIVE = {"modular_arithmetic", "cycle_navigation", "modular_arithmetic_brackets", "solve_equation", "bucket_sort"}
# Inputs as strings with one character per symbol: the task's symbols, or -1, 0, +1 as 0, 1, 2, and - for POP, a and b
# for PUSH 0 and PUSH 1.
CHARACTERS = {name: "".join(task.input_symbols) for name, task in TASKS.items()}
CHARACTERS |= {"cycle_navigation": "012", "stack_manipulation": "01-ab"}
LENGTHS = st.one_of(st.integers(1, 12), st.integers(1, 500))
SEEDS = st.integers(0, 2**32)


def files() -> list[Path]:
    """Return the files of all tasks in every folder."""
    return [file for folder in FOLDERS for file in sorted(folder.glob("*.json")) if file.stem not in NOT_TASKS]


def draw(task: str, num: int, length: int, seed: int = 0) -> np.ndarray:
    return TASKS[task].sample(np.random.default_rng(seed), num, length)


def symbols(task: str, *inputs: str) -> np.ndarray:
    return np.array([[CHARACTERS[task].index(c) for c in string] for string in inputs], np.int32)


# ---- golden


def test_golden_che_has_every_task():
    assert {file.stem for file in files()} == TASKS.keys() == CHARACTERS.keys() == ANSWERS.keys()


@pytest.mark.parametrize("file", files(), ids=lambda file: f"{file.parents[1].name}-{file.stem}")
def test_golden_che_examples(file):
    golden = json.loads(file.read_text())
    task = TASKS[golden["task"]]
    assert golden["task"] == file.stem
    assert task.level == LEVELS[golden["level"]]
    assert (len(task.input_symbols), len(task.output_symbols)) == (golden["input_size"], golden["output_size"])
    assert golden["output_length_at"] == {n: task.output_length(int(n)) for n in golden["output_length_at"]}
    assert (task.end is not None) == golden["has_accuracy_mask"]
    assert task.random_accuracy == (1 / 5 if golden["task"] in FIVE else 1 / 2)
    assert len(golden["examples"]) == golden["n_examples"] > 0
    for example in golden["examples"]:
        targets_BM = task.solve(np.array([example["input"]], np.int32))
        assert targets_BM.tolist() == [example["target"]], example
        assert task.counted(targets_BM).tolist() == [example.get("mask", [1] * len(example["target"]))]
        assert draw(golden["task"], 1, example["length"]).shape == (1, len(example["input"]))


# Statistics in the reference: a function of each sample, and the number of decimals. Operator and missing symbol are 2.
MEASURES: dict[str, tuple[Callable[[np.ndarray, np.ndarray, int], np.ndarray], int]] = {
    "input_symbol_frequency": (lambda inputs, _, num: (inputs[..., None] == np.arange(num)).mean(axis=1), 4),
    "target_symbol_frequency": (lambda _, targets, num: (targets[..., None] == np.arange(num)).mean(axis=1), 4),
    "target_class_frequency": (lambda _, targets, num: (targets[..., None] == np.arange(num)).mean(axis=1), 4),
    "mean_termination_index": (lambda _, targets, __: (targets == 2).argmax(axis=1)[:, None], 3),
    "missing_position_frequency": (lambda inputs, *_: inputs == 2, 4),
    "operator_position_frequency": (lambda inputs, *_: inputs == 2, 4),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_golden_che_sampler(folder, task):
    """Frequencies are within 4 standard errors (of the difference of two means) of the reference's.

    Symbols of one sample are not independent, so a sample counts once, by its mean; variances are those of our samples.
    """
    num = 20_000
    for golden in json.loads((folder / "sampler_stats.json").read_text())[task]:
        inputs_BN = draw(task, num, golden["length"], seed=golden["length"])
        targets_BM = TASKS[task].solve(inputs_BN)
        assert inputs_BN.shape[1] == golden["actual_input_length"]
        found = golden.keys() & MEASURES.keys()
        assert len(found) >= 2
        for key in found:
            measure, decimals = MEASURES[key]
            expected_X = np.atleast_1d(golden[key])
            values_BX = measure(inputs_BN, targets_BM, len(expected_X))
            error_X = values_BX.std(axis=0) * (1 / golden["n_samples"] + 1 / num) ** 0.5
            off_X = np.abs(values_BX.mean(axis=0) - expected_X) - 0.5 * 10.0**-decimals
            assert (off_X <= 4 * error_X + 1e-9).all(), (golden["length"], key, off_X, error_X)


def test_unknown_is_the_first_digit_from_a_uniform_index():
    """In (1+2), indices 4, 0 and 1 select the first digit, 2 and 3 the second."""
    num = 20_000
    inputs_BN = draw("solve_equation", num, 7)
    share_2 = (inputs_BN[:, 1:4:2] == CHARACTERS["solve_equation"].index("x")).mean(axis=0)
    np.testing.assert_allclose(share_2, [3 / 5, 2 / 5], atol=4 * (0.6 * 0.4 / num) ** 0.5)


# ---- inputs


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=15, deadline=None)
@given(length=LENGTHS, seed=SEEDS)
def test_samples_are_solved(task, length, seed):
    inputs_BN = draw(task, 3, length, seed)
    assert inputs_BN.shape == (3, length - (task == "modular_arithmetic" and length % 2 == 0))
    check_answers(task, inputs_BN)
    np.testing.assert_array_equal(inputs_BN, draw(task, 3, length, seed))
    if length >= 40:
        assert (draw(task, 3, length, seed + 1) != inputs_BN).any()
    for shortest in (1, 2, 3):
        check_answers(task, draw(task, 2, shortest, seed))


# ---- answers


def stack_from_top(string: str) -> str:
    stack = []
    for action in string:
        if action != "-":
            stack.append({"a": "0", "b": "1"}.get(action, action))
        elif stack:
            stack.pop()
    return "".join(reversed(stack))


def little_endian(number: int) -> str:
    return bin(number)[:1:-1]


def ended(string: str, length: int) -> str:
    return string + "2" + "0" * (length - len(string) - 1)


def missing(string: str) -> str:
    """Return the bit that makes the number of 1s even, as in two equal words."""
    return str(string.count("1") % 2)


def unknown(string: str) -> str:
    """Return the only digit that makes both sides equal."""
    if "=" not in string:
        return "0"
    left, right = string.split("=")
    (digit,) = np.flatnonzero(eval(left, {"x": np.arange(5)}) % 5 == int(right))
    return str(digit)


def root(string: str) -> str:
    """Return the largest number whose square is not above the input, digit by digit."""
    found = 0
    for bit in reversed(range((len(string) + 1) // 2)):
        found += 2**bit * ((found + 2**bit) ** 2 <= int(string, 2))
    return f"{found:0{(len(string) + 1) // 2}b}"


def added(string: str) -> str:
    return ended(little_endian(sum(int(number[::-1], 2) for number in string.split("+"))), len(string) + 1)


def multiplied(string: str) -> str:
    if len(string) < 3:
        return {1: "2", 2: "02"}[len(string)]
    a, b = (int(number[::-1], 2) for number in string.split("*"))
    return ended(little_endian(a * b), len(string))


# The answer to an input string, as a string of the output symbols' digits.
ANSWERS: dict[str, Callable[[str], str]] = {
    "even_pairs": lambda string: str(sum(a != b for a, b in itertools.pairwise(string)) % 2),
    "modular_arithmetic": lambda string: str(eval(string) % 5),
    "parity_check": lambda string: str(string.count("1") % 2),
    "cycle_navigation": lambda string: str((string.count("2") - string.count("0")) % 5),
    "stack_manipulation": lambda string: ended(stack_from_top(string), len(string) + 1),
    "reverse_string": lambda string: "".join(reversed(string)),
    "modular_arithmetic_brackets": lambda string: str(eval(string) % 5),
    "solve_equation": unknown,
    "duplicate_string": lambda string: string * 2,
    "missing_duplicate_string": missing,
    "odds_first": lambda string: string[1::2] + string[::2],
    "binary_addition": added,
    "binary_multiplication": multiplied,
    "compute_sqrt": root,
    "bucket_sort": lambda string: "".join(sorted(string)),
}


def check_answers(task: str, inputs_BN: np.ndarray) -> None:
    before_BN = inputs_BN.copy()
    targets_BM = TASKS[task].solve(inputs_BN)
    assert targets_BM.shape == (len(inputs_BN), TASKS[task].output_length(inputs_BN.shape[1]))
    assert inputs_BN.dtype == targets_BM.dtype == np.int32
    np.testing.assert_array_equal(inputs_BN, before_BN)
    for row, target in zip(inputs_BN.tolist(), targets_BM.tolist(), strict=True):
        string = "".join(CHARACTERS[task][symbol] for symbol in row)
        assert "".join(map(str, target)) == ANSWERS[task](string), string


@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        ("modular_arithmetic", ["*".join("3" * 250), "-".join("4" * 250), "2" + "*2" * 248 + "-0"]),
        ("stack_manipulation", ["1" + "-" * 499, "0" * 250 + "-" * 250, "1" * 499 + "b", "0--b-" * 100]),
        # The deepest expressions of 497 and 500 symbols, nested on either side, and products that are not 0.
        ("modular_arithmetic_brackets", ["(" * 124 + "3" + "*3)" * 124, "(2-" * 124 + "4" + ")" * 124]),
        ("solve_equation", ["(" * 124 + "x" + "-1)" * 124 + "=2", "(2-" * 124 + "-x" + ")" * 124 + "=4"]),
        ("binary_addition", ["1" * 498 + "+1", "1+" + "1" * 498, "1" * 249 + "+" + "1" * 250]),
        ("binary_multiplication", ["1" * 498 + "*1", "1*" + "1" * 498, "1" * 249 + "*" + "1" * 250]),
        ("compute_sqrt", ["1" * 500, f"{(2**250 - 1) ** 2:b}", f"{(2**250 - 1) ** 2 - 1:b}", f"{1:0500b}"]),
    ],
)
def test_answers_at_the_extremes(task, inputs):
    """Test rare cases of random inputs: long carries, products other than 0, empty stacks, roots of squares."""
    for string in inputs:
        assert len(string) >= 495
        check_answers(task, symbols(task, string))


@pytest.mark.parametrize("task", [task for task in TASKS if task != "missing_duplicate_string"])
def test_permutation_invariant(task):
    """Answers are independent of the order of symbols if and only if the task is `permutation_invariant`.

    In a duplicated string with a missing symbol the count of 1s suffices, but other orders are not inputs.
    """
    inputs_BN = draw(task, 3000, 7)
    targets_BM = TASKS[task].solve(inputs_BN)
    answers: dict[bytes, set[bytes]] = {}
    for given_N, target_M in zip(np.sort(inputs_BN, axis=1), targets_BM, strict=True):
        answers.setdefault(given_N.tobytes(), set()).add(target_M.tobytes())
    assert len(answers) < len(np.unique(inputs_BN, axis=0)) / 2  # several orders of the same symbols occur
    assert (max(map(len, answers.values())) == 1) == TASKS[task].permutation_invariant


# ---- associative recall


@settings(max_examples=50, deadline=None)
@given(length=LENGTHS, seed=SEEDS)
def test_recall_asks_for_every_key_once(length, seed):
    inputs_BN = RECALL.sample(np.random.default_rng(seed), 3, length)
    pairs, targets_BM = length // 3, RECALL.solve(inputs_BN)
    assert inputs_BN.dtype == targets_BM.dtype == np.int32
    assert inputs_BN.shape == (3, max(1, 3 * pairs))
    if pairs == 0:
        assert (inputs_BN < NUM_KEYS).all()
        assert targets_BM.tolist() == [[0]] * 3
        return
    for row, answers in zip(inputs_BN.tolist(), targets_BM.tolist(), strict=True):
        value_of = dict(zip(row[: 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert sorted(value_of) == sorted(row[2 * pairs :])
        assert set(value_of) <= set(range(NUM_KEYS))
        assert set(value_of.values()) <= set(range(NUM_KEYS, NUM_KEYS + NUM_VALUES))
        assert answers == [value_of[query] - NUM_KEYS for query in row[2 * pairs :]]


def test_recall_is_answered_at_the_queries():
    config = TaskConfig("associative_recall", 0, 8, None, 0)
    tapes = draw_tapes(config, 0, 0, 5, length=13)
    inputs_BN = tapes["inputs"][:, :12]
    assert tapes["inputs"].shape == (5, 16)
    np.testing.assert_array_equal(np.flatnonzero(tapes["weights"][0]), [8, 9, 10, 11])
    np.testing.assert_array_equal(tapes["counted"], tapes["weights"] > 0)
    np.testing.assert_array_equal(tapes["targets"][:, 8:12], RECALL.solve(inputs_BN))
    assert tapes["positions"][0].tolist() == [*range(12), *[-1] * 4]
    assert (tapes["inputs"][:, 12:] == config.vocab_size - 1).all()


def test_recall_refuses_long_inputs_and_computation_steps():
    config = TaskConfig("associative_recall", computation_steps=0, pad_to=8, max_position=None, seed=0)
    config.check_length("train.train_length", 768)
    with pytest.raises(InputError, match=r"train\.train_length = 769: must be 1 or more symbols, at most 768"):
        config.check_length("train.train_length", 769)
    with pytest.raises(InputError, match=r"data\.computation_steps = 1: must be 0"):
        TaskConfig("associative_recall", computation_steps=1, pad_to=8, max_position=None, seed=0)
