"""The fifteen algorithmic tasks of the Chomsky hierarchy (CHE): strings, and what each is answered with.

Read in that order: task, regular, context_free, context_sensitive, tapes.
"""

from dape_jax.tasks.context_free import CONTEXT_FREE
from dape_jax.tasks.context_sensitive import CONTEXT_SENSITIVE
from dape_jax.tasks.regular import REGULAR

TASKS = REGULAR | CONTEXT_FREE | CONTEXT_SENSITIVE
