"""Settings of runs on several devices: the mesh, how the processes meet, and how long they wait. No torch here."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from daguerre.distributed import mesh, sharding_rules
from daguerre.distributed.mesh import Axis
from daguerre.errors import UserError
from daguerre.settings import ELASTIC, FREE, Settings

Degree = Annotated[int, Field(ge=-1)]

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})/?")


def _checked_url(url: str) -> str:
    tcp = _TCP.fullmatch(url)
    if url == "env://" or re.fullmatch(r"file:///.*[^/]", url) or (tcp and 0 < int(tcp["port"]) < 1 << 16):
        return url
    raise UserError("write env://, tcp://HOST:PORT, or file:///FOLDER/NEW-FILE on a disk that all nodes share")


def _rule(given: Any) -> tuple[str, list[str]]:
    """A logical axis and where it goes; MaxDiffusion writes [heads, tensor] for [heads, [tensor]]."""
    known = (*sharding_rules.PARAMETER_AXES, *sharding_rules.ACTIVATION_AXES)
    name, axes = given if isinstance(given, (list, tuple)) and len(given) == 2 else (None, None)
    listed = [axes] if isinstance(axes, str) else axes
    if name in known and isinstance(listed, list) and all(axis in mesh.AXES for axis in listed):
        return name, listed
    raise UserError(
        f"{given!r}: a rule is a logical axis and its mesh axes, such as [heads, [tensor]]; logical axes are "
        f"{', '.join(known)}; mesh axes are {', '.join(mesh.AXES)}"
    )


class MeshSettings(Settings):
    """The mesh of a run's devices; nothing that is learnt depends on it. `data` copies the model and splits
    the batch, `fsdp` splits the batch and the model's state, `tensor` splits single layers."""

    mesh_axes: list[Axis] = Field(["data", "fsdp", "tensor"], json_schema_extra=ELASTIC)
    """Order of the axes, the outermost first: neighbours along the last one are neighbouring ranks."""
    dcn_data_parallelism: Degree = Field(-1, json_schema_extra=ELASTIC)
    """Degree of `data` between nodes; -1: what the others leave."""
    dcn_fsdp_parallelism: Degree = Field(1, json_schema_extra=ELASTIC)
    """Degree of `fsdp` between nodes; -1: the rest."""
    dcn_tensor_parallelism: Degree = Field(1, json_schema_extra=ELASTIC)
    """Degree of `tensor` between nodes; -1: the rest."""
    ici_data_parallelism: Degree = Field(-1, json_schema_extra=ELASTIC)
    """Degree of `data` inside a node; -1: what the others leave."""
    ici_fsdp_parallelism: Degree = Field(1, json_schema_extra=ELASTIC)
    """Degree of `fsdp` inside a node; -1: the rest."""
    ici_tensor_parallelism: Degree = Field(1, json_schema_extra=ELASTIC)
    """Degree of `tensor` inside a node; -1: the rest."""
    logical_axis_rules: list[tuple[str, list[Axis]]] = Field(
        [(name, list(axes)) for name, axes in sharding_rules.DEFAULT], json_schema_extra=ELASTIC
    )
    """Which axes of the mesh a logical axis is split over, the first rule that fits first: [[heads, [tensor]], ...]."""
    data_sharding: list[Axis] = Field(["data", "fsdp"], json_schema_extra=ELASTIC)
    """Axes over which a global batch is cut. The devices of a tensor group read the same samples, so `tensor` may stand
    here while its degree is 1."""
    shard_frozen: bool = Field(True, json_schema_extra=ELASTIC)
    """Split frozen networks (the autoencoder, text encoders) by the same rules; off: each device holds them whole,
    which takes memory and saves the gathering."""

    @field_validator("logical_axis_rules", mode="before")
    @classmethod
    def _single_axes(cls, given: object) -> object:
        return [_rule(rule) for rule in given] if isinstance(given, list) else given

    @field_validator("data_sharding", mode="before")
    @classmethod
    def _flat(cls, given: object) -> object:
        """MaxDiffusion writes [[data, fsdp]] for [data, fsdp]."""
        return given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list) else given

    @field_validator("mesh_axes")
    @classmethod
    def _names_all(cls, axes: list[Axis]) -> list[Axis]:
        if sorted(axes) != sorted(mesh.AXES):
            raise ValueError(f"the axes are {', '.join(mesh.AXES)}, each once, in any order")
        return axes

    def degrees(self, kind: Literal["dcn", "ici"]) -> dict[str, int]:
        """Degrees of one kind by axis, as they are given."""
        return {axis: getattr(self, f"{kind}_{axis}_parallelism") for axis in mesh.AXES}

    def resolved(self, devices: int, nodes: int) -> mesh.Mesh:
        """The mesh on so many devices. UserError where degrees and devices do not agree, or for rules that this engine
        cannot follow on it."""
        found = mesh.resolve(self.degrees("dcn"), self.degrees("ici"), devices, nodes, tuple(self.mesh_axes))
        sharding_rules.check_data_sharding(self.data_sharding, found)
        return found


class DistributedSettings(Settings):
    """Process group: rendezvous of the processes of a run, and how long they wait for one another."""

    dist_backend: Literal["auto", "nccl", "gloo"] = Field("auto", json_schema_extra=FREE)
    """What carries tensors between devices: nccl between GPUs, gloo between CPUs. `auto`: as the devices are."""
    dist_url: Annotated[str, AfterValidator(_checked_url)] = Field("env://", json_schema_extra=FREE)
    """Where the processes meet. `env://`: as torchrun and srun say (MASTER_ADDR and MASTER_PORT; under srun the first
    node, and a port that follows from the job's id). `tcp://HOST:PORT` of rank 0. `file:///FOLDER/NEW-FILE` on a disk
    that all nodes share, not there yet."""
    rendezvous_seconds: float = Field(600, gt=0, json_schema_extra=FREE)
    """How long the processes wait for one another at the start; those that did not come are then named."""
    timeout_seconds: float = Field(3600, gt=0, json_schema_extra=FREE)
    """Time-out of torch's own for a single collective call, the last resort: it knows neither which rank is missing nor
    why. Longer than the longest thing that one rank does while others wait (generating images, a save)."""
    stuck_seconds: float = Field(300, gt=0, json_schema_extra=FREE)
    """How long no rank may make a step before the stacks of all ranks are written and the run ends. Phases that
    take longer by nature (a first compilation, generating images, evaluation) do not count."""
    silent_seconds: float = Field(120, ge=1, json_schema_extra=FREE)
    """How long a process may give no sign of life (its machine is down, its network is cut, it was stopped) before the
    run ends. A process that ends, however, is known at once."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.timeout_seconds <= self.stuck_seconds:
            raise ValueError(
                f"timeout_seconds={self.timeout_seconds:g} must be above stuck_seconds={self.stuck_seconds:g}: "
                "otherwise torch's own time-out comes first, without a useful message"
            )
        return self

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of a tcp:// rendezvous."""
        found = _TCP.fullmatch(self.dist_url)
        return (found["host"].strip("[]"), int(found["port"])) if found else None
