"""Where a command writes: results to stdout, progress and messages to stderr."""

import json
import logging
import os
import sys
from typing import Any

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.text import Text

#: Columns of a table that is piped: wide enough for a site's reason on one line.
PIPE_WIDTH = 160


class Output:
    """What one run of a command prints.

    Args:
        quiet: print results and errors only.
        verbosity: 0 shows warnings, 1 what is done, 2 everything.
    """

    def __init__(self, *, quiet: bool = False, verbosity: int = 0) -> None:
        self.quiet, self.verbosity = quiet, verbosity
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
        self.out = Console(width=width, highlight=False)
        self.err = Console(stderr=True, highlight=False)

    def show(self, result: RenderableType) -> None:
        """Print a result. A string is printed as it is: a site's brackets are no markup, and no line is broken."""
        if isinstance(result, str):
            self.out.print(Text(result), soft_wrap=True)
        else:
            self.out.print(result)

    def show_json(self, result: Any) -> None:
        self.show(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))

    def note(self, message: str) -> None:
        """Print a message that is no result, unless ``--quiet``."""
        if not self.quiet:
            self.err.print(Text(message), soft_wrap=True)

    def error(self, message: str) -> None:
        self.err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)

    @property
    def shows_progress(self) -> bool:
        return not self.quiet and self.err.is_terminal and "CI" not in os.environ

    def configure_logging(self) -> None:
        """Send the library's log to stderr; nobody else's loggers are touched."""
        levels = [logging.WARNING, logging.INFO, logging.DEBUG]
        logger = logging.getLogger("autoprec")
        logger.setLevel(logging.ERROR if self.quiet else levels[min(self.verbosity, 2)])
        logger.handlers = [RichHandler(console=self.err, show_path=self.verbosity > 1, show_time=self.verbosity > 0)]
        logger.propagate = False
