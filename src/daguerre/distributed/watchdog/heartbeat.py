"""Heartbeats of the watchdogs of a run: each holds a connection to that of rank 0, and beats once a second.

The kernel closes the connections of a process that ends, however it ends, so the others know at once; a connection on
which nothing is heard belongs to a process that stands still, or to a machine that is out of reach. `HeartbeatServer`
is rank 0's side and judges, `HeartbeatClient` the others'. JSON documents go over the connections, one a line. No
torch, no thread: distributed/watchdog/watchdog.py calls `turn` again and again.
"""

import json
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from daguerre.distributed.watchdog.failure import Failure, Limits, Report, failed, from_document, gone, silent, stuck
from daguerre.distributed.watchdog.processes import Peer
from daguerre.errors import UserError

BEAT_SECONDS = 1.0
_TOGETHER_SECONDS = 0.3
"""Processes that end within this are lost together, as those of a node are."""
_STOOD_STILL_SECONDS = 5.0
"""A watchdog that was not called for this long was stopped itself, and knows nothing of the others in between."""
_CONNECT_SECONDS = 5.0
_LONGEST_LINE_BYTES = 1 << 20
_MOST_UNSENT_BYTES = 1 << 22


class Line:
    """One end of a connection. A connection that breaks, or that carries something else, is no longer `open`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.open = True
        """True while more can come."""
        self._unread = b""
        self._unsent = b""

    def send(self, document: dict[str, Any]) -> None:
        """Hands a document to the system, as far as that takes it; the rest goes with the next call."""
        self._unsent += json.dumps(document).encode() + b"\n"
        self.flush()
        self.open = self.open and len(self._unsent) < _MOST_UNSENT_BYTES

    def flush(self) -> None:
        """Hands over what is left."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # what the other end has said before it went can still be read

    def receive(self) -> list[dict[str, Any]]:
        """The documents that have come, without waiting; those that came before the end count."""
        try:
            while data := self.socket.recv(1 << 16):
                self._unread += data
                if len(self._unread) > _LONGEST_LINE_BYTES:
                    break
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._unread = self._unread.split(b"\n")
        return [document for line in lines if (document := self._read(line)) is not None]

    def _read(self, line: bytes) -> dict[str, Any] | None:
        try:
            document = json.loads(line)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            self.open = False  # somebody else's
            return None
        return document

    def close(self) -> None:
        self.open = False
        self.socket.close()


def settle(lines: Collection[Line], seconds: float = 0.5) -> None:
    """Ends connections so that the last words arrive: what comes in meanwhile is read, as the kernel would otherwise
    throw away both directions. Waits no longer than this for the other ends."""
    for line in lines:
        line.flush()
        with suppress(OSError):
            line.socket.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + seconds
    left = [line for line in lines if line.open]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        for line in left:
            line.receive()
        left = [line for line in left if line.open]
    for line in lines:
        line.close()


def listen() -> socket.socket:
    """Rank 0's end, on a port that the system chooses."""
    return socket.create_server(("", 0), backlog=1024)


def invitation(listener: socket.socket, addresses: Sequence[str]) -> dict[str, Any]:
    """JSON for the other ranks: where to connect, and a word that strangers do not know."""
    hosts = [*addresses, socket.gethostname(), *_own_addresses()]
    return {"hosts": list(dict.fromkeys(hosts)), "port": listener.getsockname()[1], "word": secrets.token_hex(16)}


