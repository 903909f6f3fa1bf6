"""Check the annotations of functions and classes at run time, arrays' shapes included."""

from typing import Any

import beartype as checker


def beartype(annotated: Any) -> Any:
    """Check calls of a function or class, except of a nested function without shapes of arrays in its annotations.

    The check of a nested function is compiled at each call of the outer function. Checking all nested functions took a
    twelfth of the tests' time.
    """
    has_shapes = "jaxtyping." in repr(getattr(annotated, "__annotations__", ""))
    return checker.beartype(annotated) if has_shapes or "<locals>" not in annotated.__qualname__ else annotated
