"""A GPU on the CPU that finds races: copies run at once, but only what streams and events promise counts as an order.

Every stream counts its operations, and knows of the others' those before an event that it waited for. An access to
memory after one on another stream, at least one of which writes, is a race unless the stream knows of the earlier one.
The allocator hands out freed memory at once, so freeing counts as a write of the computing stream.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dpshard.records.offload.copies import Gpu


class RaceError(Exception):
    pass


class Stream:
    def __init__(self, name, forgets):
        self.name, self.forgets, self.known = name, forgets, {name: 0}

    def record_event(self):
        return Event(self.name, {**self.known})

    def wait_event(self, event):
        if (self.name, event.stream) != self.forgets:
            self.known |= {name: max(n, self.known.get(name, 0)) for name, n in event.known.items()}


class Event:
    waits_of_the_cpu = 0

    def __init__(self, stream, known):
        self.stream, self.known = stream, known

    def synchronize(self):
        Event.waits_of_the_cpu += 1


class SimulatedGpu(Gpu):
    """`could`: bytes that tensors could have, of which `takes()` are taken; `forgets`: (a stream, whom it awaits)."""

    def __init__(self, *, forgets=None, could=2**40, takes=lambda: 0):
        super().__init__(torch.device("cpu"))
        self.forgets, self.could, self.taken = forgets, could, takes
        self.compute, self._names = Stream("compute", forgets), iter(("out", "into"))
        self.moved = {"out": 0, "into": 0}
        self._accesses = {}  # by address: the storage, and (start, stop, stream, count, writes) of each access

    def current(self):
        return self.compute

    def stream(self):
        return Stream(next(self._names), self.forgets)

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, nbytes):
        room = torch.full((nbytes,), 77, dtype=torch.uint8)
        self.uses(room, self.compute, writes=True)
        return room

    def copy(self, target, source, stream):
        self.moved[stream.name] += source.nbytes
        self.uses(source, stream, writes=False)
        self.uses(target, stream, writes=True)
        target.copy_(source)

    def uses(self, x, stream, *, writes):
        """Note an access to `x`; raise RaceError if it does not come after those before it."""
        self.find_freed()
        storage, start = x.untyped_storage(), x.data_ptr()
        _, accesses = self._accesses.setdefault(storage.data_ptr(), (StorageWeakRef(storage), []))
        _require_order(accesses, start, start + x.nbytes, stream, writes)
        stream.known[stream.name] += 1
        accesses.append((start, start + x.nbytes, stream.name, stream.known[stream.name], writes))

    def find_freed(self):
        """Raise RaceError if memory was freed that the computing stream may not use yet."""
        for address, (storage, accesses) in list(self._accesses.items()):
            if storage.expired():
                del self._accesses[address]
                _require_order(accesses, 0, 2**64, self.compute, True)

    def could_be_taken(self):
        return self.could


def _require_order(accesses, start, stop, stream, writes):
    for first, last, name, count, wrote in accesses:
        if first < stop and start < last and (writes or wrote) and stream.known.get(name, 0) < count:
            raise RaceError(f"{stream.name} {'writes' if writes else 'reads'} memory that {name} may still use")
