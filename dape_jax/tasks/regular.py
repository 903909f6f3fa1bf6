"""Regular tasks, which can be solved with finite memory at any input length.

In: a random generator and a length, or the inputs of a batch. Out: `inputs_BN`, or `targets_BM`. A task is an entry of
`REGULAR` at the end of this file. Next: `context_free.py`.
"""

from functools import partial

import numpy as np

from dape_jax.tasks.task import BITS, DIGITS, Symbols, Targets, Task, strings

MODULUS = len(DIGITS)
PLUS, MINUS, TIMES = 5, 6, 7  # after the digits


def solve_even_pairs(inputs_BN: Symbols) -> Targets:
    """Return 1 if the number of unequal neighbours is odd, else 0.

    The number is odd if and only if the last symbol differs from the first.
    """
    return (inputs_BN[:, :1] != inputs_BN[:, -1:]).astype(np.int32)


def sample_modular_arithmetic(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Draw digits with an operator between neighbours; N is odd, so an even `length` is reduced by 1."""
    symbols_BN = strings(MODULUS, rng, num, length - (length + 1) % 2)
    symbols_BN[:, 1::2] = rng.integers(PLUS, TIMES + 1, symbols_BN[:, 1::2].shape, np.int32)
    return symbols_BN


def solve_parity_check(inputs_BN: Symbols) -> Targets:
    """Return 1 if the number of 1s is odd, else 0."""
    return inputs_BN.sum(axis=1, keepdims=True, dtype=np.int32) % 2


def solve_cycle_navigation(inputs_BN: Symbols) -> Targets:
    """Return the final position after steps on a cycle of five positions."""
    return (inputs_BN - 1).sum(axis=1, keepdims=True, dtype=np.int32) % MODULUS


def solve_modular_arithmetic(inputs_BN: Symbols) -> Targets:
    """Return the value modulo 5, with products before sums.

    One pass from left to right: `total` sums the complete terms, `term` is the product in progress.
    """
    total_B, term_B = np.zeros_like(inputs_BN[:, 0]), inputs_BN[:, 0]
    for operator_B, digit_B in zip(inputs_BN[:, 1::2].T, inputs_BN[:, 2::2].T, strict=True):
        times_B = operator_B == TIMES
        total_B = total_B + np.where(times_B, 0, term_B)
        signed_B = np.where(operator_B == MINUS, -digit_B, digit_B)
        term_B = np.where(times_B, term_B * digit_B, signed_B) % MODULUS
    return (total_B + term_B)[:, None] % MODULUS


task = partial(Task, "regular")
ARITHMETIC = (*DIGITS, "+", "-", "*", "_")  # _ is the blank of the reference; it is never drawn
REGULAR = {
    "even_pairs": task(BITS, BITS, solve_even_pairs),
    "modular_arithmetic": task(ARITHMETIC, DIGITS, solve_modular_arithmetic, sampler=sample_modular_arithmetic),
    "parity_check": task(BITS, BITS, solve_parity_check, permutation_invariant=True),
    "cycle_navigation": task(("-1", "0", "+1"), DIGITS, solve_cycle_navigation, permutation_invariant=True),
}
