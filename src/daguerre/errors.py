"""What a user can cause and mend: its text is all that is shown, without a traceback. No other error lives here."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what, what is allowed and what to do."""
