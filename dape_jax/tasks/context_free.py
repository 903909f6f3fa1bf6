"""Deterministic context-free tasks, which can be solved with a stack.

In: a random generator and a length, or the inputs of a batch. Out: `inputs_BN`, or `targets_BM`. A task is an entry of
`CONTEXT_FREE` at the end of this file. Next: `context_sensitive.py`.
"""

from functools import partial

import numpy as np
from jaxtyping import Int32

from dape_jax.tasks.regular import MINUS, MODULUS, PLUS, TIMES
from dape_jax.tasks.task import BITS, DIGITS, Symbols, Targets, Task, strings

END = 2  # after a target of bits
POP, PUSH_0 = 2, 3
OPEN, CLOSE = 8, 9
# Equations have no multiplication, so their brackets are 7 and 8.
UNKNOWN, EQUALS = 9, 10


def sample_stack_manipulation(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Draw a stack of 1 to N - 1 bits, bottom first, followed by actions; only a stack if N = 1."""
    symbols_BN = strings(2, rng, num, length)
    if length == 1:
        return symbols_BN
    height_B = rng.integers(1, length, num)
    actions_BN = POP + strings(3, rng, num, length)
    return np.where(np.arange(length) < height_B[:, None], symbols_BN, actions_BN)


def solve_stack_manipulation(inputs_BN: Symbols) -> Targets:
    """Return the final stack, top first, then END, then 0s. Popping an empty stack has no effect.

    The initial bits count as pushes. The height is the number of pushes minus pops, raised by one for every pop of an
    empty stack. Each level of the stack contains the last bit that was pushed to that height.
    """
    B, N = inputs_BN.shape
    pops_BN = inputs_BN == POP
    unbounded_BN = np.cumsum(np.where(pops_BN, -1, 1), axis=1)
    height_BN = unbounded_BN - np.minimum(np.minimum.accumulate(unbounded_BN, axis=1), 0)
    rows, times = np.nonzero(~pops_BN)
    stack_BN = np.zeros((B, N), np.int32)
    stack_BN[rows, height_BN[rows, times] - 1] = inputs_BN[rows, times] % PUSH_0  # the last assignment to a level wins
    below_BM = height_BN[:, -1:] - 1 - np.arange(N + 1)
    bits_BM = np.take_along_axis(stack_BN, np.maximum(below_BM, 0), axis=1)
    return np.where(below_BM >= 0, bits_BM, np.where(below_BM == -1, END, 0)).astype(np.int32)


# ---- expressions with brackets, and equations


def expressions(rng: np.random.Generator, num: int, length: int, num_operators: int) -> Symbols:
    """Draw expressions with brackets around every operation.

        length       1  2   3    4     n >= 5
        expression   d  -d  (d)  (-d)  (left operator right), with 1 to n - 4 symbols in left and the rest in right

    Digits, operators and the length of left are uniform. The length of an expression determines the positions of its
    brackets and parts, so all expressions of one depth, in all rows, are written in one step.

    Args:
        rng: random generator.
        num: number of rows.
        length: length of each row.
        num_operators: 3 for + - *, 2 for + -.
    """
    symbols = np.empty(num * length, np.int32)  # all rows, concatenated
    start, size = np.arange(num) * length, np.full(num, length)
    while len(start):
        bracketed = size >= 3
        symbols[start[bracketed]] = OPEN
        symbols[(start + size - 1)[bracketed]] = CLOSE
        single, negative = size <= 4, (size == 2) | (size == 4)
        digit = start + size // 2
        symbols[digit[single]] = rng.integers(0, MODULUS, single.sum())
        symbols[digit[negative] - 1] = MINUS
        start, size = start[~single], size[~single]
        left = rng.integers(1, size - 3)
        symbols[start + 1 + left] = rng.integers(PLUS, PLUS + num_operators, len(start))
        start, size = np.concatenate([start + 1, start + 2 + left]), np.concatenate([left, size - 3 - left])
    return symbols.reshape(num, length)


def values(expressions_BN: Symbols) -> Int32[np.ndarray, "B"]:
    """Return the values of expressions drawn by `expressions`, modulo `MODULUS`.

    Rewrites all rows at once: first applies signs, then removes brackets around single values, then replaces every
    innermost (value operator value) by its value until one value per row remains.
    """
    ends_value_BN = (expressions_BN < PLUS) | (expressions_BN == CLOSE)
    sign_BN = expressions_BN == MINUS
    sign_BN[:, 1:] &= ~ends_value_BN[:, :-1]
    symbols, sign = expressions_BN.flatten(), np.flatnonzero(sign_BN)
    symbols[sign + 1] = -symbols[sign + 1] % MODULUS
    symbols = np.delete(symbols, sign)
    (start,) = np.nonzero((symbols[:-2] == OPEN) & (symbols[2:] == CLOSE))
    symbols = np.delete(symbols, np.concatenate([start, start + 2]))
    # An OPEN four symbols before a CLOSE always matches it: no other bracketed expression is shorter than five symbols.
    while len(start := np.flatnonzero((symbols[:-4] == OPEN) & (symbols[4:] == CLOSE))):
        left, operator, right = symbols[start + 1], symbols[start + 2], symbols[start + 3]
        added = left + np.where(operator == MINUS, -right, right)
        symbols[start] = np.where(operator == TIMES, left * right, added) % MODULUS
        symbols = np.delete(symbols, (start[:, None] + np.arange(1, 5)).ravel())
    return symbols


def sample_solve_equation(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Draw an expression with + and -, one digit replaced by the unknown, then "=" and its value; all 0 if N < 3.

    The unknown is the first digit at or after a uniformly drawn index, wrapping around at the end.
    """
    if length < 3:
        return np.zeros((num, length), np.int32)
    expressions_BL = expressions(rng, num, length - 2, 2)
    values_B = values(expressions_BL)
    rows, L = np.arange(num), length - 2
    indices_BL = (rng.integers(0, L, (num, 1)) + np.arange(L)) % L
    first_B = np.take_along_axis(expressions_BL < PLUS, indices_BL, axis=1).argmax(axis=1)
    equations_BN = np.empty((num, length), np.int32)
    equations_BN[:, :-2] = expressions_BL - (expressions_BL > TIMES)
    equations_BN[rows, indices_BL[rows, first_B]] = UNKNOWN
    equations_BN[:, -2], equations_BN[:, -1] = EQUALS, values_B
    return equations_BN


def solve_solve_equation(inputs_BN: Symbols) -> Targets:
    """Return the unknown digit x.

    The left side is c + s x with s = 1 or -1, so that its values for x = 0 and x = 1 determine c and s.
    """
    B, N = inputs_BN.shape
    if N < 3:
        return np.zeros((B, 1), np.int32)
    sides_BL = inputs_BN[:, :-2]
    with_0_B, with_1_B = (
        values(np.where(sides_BL == UNKNOWN, np.int32(digit), sides_BL + (sides_BL > MINUS))) for digit in (0, 1)
    )
    return ((inputs_BN[:, -1] - with_0_B) * (with_1_B - with_0_B) % MODULUS)[:, None]


task = partial(Task, "context-free")
# x is the unknown of the reference; it is never drawn in expressions.
EXPRESSIONS, EQUATIONS = (*DIGITS, "+", "-", "*", "(", ")", "x"), (*DIGITS, "+", "-", "(", ")", "x", "=")
ACTIONS = (*BITS, "POP", "PUSH 0", "PUSH 1")
CONTEXT_FREE = {
    "stack_manipulation": task(
        ACTIONS, (*BITS, "END"), solve_stack_manipulation, lambda N: N + 1, sample_stack_manipulation, end=END
    ),
    "reverse_string": task(BITS, BITS, lambda inputs_BN: inputs_BN[:, ::-1].copy(), lambda N: N),
    "modular_arithmetic_brackets": task(
        EXPRESSIONS, DIGITS, lambda inputs_BN: values(inputs_BN)[:, None], sampler=partial(expressions, num_operators=3)
    ),
    "solve_equation": task(EQUATIONS, DIGITS, solve_solve_equation, sampler=sample_solve_equation),
}
