"""Write the report of a run: report.html in its folder.

usage: daguerre report RUN_FOLDER [--open]

Writes RUN_FOLDER/report.html, one page that needs no other file and no network, and prints its path. A run writes it at
each save too; this rewrites it, of a run in progress as well.

  daguerre report runs/quickstart
  daguerre report runs/quickstart --open         and show it in the browser
  daguerre report s3://bucket/runs/quickstart    of a run in an object store; the page is written there, too
"""

import webbrowser

from daguerre.errors import UserError
from daguerre.fresh import FULL
from daguerre.remote import local_copy
from daguerre.report import page
from daguerre.storage.errors import StoreError


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError for a folder that is no run's or cannot be written to."""
    folders = [argument for argument in arguments if argument != "--open"]
    if len(folders) != 1 or folders[0].startswith("-"):
        got = " ".join(arguments) or "nothing"
        raise UserError(f"`daguerre report` takes one run folder, and --open if you like; you gave {got}")
    try:
        folder = local_copy.located(folders[0])
        path = page.write(folder)
        local_copy.send(folder, path.name)
    except StoreError as error:
        print(f"the page was written only on this machine: {error.explanation}")
    except OSError as error:
        way_out = "Make the folder writable, or copy it to a folder that is"
        if error.errno in FULL:
            way_out = "Free some space and run the same command again"
        raise UserError(
            f"cannot write the report of {folders[0]}: {error.strerror}. {way_out}",
            code="failed",
        ) from error
    print(path)
    if "--open" in arguments:
        webbrowser.open(path.resolve().as_uri())
    return 0
