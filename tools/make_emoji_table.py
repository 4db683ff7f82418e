#!/usr/bin/env python3
"""Writes src/daguerre/assets/emoji.txt, the captions of the source `emoji`, from the npm package emojibase-data.

python3 tools/make_emoji_table.py PACKAGE      # the unpacked package; the table in the repository is of 17.0.0
"""

import json
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "src/daguerre/assets/emoji.txt"
TONED = 5
"""Versions of an emoji that has one person or one hand; those of two people have 25."""


def main(package):
    every = json.loads((package / "en/data.json").read_text(encoding="utf-8"))
    meta = json.loads((package / "meta/groups.json").read_text(encoding="utf-8"))
    lines, heading = [], None
    for one in sorted((one for one in every if one.get("group") is not None), key=lambda one: one["order"]):
        own = f"{meta['groups'][str(one['group'])]}/{meta['subgroups'][str(one['subgroup'])]}"
        if own.startswith("component/"):  # skin tones and hair alone
            continue
        if own != heading:
            lines.append(f"# {own}")
            heading = own
        has_tones = len(one.get("skins", [])) == TONED
        lines.append(f"{'+' if has_tones else ''}{one['hexcode']} {one['label'].replace('“', '').replace('”', '')}")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(lines):,} lines")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
