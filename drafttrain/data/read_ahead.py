"""The train split's features on their way into the trainer: stored ones are read by a thread while the step before them
runs, and samples whose features are not finite are left out by name.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from rich.console import Console

from drafttrain.data.batching import row_name
from drafttrain.data.conversations import DataError
from drafttrain.data.features import ATTACHED, FeatureSource, finite_rows, muted
from drafttrain.drafts.base import Batch

DEPTH = 2
"""Batches that are read ahead of the one in training."""
MOST_BROKEN = 16
"""So many samples may be left out before their share counts: above half, something is wrong with all of them."""
NAMES = tuple(field.name for field in fields(Batch))


class ReadAhead:
    """Iterates over collated batches, the stored part of the next ones being read by one thread meanwhile.

    source(): asked anew for each batch. Order and values are those without it; an error of the thread is raised where
    its batch would come. waited: seconds that the consumer had to wait for the thread.
    """

    def __init__(self, source: Callable[[], FeatureSource], depth: int = DEPTH):
        self.source, self.depth, self.waited = source, depth, 0.0
        self._batches: Iterator[dict[str, Any]] | None = None
        self._reading: Iterator[dict[str, Any]] = iter(())

    def over(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same batches, with what is stored for them. Asked for the same iterator again: goes on with it."""
        if not self.source().reads_ahead:
            return batches
        if batches is not self._batches:
            self.close()
            self._batches, self._reading = batches, self._read_all(batches)
        return self._reading

    def close(self) -> None:
        """End the thread; what it has read is dropped."""
        if self._batches is not None:
            self._reading.close()
            self._batches = None

    def _read_all(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        pool = ThreadPoolExecutor(1, "features")
        waiting: deque = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(self._read, batch))
                if len(waiting) > self.depth:
                    yield self._next(waiting)
            while waiting:
                yield self._next(waiting)
        finally:
            pool.shutdown(cancel_futures=True)

    def _next(self, waiting: deque) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            return waiting.popleft().result()
        finally:
            self.waited += time.perf_counter() - started

    def _read(self, inputs: dict[str, Any]) -> dict[str, Any]:
        batch = self.source().read(batch_of(inputs))
        found = {name: getattr(batch, name) for name in ATTACHED}
        return inputs | {name: values for name, values in found.items() if values is not None}


class Screen:
    """Leaves out samples whose features are not finite: nothing of them is supervised. Each is named once on stderr.

    rows: of the split, for the names. DataError where most samples are broken.
    """

    def __init__(self, rows: Sequence[dict]):
        self.names = {row["index"]: row_name(row) for row in rows}
        self.seen, self.broken = 0, set()

    def pass_on(self, batch: Batch) -> Batch:
        """The batch, its broken samples silent."""
        finite = finite_rows(batch)
        self.seen += len(finite)
        if finite.all():
            return batch
        for index in batch.index[~finite].tolist():
            if index not in self.broken:
                name = self.names.get(index, "what the draft wrote itself")
                Console(stderr=True, soft_wrap=True).print(
                    f"skipped {name}: the target's features are not finite there", highlight=False, markup=False
                )
            self.broken.add(index)
        if len(self.broken) > max(MOST_BROKEN, self.seen / 2):
            raise DataError(
                f"the target's features are not finite in {len(self.broken)} of {self.seen} samples. Expected numbers. "
                "Mend: features.dtype bfloat16 (float16 ends at 65504), or check the target's weights"
            )
        return muted(batch, finite)


def batch_of(inputs: dict[str, Any]) -> Batch:
    """The Batch in a dict that also holds other things."""
    return Batch(**{name: inputs[name] for name in NAMES if name in inputs})
