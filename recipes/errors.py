"""What a recipe says when its input cannot be used, or when a run cannot go on."""

import sys
from collections.abc import Callable

from hf_sigmoid.errors import BadInput


def run(main: Callable[[], object]) -> None:
    """Run a script's `main`; what it can explain ends it with one line, not with a traceback.

    Status 2 for bad input, 1 for a run that diverged.
    """
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
