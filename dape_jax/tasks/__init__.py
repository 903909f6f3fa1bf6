"""Algorithmic tasks: fifteen tasks of the Chomsky hierarchy (CHE), and associative recall.

Reading order: task, regular, context_free, context_sensitive, associative_recall, tapes, batches.
"""

from dape_jax.tasks.associative_recall import ASSOCIATIVE_RECALL
from dape_jax.tasks.context_free import CONTEXT_FREE
from dape_jax.tasks.context_sensitive import CONTEXT_SENSITIVE
from dape_jax.tasks.regular import REGULAR

CHE = REGULAR | CONTEXT_FREE | CONTEXT_SENSITIVE  # the paper's table 6 lacks binary_multiplication
TASKS = CHE | ASSOCIATIVE_RECALL
