"""What a recipe says when its input cannot be used."""

import sys
from collections.abc import Callable


class BadInput(ValueError):
    """A mistake in what the caller gave; the message names what was given and what was expected."""


def run(main: Callable[[], object]) -> None:
    """Run a script's `main`; bad input ends it with one line and status 2, not with a traceback."""
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
