"""Faults as the files of results have them."""


def one_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message, of at most 200 characters."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
