"""Check the annotations of functions and classes at run time, arrays' shapes included."""

from typing import Any

import beartype as checker


def beartype(annotated: Any) -> Any:
    """Check calls of what a module or a class defines.

    A function inside a function is as it is: a check would be compiled anew for each call of the outer one, which took
    a twelfth of the tests' time.
    """
    return annotated if "<locals>" in annotated.__qualname__ else checker.beartype(annotated)
