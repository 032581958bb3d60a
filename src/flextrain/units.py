"""Numbers as people read them: bytes, seconds, counts and dollars."""

import math
import re
from collections.abc import Mapping

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _split(text: str | float, units: Mapping[str, float], kind: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if not match or match[2] not in units:
        raise ValueError(f"{text!r} is not a {kind}; write a number and one of {', '.join(u for u in units if u)}")
    return float(match[1]) * units[match[2]]


def parse_bytes(text: str | float) -> int:
    """'16MiB' -> 16777216; 'kB, MB' count in thousands, 'KiB, MiB' in 1,024s. Raises ValueError."""
    return round(_split(text, _BYTE_UNITS, "size"))


def parse_seconds(text: str | float) -> float:
    """'90s', '1.5h', 20 -> seconds. Raises ValueError."""
    return _split(text, _SECONDS, "duration")


def format_bytes(size_bytes: float) -> str:
    """1536000 -> '1.5 MB' (thousands, as disks and networks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 999.5:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def format_seconds(seconds: float) -> str:
    """3725 -> '1:02:05'; below a minute '12.3 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_count(count: float) -> str:
    """1_090_000 -> '1.09M'."""
    for unit in ("", "k", "M", "B"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def format_usd(usd: float) -> str:
    """0.0312 -> '$0.0312', 0.0000213 -> '$0.0000213': cents from a dollar up; below, four digits or as many as show
    three figures, so that a laptop run does not read $0.00."""
    digits = 2 if abs(usd) >= 1 or usd == 0 else max(4, 2 - math.floor(math.log10(abs(usd))))
    return f"{'-' if usd < 0 else ''}${abs(usd):,.{digits}f}"
