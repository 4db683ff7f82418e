"""What Watch sees of operators that are known to wait, and of some that do not: python seen.py LIBRARY, JSON out."""

import json
import sys
from pathlib import Path

import fake_cuda

fake_cuda.load(Path(sys.argv[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import watch as watching  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

PINNED = fake_cuda.pretend()

from daguerre.distributed import collectives  # noqa: E402


class Mesh:
    """Two axes of two devices each, over which nothing is sent."""

    mesh_dim_names = ("fsdp", "tensor")

    def __getitem__(self, axis):
        return self

    def size(self):
        return 2

    def get_group(self):
        return None


def mixed(x):
    """Tells of a tensor of the host beside the device's."""
    try:
        return x * torch.ones(3)
    except (AssertionError, RuntimeError) as error:
        return str(error)


def main() -> None:
    pinned, pageable = torch.ones(3).pin_memory(), torch.ones(3)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    seen, found = watching.Watch(fake, PINNED), {}
    watching.see_constants(seen)
    collectives.dist.all_reduce = lambda *args, **named: None
    with fake, seen:
        x = torch.empty(3, device="cuda")
        acts = {
            "product": lambda: x * 2.0,
            "pinned": lambda: pinned.to("cuda", non_blocking=True),
            "filled": lambda: x.new_full((2,), 1.0),
            "view": lambda: x[:2],
            "norm": lambda: collectives.squared_norm({frozenset({"fsdp"}): [x], frozenset(): [x, x]}, Mesh()),
            "pinned, blocking": lambda: pinned.to("cuda"),
            "pageable": lambda: pageable.to("cuda", non_blocking=True),
            "of numpy": lambda: torch.from_numpy(np.ones(3)).to("cuda"),
            "into": lambda: x.copy_(pageable),
            "constant": lambda: torch.tensor([1.0, 2.0], device="cuda"),
            "new constant": lambda: x.new_tensor([1.0]),
            "as constant": lambda: torch.as_tensor(1.0, device="cuda"),
            "item": lambda: x[0].item(),
            "asked": lambda: bool(x[0] > 0),
            "to the host": lambda: x.cpu(),
        }
        for name, act in acts.items():
            seen.forget()
            act()
            found[name] = [sum(seen.waits.values()), sum(seen.kernels.values())]
        found["mixed"] = mixed(x)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
