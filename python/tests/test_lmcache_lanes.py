"""The eventfd of a lane, with a queue whose jobs end in a given order."""

from __future__ import annotations

import os
import select

import pytest

pytest.importorskip("lmcache", reason="LMCache is not in this environment")

from larder_kv.lmcache.lanes import Lane, Part, Task  # noqa: E402
from larder_kv.store import Status  # noqa: E402


class Queue:
    """The calls of a store's queue that a lane makes."""

    def __init__(self):
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.jobs = 0
        self.done = []

    def event_fd(self):
        return self.fd

    def submit(self, part):
        self.jobs += 1
        return self.jobs - 1

    def end(self, job):
        self.done.append((job, bytes([Status.OK]), 0, 0))
        os.eventfd_write(self.fd, 1)

    def poll(self):
        done, self.done = self.done, []
        if done and is_readable(self.fd):
            os.eventfd_read(self.fd)
        return done

    def close(self):
        os.close(self.fd)


def is_readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


@pytest.fixture
def queue():
    made = Queue()
    yield made
    made.close()


def submitted(lane, keys):
    """A task with a job for each key."""
    parts = []
    for slot in range(keys):
        part = Part(space=None)
        part.slots.append(slot)
        parts.append(part)
    return lane.submit(lambda number: Task(number, range(keys), 0), parts, Queue.submit)


def test_a_finished_task_keeps_its_wake_up_while_a_part_of_another_one_ends(queue):
    lane = Lane(queue)
    first, second, third = submitted(lane, 1), submitted(lane, 1), submitted(lane, 2)
    queue.end(0)
    # As LMCache's loop: it reads the eventfd, then it asks for each of its tasks.
    os.eventfd_read(queue.fd)
    assert lane.take(second) is None
    queue.end(1)
    assert lane.take(first).id == first
    queue.end(2)
    assert lane.take(third) is None
    assert is_readable(queue.fd)
    os.eventfd_read(queue.fd)
    assert lane.take(second).id == second
    assert not is_readable(queue.fd)
    queue.end(3)
    assert lane.take(third).id == third
