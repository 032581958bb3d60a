"""Numbers as people read them: bytes, seconds, counts and dollars."""

import math


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
