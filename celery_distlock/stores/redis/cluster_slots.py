"""Slots of a cluster: the slot of a key, and a text that is in a given slot."""

import binascii
import itertools

SLOTS = 16384


def slot_of(key: bytes) -> int:
    """Return the slot of *key*, by the cluster's specification."""
    _, brace, rest = key.partition(b"{")
    tag, end, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if brace and end and tag else key, 0) % SLOTS


# Tags of four letters out of sixteen that differ in four bits: as a CRC is linear, every checksum
# is that of one of them, and is found from the checksums of their halves.
_PAIRS = [bytes(pair) for pair in itertools.product(b"@ABCDEFGHIJKLMNO", repeat=2)]
_FRONTS = {binascii.crc_hqx(pair + b"@@", 0): pair for pair in _PAIRS}
_BACKS = {binascii.crc_hqx(b"@@" + pair, 0): pair for pair in _PAIRS}
_MIDDLE = binascii.crc_hqx(b"@@@@", 0)


def tag_of(slot: int) -> str:
    """Return a short text that falls in *slot*: channels are in slots, too."""
    for checksum in range(slot, 1 << 16, SLOTS):
        for front, pair in _FRONTS.items():
            back = _BACKS.get(front ^ checksum ^ _MIDDLE)
            if back is not None:
                return (pair + back).decode()
    raise ValueError(f"there is no slot {slot}")
