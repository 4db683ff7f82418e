"""Settings of runs on several devices: how the processes meet, and how long they wait. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from daguerre.settings import FREE, Settings

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})/?")


def _checked_url(url: str) -> str:
    tcp = _TCP.fullmatch(url)
    if url == "env://" or re.fullmatch(r"file:///.*[^/]", url) or (tcp and 0 < int(tcp["port"]) < 1 << 16):
        return url
    raise ValueError("write env://, tcp://HOST:PORT, or file:///FOLDER/NEW-FILE on a disk that all nodes share")


class DistributedSettings(Settings):
    """How the processes of a run meet, and how long they wait for one another."""

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
    why. Longer than the longest thing that one rank does while others wait (drawing pictures, a save)."""
    stuck_seconds: float = Field(300, gt=0, json_schema_extra=FREE)
    """How long no rank may make a step before the stacks of all ranks are written and the run ends. Phases that
    take longer by nature (a first compilation, drawing pictures, evaluation) do not count."""
    silent_seconds: float = Field(120, ge=1, json_schema_extra=FREE)
    """How long a process may give no sign of life (its machine is down, its network is cut, it was stopped) before the
    run ends. A process that ends, however, is known at once."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.timeout_seconds <= self.stuck_seconds:
            raise ValueError(
                f"timeout_seconds={self.timeout_seconds:g} must be above stuck_seconds={self.stuck_seconds:g}: torch's "
                "time-out would come first, and says neither where nor why"
            )
        return self

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of a tcp:// rendezvous."""
        found = _TCP.fullmatch(self.dist_url)
        return (found["host"].strip("[]"), int(found["port"])) if found else None
