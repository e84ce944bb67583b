"""LMCache's tasks of one kind, and the store's jobs that each consists of."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from typing import Any, Callable, Optional, Sequence

from larder_kv.lmcache.spaces import Space
from larder_kv.store import Queue, QueueFull, Status, StoreError

logger = logging.getLogger(__name__)

#: Of a chunk that this adapter left out on purpose, beside the store's statuses.
LEFT_OUT = 255


class Task:
    """A task: one status a key."""

    def __init__(
        self,
        number: int,
        keys: Sequence[Any],
        mark: int,
        objects: Optional[Sequence[Any]] = None,
        left_out: Sequence[int] = (),
    ) -> None:
        self.id = number
        self.keys = keys
        #: Of the ledger, at the submission. The result does not contradict later entries.
        self.mark = mark
        #: LMCache's memory, kept as long as jobs touch it.
        self.objects = objects
        self.statuses = bytearray([Status.OTHER]) * len(keys)
        for slot in left_out:
            self.statuses[slot] = LEFT_OUT
        #: By place in ``keys``: where the chunk is.
        self.spaces: dict[int, Space] = {}
        #: Jobs that are not finished.
        self.left = 0

    def end(self) -> None:
        """No job touches LMCache's memory any more."""
        self.objects = None

    def take(self, slots: Sequence[int], space: Space, statuses: Sequence[int]) -> None:
        """The result of a job. For a key with jobs in several spaces, the space with the key
        counts.
        """
        for slot, status in zip(slots, statuses):
            if self.statuses[slot] > Status.DUPLICATE:
                self.statuses[slot] = status
                self.spaces[slot] = space


class LoadTask(Task):
    """A load: LMCache cannot give its buffers to another chunk before it ends.

    LMCache frees the buffers of a load that goes on when its write reservation lapses, a request is
    aborted, or L1 is cleared. Its allocators pass over a buffer that is invalid, so the buffers are
    invalid until no I/O writes them. Then LMCache frees them as usual; buffers that it has dropped
    meanwhile are freed with their last reference, which is ours.
    """

    def __init__(self, *fields: Any, **more: Any) -> None:
        super().__init__(*fields, **more)
        for memory in self.objects or ():
            memory.invalidate()

    def end(self) -> None:
        for memory in self.objects or ():
            memory.valid = True
        super().end()


class Part:
    """Keys of a task that are one job."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.slots: list[int] = []
        self.keys: list[bytes] = []
        self.rows: list[int] = []


class Lane:
    """Tasks with an eventfd.

    Invariant: the eventfd is readable while a task has finished since the last hand-out. Each task
    is handed out once.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue: Optional[Queue] = queue
        self._fd = queue.event_fd()
        #: Guards the fields below. A submit is recorded under it, before a poll can return the job.
        self._guard = threading.Lock()
        self._numbers = itertools.count()
        #: By number of the store's job.
        self._jobs: dict[int, tuple[Task, Part]] = {}
        self._finished: dict[int, Task] = {}
        #: Jobs that the queue had no room for.
        self.refused = 0

    def event_fd(self) -> int:
        return self._fd

    def submit(
        self,
        task_of: Callable[[int], Task],
        parts: Sequence[Part],
        call: Callable[[Queue, Part], int],
    ) -> int:
        """A task of these parts, each given to the queue by ``call``. Never raises: rejected work
        fails.
        """
        with self._guard:
            task = task_of(next(self._numbers))
            for part in parts:
                self._give(task, part, call)
            if not task.left:
                self._end(task)
                self._wake()
            return task.id

    def _give(self, task: Task, part: Part, call: Callable[[Queue, Part], int]) -> None:
        why = Status.CLOSED
        if self._queue is not None:
            try:
                self._jobs[call(self._queue, part)] = (task, part)
                task.left += 1
                return
            except (TypeError, ValueError):
                why = Status.OTHER
                logger.exception("larder: a job of %d keys is wrong", len(part.slots))
            except QueueFull:
                why = Status.BUSY
                if not self.refused:
                    logger.warning(
                        "larder: more jobs than the queue takes: some are refused "
                        "(counted in `refused_jobs`)"
                    )
                self.refused += 1
            except StoreError as error:
                logger.warning("larder: a job was not accepted: %s", error)
        task.take(part.slots, part.space, [why] * len(part.slots))

    def _end(self, task: Task) -> None:
        task.end()
        self._finished[task.id] = task

    def _wake(self) -> None:
        if self._queue is not None:
            os.eventfd_write(self._fd, 1)

    def _poll(self) -> bool:
        """Notes the finished jobs. True if there are any: then the eventfd is reset."""
        jobs = self._queue.poll() if self._queue is not None else []
        for number, statuses, _, _ in jobs:
            task, part = self._jobs.pop(number)
            task.take(part.slots, part.space, statuses)
            task.left -= 1
            if not task.left:
                self._end(task)
        return bool(jobs)

    def finished(self) -> list[Task]:
        """All finished tasks."""
        with self._guard:
            self._poll()
            tasks = list(self._finished.values())
            self._finished.clear()
            return tasks

    def take(self, number: int) -> Optional[Task]:
        """One task, if it has finished."""
        with self._guard:
            is_reset = self._poll()
            task = self._finished.pop(number, None)
            if is_reset and self._finished:
                self._wake()
            return task

    @property
    def pending(self) -> int:
        """Jobs that have not finished."""
        queue = self._queue
        return queue.pending if queue is not None else 0

    @property
    def is_quiet(self) -> bool:
        """Whether all tasks were handed out."""
        with self._guard:
            return not self._jobs and not self._finished

    @property
    def stuck(self) -> int:
        """Jobs that the device holds beyond their timeout."""
        queue = self._queue
        return queue.stuck if queue is not None else 0

    def close(self) -> None:
        """Refuses further jobs and waits for running jobs, which the disk may hold."""
        queue = self._queue
        if queue is None:
            return
        queue.close()
        with self._guard:
            self._poll()
            self._queue = None
