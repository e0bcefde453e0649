"""The main thing: tasks of one key run one after the other, and all of them run."""

from __future__ import annotations

SHARED = True


def test_a_task_keeps_its_key_for_longer_than_three_leases(site, key):
    first = site.tasks.count.delay(key, 3.3 * site.tasks.LEASE)
    site.wait_held(key)
    others = [site.tasks.count.delay(key) for _ in range(3)]

    for result in [first, *others]:
        result.get(timeout=60)

    assert site.journal.read(f"{key}:overlaps") == []
    assert site.journal.get(key) == 4


def test_500_tasks_over_5_keys_neither_overlap_nor_get_lost(site, key):
    keys = [f"{key}:{number}" for number in range(5)]

    results = [site.tasks.count.delay(keys[i % 5]) for i in range(500)]
    for result in results:
        result.get(timeout=100)

    for each in keys:
        assert site.journal.read(f"{each}:overlaps") == []
        assert site.journal.get(each) == 100
        tokens = site.journal.read(f"{each}:tokens")
        assert len(set(tokens)) == 100
        assert tokens == sorted(tokens)
