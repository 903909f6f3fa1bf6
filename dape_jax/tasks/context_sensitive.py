"""The context-sensitive tasks: what solves them is a memory as long as the input, read and written anywhere.

In: a random generator and a length, or the inputs of a batch. Out: `inputs_BN`, or `targets_BM`. A task is two
functions and a line in `CONTEXT_SENSITIVE` at the foot. Next: `tapes.py`.

Numbers of up to 500 bits are Python's integers, one for each row: exact at any length.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Bool, Int32

from dape_jax.tasks.context_free import END
from dape_jax.tasks.regular import BITS, DIGITS, Targets, strings
from dape_jax.tasks.task import Symbols, Task

OPERATOR = 2  # of two numbers
MISSING, PAD = 2, 3


# ---- duplicate string


def solve_duplicate_string(inputs_BN: Symbols) -> Targets:
    """The input, and once more."""
    return np.concatenate([inputs_BN, inputs_BN], axis=1)


# ---- missing duplicate


def sample_missing_duplicate_string(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """A string of N // 2 bits, twice, one of all its bits missing, and a pad if N is odd; a 1 alone if N is 1."""
    half, rows = length // 2, np.arange(num)
    if half == 0:
        return np.ones((num, length), np.int32)
    bits_BH = strings(2, rng, num, half)
    symbols_BN = np.concatenate([bits_BH, bits_BH, np.full((num, length % 2), PAD, np.int32)], axis=1)
    symbols_BN[rows, rng.integers(0, 2 * half, num)] = MISSING
    return symbols_BN


def solve_missing_duplicate_string(inputs_BN: Symbols) -> Targets:
    """The missing bit: what stands in its place in the other half."""
    B, N = inputs_BN.shape
    if N == 1:
        return inputs_BN.copy()
    half = N // 2
    place_B = (inputs_BN == MISSING).argmax(axis=1)
    return inputs_BN[np.arange(B), (place_B + half) % (2 * half)][:, None]


# ---- odds first


def solve_odds_first(inputs_BN: Symbols) -> Targets:
    """The symbols at places 1, 3, 5 .., then those at 0, 2, 4 .."""
    return np.concatenate([inputs_BN[:, 1::2], inputs_BN[:, ::2]], axis=1)


# ---- numbers


def integers_of(bits_BN: Bool[np.ndarray, "B N"]) -> list[int]:
    """The number that each row writes, its lowest bit first."""
    return [int.from_bytes(row.tobytes(), "little") for row in np.packbits(bits_BN, axis=1, bitorder="little")]