def _own_addresses() -> list[str]:
    with suppress(OSError):
        return [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return []


def connect(invited: dict[str, Any], me: Peer) -> Line:
    """A rank's connection to rank 0. UserError where none of its addresses answers."""
    errors = []
    for host in invited["hosts"]:
        try:
            connection = socket.create_connection((host, invited["port"]), _CONNECT_SECONDS)
        except OSError as error:
            errors.append(f"{host}:{invited['port']}: {error}")
            continue
        line = Line(connection)
        line.send({"word": invited["word"], "peer": vars(me)})
        return line
    raise UserError(
        f"rank {me.rank} on {me.host} cannot reach the watchdog of rank 0 ({'; '.join(errors)}): open the ports "
        "between the nodes, or give MASTER_ADDR as an address that all of them can reach",
        code="unreachable",
    )


class _Side:
    """One end of the connections between the watchdogs."""

    def __init__(self, me: Peer, size: int, limits: Limits) -> None:
        self.peers = {me.rank: me}
        """Those that are known, this one among them."""
        self.limits = limits
        self._me, self._size = me, size
        self._beaten = self._turned = time.monotonic()
        self._selector = selectors.DefaultSelector()

    def _beats(self) -> bool:
        """True if it is time to beat."""
        now = time.monotonic()
        beats = now - self._beaten >= BEAT_SECONDS
        self._beaten = now if beats else self._beaten
        return beats

    def _stood_still(self) -> bool:
        """True if this watchdog stood still since it last asked. It asks after its wait, in which it spends nearly all
        of its time: a process that Ctrl-Z or a cluster stops is stopped there."""
        before, self._turned = self._turned, time.monotonic()
        return self._turned - before > _STOOD_STILL_SECONDS


class HeartbeatClient(_Side):
    """The side of every rank but 0."""

    def __init__(self, line: Line, me: Peer, size: int, limits: Limits) -> None:
        super().__init__(me, size, limits)
        self._line = line
        self._heard = self._turned
        self._selector.register(line.socket, selectors.EVENT_READ)
        self._released = False

    def turn(self, report: Report, seconds: float) -> Failure | None:
        """Sends and receives what there is, for about so long; the failure, once there is one."""
        if self._released:  # rank 0 is done in good order
            time.sleep(seconds)
            return None
        if self._beats():
            self._line.send({"beat": vars(report)})
        self._selector.select(seconds)
        if self._stood_still():
            self._heard = self._turned
        for document in self._line.receive():
            self._heard = time.monotonic()
            if "peers" in document:
                self.peers |= {peer["rank"]: Peer(**peer) for peer in document["peers"]}
            if "failure" in document:
                return from_document(document["failure"])
            if "bye" in document:
                self._released = True
        if self._released or (self._line.open and time.monotonic() - self._heard < self.limits.silent_seconds):
            return None
        if not self._line.open:
            return gone(self.peers, [0], self._size)
        failure = silent(self.peers, [0], self._size, self.limits)
        self._line.send({"failure": vars(failure)})  # should it wake up
        return failure

    def settle(self) -> None:
        """Sees to it that the last documents arrive."""
        settle([self._line])

    def leave(self, failure: str) -> None:
        """Sends the last word of this rank: why it failed, or nothing for an orderly end."""
        self._line.send({"failed": failure} if failure else {"bye": True})
        self._selector.close()
        settle([self._line])


class HeartbeatServer(_Side):
    """Rank 0's side: hears all ranks, and judges. Without a listener, one process on its own."""

    def __init__(self, listener: socket.socket | None, word: str, me: Peer, size: int, limits: Limits) -> None:
        super().__init__(me, size, limits)
        self._listener, self._word = listener, word
        self._lines: dict[int, Line] = {}
        self._strangers: list[Line] = []
        self._reports: dict[int, Report] = {}
        self._left: set[int] = set()
        """Ranks that are done in good order."""
        self._further = self._turned
        self._heard = dict.fromkeys(range(1, size), self._turned)
        self._lost_at: float | None = None
        self._failure: Failure | None = None
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def turn(self, report: Report, seconds: float) -> Failure | None:
        """As `HeartbeatClient.turn`; the others hear of a failure before this returns it."""
        self._note(0, report)
        if self._beats():
            self._tell({"beat": True})
        self._selector.select(seconds)
        if self._stood_still():
            self._further, self._heard = self._turned, dict.fromkeys(self._heard, self._turned)
        if self._listener is not None:
            self._welcome(self._listener)
        for rank, line in list(self._lines.items()):
            self._hear(rank, line)
        failure = self._failure or self._judge(time.monotonic())
        if failure is not None:
            self._tell({"failure": vars(failure)})
        return failure

    def _welcome(self, listener: socket.socket) -> None:
        """Ranks that connect say who they are; whoever says something else is shown out."""
        with suppress(BlockingIOError):
            while True:
                self._strangers.append(Line(listener.accept()[0]))
                self._selector.register(self._strangers[-1].socket, selectors.EVENT_READ)
        for line in list(self._strangers):
            documents = line.receive()
            if not documents and line.open:
                continue
            self._strangers.remove(line)
            if not documents or not secrets.compare_digest(str(documents[0].get("word")), self._word):
                self._selector.unregister(line.socket)
                line.close()
                continue
            peer = Peer(**documents[0]["peer"])
            self._lines[peer.rank], self.peers[peer.rank] = line, peer
            self._heard[peer.rank] = time.monotonic()
            self._understand(peer.rank, documents[1:])
            if len(self.peers) == self._size:
                self._tell({"peers": [vars(known) for known in self.peers.values()]})

    def _hear(self, rank: int, line: Line) -> None:
        self._understand(rank, line.receive())
        if not line.open:
            self._selector.unregister(line.socket)
            line.close()
            del self._lines[rank]
            if rank not in self._left:
                self._lost_at = self._lost_at or time.monotonic()

    def _understand(self, rank: int, documents: Collection[dict[str, Any]]) -> None:
        for document in documents:
            self._heard[rank] = time.monotonic()
            if "beat" in document:
                self._note(rank, Report(**document["beat"]))
            if "failure" in document:
                self._failure = self._failure or from_document(document["failure"])
            if "bye" in document:
                self._left.add(rank)
            if "failed" in document:
                self._left.add(rank)
                self._failure = self._failure or failed(self.peers[rank], document["failed"], self._size)

    def _note(self, rank: int, report: Report) -> None:
        before = self._reports.get(rank)
        if before is None or before.count != report.count:
            self._further = time.monotonic()
        self._reports[rank] = report

    def _judge(self, now: float) -> Failure | None:
        watched = [rank for rank in range(1, self._size) if rank not in self._left]
        if self._lost_at is not None:
            if now - self._lost_at < _TOGETHER_SECONDS:
                return None
            lost = [rank for rank in watched if rank in self.peers and rank not in self._lines]
            return gone(self.peers, lost, self._size)
        quiet = [rank for rank in watched if now - self._heard[rank] > self.limits.silent_seconds]
        if quiet:
            return silent(self.peers, quiet, self._size, self.limits)
        return self._stuck(now)

    def _stuck(self, now: float) -> Failure | None:
        """No rank got any further, and none is in a phase that may last."""
        reports = {rank: report for rank, report in self._reports.items() if rank not in self._left}
        allowed = [self.limits.stuck_seconds]
        for report in reports.values():
            if report.allowed_seconds is None:
                return None
            allowed.append(report.allowed_seconds)
        if now - self._further < max(allowed):
            return None
        quiet = {rank for rank in reports if rank and now - self._heard[rank] > 3 * BEAT_SECONDS}
        return stuck(self.peers, reports, quiet, self._size, max(allowed))

    def settle(self) -> None:
        settle([*self._lines.values(), *self._strangers])

    def _tell(self, document: dict[str, Any]) -> None:
        for line in self._lines.values():
            line.send(document)

    def leave(self, failure: str) -> None:
        """As `HeartbeatClient.leave`; the others hear why, or that nobody watches any longer."""
        if failure:
            self._tell({"failure": vars(failed(self._me, failure, self._size))})
        else:
            self._tell({"bye": True})
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        self.settle()


Heartbeat = HeartbeatClient | HeartbeatServer
"""A watchdog's way to the others."""
