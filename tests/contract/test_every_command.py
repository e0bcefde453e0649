"""
Whatever befalls a request, at whichever of its commands, what is guaranteed is kept.

Each scenario is played once for each command of each of its requests and each mishap. No key is
held twice, no more units are in use than fit, tokens rise, no task is lost, none runs twice unless
its process died; and in the end all keys are free, and nothing waits.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from celery_distlock import clock
from celery_distlock.rate import Rate
from celery_distlock.stores.memory.commands import COMMANDS
from celery_distlock.stores.queue_parts import Settled
from celery_distlock.stores.redis import request_runner, scripts
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.values import ALONE, Action, Limit, PeerChannel, Want, WokenTask
from tests.breaking import LEASE, READS, WRITES, Fault, Mishap, Run, World

AT_A_COMMAND = Mishap.ENDED, Mishap.ENDED_FOR_GOOD, Mishap.REFUSED
LEFT_TO_TEST_ALL = Mishap.ENDED_FOR_GOOD, Mishap.REFUSED
MISHAPS = [
    pytest.param(
        each,
        id=each.name.lower(),
        marks=[pytest.mark.exhaustive] if each in LEFT_TO_TEST_ALL else [],
    )
    for each in Mishap
]


def one_after_the_other(world):
    first, second, third = (world.comes("k") for _ in range(3))
    world.renews(first)
    world.ends(first)
    for run, _ in list(world.messages):
        world.messages.remove((run, True))
        world.begins(run, may_be_copy=True)
    world.ends(second)
    world.ends(third)


def a_holder_dies(world):
    first, _ = world.comes("k"), world.comes("k")
    world.dies(first)


def units(world):
    two = Want(2, 3)
    first, second, third = (
        world.comes("k", want=Want(1, 3)),
        *(world.comes("k", want=two) for _ in "ab"),
    )
    world.renews(first)
    world.ends(first)
    world.ends(second)
    world.ends(third)


def readers_and_a_writer(world):
    reader, other = world.comes("k", want=Want(1, 9)), world.comes("k", want=Want(1, 9))
    world.comes("k")
    world.comes("k", want=Want(1, 9))
    world.ends(reader)
    world.ends(other)


def rates(world):
    want = Want(1, 2, (Rate(2, per=20.0, burst=2),))
    for run in [world.comes("k", want=want) for _ in range(3)]:
        world.ends(run)


def several_keys(world):
    first, _, third = world.comes("a"), world.comes("a", "b"), world.comes("b")
    world.ends(first)
    world.ends(third)


def threads(world):
    first, *_ = world.comes("k"), world.blocks("k"), world.comes("k"), world.blocks("k")
    world.renews(first)
    world.ends(first)


def threads_alone(world):
    first, *_ = world.comes("k"), world.blocks("k"), world.blocks("k")
    world.ends(first)


def calls(world):
    first = world.sends("k")
    world.sends("k")
    world.sends("k", delay=5.0)
    world.cancels(world.sends("k"))
    world.cancels(world.sends("k", delay=5.0))
    world.ask(lambda: world.store.parking.destinations(["k"]))
    for ask in (world.store.calls.delayed, world.store.calls.bearers, world.store.waiters):
        world.ask(lambda ask=ask: ask("k"))
    world.ask(lambda: world.store.calls.peek("k", "same"))
    world.ask(lambda: world.store.calls.inherit("k", Identity("same", "finished"), first.name))


def newer_calls(world):
    same = Identity("same", recalls="all")
    first = world.sends("k", identity=same)
    world.arrives(first)
    second = world.sends_newer(first, identity=same)
    world.renews(first)
    third = world.sends_newer(second, identity=same._replace(replaces=second.name, beside=True))
    world.dies(first)
    world.arrives(first)
    world.arrives(second)
    world.renews(second)
    world.ask(lambda: world.store.recall("k", next(iter(second.holds.values()), "")))
    world.ends(second)
    world.arrives(third)
    world.ends(third)


def lanes(world):
    first = world.comes("k")
    for lane in ("a", "a", "b", None):
        world.sends("k", want=ALONE._replace(lane=lane))
    store, units = world.store, world.store.units
    world.ask(lambda: units.set_limit("k", Limit(0, store.time(1.0) / 1e6 + 5.0, "ann"), "a"))
    world.ask(lambda: store.parking.lanes("k"))
    world.ask(lambda: units.set_limit("k", None, "a"))
    world.ends(first)


def lanes_at_their_most(world):
    wants = [Want(1, 9, lane=lane, most=2) for lane in "aaab"]
    runs = [world.comes("k", want=want) for want in wants]
    runs += [world.sends("k", want=want) for want in wants]
    for run in runs:
        world.ends(run)


def strict(world):
    want = Want(strict=True)
    runs = [world.sends("k", want=each) for each in (want, want, Want(ahead=500), want)]
    for run in runs:
        world.ends(run)


def several_keys_step_by_step(world):
    # As where they are in several slots.
    world.store.parking.try_all = lambda request, counts: None
    several_keys(world)


def drops(world):
    first, second, _ = (world.comes("k") for _ in range(3))
    world.ends(first)
    world.drops(second)


def changes(world):
    first, second, third = (world.comes("k") for _ in range(3))
    world.shares_for_a_while(first)
    world.cancels(third)
    store, wake = world.store, WokenTask("k", second.name, second.name.encode())
    for act in (
        lambda: store.units.rest("k", next(iter(first.holds.values()), ""), 1.0),
        lambda: store.audit.record_action("k", Action("pause", "ann@ops-1", "their import")),
        lambda: store.units.set_limit("k", Limit(0, store.time(1.0) / 1e6 + 5.0, "ann@ops-1")),
        lambda: store.units.set_limit("k", None),
        lambda: store.count({"granted": 1.0}),
        lambda: store.retry_delay("k", 1.0, (1.0, 60.0), 1.0),
        lambda: store.channels.register_channel(
            ["celery"], PeerChannel(f"p:channel:{'0' * 32}", 1), 9.0
        ),
        lambda: store.channels.find_channels(["celery"]),
    ):
        world.ask(act)
    world.ends(first)
    for act in (
        lambda: store.channels.push(wake, [f"p:channel:{'0' * 32}"]),
        lambda: store.parking.keep_reserved([wake], 1.0),
        lambda: store.parking.mark_left(wake),
        lambda: store.parking.mark_returned(wake),
        lambda: [world.woken(each) for each in list(store.parking.wake_again("k"))],
        lambda: [world.woken(each) for each in list(store.parking.sweep(1.0))],
        store.timetable.dues,
    ):
        world.ask(act)


def times(world):
    store, names = world.store, ["k"]
    world.ends(world.comes("k"))
    world.ask(lambda: store.timetable.note_due({"k": 0.0}))
    with closing(store.timetable.ticker_inbox("t")) as inbox:
        claim = world.ask(lambda: store.timetable.claim_due("t", inbox, 5.0))
        world.ask(store.timetable.led_for)
        world.ask(lambda: [world.woken(each) for each in list(store.parking.wake_due(names, {}))])
        settled = Settled(claim.number if claim else "", {"k": None})
        world.ask(lambda: store.timetable.claim_due("t", inbox, 5.0, settled))


def one_leaves(world):
    first, _, third = world.comes("k"), world.comes("k", leaves=1.0), world.comes("k")
    world.pass_time(2.0)
    look = world.store.parking.wake_due
    world.ask(lambda: [world.woken(each) for each in list(look(["k"], {}))])
    world.ends(first)
    world.ends(third)


def all_in_one_step(world):
    store, runs = (
        world.store,
        [Run("r:0:0:0", ["a", "b"], ALONE), Run("s:0:0:0", ["a", "b"], ALONE)],
    )
    for run in runs:
        owners = [f"{run.name}/a", f"{run.name}/b"]
        world.runs[run.name] = run
        found = world.ask(
            lambda run=run, owners=owners: store.acquire_all("ab", owners, LEASE, run=run.name), run
        )
        if found:
            world.believes(run, dict(zip("ab", owners, strict=True)))
        else:
            world.begins(run, may_be_copy=world.died)
    world.ends(runs[0])


SCENARIOS = [
    lanes,
    lanes_at_their_most,
    strict,
    newer_calls,
    *(threads, calls, changes, times, all_in_one_step, drops, several_keys_step_by_step),
    threads_alone,
    one_after_the_other,
    a_holder_dies,
    units,
    readers_and_a_writer,
    rates,
    several_keys,
    one_leaves,
]


@pytest.fixture
def play(monkeypatch):
    """Play a scenario with a fault; return the world after it."""
    now = [clock.monotonic()]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(request_runner.time, "sleep", lambda _: None)

    def pass_time(seconds):
        now[0] += seconds

    def play(scenario, fault=None):
        world = World(fault, pass_time)
        tick = world.server.execute

        def execute(call):
            pass_time(0.001)
            return tick(call)

        world.server.execute = execute
        scenario(world)
        world.come_to_rest("abk")
        return world

    return play


def faults(requests, mishaps):
    seen = set()
    for number, (script, *commands) in enumerate(requests):
        if script == "inspect" or (script, *commands) in seen:
            continue
        seen.add((script, *commands))
        for mishap in mishaps:
            if mishap in AT_A_COMMAND:
                yield from (Fault(mishap, number, at) for at in range(len(commands)))
            else:
                yield Fault(mishap, number)


@pytest.mark.parametrize("mishap", MISHAPS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_is_guaranteed_is_kept(play, scenario, mishap):
    for fault in faults(play(scenario).server.requests, [mishap]):
        try:
            play(scenario, fault)
        except Exception as error:
            error.add_note(f"{fault}")
            raise


def test_every_script_takes_part(play):
    called = {script for each in SCENARIOS for script, *_ in play(each).server.requests}
    texts = {path.stem: path.read_text() for path in Path(scripts.__file__).parent.glob("*.lua")}
    used = {
        name
        for text in texts.values()
        for name in text.partition("USES ")[2].split("\n")[0].split()
    }

    assert texts.keys() - used - called == {"vote"}  # which is Redlock's


def test_every_command_is_known_to_write_or_to_read():
    assert COMMANDS.keys() == READS | WRITES
