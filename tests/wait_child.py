"""A process that waits in one known way: `python wait_child.py HOW [FILE]`. Says `ready` first."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time


def burn() -> None:
    while True:
        pass


def gil() -> None:
    threading.Thread(target=burn, name="spinner-2", daemon=True).start()
    burn()


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def condition() -> None:
    threading.Event().wait()


def sleep() -> None:
    time.sleep(1000)


def recv() -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def accept() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    server.accept()


def epoll() -> None:
    ours, _theirs = socket.socketpair()
    poller = select.epoll()
    poller.register(ours, select.EPOLLIN)
    poller.poll()


def poll() -> None:
    ours, _theirs = socket.socketpair()
    poller = select.poll()
    poller.register(ours, select.POLLIN)
    poller.poll()


def select_() -> None:
    ours, _theirs = socket.socketpair()
    select.select([ours], [], [])


def pipe() -> None:
    read_end, _write_end = os.pipe()
    os.read(read_end, 1)


def fsync() -> None:
    with open(sys.argv[2], "wb") as file:
        while True:
            file.write(bytes(65_536))
            os.fsync(file.fileno())
            file.seek(0)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def parent() -> None:
    subprocess.run([sys.executable, __file__, "sleep"])


def churn() -> None:
    while True:
        thread = threading.Thread(target=time.sleep, args=(0.002,))
        thread.start()
        thread.join()


def address() -> None:
    """Say where this Python's runtime state lies."""
    import ctypes

    print(ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime")), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    print("ready", flush=True)
    {"select": select_}.get(sys.argv[1], globals().get(sys.argv[1]))()
