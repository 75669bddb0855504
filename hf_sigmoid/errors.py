"""Errors that a command says in one line."""


class BadInput(ValueError):
    """A mistake in what the caller gave; the message names what was given and what was expected."""


class ChecksFailed(RuntimeError):
    """A model gives one answer this way and another that way, or none."""
