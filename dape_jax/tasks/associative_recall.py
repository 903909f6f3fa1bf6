"""Multi-query associative recall: key-value pairs, then each key again as a query for its value.

In: a random generator and a length, or the inputs of a batch. Out: `inputs_BN`, or `targets_BM`. Next: `tapes.py`.

With 3 pairs, keys in lower case and values in upper case:

    input     c X a Y f X f c a        3 pairs, then the 3 keys in random order
    target                X X Y        the value of each query

The paper attributes low perplexity beyond the train length to associative recall (section 3.4 and Proposition 1).
Perplexity of text mixes associative recall with other effects. This task isolates it: train on few pairs, test on many;
the accuracy on few pairs is the positive control.

Source: Arora et al. 2024 ("Zoology"), multi-query associative recall.
Differs: the queries directly follow all pairs, without filler, so that the length alone determines the number of
    pairs and the mean distance between a key and its query.
"""

import numpy as np

from dape_jax.tasks.task import Symbols, Targets, Task

NUM_KEYS, NUM_VALUES = 256, 16  # the keys of a string are distinct: 256 keys allow inputs of up to 768 symbols


def sample_associative_recall(rng: np.random.Generator, num: int, length: int) -> Symbols:
    """Draw P distinct keys, each with a random value, then the same keys in random order; N = 3 P.

    For a length of 1 or 2, the input is one key without a value.
    """
    P = length // 3  # a pair and its query are 3 symbols
    if P == 0:
        return rng.integers(0, NUM_KEYS, (num, 1), np.int32)
    keys_BP = rng.permuted(np.tile(np.arange(NUM_KEYS, dtype=np.int32), (num, 1)), axis=1)[:, :P]
    values_BP = rng.integers(NUM_KEYS, NUM_KEYS + NUM_VALUES, (num, P), np.int32)
    pairs_BN = np.stack([keys_BP, values_BP], axis=2).reshape(num, 2 * P)
    return np.concatenate([pairs_BN, rng.permuted(keys_BP, axis=1)], axis=1)


def solve_associative_recall(inputs_BN: Symbols) -> Targets:
    """Return the value of every query; 0 for an input of one key without a value."""
    P = inputs_BN.shape[1] // 3
    if P == 0:
        return np.zeros_like(inputs_BN)
    keys_BP, values_BP, queries_BP = inputs_BN[:, : 2 * P : 2], inputs_BN[:, 1 : 2 * P : 2], inputs_BN[:, 2 * P :]
    pair_BP = (queries_BP[:, :, None] == keys_BP[:, None, :]).argmax(axis=2)
    return np.take_along_axis(values_BP, pair_BP, axis=1) - NUM_KEYS


ASSOCIATIVE_RECALL = {
    "associative_recall": Task(
        "context-sensitive",
        tuple(f"key {i}" for i in range(NUM_KEYS)) + tuple(f"value {i}" for i in range(NUM_VALUES)),
        tuple(f"value {i}" for i in range(NUM_VALUES)),
        solve_associative_recall,
        lambda length: max(1, length // 3),
        sample_associative_recall,
        answered_in_place=True,
        longest=3 * NUM_KEYS,
    )
}
