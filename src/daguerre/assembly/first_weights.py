"""The weights that training begins with: those of the base, of another run or of a file (`init_from`)."""

from daguerre.adapters.adapter import Attached
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.store import Store
from daguerre.errors import UserError, named
from daguerre.remote import local_copy
from daguerre.training.state import adopt


def take(attached: Attached, init_from: str | None) -> list[str]:
    """Puts the weights of `init_from` into the net, before it is split; without one it keeps those of the base. Returns
    notices."""
    if init_from is None:
        return []
    other = RunFolder(local_copy.located(init_from))
    if other.path.exists() and not (other.checkpoints.is_dir() or other.config.is_file()):
        return attached.start_from(other.path)
    notices, place = local_copy.fetch(other.path), f"{local_copy.display_name(other.path)}/checkpoints"
    found = Store(other.checkpoints).newest_verified()
    if found.path is None:
        raise UserError(
            f"init_from={init_from}: there is no checkpoint in {place}; train that run first, or give the folder of "
            "another",
            code="missing",
            setting="init_from",
        )
    notices += [*found.notices, f"starting from the weights of {place}/{found.path.name}"]
    with named(f"{place}/{found.path.name}"):
        return [*notices, *adopt(attached.net, Store(other.checkpoints).load(found.path).tensors, attached.names)]
