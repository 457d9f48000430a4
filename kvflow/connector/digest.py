"""Digest a prompt, so that the two legs of a transfer can prove that they mean the same one."""

import hashlib
import sys
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16
# Converting a list holds the GIL; small pieces let the engine's thread in between.
_PIECE = 4096


def prompt_digest(prompt: Sequence[int], salt: str = "") -> bytes:
    """Return blake2b-16 over the token ids as little-endian u32, followed by the salt."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for start in range(0, len(prompt), _PIECE):
        digest.update(pack_u32(prompt[start : start + _PIECE]))
    digest.update(salt.encode("utf-8", "surrogatepass"))
    return digest.digest()


def pack_u32(values: Sequence[int]) -> bytes:
    """Pack whole numbers as little-endian u32; numbers that do not fit wrap around."""
    try:
        packed = array("I", values)
    except (OverflowError, TypeError):
        packed = array("I", [int(value) & 0xFFFF_FFFF for value in values])
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
