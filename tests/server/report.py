"""Lines that the tests print at their end."""

LINES: list[str] = []
