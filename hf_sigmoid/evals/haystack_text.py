"""The text that needles are hidden in, as the command line names it.

`conversions/texts.py` says what may be given; it is imported when asked, since its package brings
torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_sigmoid.text import austen

if TYPE_CHECKING:
    from hf_sigmoid.conversions.texts import Text


def read_haystack(given: Sequence[str] | None, tokenizer: Any, tokens: int) -> "Text":
    """The texts that were asked for, one after the other.

    Args:
        given: files, folders and data sets; None takes the built-in novel whole.
        tokens: a data set is read until its documents have so many.

    Returns:
        The text's `name`, without the folders that it is in, its `content` and `sha256`.

    Raises:
        ValueError: no such text, or nothing in it; see `texts.read`.
    """
    from hf_sigmoid.conversions import texts

    return texts.read(given, austen, "haystack", tokenizer, tokens)
