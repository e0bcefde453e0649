"""``celery locks tick``."""

import click
from celery.bin.base import CLIContext

from celery_distlock.naming import printable
from celery_distlock.stores import Ability

from . import CommandError, command
from .display import Screen, duration, write_json
from .single import admin_of, json_option

WAITS = 4  # the exit status, with --exit-code


@command("tick")
@click.option(
    "--exit-code", is_flag=True, help=f"Exit with status {WAITS} if tasks or calls wait after it."
)
@json_option
def tick_(obj: CLIContext, exit_code: bool, as_json: bool) -> None:
    """
    Wake what is due, once, as workers do all the time.

    Use this from a cron job while no worker runs: it sends tasks whose key is free, delayed calls
    that are due, and what a crash has left behind. Then it prints how much waits, by broker queue,
    and in how long time alone opens the next key. It does no harm while workers run.
    """
    done = admin_of(obj, Ability.LIST, Ability.QUEUE).tick()
    kinds = done.demand.kinds
    queues: dict[str, dict[str, int]] = {
        queue: {kind: numbers[queue] for kind, numbers in kinds.items()}
        for queue in sorted(done.demand.queues)
    }
    if as_json:
        write_json(
            {
                "sent": done.sent,
                "not_sent": done.left,
                **{kind: numbers.total() for kind, numbers in kinds.items()},
                "next_in_seconds": done.opens,
                "queues": queues,
            }
        )
    else:
        screen = Screen(obj)
        upcoming = "-" if done.opens is None else f"in {duration(done.opens)}"
        screen.facts([("sent", str(done.sent)), ("next", upcoming)])
        rows = ([printable(queue), *map(str, each.values())] for queue, each in queues.items())
        screen.table(("queue", *(kind.replace("_", " ") for kind in kinds)), rows)
    if done.left:
        raise CommandError(
            f"{done.left} that should have been sent were not: see the lines above; the next tick,"
            " or a worker, tries again"
        )
    if queues and exit_code:
        click.get_current_context().exit(WAITS)
