"""What all commands share: their common options, and how an error becomes an exit code."""

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from autoprec.cli.console import Output
from autoprec.errors import AutoprecError

#: Exit codes: done; done, but the answer is no; a usage, configuration or internal error.
DONE, NO, FAILED = 0, 1, 2

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Results and errors only.", rich_help_panel="Logging")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Say more; twice for all.", rich_help_panel="Logging")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Logging")]

_COMMON: dict[str, tuple[Any, Any]] = {"quiet": (Quiet, False), "verbose": (Verbose, 0), "debug": (Debug, False)}


def command(app: typer.Typer, *, example: str, name: str | None = None) -> Callable[[Callable[..., None]], None]:
    """Register ``function(output, ...)`` as a command of ``app``, with the options that every command has.

    Args:
        app: where the command goes.
        example: a command line, shown at the help's end.
        name: of the command; the function's own by default.
    """

    def register(function: Callable[..., None]) -> None:
        @functools.wraps(function)
        def run(quiet: bool, verbose: int, debug: bool, **options: Any) -> None:
            output = Output(quiet=quiet, verbosity=verbose)
            output.configure_logging()
            try:
                function(output, **options)
            except (typer.TyperException, typer.Exit, typer.Abort, BrokenPipeError):
                raise
            except Exception as error:
                if debug:
                    raise
                _fail(output, error)

        run.__signature__ = _with_common_options(function)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in run.__signature__.parameters.values()}  # type: ignore[attr-defined]
        app.command(name or function.__name__, epilog=f"Example: {example}")(run)

    return register


def answer(yes: bool) -> None:
    """End the command with exit code 1 if its answer is no."""
    if not yes:
        raise typer.Exit(NO)


def _with_common_options(function: Callable[..., None]) -> inspect.Signature:
    signature = inspect.signature(function, eval_str=True)
    own = list(signature.parameters.values())[1:]  # without `output`
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _COMMON.items()
    ]
    return signature.replace(parameters=[*own, *common])


def _fail(output: Output, error: Exception) -> NoReturn:
    """Say what went wrong in one message and end the command.

    An error of ours speaks for itself; any other, from a user's model or from a bug, is named with its place.
    """
    if isinstance(error, AutoprecError):
        output.error(str(error))
    else:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"(in {where.filename}:{where.lineno}; --debug shows the traceback)"
        output.error(f"{type(error).__name__}: {error}\n{place}")
    raise typer.Exit(FAILED) from error
