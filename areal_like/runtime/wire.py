"""Python values and tensors between the driver and a worker, over a Unix socket pair.

Small messages travel inside the socket. Large ones are written once into anonymous memory (`memfd_create`) whose file
descriptor is sent along: one descriptor a message however many tensors it holds, closed as soon as it is mapped,
without a name that could be left behind, and outside the small /dev/shm of containers. The receiver's tensors are
private (copy-on-write) views of that memory. A packet made once can be sent to many workers.

Only the two processes at the ends of the socket pair can write to it, which is why unpickling is safe here.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
import threading
from typing import Any

import torch

_INLINE_LIMIT = 64 * 1024
_ALIGNMENT = 64
_HEADER = struct.Struct("<QB")  # length of the frame that follows; 1 when a file descriptor comes with this header


class _Pickler(pickle.Pickler):
    """Sends a tensor as its own bytes, out of band: not the whole storage that it is a view of, not its device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            flat = obj.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy() if flat.numel() else b""
            return _rebuild_tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _rebuild_tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("areal-like", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # no room is an OSError here, not a SIGBUS while writing
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Packet:
    """A value ready to be sent, once or to many receivers. Close it (or let it be collected) after the last send."""

    def __init__(self, value: Any) -> None:
        self.descriptor: int | None = None
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        sizes = [part.nbytes for part in parts]
        total = sum(map(_aligned, sizes))
        inline = total <= _INLINE_LIMIT
        if inline:
            memory: Any = bytearray(total)
        else:
            self.descriptor = _anonymous_file(total)
            memory = mmap.mmap(self.descriptor, total)
        offset = 0
        with memoryview(memory) as view:
            for part, size in zip(parts, sizes, strict=True):
                view[offset : offset + size] = part
                offset += _aligned(size)
        if not inline:
            memory.close()
        self.frame = pickle.dumps((sizes, bytes(memory) if inline else None))

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    __del__ = close


def _unpack(frame: bytes, descriptor: int | None) -> Any:
    sizes, inline = pickle.loads(frame)
    if descriptor is None:
        view = memoryview(bytearray(inline))
    else:
        # Through torch, because an `mmap.mmap` keeps a descriptor open for as long as it lives.
        size = os.fstat(descriptor).st_size
        view = memoryview(torch.from_file(f"/dev/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8).numpy())
    parts = []
    offset = 0
    for size in sizes:
        parts.append(view[offset : offset + size])
        offset += _aligned(size)
    return pickle.loads(parts[0], buffers=parts[1:])


class Channel:
    """One end of the socket pair. `send` may be called from several threads, `recv` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, value: Any) -> None:
        """Raises OSError when the other end is gone."""
        packet = value if isinstance(value, Packet) else Packet(value)
        try:
            with self._lock:
                header = _HEADER.pack(len(packet.frame), packet.descriptor is not None)
                descriptors = [] if packet.descriptor is None else [packet.descriptor]
                sent = socket.send_fds(self._socket, [header], descriptors)
                self._socket.sendall(header[sent:] + packet.frame)
        finally:
            if packet is not value:
                packet.close()

    def recv(self) -> Any:
        """Raises EOFError when the other end is gone."""
        try:
            header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
            if not header:
                raise EOFError
            header += self._read(_HEADER.size - len(header))
            length, with_descriptor = _HEADER.unpack(header)
            frame = self._read(length)
        except ConnectionError as error:
            raise EOFError from error
        try:
            return _unpack(frame, descriptors[0] if with_descriptor else None)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def close(self) -> None:
        self._socket.close()
