"""Where the row of a key is: an index from any int64 to the slots 0, 1, 2, ...

Promises:
- Every int64 is a key: 0, -1 and the extremes too. Whatever keys are inside, and in which order they came, each one
  is found, and nothing else is.
- A new key gets the slot that was freed last, or the next one that never was used. Within a call slots are handed out
  in the order of first appearance, so the same calls give the same slots on any machine.
- `add` adds all of its keys, or raises a `MemoryError` and adds none.
- It takes 8 bytes a key for the key itself, and 4 bytes for each of 2 to 4 buckets a key (up to 4.6 where keys were
  removed too; a removed key keeps its bucket until the next rebuild).

How it works: open addressing over a power of two of buckets, each an int32. The hash of a key names its first bucket;
the next ones lie 1, 3, 6, 10, ... further, which comes to every bucket and keeps no runs that grow. A bucket holds 0
(never used: a search ends here), 1 (removed: it goes on) or a slot + 2, and the key at that slot tells whether it is
the right one. The buckets are at most half full, so most keys are found in the first round. All keys of a call take
the rounds together, as arrays; the keys that are left after the first one are few.

It is made for ids, not against an attacker who knows the hash. One thread at a time may use it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.server.memory import Column, Slots, advise_large_pages, check_available, reserve
from paceline.wire.memory import total_bytes

Keys = npt.NDArray[np.int64]
# What a bucket holds.
Entries = npt.NDArray[np.int32]

MAX_KEYS = 2**31 - 4

_EMPTY, _REMOVED, _FIRST = 0, 1, 2
# Keys looked up together: enough that calls cost little, so few that what is between two steps stays in the cache.
_CHUNK = 65_536
_MIN_BUCKETS = 1024
_LARGE_BYTES = 2**22


class KeyIndex:
    def __init__(self) -> None:
        max_keys = min(MAX_KEYS, total_bytes() // 8)
        # By entry, not by slot: the first two stand for no key.
        self._keys = Column(width=1, dtype=torch.int64, max_slots=max_keys + _FIRST, what="the keys of an index")
        self._key_tensor = self._keys.tensor.view(-1)
        self._key_array: Keys = self._key_tensor.numpy()
        what = "the free slots of an index"
        self._freed = Column(width=1, dtype=torch.int32, max_slots=max_keys, what=what, urgent=True)
        self._freed_array: Entries = self._freed.tensor.view(-1).numpy()
        self._num_freed = 0
        self._num_removed = 0
        self._num_slots = 0
        self._set_table(_table_of(_MIN_BUCKETS))

    def __len__(self) -> int:
        return self._num_slots - self._num_freed

    @property
    def num_slots(self) -> int:
        """Slots that were ever used: all are below this."""
        return self._num_slots

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes + self._keys.num_bytes + self._freed.num_bytes

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The slot of each key, -1 where there is none."""
        wanted = _array(keys)
        slots = np.empty(len(wanted), dtype=np.int64)
        open_keys, open_places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start in range(0, len(wanted), _CHUNK):
            part = wanted[start : start + _CHUNK]
            places = self._homes(part)
            entries, known = self._look(places)
            np.subtract(entries, _FIRST, out=slots[start : start + _CHUNK])
            other = known != part
            other |= entries < _FIRST
            unmatched = np.flatnonzero(other)
            slots[unmatched + start] = -1
            unmatched = unmatched[entries[unmatched] != _EMPTY]
            open_keys.append(unmatched + start)
            open_places.append(places[unmatched])
        self._find_further(wanted, slots, np.concatenate(open_keys), np.concatenate(open_places))
        return torch.from_numpy(slots)

    def add(self, keys: torch.Tensor) -> torch.Tensor:
        """The slot of each key, a new one where there was none; a key may come more than once."""
        wanted = _array(keys)
        slots = np.empty(len(wanted), dtype=np.int64)
        before = self._num_slots, self._num_freed
        added = [np.empty(0, np.int64)]
        start = 0
        try:
            while start < len(wanted):
                if 2 * (len(self) + self._num_removed) > len(self._table):
                    self._rebuild()
                # So few that the buckets never fill up, even if all of these are new.
                part = wanted[start : start + min(_CHUNK, len(self._table) // 4)]
                slots[start : start + len(part)], new = self._add_part(part)
                added.append(new)
                start += len(part)
        except MemoryError:
            self._undo(np.concatenate(added), before)
            raise
        return torch.from_numpy(slots)

    def remove(self, keys: torch.Tensor) -> torch.Tensor:
        """Forget these keys; the slots that are free now, in the order of the keys. Unknown keys are none."""
        wanted = _array(keys)
        slots = self.find(keys).numpy()
        _, firsts = np.unique(slots, return_index=True)
        firsts.sort()
        firsts = firsts[slots[firsts] >= 0]
        freed = slots[firsts]
        self._freed.grow(self._num_freed + len(freed))
        self._table[self._places_of(wanted[firsts], freed)] = _REMOVED
        self._freed_array[self._num_freed : self._num_freed + len(freed)] = freed
        self._num_freed += len(freed)
        self._num_removed += len(freed)
        return torch.from_numpy(freed)

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The key of each slot; of a slot that is free, any."""
        return torch.index_select(self._key_tensor, 0, slots + _FIRST)

    def _find_further(self, wanted: Keys, slots: Slots, at: Slots, places: Slots) -> None:
        """The second and later rounds, for the keys at these positions."""
        keys, step = wanted[at], 0
        while len(at):
            step += 1
            places += step
            places &= self._mask
            entries, known = self._look(places)
            hit = known == keys
            hit &= entries >= _FIRST
            slots[at[hit]] = entries[hit] - _FIRST
            on = np.flatnonzero(~hit & (entries != _EMPTY))
            at, places, keys = at[on], places[on], keys[on]

    def _add_part(self, keys: Keys) -> tuple[Slots, Keys]:
        """The slots, and which keys are new. A new key first claims a bucket with its position in the call, as a
        negative number, and the first of those that want the same one gets it; so equal keys, which go through the
        same buckets in the same rounds, all come to the claim of the first of them."""
        self._keys.grow(_FIRST + max(self._num_slots, len(self) + len(keys)))
        entries = np.empty(len(keys), dtype=np.int32)
        taken = np.empty(len(keys), dtype=np.int64)
        at, places, step = np.arange(len(keys), dtype=np.int32), self._homes(keys), 0
        while len(at):
            claims = -1 - at
            found = self._buckets(places)
            free = np.flatnonzero(found == _EMPTY)[::-1]
            if len(free):
                # Of several values for one bucket the last stays; they are in reverse.
                wanted = places[free]
                self._table[wanted] = claims[free]
                found[free] = self._buckets(wanted)
            entries[at], taken[at] = found, places
            on = self._others(keys, at, found, np.flatnonzero(found != claims))
            step += 1
            at, places = at[on], (places[on] + step) & self._mask
        claims = -1 - np.arange(len(keys), dtype=np.int32)
        first = np.flatnonzero(entries == claims)
        if len(first):
            claims[first] = self._next_slots(len(first)) + _FIRST
            self._table[taken[first]] = claims[first]
            self._key_array[claims[first]] = keys[first]
            repeated = np.flatnonzero(entries < 0)
            entries[repeated] = claims[-1 - entries[repeated]]
        return entries - np.int64(_FIRST), keys[first]

    def _others(self, keys: Keys, at: Entries, found: Entries, among: Slots) -> Slots:
        """Of the rounds of `_add_part`: who came to the bucket of another key, by position in `at`."""
        found = found[among]
        known = np.where(found < 0, keys[-1 - np.minimum(found, -1)], self._key_array[np.maximum(found, 0)])
        other: Slots = among[(known != keys[at[among]]) | (found == _REMOVED)]
        return other

    def _undo(self, added: Keys, before: tuple[int, int]) -> None:
        """Forget the keys of an `add` that failed. Their slots were not handed out: the free ones are still written
        where they were."""
        slots = self.find(torch.from_numpy(added)).numpy()
        self._table[self._places_of(added, slots)] = _REMOVED
        self._num_removed += len(added)
        self._num_slots, self._num_freed = before

    def _next_slots(self, num: int) -> Entries:
        reused = min(num, self._num_freed)
        old = self._freed_array[self._num_freed - reused : self._num_freed][::-1]
        new = np.arange(self._num_slots, self._num_slots + num - reused, dtype=np.int32)
        self._num_freed -= reused
        self._num_slots += num - reused
        return np.concatenate([old, new])

    def _rebuild(self) -> None:
        """New buckets for the keys that are left. Not more than 7/16 of them will be used, so that the next rebuild is
        far, even if keys are removed as often as added; where keys are only added, it is 1/4."""
        num_buckets = _MIN_BUCKETS
        while 16 * len(self) > 7 * num_buckets:
            num_buckets *= 2
        old, old_removed = self._table, self._num_removed
        self._set_table(_table_of(num_buckets))
        self._num_removed = 0
        try:
            used = np.ones(self._num_slots, dtype=bool)
            used[self._freed_array[: self._num_freed]] = False
            for start in range(0, self._num_slots, _CHUNK):
                entries = np.flatnonzero(used[start : start + _CHUNK]).astype(np.int32)
                entries += start + _FIRST
                self._put(entries)
        except MemoryError:
            self._set_table(old)
            self._num_removed = old_removed
            raise

    def _put(self, entries: Entries) -> None:
        """Place these, whose keys are known and differ, in the empty buckets."""
        places, step = self._homes(self._key_array[entries]), 0
        while len(entries):
            free = np.flatnonzero(self._buckets(places) == _EMPTY)
            self._table[places[free]] = entries[free]
            on = np.flatnonzero(self._buckets(places) != entries)
            step += 1
            entries, places = entries[on], (places[on] + step) & self._mask

    def _places_of(self, keys: Keys, slots: Slots) -> Slots:
        """The buckets that hold these slots, whose keys are these."""
        places, step = self._homes(keys), 0
        while len(off := np.flatnonzero(self._table[places] != slots + _FIRST)):
            # All of those that are not there yet have come equally far.
            step += 1
            places[off] = (places[off] + step) & self._mask
        return places

    def _look(self, places: Slots) -> tuple[Entries, Keys]:
        """What these buckets hold, and the key at that slot. (At single numbers torch is faster than numpy.)"""
        entries = self._buckets(places)
        return entries, torch.index_select(self._key_tensor, 0, torch.from_numpy(entries)).numpy()

    def _buckets(self, places: Slots) -> Entries:
        entries: Entries = torch.index_select(self._table_tensor, 0, torch.from_numpy(places)).numpy()
        return entries

    def _homes(self, keys: Keys) -> Slots:
        """The first bucket of each key. The upper half is folded into the lower, so that the product, of which the
        top bits count, depends on all bits: ids that differ only high up, or count up in large strides, spread too."""
        bits = keys.view(np.uint64)
        mixed = bits >> np.uint64(32)
        mixed ^= bits
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed >>= self._shift
        return mixed.view(np.int64)

    def _set_table(self, table: Entries) -> None:
        self._table = table
        self._table_tensor = torch.from_numpy(table)
        self._mask = np.int64(len(table) - 1)
        self._shift = np.uint64(65 - len(table).bit_length())


def _table_of(num_buckets: int) -> Entries:
    num_bytes = 4 * num_buckets
    if num_bytes < _LARGE_BYTES:
        return np.zeros(num_buckets, dtype=np.int32)
    check_available(num_bytes, "the buckets of an index")
    mapping = reserve(num_bytes, "the buckets of an index")
    advise_large_pages(mapping)
    return np.frombuffer(mapping, dtype=np.int32)


def _array(keys: torch.Tensor) -> Keys:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys are {keys.dtype} of shape {tuple(keys.shape)}; they must be int64 in one dimension")
    array: Keys = keys.contiguous().numpy()
    return array
