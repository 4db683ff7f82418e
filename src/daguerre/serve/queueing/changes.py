"""Changes of the queue that the page asks for: the verbs of `daguerre queue`, by the same code."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from daguerre import documents
from daguerre.queue.queue import Queue

MOST_BYTES = 4096
_Ident = Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


class Move(BaseModel):
    """Another place in the order."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["move"]
    id: _Ident
    where: Literal["first", "last"] | _Ident


class OfEntry(BaseModel):
    """A change of one entry."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["pause", "resume", "stop", "remove"]
    id: _Ident


class OfQueue(BaseModel):
    """Pauses the whole queue, or goes on with it."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["pause_all", "resume_all"]


_MESSAGE: TypeAdapter[Move | OfEntry | OfQueue] = TypeAdapter(
    Annotated[Move | OfEntry | OfQueue, Field(discriminator="kind")]
)


def make(queue: Queue, given: bytes) -> str:
    """Makes the change of a message; what happens now, in words. UserError for a change that cannot be made."""
    found = documents.sent(_MESSAGE.validate_json, given, "the page sent no change of the queue")
    match found:
        case Move():
            queue.move(found.id, found.where)
            return ""
        case OfQueue():
            queue.pause_all(found.kind == "pause_all")
            return "no further entry is started" if found.kind == "pause_all" else ""
        case OfEntry(kind="pause"):
            return queue.pause(found.id)
        case OfEntry(kind="stop"):
            return queue.stop(found.id).replace("a second `stop` kills it", "a second press kills it")
        case OfEntry(kind="resume"):
            queue.resume(found.id)
        case OfEntry():
            queue.remove(found.id)
    return ""
