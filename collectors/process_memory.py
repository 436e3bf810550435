"""How the collector's process uses the allocator of glibc: it keeps what it will need again.

Each segment takes and frees tens of megabytes. As glibc comes, these go back to the kernel and are
cleared page by page when they are asked for again: a tenth of all CPU at full load (measured).
"""

import ctypes

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 256 * 2**20
_LARGEST_THRESHOLD = 32 * 2**20


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process, up to 256 MiB; return whether that is possible."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # another C library
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
    )
    return all([mallopt(name, value) == 1 for name, value in settings])
