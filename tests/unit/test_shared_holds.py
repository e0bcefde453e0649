from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from types import SimpleNamespace

import pytest

from celery_distlock import clock
from celery_distlock.engine import shared_holds as ledger_module
from celery_distlock.engine.hold import Hold, HoldState, Terms, believed
from celery_distlock.engine.shared_holds import OrphanedHold, SharedHolds, StalledHolds
from celery_distlock.keys import slot_name
from tests import processes


def hold(key: str, store: str = "redis://here#p") -> Hold:
    return Hold(SimpleNamespace(identity=store), key, Terms(), label="task")


@pytest.fixture
def small_page(monkeypatch) -> None:
    """Pages that have room for one key of a hundred characters."""
    empty = len(json.dumps([["redis://here#p", "", hold("x").owner, 0.0, None]]))
    monkeypatch.setattr(ledger_module, "_HALF", empty + 140)  # a child's owner differs by some


def keys(remains) -> list[str]:
    return [each.key for each in remains]


def fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 on: threads of other tests may be alive, which is no concern of ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Child:
    """
    A forked process that notes and removes what is ordered, until it is killed.

    Attributes:
        pid: Its own.
    """

    def __init__(self, ledger: SharedHolds) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            try:
                os.close(self._orders)
                _serve(ledger, orders, answers)
            finally:
                os._exit(0)
        os.close(orders)
        os.close(answers)
        self._reader = os.fdopen(self._answers, "r")
        self.reaped = False

    def do(self, *order: str) -> str:
        """Have an order carried out; return the answer, an owner or a pid."""
        os.write(self._orders, json.dumps(order).encode() + b"\n")
        return json.loads(self._reader.readline())

    def note(self, *keys: str) -> None:
        for key in keys:
            self.do("note", key)

    def remove(self, key: str) -> None:
        self.do("remove", key)

    def kill(self, *, reap: bool = True) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if reap:
            self.reap()

    def reap(self) -> None:
        os.waitpid(self.pid, 0)
        self.reaped = True

    def close(self) -> None:
        if not self.reaped:
            self.kill()
        self._reader.close()
        os.close(self._orders)


def _serve(ledger: SharedHolds, orders: int, answers: int) -> None:
    ledger.after_fork()
    noted: dict[str, Hold] = {}
    for line in os.fdopen(orders):
        verb, what = json.loads(line)
        answer: object = os.getpid()
        if verb in {"note", "ask"}:
            noted[what] = hold(what)
            ledger.record(noted[what], at_once=verb == "ask")
            answer = noted[what].owner
        elif verb == "take":
            noted[what].state = HoldState.HELD
            ledger.record(noted[what])
        elif verb == "end":
            noted[what].end()
            ledger.record(noted[what])
        elif verb == "beat":
            at = clock.monotonic() + float(what)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(clock, "monotonic", lambda at=at: at)
                ledger.heartbeat()
        elif verb == "kept":
            answer = ledger.renewed_until(noted[what].owner)
        elif verb == "remove":
            ledger.erase(noted[what].owner)
        elif verb == "fork":
            answer = os.fork()
            if answer == 0:
                ledger.after_fork()
                ledger.record(hold(what))
                answer = os.getpid()
                os.write(answers, json.dumps(answer).encode() + b"\n")
                signal.pause()
            continue
        os.write(answers, json.dumps(answer).encode() + b"\n")


@pytest.fixture
def ledger():
    ledger = SharedHolds()
    yield ledger
    ledger.close()


@pytest.fixture
def child(ledger):
    """Forks children of this process that share `ledger`."""
    children: list[Child] = []

    def start() -> Child:
        children.append(Child(ledger))
        return children[-1]

    yield start
    for each in children:
        each.close()


