"""`daguerre data`: verbs that work on a data set without training on it, one file each."""

from __future__ import annotations

import difflib

from daguerre.errors import UserError

SUMMARY = "pack, index, verify, measure and show a data set"
HELP = """\
usage: daguerre data VERB DATA [key=value ...]

  pack     write a data set into tar shards
  index    index shards: offsets, sizes, digests and metadata that training needs
  verify   look for damage: digests, counts, and a share of the images decoded
  stats    a report on sizes, shapes, captions, filters and cropping
  show     an image of samples as the network will see them, with captions

DATA is a path (a folder of images, tar shards, a parquet or CSV table; also s3://, gs://, https://), or a recipe, of
which the data section is read. Settings are changed as in training, so that filters, captions and buckets are the same:

  daguerre data stats my_images
  daguerre data stats quickstart
  daguerre data show "shards/part-{000..009}.tar" data.resolution=256 data.filters="pwatermark < 0.5"

`daguerre data VERB --help` says more about a verb, docs/data-tools.md about all of them.
"""

VERBS = ("pack", "index", "verify", "stats", "show")


def run(arguments: list[str]) -> int:
    """Prints the help where no verb was named. UserError for a verb that does not exist."""
    if not arguments:
        print(HELP.strip("\n"))
        return 0
    near = difflib.get_close_matches(arguments[0], VERBS, n=1)
    hint = f"Did you mean `daguerre data {near[0]}`?" if near else f"The verb comes first: daguerre data {VERBS[0]} ..."
    raise UserError(f"there is no verb `data {arguments[0]}`; there are: {', '.join(VERBS)}. {hint}", code="unknown")
