"""vLLM's jobs and the store's jobs that each consists of: one for each namespace and run of a
prefix.

vLLM reuses a row once its job is reported, and ends the engine for a job that is reported twice. So
a job is reported exactly once, when the last of its parts has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, NamedTuple, Optional

from larder_kv.vllm.spaces import Space


@dataclass
class Job:
    """A job of vLLM's."""

    id: int
    request: str
    is_load: bool
    #: Parts that have not finished; one more while parts are being submitted.
    left: int = 1
    #: Keys of chunks that were read, or are stored.
    good: list[bytes] = field(default_factory=list)
    #: Keys of chunks that were not.
    bad: list[bytes] = field(default_factory=list)
    #: Not all of it could be submitted.
    is_broken: bool = False
    #: Keys of chunks that were not in the store before.
    stored: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0
    #: Until when its chunks are pinned, in seconds since 1970.
    pin_until: Optional[float] = None
    #: The namespaces of its tenant.
    spaces: Mapping[bytes, Space] = field(default_factory=dict)


class Part(NamedTuple):
    """A job of the store."""

    job: Job
    keys: list[bytes]


class Jobs:
    """The jobs that are not reported yet."""

    def __init__(self) -> None:
        #: By the store's number.
        self._parts: dict[int, Part] = {}
        #: Finished, for the next report.
        self._finished: list[Job] = []

    def add(self, number: int, job: Job, keys: list[bytes]) -> None:
        """Notes a part that the store has accepted."""
        job.left += 1
        self._parts[number] = Part(job, keys)

    def take(self, number: int) -> Optional[Part]:
        """The part that finished. The caller hands it to ``end``, also after a failure."""
        return self._parts.pop(number, None)

    def end(self, job: Job) -> None:
        """One part of a job is over, or its submission."""
        job.left -= 1
        if job.left == 0:
            self._finished.append(job)

    def reported(self) -> list[Job]:
        """The finished jobs. They are forgotten."""
        finished, self._finished = self._finished, []
        return finished

    def abandon(self) -> None:
        """Fails all that is left, once the store touches no row any more."""
        parts, self._parts = self._parts, {}
        for part in parts.values():
            part.job.bad += part.keys
            self.end(part.job)

    def __len__(self) -> int:
        return len(self._parts)


def result(job: Job, kind: Any) -> Any:
    """A job in the form of vLLM's reports: ``kind`` is vLLM's ``JobResult``."""
    is_good = not (job.bad or job.is_broken)
    return kind(
        job_id=job.id,
        success=is_good,
        successful_keys=tuple(job.good) if job.is_load and job.good and not is_good else None,
        transfer_time=job.seconds or None,
        transfer_bytes=job.bytes,
    )
