"""Names of parameters as a network had them before adapters wrapped its layers, and the axes of what they added."""

import re

from daguerre.distributed.sharding_rules import Dims

_FACTOR = re.compile(
    r"\.(?:(lora_[AB])\.\w+\.weight|(?:lora_magnitude_vector|hada_\w+|lokr_\w+|boft_\w+)\.\w+(?:\.weight)?)$"
)
ROWS = "rows"
"""Rows added to embeddings, which every device has."""
OTHER = "other"
"""An addition to a weight that is not one of a LoRA's two factors."""


def host(name: str) -> tuple[str, str]:
    """The name of the parameter as the network had it before adapters wrapped its layers; and, of what is added to a
    weight, what it is: `lora_A` (rank, in), `lora_B` (out, rank), `rows` (n, width; by their own name) or `other`."""
    if found := _FACTOR.search(name):
        return f"{name[: found.start()]}.weight", found[1] or OTHER
    if name.endswith(f".{ROWS}"):
        # Not the table's name: where two modules share one, the weight has the name of the other.
        return name, ROWS
    return name.replace(".base_layer.", "."), ""


def of_factor(dims: Dims, factor: str) -> Dims:
    """The axes of a factor of a weight with these, or of the weight itself."""
    if factor in ("", OTHER, ROWS) or len(dims) < 2:
        return () if factor else dims
    return (dims[0], "rank", *dims[2:]) if factor == "lora_B" else ("rank", *dims[1:])
