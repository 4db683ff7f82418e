"""A message to an address of the user's when a run ends or fails: DAGUERRE_WEBHOOK of the environment, and nowhere
else. Such an address is a secret, as who knows it may write there: no message or file names it. No torch here.
"""

import json
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Any

VARIABLE = "DAGUERRE_WEBHOOK"
SECONDS = 10.0
"""A run waits no longer for whoever listens there."""


def tell(folder: Path, state: str, reason: str = "", step: int | None = None, total_steps: int | None = None) -> str:
    """Sends one POST of JSON, if the variable is set; the reason why it could not be sent, or ""."""
    address = os.environ.get(VARIABLE, "")
    if not address:
        return ""
    if not address.lower().startswith(("http://", "https://")):
        return (
            f"{VARIABLE} is no address that begins with https:// or http://: no message of the end of this run was sent"
        )
    at = f" at update {step:,}" if step is not None else ""
    words = f"{folder.name}: {state}{at}{reason and f' ({reason})'}"
    document = {"run": folder.name, "state": state, "reason": reason, "step": step, "total_steps": total_steps}
    # The keys under which Slack, Mattermost and Discord look for what they show.
    document |= {"text": words, "content": words[:1900]}
    outcome: list[str] = []
    # A thread, as the limit of a request holds for each of its parts alone, and a name may take long to be found.
    thread = Thread(target=lambda: outcome.append(_post(address, document)), name="webhook", daemon=True)
    thread.start()
    thread.join(SECONDS)
    why = outcome[0] if outcome else f"no answer within {SECONDS:g} s"
    return f"{VARIABLE} got no message of the end of this run: {why}" if why else ""


def _post(address: str, document: dict[str, Any]) -> str:
    head = {"Content-Type": "application/json", "User-Agent": "daguerre"}
    try:
        request = urllib.request.Request(address, json.dumps(document).encode(), head, method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ""
    except (OSError, ValueError, LookupError, HTTPException) as error:  # its text may hold the address
        status = getattr(error, "code", None)
        return f"it answered {status}" if isinstance(status, int) else type(error).__name__
