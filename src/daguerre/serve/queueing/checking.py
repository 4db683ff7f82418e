"""Answers of `daguerre train --dry-run` and `daguerre plan` as a page shows them."""

import re
from typing import Any

from daguerre import system
from daguerre.config.errors import Problem
from daguerre.errors import UserError
from daguerre.formatting import format_duration, format_size
from daguerre.queue.check import check, plan
from daguerre.report.html import Html, element, join, table
from daguerre.serve.queueing import trial
from daguerre.serve.queueing.drafts import Meant, place_of
from daguerre.serve.site import Site

_HEAD = re.compile(r".*: \d+ problems?")
_BLOCK = re.compile(r"  (\S+)(?: = .*)?\n((?:      .*(?:\n|$))+)")


def problems(text: str) -> list[Problem]:
    """The problems in a refusal, by setting; all of it as one without a path where it is no list of them."""
    head, _, rest = text.strip().partition("\n\n")
    blocks = rest.split("\n\n")
    found = [_BLOCK.fullmatch(block) for block in blocks]
    if not _HEAD.fullmatch(head) or not all(found):
        return [Problem("", text.strip())]
    return [Problem(one[1], "\n".join(line[6:] for line in one[2].splitlines())) for one in found if one]


def machine() -> list[str]:
    """Options of `plan` that say what this machine has: the memory of the host, and of its GPU if there is one."""
    found = [f"ram={system.memory_bytes() // 1_000_000}MB"]
    if gpus := system.gpus():
        found.append(f"card={min(one.total_bytes for one in gpus) >> 20}MiB")
    return found


def checked(site: Site, meant: Meant) -> dict[str, Any]:
    """The answer of `train --dry-run`, and the problems in it by setting; nothing else is true of what has none."""
    try:
        place_of(site, meant)
        return {"said": check(meant.words, site.catalog.folder, site.bounds), "problems": []}
    except UserError as error:
        return {"said": "", "problems": [[one.path, one.text] for one in problems(str(error))]}


def added(site: Site, meant: Meant) -> dict[str, Any]:
    """The same, and the id of the entry that a draft without problems becomes."""
    answer = checked(site, meant)
    if answer["problems"]:
        return answer
    where, works_in = place_of(site, meant)
    ident = site.queue.add(meant.words, where, works_in, site.catalog.folder, meant.devices, site.bounds)
    return {**answer, "id": ident}


def planned(site: Site, meant: Meant) -> Html:
    """The plan for this machine. UserError with its refusal."""
    options = machine()
    count = [f"devices={meant.devices}"]
    return summed_up(plan(meant.words, site.catalog.folder, site.bounds, [*options, *count]), options)


def tried(site: Site, meant: Meant) -> Html:
    """The figures of the first updates on this machine. UserError with the refusal."""
    place_of(site, meant)
    if meant.devices > 1:
        raise UserError("a trial is made on one device: try it on one, without `On N GPUs together`", code="conflict")
    if any(each.state == "running" for each in site.queue.entries()):
        raise UserError("a run of the queue trains now, and both would take the same device", code="in_use")
    found = trial.tried(meant.words, site.catalog.folder, site.bounds, site.stopping)
    rows: list[list[object]] = [
        ["an update", f"{found.seconds_per_update:.3g} s"],
        ["memory at most", format_size(found.peak_bytes)],
        ["in all", f"{found.total_steps:,} updates, {format_duration(found.hours * 3600)}"] if found.hours else [],
    ]
    note = f"Measured: the median of {trial.UPDATES} updates but the first; without saves, samples and validation."
    return join(table([], [row for row in rows if row], "plain"), element("p", note, class_="note"))


def summed_up(document: dict[str, Any], options: list[str]) -> Html:
    """A plan in a few lines: whether it fits, what it takes, how long it is."""
    step, host = document["step"], document.get("host") or {}
    ram = int(options[0].removeprefix("ram=").removesuffix("MB")) * 1_000_000
    fits = step.get("fits", True) and host.get("memory_bytes", 0) <= ram
    card = f" of {format_size(step['card_bytes'])}" if "card_bytes" in step else ""
    batch = f"{step['global_batch']:,} samples, {step['micro_batch']:,} at once"
    length = host.get("hours") is not None
    rows: list[list[object]] = [
        [
            f"memory of {'the device' if step['device'] == 'cuda' else 'a step'}",
            format_size(step["taken_bytes"]) + card,
        ],
        ["memory of the machine", f"{format_size(host['memory_bytes'])} of {format_size(ram)}"] if host else [],
        ["disk", format_size(sum(host["disk"].values()))] if host.get("disk") else [],
        ["an update", f"{batch}, {host['seconds_per_update']:.3g} s" if host else batch],
        [
            f"in all{', at most' * host['updates_at_most']}",
            f"{host['updates']:,} updates, {format_duration(host['hours'] * 3600)}",
        ]
        if length
        else [],
    ]
    said = "It fits this machine." if fits else "It does not fit this machine."
    fitting = document.get("fitting")
    remedy = (
        element("p", "It fits with ", *(join(element("code", word), " ") for word in fitting["overrides"]))
        if fitting
        else None
    )
    computed = element("p", f"Computed, not measured: {host['assumed']}.", class_="note") if host else None
    return join(
        element("p", element("b", said, class_="good" if fits else "poor")),
        remedy,
        table([], [row for row in rows if row], "plain"),
        computed,
    )
