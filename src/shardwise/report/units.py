"""Numbers as people read them: bytes, counts, times, shares, spans of ranks."""

import math

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNT = ("", "k", "M", "B", "T", "P")


def format_bytes(n: float, binary: bool = False) -> str:
    """Bytes with three significant digits: GB = 1e9 bytes, or GiB = 2**30 bytes when `binary`."""
    return _scaled(n, _BINARY if binary else _DECIMAL, 1024 if binary else 1000, " ")


def format_apart(n: float, other: float) -> tuple[str, str]:
    """Two different numbers of bytes with as many digits as tell them apart, at least three."""
    texts = format_bytes(n), format_bytes(other)
    size = next(size for size in (1e18, 1e15, 1e12, 1e9, 1e6, 1e3, 1.0) if max(n, other) >= size or size == 1.0)
    unit, digits = _DECIMAL[round(math.log10(size) / 3)], 1
    while texts[0] == texts[1] and n != other and digits < 9:
        texts = f"{n / size:.{digits}f} {unit}", f"{other / size:.{digits}f} {unit}"
        digits += 1
    return texts


def format_count(n: float) -> str:
    """A count with three significant digits: 7.00B is 7e9, 1.20T is 1.2e12."""
    return _scaled(n, _COUNT, 1000, "")


def format_time(seconds: float) -> str:
    """Seconds from nanoseconds to days, three significant digits below a minute."""
    if seconds < 0:
        return "-" + format_time(-seconds)
    if seconds < 59.95:
        for unit, size in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3)):
            if 0 < seconds < 999.5 * size:
                return f"{_digits(seconds / size)} {unit}"
        return f"{_digits(seconds)} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes} min {whole % 60:02d} s"
    if days < 2:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{days} d {hours % 24:02d} h"


def format_share(fraction: float, signed: bool = False) -> str:
    """A fraction as a percentage: 0.0123 is 1.23%. Exactly zero is 0%; what would round to zero is <0.01%."""
    percent = 100 * fraction
    if percent == 0:
        return "0%"
    sign = "-" if percent < 0 else "+" if signed else ""
    size = abs(percent)
    if size < 0.01:
        return "<0.01%" if not signed else f"{sign}0.01% or less"
    return f"{sign}{_digits(size) if size < 999.5 else format(size, ',.0f')}%"


def format_things(n: int, what: str) -> str:
    """1 rank, 2 ranks; 1 micro-batch, 2 micro-batches."""
    return f"{n} {what}" if n == 1 else f"{n:,} {what}{'es' if what.endswith('ch') else 's'}"


def format_spans(numbers: tuple[int, ...]) -> str:
    """Ascending integers, runs joined: (1, 2, 3, 5) is "1-3,5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Ascending ranks as a name: "rank 3", "ranks 0-3,8"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_spans(ranks)}"


def format_role(role: str, ranks: tuple[int, ...]) -> str:
    """A role's name with its ranks: "all (ranks 0-7)", or only the ranks where they are its name."""
    spans = format_ranks(ranks)
    return role if role == spans else f"{role} ({spans})"


def _scaled(n: float, units: tuple[str, ...], step: int, gap: str) -> str:
    sign, size, index = "-" if n < 0 else "", abs(n), 0
    # 999.5 and more would be printed as 1000: that belongs to the next unit.
    while size >= step - (0.5 if index else 0) and index < len(units) - 1:
        size /= step
        index += 1
    number = _digits(size) if index or size != int(size) else str(int(size))
    return f"{sign}{number}{gap}{units[index]}".rstrip()


def _digits(size: float) -> str:
    """Three significant digits, never fewer than the integer part: 1.23, 12.3, 123, 1023."""
    if size >= 99.95:
        return f"{size:.0f}"
    if size >= 9.995:
        return f"{size:.1f}"
    return f"{size:.2f}"
