"""Progress of long work: a bar on a terminal, and one log line a minute elsewhere."""

import io
import logging
import sys
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 60.0
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} elapsed, {remaining} left{postfix}"

logger = logging.getLogger(__name__)


class Progress(tqdm):
    """Progress bar on a terminal, log lines elsewhere: a bar would fill a log file with its redraws.

    A line is logged each minute and, unless `leave` is False, when the work ends.
    """

    def __init__(self, *args: Any, **options: Any):
        self.is_terminal, self.logged = sys.stderr.isatty(), None
        if not self.is_terminal:
            # miniters=1: tqdm checks the time after every update, even if the first updates were fast.
            options |= {"mininterval": SECONDS_BETWEEN_LINES, "miniters": 1, "bar_format": _LINE}
            options |= {"file": io.StringIO()}  # discards the line breaks that tqdm writes
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Draw the bar, or log a line if there is progress since the last one."""
        if self.is_terminal:
            return super().display(msg, pos)
        if msg is None and self.n not in (self.initial, self.logged):
            self.logged = self.n
            logger.info("%s", str(self))  # formatted now: a handler may do it after more updates
        return True
