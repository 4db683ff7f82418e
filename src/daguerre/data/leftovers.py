"""Things that other programs and systems leave next to pictures and in archives: never samples. No torch here."""

import re

LEFTOVER = "left there by a system or another program (such as .DS_Store, Thumbs.db, @eaDir, caches of latents)"
HIDDEN = ".daguerre"
"""Folder of `daguerre serve` in a folder of pictures, with those that were left out: no sample, and nothing to tell."""
_FOLDERS = frozenset(
    {
        "__macosx",  # macOS' archives
        "@eadir", "@tmp", "#recycle", "@__thumb", "#snapshot",  # network disks by Synology and QNAP: small copies
        "@recycle", "@recently-snapshot", "network trash folder", "temporary items",  # QNAP's, and those of AFP
        "$recycle.bin", "recycler", "recycled", "system volume information", "lost+found",
        "_gsdata_",  # GoodSync's earlier versions
        "__pycache__", "_latent_cache", "_t_e_cache", "_clip_vision_cache", "_controls",  # ai-toolkit's
    }
)  # fmt: skip
_FILES = frozenset({"thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "icon\r"})
_CACHES = re.compile(r"\.(npz|npy|safetensors|pt|pth|ckpt)$|^aspect_ratio_bucket_(indices|metadata)_.*\.json$")
"""Of latents and text features, as kohya's scripts write them next to images; the last one is SimpleTuner's."""


def is_leftover(path: str, in_archive: bool = False) -> bool:
    """True for a file that somebody's program put there, or that lies in such a folder; for a path that begins in the
    data, with slashes. Hidden ones are such too: no program shows them, and `._cat.jpg` is no picture.
    In an archive caches are members like others, which samples have."""
    *folders, name = [part for part in path.lower().split("/") if part not in ("", ".", "..")] or [""]
    if any(part in _FOLDERS or part.startswith(".") for part in folders):
        return True
    if name.startswith(".") or name in _FOLDERS or name in _FILES:
        return True
    if folders and folders[-1].endswith(".info") and name.endswith("_thumbnail.png"):  # Eagle's, beside the picture
        return True
    return not in_archive and _CACHES.search(name) is not None