@pytest.fixture
def later(monkeypatch):
    """Makes seconds pass for this process."""
    now, passed = clock.monotonic, 0.0

    def skip(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(clock, "monotonic", lambda: now() + passed)
    return skip


# What a child does not renew


@pytest.fixture
def holder(ledger, child, later):
    """A child that has held "a" for more than half a lease and has not renewed it."""
    one = child()
    one.note("a")
    one.do("take", "a")
    assert not list(ledger.stalled())  # seen for the first time
    later(16.0)
    return one


def test_what_a_child_has_not_renewed_for_half_a_lease_is_neglected(ledger, holder):
    (neglect,) = ledger.stalled()

    assert [(hold.key, hold.lease) for hold in neglect.holds.values()] == [("a", 30.0)]


def test_what_it_has_held_for_less_is_not(ledger, child, later):
    one = child()
    one.note("a")
    one.do("take", "a")
    for _ in range(2):
        assert not list(ledger.stalled())
        later(14.0)


def test_what_it_renews_itself_is_not(ledger, holder):
    holder.do("beat", "10.0")

    assert not list(ledger.stalled())


def test_what_it_has_asked_for_and_not_got_is_not(ledger, child, later):
    child().note("a")
    assert not list(ledger.stalled())
    later(16.0)

    assert not list(ledger.stalled())


def test_what_it_has_asked_for_at_once_counts_as_got_and_is_not_written_again(ledger, child, later):
    one = child()
    one.do("ask", "a")
    assert not list(ledger.stalled())
    later(10.0)
    one.do("take", "a")
    later(6.0)

    (neglect,) = ledger.stalled()  # had it been written again, that would have been a sign of life
    keep_all(ledger, neglect, clock.monotonic())

    assert one.do("kept", "a")


def test_what_it_is_giving_back_is_not(ledger, holder, later):
    holder.do("end", "a")
    assert not list(ledger.stalled())
    later(16.0)

    assert not list(ledger.stalled())


def test_what_a_dead_child_held_is_not(ledger, holder):
    holder.kill()
    list(ledger.reap())

    assert not list(ledger.stalled())


def keep_all(ledger, neglect, asked_at):
    ledger.extend(neglect, list(neglect.holds), asked_at)


def test_a_child_believes_what_its_parent_has_renewed(ledger, holder):
    (neglect,) = ledger.stalled()
    asked_at = clock.monotonic()

    keep_all(ledger, neglect, asked_at)

    assert holder.do("kept", "a") == asked_at + believed(30.0)
    assert not list(ledger.stalled())


def test_what_its_parent_renews_goes_on_being_neglected(ledger, holder, later):
    for _ in range(3):
        (neglect,) = ledger.stalled()
        keep_all(ledger, neglect, clock.monotonic())
        later(16.0)


def test_what_could_not_be_renewed_is_tried_again_after_a_ninth_of_the_lease(ledger, holder, later):
    assert list(ledger.stalled())
    later(3.0)
    assert not list(ledger.stalled())
    later(0.5)
    assert list(ledger.stalled())


def test_a_child_believes_only_of_what_was_renewed(ledger, child, later):
    one = child()
    for key in "abc":
        one.note(key)
        one.do("take", key)
    one.note("d")  # asked for
    assert not list(ledger.stalled())
    later(16.0)
    (neglect,) = ledger.stalled()

    ledger.extend(neglect, [0, 2], clock.monotonic())

    assert list(neglect.holds) == [0, 1, 2]
    assert [bool(one.do("kept", key)) for key in "abcd"] == [True, False, True, False]


def test_a_child_goes_on_to_believe_it_when_it_writes_again(ledger, holder):
    (neglect,) = ledger.stalled()
    asked_at = clock.monotonic()
    keep_all(ledger, neglect, asked_at)

    holder.note("b")
    holder.do("take", "b")
    holder.remove("b")

    assert holder.do("kept", "a") == asked_at + believed(30.0)


def test_a_child_does_not_believe_it_of_what_it_has_taken_since(ledger, holder):
    (neglect,) = ledger.stalled()
    holder.note("b")
    holder.do("take", "b")

    keep_all(ledger, neglect, clock.monotonic())

    assert holder.do("kept", "a") == holder.do("kept", "b") == 0.0


# What is left of a child


def test_what_a_dead_child_noted_is_reported_once(ledger, child):
    one = child()
    owner = one.do("note", "a")
    one.note("b")
    one.kill()

    assert sorted(ledger.reap()) == [
        OrphanedHold("redis://here#p", "a", owner),
        OrphanedHold("redis://here#p", "b", owner[:-1] + "2"),
    ]
    assert not list(ledger.reap())


def test_what_it_removed_is_not(ledger, child):
    one = child()
    one.note("a", "b", "c")
    one.remove("b")
    one.kill()

    assert keys(ledger.reap()) == ["a", "c"]


def test_a_child_that_removed_everything_leaves_nothing(ledger, child):
    one = child()
    one.note("a", "b")
    one.remove("a")
    one.remove("b")
    one.kill()

    assert not list(ledger.reap())


def test_a_second_removal_does_nothing(ledger, child):
    one = child()
    one.note("a", "b")
    one.remove("a")
    one.remove("a")
    one.kill()

    assert keys(ledger.reap()) == ["b"]


def test_any_text_is_a_key(ledger, child):
    texts = ["ä€😀", 'a"b\\c\n', "{}", "\0"]
    one = child()
    one.note(*texts)
    one.kill()

    assert keys(ledger.reap()) == texts


def test_children_do_not_mix(ledger, child):
    gone, stays = child(), child()
    stays.note("kept")
    gone.note("left")
    stays.note("kept too")
    gone.kill()

    assert keys(ledger.reap()) == ["left"]
    stays.kill()
    assert keys(ledger.reap()) == ["kept", "kept too"]


# Dead processes


def test_a_child_that_lives_is_left_alone(ledger, child):
    child().note("a")

    assert not list(ledger.reap())


def test_a_child_that_is_stopped_is_left_alone(ledger, child):
    one = child()
    one.note("a")
    os.kill(one.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)

    assert not list(ledger.reap())


def test_a_dead_child_need_not_have_been_reaped_and_still_can_be(ledger, child):
    one = child()
    one.note("a")
    one.kill(reap=False)

    assert keys(ledger.reap()) == ["a"]
    assert os.waitpid(one.pid, 0) == (one.pid, signal.SIGKILL)
    one.reaped = True


@pytest.mark.parametrize("parent_dies", [False, True])
def test_a_process_that_a_child_forked_is_left_alone_while_it_lives(ledger, child, parent_dies):
    one = child()
    grandchild = int(one.do("fork", "a"))
    try:
        if parent_dies:
            one.kill()

        assert processes.alive(grandchild)
        assert not list(ledger.reap())
    finally:
        os.kill(grandchild, signal.SIGKILL)


# The parent


def test_the_parents_own_notes_are_not_reported(ledger, child):
    ours = hold("ours")
    ledger.record(ours)
    one = child()
    one.note("its")
    one.kill()

    assert keys(ledger.reap()) == ["its"]
    ledger.erase(ours.owner)


def test_a_child_cannot_remove_its_parents_notes_nor_write_them_as_its_own(ledger):
    ours = hold("ours")
    ledger.record(ours)
    pid = fork()
    if pid == 0:
        try:
            ledger.after_fork()
            ledger.erase(ours.owner)
            ledger.record(hold("its"))
            ledger.erase(ours.owner)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

    assert keys(ledger.reap()) == ["its"]
    assert ours.owner in ledger._entries


def test_a_child_writes_though_a_thread_of_its_parent_was_writing_at_the_fork(ledger, child):
    writing, done = threading.Event(), threading.Event()

    def write() -> None:
        with ledger._mutex:
            writing.set()
            done.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert writing.wait(30)
        one = child()
        one.note("a")
    finally:
        done.set()
        thread.join()
    one.kill()

    assert keys(ledger.reap()) == ["a"]


def test_a_process_that_was_not_forked_has_a_ledger_of_its_own(ledger):
    code = (
        "from tests.unit.test_shared_holds import SharedHolds, hold\n"
        "ledger = SharedHolds()\n"
        "ledger.record(hold('a'))\n"
        "assert not list(ledger.reap())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    assert not list(ledger.reap())


# Deaths in the middle of a write


def die_at(instruction: int, action) -> int:
    """Fork a child that does *action* and is killed before the given instruction of it."""
    pid = fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        left = instruction

        def trace(frame, event, _argument):
            nonlocal left
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_code.co_filename == ledger_module.__file__:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        # Python 3.12.1 asks the frame that starts it, too.
        sys._getframe().f_trace_opcodes = True
        action(lambda: sys.settrace(trace))
    finally:
        os._exit(0)


def outcomes(ledger, action) -> list[list[str]]:
    """What is left of children that are killed at one instruction of *action* after the other."""
    found = []
    for instruction in range(2000):
        status = die_at(instruction, action)
        found.append(keys(ledger.reap()))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found
    raise AssertionError("it has no end")


def changes(found: list[list[str]]) -> list[list[str]]:
    return [now for i, now in enumerate(found) if i == 0 or found[i - 1] != now]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_death_at_any_instruction_of_a_note_leaves_the_old_record_or_the_new_one(ledger):
    def action(begin) -> None:
        ledger.after_fork()
        ledger.record(hold("old"))
        new = hold("new")
        begin()
        ledger.record(new)
        sys.settrace(None)

    found = outcomes(ledger, action)

    assert len(found) > 50
    assert changes(found) == [["old"], ["old", "new"]]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_death_at_any_instruction_of_the_first_note_leaves_nothing_or_it(ledger):
    def action(begin) -> None:
        ledger.after_fork()
        first = hold("first")
        begin()
        ledger.record(first)
        sys.settrace(None)

    found = outcomes(ledger, action)

    assert len(found) > 50
    assert changes(found) == [[], ["first"]]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_death_at_any_instruction_of_a_removal_leaves_the_old_record_or_the_new_one(ledger):
    def action(begin) -> None:
        ledger.after_fork()
        gone = hold("gone")
        ledger.record(gone)
        ledger.record(hold("kept"))
        begin()
        ledger.erase(gone.owner)
        sys.settrace(None)

    assert changes(outcomes(ledger, action)) == [["gone", "kept"], ["kept"]]


def record_twice(ledger, line: int) -> int:
    """Fork one that records a first hold, and another in a handler at *line*; return its status."""
    pid = fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    signal.alarm(30)
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != ledger_module.__file__:
            return None
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            ledger.record(hold("handler"))
        return trace

    try:
        ledger.after_fork()
        first = hold("first")
        sys.settrace(trace)
        ledger.record(first)
        sys.settrace(None)
    finally:
        os._exit(left < 0)


def test_what_a_signal_s_handler_records_at_any_line_of_another_record_is_there(ledger):
    for line in range(200):
        status = record_twice(ledger, line)
        assert os.WIFEXITED(status), f"it hangs at line {line}"
        found = sorted(keys(ledger.reap()))
        if not os.WEXITSTATUS(status):  # the handler was no longer called
            assert line > 20
            return
        assert found == ["first", "handler"], line
    raise AssertionError("it has no end")


def remove_and_record(ledger, moment: int, renewed: str) -> int:
    """
    Fork one that removes a hold, and records another in a long handler.

    That comes at a *moment* when one can: as a function begins or ends. What has the key *renewed*
    is renewed for it in between.

    Returns:
        0 if the handler was not called, 1 if just that is believed then, else another number.
    """
    pid = fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(30)
    left, expected, removed, other = moment, 0.0, hold("removed"), hold("handler")

    def handle() -> None:
        nonlocal expected
        ledger.record(other)
        page = ledger._page
        version = ledger._heads[page].version
        written = dict(enumerate(ledger_module._decode(ledger._read(page))))
        indexes = [index for index, each in written.items() if each.key == slot_name(renewed)]
        if indexes:
            ledger.extend(StalledHolds(page, version, written), indexes, clock.monotonic())
            expected = ledger.renewed_until(other.owner)

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != ledger_module.__file__:
            return None
        left -= event in ("call", "return")
        if left < 0:
            sys.settrace(None)
            handle()
        return trace

    status = 2
    try:
        ledger.after_fork()
        ledger.record(removed)
        sys.settrace(trace)
        ledger.erase(removed.owner)
        sys.settrace(None)
        if ledger.renewed_until(other.owner) == expected:
            status = int(left < 0)
    finally:
        os._exit(status)


@pytest.mark.parametrize("renewed", ["removed", "handler"])
def test_what_is_renewed_while_a_signal_s_handler_lasts_is_what_is_believed(ledger, renewed):
    for moment in range(200):
        status = remove_and_record(ledger, moment, renewed)
        list(ledger.reap())
        if not status:  # the handler was no longer called
            assert moment > 8
            return
        assert status == 1, moment
    raise AssertionError("it has no end")


def test_a_death_while_the_text_is_copied_leaves_the_old_record(ledger):
    class HalfCopied:
        def __init__(self, memory) -> None:
            self._memory = memory

        def __getitem__(self, place):
            return self._memory[place]

        def __setitem__(self, place, value) -> None:
            assert isinstance(place, slice), "the text comes first"
            self._memory[place.start : place.start + len(value) // 2] = value[: len(value) // 2]
            os.kill(os.getpid(), signal.SIGKILL)

    pid = fork()
    if pid == 0:
        try:
            ledger.after_fork()
            for key in ("a", "b"):
                ledger.record(hold(key))
            ledger._parents_renewals = dict  # which would read it
            ledger._memory = HalfCopied(ledger._memory)
            ledger.record(hold("c"))
        finally:
            os._exit(0)

    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert keys(ledger.reap()) == ["a", "b"]


# Pages


def pages_taken(ledger) -> int:
    return sum(head.pid != 0 for head in ledger._heads)


def test_a_page_is_taken_by_the_first_note_and_used_again_after_a_death(ledger, child):
    for number in range(5):
        one = child()
        assert pages_taken(ledger) == 0
        one.note(f"{number} first", f"{number} second")
        assert pages_taken(ledger) == 1
        one.kill()
        assert keys(ledger.reap()) == [f"{number} first", f"{number} second"]
    assert pages_taken(ledger) == 0


def test_a_page_shows_nothing_of_its_former_owner(ledger, child):
    before = child()
    before.note("a" * 1000, "b" * 1000, "c")
    before.kill()
    list(ledger.reap())

    after = child()
    after.note("d")
    after.remove("d")
    after.kill()
    assert not list(ledger.reap())


def test_a_child_without_a_free_page_goes_on_without(monkeypatch, child):
    monkeypatch.setattr(ledger_module, "PAGES", 2)
    small = SharedHolds()
    children = [Child(small) for _ in range(3)]
    try:
        for number, each in enumerate(children):
            each.note(str(number), f"{number} again")
            each.remove(str(number))
            each.kill()
        assert keys(small.reap()) == ["0 again", "1 again"]

        late = Child(small)
        children.append(late)
        late.note("late")
        late.kill()
        assert keys(small.reap()) == ["late"]
    finally:
        for each in children:
            each.close()
        small.close()


def test_children_that_begin_at_one_time_take_a_page_each(ledger):
    count, start = 16, os.pipe()
    pids = []
    for number in range(count):
        pid = fork()
        if pid == 0:
            try:
                ledger.after_fork()
                os.close(start[1])
                os.read(start[0], 1)  # ends for all of them when the parent closes it
                ledger.record(hold(str(number)))
            finally:
                os._exit(0)
        pids.append(pid)
    for end in start:
        os.close(end)
    for pid in pids:
        os.waitpid(pid, 0)

    assert sorted(keys(ledger.reap()), key=int) == [str(number) for number in range(count)]


def test_a_key_that_is_longer_than_a_page_is_noted_by_the_name_of_its_records(ledger, child):
    key = "b" * ledger_module.PAGE
    one = child()
    one.note("a", key)
    one.kill()

    short, long = keys(ledger.reap())
    assert (short, slot_name(long)) == ("a", slot_name(key))


def test_too_much_for_a_page_is_left_to_the_leases_until_it_is_removed(ledger, child, small_page):
    one = child()
    one.note("a", "b" * 150)
    two = child()
    two.note("c", "d" * 150)
    two.remove("d" * 150)
    one.kill()
    two.kill()

    assert keys(ledger.reap()) == ["c"]


def test_what_just_fits_a_page_is_kept_whole_in_either_half(ledger, child, small_page):
    longest = 100
    for _ in range(2):
        one, neighbour = child(), child()
        neighbour.note("n")
        for number in range(3):
            key = str(number) * longest
            one.note(key)
            if number < 2:
                one.remove(key)
        one.kill()
        assert keys(ledger.reap()) == ["2" * longest]
        neighbour.kill()
        assert keys(ledger.reap()) == ["n"]


def test_the_file_is_nowhere_to_be_found_and_ends_with_the_ledger():
    ledger = SharedHolds()
    number = ledger._file.fileno()
    with contextlib.suppress(FileNotFoundError):
        assert not os.path.exists(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH110, PTH115
    ledger.close()


SIZE = ledger_module.PAGES * ledger_module.PAGE  # bytes


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is a disk under it here")
def test_it_needs_no_temporary_folder_which_may_be_full(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")

    with contextlib.closing(SharedHolds()._file) as file:
        assert os.fstat(file.fileno()).st_size == SIZE


def test_where_it_needs_a_disk_it_has_all_of_its_room_from_the_beginning(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)

    with contextlib.closing(SharedHolds()._file) as file:
        assert os.fstat(file.fileno()).st_blocks * 512 >= SIZE


@pytest.mark.parametrize("memory", [True, False])
def test_a_ledger_for_which_there_is_no_room_is_not_made(monkeypatch, memory):
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            SharedHolds()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
