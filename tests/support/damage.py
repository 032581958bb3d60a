"""Damage to a file, of a kind and at a place chosen by a seed."""

import random
from pathlib import Path

HOWS = ["flip", "flip", "flips", "truncate", "empty", "extend", "zeros", "delete", "another step's"]


def damage(rng: random.Random, path: Path, others: list[bytes]) -> str:
    """Returns what was done; `others` are contents to choose from for the file of another step."""
    how, raw = rng.choice(HOWS), bytearray(path.read_bytes())
    if how in ("flip", "flips"):
        for place in rng.sample(range(len(raw)), 1 if how == "flip" else min(8, len(raw))):
            raw[place] ^= 1 << rng.randrange(8)
    elif how in ("truncate", "empty"):
        del raw[0 if how == "empty" else rng.randrange(len(raw)) :]
    elif how == "extend":
        raw += rng.randbytes(rng.randint(1, 5000))
    elif how == "zeros":
        start = rng.randrange(len(raw))
        raw[start : start + 512] = bytes(len(raw[start : start + 512]))
        raw[start] ^= not any(path.read_bytes()[start : start + 512])  # it was zeros before
    path.write_bytes(raw)
    if how == "delete":
        path.unlink()
    if how == "another step's":
        path.write_bytes(rng.choice(others))
    return how
