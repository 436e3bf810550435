"""How kernels are compiled: without the GIL, and kept on disk so that a second start is quick.

numba keeps machine code beside the source and notices only changes of the file that a kernel is
in, not of those that it calls. So the cache's folder is named after the content of all of them.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _sources_hash() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def cache_folder() -> Path:
    """Return where compiled kernels are kept: in PERFLEDGER_CACHE, or ~/.cache/perfledger."""
    named = os.environ.get("PERFLEDGER_CACHE")
    root = Path(named) if named else Path.home() / ".cache" / "perfledger"
    return root / "kernels" / _sources_hash()


def is_compiled() -> bool:
    """Return whether an earlier start has left compiled kernels."""
    return any(cache_folder().rglob("*.nbc"))


setattr(numba.config, "CACHE_DIR", str(cache_folder()))  # noqa: B010 (numba makes these late)


def compiled(function: Callable[..., object]) -> Callable[..., Any]:
    """Return a kernel, compiled on its first call. It may not raise, and checks its own bounds."""
    options: dict[str, Any] = {"cache": True, "nogil": True, "no_cfunc_wrapper": True}
    kernel: Callable[..., Any] = numba.njit(**options)(function)
    return kernel


def part(function: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that only kernels call: it is compiled into them, at half the cost."""
    options: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
    inner: Callable[..., Any] = numba.njit(**options)(function)
    return inner


# Kernels read bytes by address: an array that is handed to a function has its references counted,
# which costs more than reading a field does. Whoever calls has checked the bounds.


@intrinsic
def load8(context: Any, address: Any) -> Any:
    """Return the byte at an address as int64."""
    return types.int64(types.int64), _loader(8)


@intrinsic
def load32(context: Any, address: Any) -> Any:
    """Return four bytes at an address, little-endian, as int64 that is never negative."""
    return types.int64(types.int64), _loader(32)


@intrinsic
def load64(context: Any, address: Any) -> Any:
    """Return eight bytes at an address, little-endian, as int64."""
    return types.int64(types.int64), _loader(64)


def _loader(bits: int) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
        loaded = builder.load(pointer, align=1)
        return loaded if bits == 64 else builder.zext(loaded, ir.IntType(64))

    return generate


@intrinsic
def store8(context: Any, address: Any, value: Any) -> Any:
    """Write the low byte of a number to an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        builder.store(builder.trunc(arguments[1], ir.IntType(8)), pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def store64(context: Any, address: Any, value: Any) -> Any:
    """Write a number to eight bytes at an address, little-endian."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store(arguments[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the memory at an address before it is read; any address will do."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), kind)
        # For reading, to stay in all caches, data.
        builder.call(call, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def copy_bytes(context: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy bytes from one address to another, as memcpy does: thrice as fast as a loop."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        to, of = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in arguments[:2])
        copy: Any = cgutils.raw_memcpy
        copy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