def bits_of(numbers: Sequence[int], num_bits: int) -> Int32[np.ndarray, "B M"]:
    """The `num_bits` bits of each number, its lowest first, 0s behind its highest."""
    num_bytes = -(-num_bits // 8)
    bytes_BX = np.frombuffer(b"".join(number.to_bytes(num_bytes, "little") for number in numbers), np.uint8)
    bits_BM = np.unpackbits(bytes_BX.reshape(-1, num_bytes), axis=1, count=num_bits, bitorder="little")
    return bits_BM.astype(np.int32)


def accepted_bits(
    rng: np.random.Generator, num: int, length: int, accepts: Callable[[Symbols], Bool[np.ndarray, "B"]]
) -> Symbols:
    """Draw bits uniformly from those that are accepted: rows that are not are drawn anew."""
    bits_BN = strings(2, rng, num, length)
    while (refused_B := ~accepts(bits_BN)).any():
        bits_BN[refused_B] = strings(2, rng, int(refused_B.sum()), length)
    return bits_BN


def sample_two_numbers(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Two numbers of at least 1, their lowest bits first, an operator between them, at a uniform place.

    For N of 1 and 2, as in the reference, one number that is not all 1s, and no operator.
    """
    if length < 3:
        return accepted_bits(rng, num, length, lambda bits_BN: bits_BN.min(axis=1) == 0)
    operator_B1 = rng.integers(1, length - 1, (num, 1))
    first_BN, second_BN = np.arange(length) < operator_B1, np.arange(length) > operator_B1

    def none_is_zero(bits_BN: Symbols) -> Bool[np.ndarray, "B"]:
        return (bits_BN & first_BN).max(axis=1) & (bits_BN & second_BN).max(axis=1) == 1

    symbols_BN = accepted_bits(rng, num, length, none_is_zero)
    np.put_along_axis(symbols_BN, operator_B1, OPERATOR, axis=1)
    return symbols_BN


def two_numbers(inputs_BN: Symbols) -> tuple[list[int], list[int]]:
    """What is written before the operator and behind it; 0 behind it where there is none."""
    N = inputs_BN.shape[1]
    is_operator_BN = inputs_BN == OPERATOR
    place_B = np.where(is_operator_BN.any(axis=1), is_operator_BN.argmax(axis=1), N)
    before_BN = np.arange(N) < place_B[:, None]
    first = integers_of((inputs_BN == 1) & before_BN)
    second = integers_of((inputs_BN == 1) & ~before_BN)
    return first, [number >> (place + 1) for number, place in zip(second, place_B.tolist(), strict=True)]


def ended(numbers: Sequence[int], num_symbols: int) -> Int32[np.ndarray, "B M"]:
    """Numbers without high 0s (0 itself is one), their lowest bits first, then END, then 0s.

    Where there is room for one symbol alone, it is END: the reference's product of no numbers.
    """
    symbols_BM = bits_of(numbers, num_symbols)
    num_bits = [min(max(number.bit_length(), 1), num_symbols - 1) for number in numbers]
    symbols_BM[np.arange(len(numbers)), num_bits] = END
    return symbols_BM


def solve_binary_addition(inputs_BN: Symbols) -> Targets:
    """The sum, as `ended`."""
    return ended([a + b for a, b in zip(*two_numbers(inputs_BN), strict=True)], inputs_BN.shape[1] + 1)


def solve_binary_multiplication(inputs_BN: Symbols) -> Targets:
    """The product, as `ended`."""
    return ended([a * b for a, b in zip(*two_numbers(inputs_BN), strict=True)], inputs_BN.shape[1])


def sample_compute_sqrt(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """A number of at least 1, its highest bit first."""
    return accepted_bits(rng, num, length, lambda bits_BN: bits_BN.max(axis=1) == 1)


def solve_compute_sqrt(inputs_BN: Symbols) -> Targets:
    """The root, rounded down, its highest bit first, in half as many bits."""
    roots = [math.isqrt(number) for number in integers_of(inputs_BN[:, ::-1] == 1)]
    return bits_of(roots, (inputs_BN.shape[1] + 1) // 2)[:, ::-1].copy()


# ---- bucket sort


def solve_bucket_sort(inputs_BN: Symbols) -> Targets:
    """The symbols in ascending order."""
    return np.sort(inputs_BN, axis=1)


CONTEXT_SENSITIVE = {
    "duplicate_string": Task(
        "context-sensitive", BITS, BITS, lambda length: 2 * length, partial(strings, 2), solve_duplicate_string
    ),
    "missing_duplicate_string": Task(
        "context-sensitive",
        (*BITS, "?", "_"),
        BITS,
        lambda _: 1,
        sample_missing_duplicate_string,
        solve_missing_duplicate_string,
    ),
    "odds_first": Task("context-sensitive", BITS, BITS, lambda length: length, partial(strings, 2), solve_odds_first),
    "binary_addition": Task(
        "context-sensitive",
        (*BITS, "+"),
        (*BITS, "END"),
        lambda length: length + 1,
        sample_two_numbers,
        solve_binary_addition,
        end=END,
    ),
    "binary_multiplication": Task(
        "context-sensitive",
        (*BITS, "*"),
        (*BITS, "END"),
        lambda length: length,
        sample_two_numbers,
        solve_binary_multiplication,
        end=END,
    ),
    "compute_sqrt": Task(
        "context-sensitive",
        BITS,
        BITS,
        lambda length: (length + 1) // 2,
        sample_compute_sqrt,
        solve_compute_sqrt,
    ),
    "bucket_sort": Task(
        "context-sensitive",
        DIGITS,
        DIGITS,
        lambda length: length,
        partial(strings, 5),
        solve_bucket_sort,
        permutation_invariant=True,
    ),
}
