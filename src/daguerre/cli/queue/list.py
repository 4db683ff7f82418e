"""Show what waits, trains and has ended.

usage: daguerre queue list [queue=DIR]
"""

from daguerre import errors
from daguerre.cli.queue import entries
from daguerre.queue.queue import Listed


def run(arguments: list[str]) -> int:
    """Exit code 0."""
    queue, _ = entries(arguments, "list", most=0, least=0)
    listed = queue.entries()
    if queue.is_paused:
        print("the queue is paused: `daguerre queue resume` starts entries again")
    if not listed:
        print("nothing is in the queue: `daguerre queue add RECIPE` puts a training there")
    for each in listed:
        print(_line(each))
    return errors.DONE


def _line(each: Listed) -> str:
    step, total = each.status.get("step"), each.status.get("total_steps")
    done = f", {step:,} of {total:,} updates" if isinstance(step, int) and isinstance(total, int) else ""
    why = f" ({each.why})" if each.why else ""
    return f"{each.ident}  {each.state:<11}  {each.entry.place}{done}{why}"
