"""Context-sensitive tasks, which can be solved with a random-access memory as long as the input.

In: a random generator and a length, or the inputs of a batch. Out: `inputs_BN`, or `targets_BM`. A task is an entry of
`CONTEXT_SENSITIVE` at the end of this file. Next: `associative_recall.py`.

Numbers of up to 500 bits are Python integers, one per row: exact at any length.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Bool, Int32

from dape_jax.tasks.context_free import END
from dape_jax.tasks.task import BITS, DIGITS, Symbols, Targets, Task, strings

OPERATOR = 2  # between two numbers
MISSING, PAD = 2, 3


def sample_missing_duplicate_string(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Draw N // 2 bits, repeat them, replace one bit by MISSING, append PAD if N is odd; a single 1 if N = 1."""
    half, rows = length // 2, np.arange(num)
    if half == 0:
        return np.ones((num, length), np.int32)
    bits_BH = strings(2, rng, num, half)
    symbols_BN = np.concatenate([bits_BH, bits_BH, np.full((num, length % 2), PAD, np.int32)], axis=1)
    symbols_BN[rows, rng.integers(0, 2 * half, num)] = MISSING
    return symbols_BN


def solve_missing_duplicate_string(inputs_BN: Symbols) -> Targets:
    """Return the missing bit: the bit at the same index of the other half."""
    B, N = inputs_BN.shape
    if N == 1:
        return inputs_BN.copy()
    half = N // 2
    index_B = (inputs_BN == MISSING).argmax(axis=1)
    return inputs_BN[np.arange(B), (index_B + half) % (2 * half)][:, None]


# ---- numbers


def bits_to_integers(bits_BN: Bool[np.ndarray, "B N"]) -> list[int]:
    """Return the integer that each row encodes, lowest bit first."""
    return [int.from_bytes(row.tobytes(), "little") for row in np.packbits(bits_BN, axis=1, bitorder="little")]


def integers_to_bits(numbers: Sequence[int], num_bits: int) -> Int32[np.ndarray, "B M"]:
    """Return each number in `num_bits` bits, lowest bit first."""
    num_bytes = -(-num_bits // 8)
    bytes_BX = np.frombuffer(b"".join(number.to_bytes(num_bytes, "little") for number in numbers), np.uint8)
    bits_BM = np.unpackbits(bytes_BX.reshape(-1, num_bytes), axis=1, count=num_bits, bitorder="little")
    return bits_BM.astype(np.int32)


def sample_accepted_bits(
    rng: np.random.Generator, num: int, length: int, accepts: Callable[[Symbols], Bool[np.ndarray, "B"]]
) -> Symbols:
    """Draw bits uniformly from the accepted rows, by rejection sampling."""
    bits_BN = strings(2, rng, num, length)
    while (rejected_B := ~accepts(bits_BN)).any():
        bits_BN[rejected_B] = strings(2, rng, int(rejected_B.sum()), length)
    return bits_BN


def sample_two_numbers(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Draw two positive numbers, lowest bit first, with an operator between them at a uniform index.

    For N = 1 and N = 2, as in the reference, draw one number that is not all 1s, without an operator.
    """
    if length < 3:
        return sample_accepted_bits(rng, num, length, lambda bits_BN: bits_BN.min(axis=1) == 0)
    operator_B1 = rng.integers(1, length - 1, (num, 1))
    first_BN, second_BN = np.arange(length) < operator_B1, np.arange(length) > operator_B1

    def both_positive(bits_BN: Symbols) -> Bool[np.ndarray, "B"]:
        return (bits_BN & first_BN).max(axis=1) & (bits_BN & second_BN).max(axis=1) == 1

    symbols_BN = sample_accepted_bits(rng, num, length, both_positive)
    np.put_along_axis(symbols_BN, operator_B1, OPERATOR, axis=1)
    return symbols_BN


def parse_two_numbers(inputs_BN: Symbols) -> tuple[list[int], list[int]]:
    """Return the numbers before and after the operator; without an operator, the second is 0."""
    N = inputs_BN.shape[1]
    is_operator_BN = inputs_BN == OPERATOR
    index_B = np.where(is_operator_BN.any(axis=1), is_operator_BN.argmax(axis=1), N)
    before_BN = np.arange(N) < index_B[:, None]
    first = bits_to_integers((inputs_BN == 1) & before_BN)
    second = bits_to_integers((inputs_BN == 1) & ~before_BN)
    return first, [number >> (index + 1) for number, index in zip(second, index_B.tolist(), strict=True)]


def bits_with_end(numbers: Sequence[int], num_symbols: int) -> Int32[np.ndarray, "B M"]:
    """Return numbers without leading zeros (0 is one bit), lowest bit first, then END, then 0s.

    If `num_symbols` is 1, that symbol is END: the reference's product at N = 1.
    """
    symbols_BM = integers_to_bits(numbers, num_symbols)
    num_bits = [min(max(number.bit_length(), 1), num_symbols - 1) for number in numbers]
    symbols_BM[np.arange(len(numbers)), num_bits] = END
    return symbols_BM


def solve_binary_addition(inputs_BN: Symbols) -> Targets:
    """Return the sum in the format of `bits_with_end`."""
    return bits_with_end([a + b for a, b in zip(*parse_two_numbers(inputs_BN), strict=True)], inputs_BN.shape[1] + 1)


def solve_binary_multiplication(inputs_BN: Symbols) -> Targets:
    """Return the product in the format of `bits_with_end`."""
    return bits_with_end([a * b for a, b in zip(*parse_two_numbers(inputs_BN), strict=True)], inputs_BN.shape[1])


def solve_compute_sqrt(inputs_BN: Symbols) -> Targets:
    """Return the square root, rounded down, highest bit first, in (N + 1) // 2 bits."""
    roots = [math.isqrt(number) for number in bits_to_integers(inputs_BN[:, ::-1] == 1)]
    return integers_to_bits(roots, (inputs_BN.shape[1] + 1) // 2)[:, ::-1].copy()


task = partial(Task, "context-sensitive")
sample_positive = partial(sample_accepted_bits, accepts=lambda bits_BN: bits_BN.max(axis=1) == 1)
two_numbers = partial(task, sampler=sample_two_numbers, end=END)
CONTEXT_SENSITIVE = {
    "duplicate_string": task(BITS, BITS, lambda inputs_BN: np.tile(inputs_BN, 2), lambda N: 2 * N),
    "missing_duplicate_string": task(
        (*BITS, "?", "_"), BITS, solve_missing_duplicate_string, sampler=sample_missing_duplicate_string
    ),
    "odds_first": task(  # indices 1, 3, 5, .., then 0, 2, 4, ..
        BITS, BITS, lambda inputs_BN: np.concatenate([inputs_BN[:, 1::2], inputs_BN[:, ::2]], axis=1), lambda N: N
    ),
    "binary_addition": two_numbers((*BITS, "+"), (*BITS, "END"), solve_binary_addition, lambda N: N + 1),
    "binary_multiplication": two_numbers((*BITS, "*"), (*BITS, "END"), solve_binary_multiplication, lambda N: N),
    "compute_sqrt": task(BITS, BITS, solve_compute_sqrt, lambda N: (N + 1) // 2, sample_positive),
    "bucket_sort": task(DIGITS, DIGITS, np.sort, lambda N: N, permutation_invariant=True),
}
