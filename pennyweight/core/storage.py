"""``data_ptr()`` and ``untyped_storage()`` of a quantized tensor: they identify its memory but cannot be read from.

Codes, scales and offsets are separate buffers in their own formats, while dtype and shape are those of a float tensor.
Code that reads ``shape`` numbers of ``dtype`` from an address would get wrong numbers and read past the end. Libraries
also compare addresses, to find tied weights or weights they have already handled. So ``data_ptr()`` returns an
:class:`Address`, which can be compared and hashed but not converted to a number.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

REFUSAL = (
    "the memory of a quantized tensor holds codes and scales, not numbers of its dtype, so it cannot be read or "
    "written as such. Save a model with pennyweight.save(model, folder) and load it with pennyweight.load(folder, "
    "model). Save a transformers or diffusers model with model.save_pretrained(folder). For other writers, "
    "pennyweight.io.flatten(model.state_dict()) returns plain tensors and metadata. tensor.dequantize() returns a "
    "float copy"
)


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError with the calls to use instead."""
    raise RuntimeError(REFUSAL)


class Address:
    """``data_ptr()`` of a quantized tensor: equal for tensors that share the same parts, but not a number.

    where    addresses of all parts: tensors that share codes and differ in scales are not equal
    storage  whether it is the address of the tensor's storage

    Raises RuntimeError if it is used as a number (ctypes, arithmetic, ordering), or if the address of a tensor is
    compared with that of a storage to find the tensor's offset in it.
    """

    __slots__ = ("_storage", "_where")

    def __init__(self, where: tuple[int | Address, ...], storage: bool = False) -> None:
        self._where, self._storage = where, storage

    def of_storage(self) -> Address:
        """The address of this tensor's storage."""
        return Address(self._where, storage=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Address):
            return False
        if self._storage is not other._storage:
            refuse()
        return self._where == other._where

    def __hash__(self) -> int:
        return hash((self._storage, self._where))

    def __repr__(self) -> str:
        return f"<address of a quantized tensor, {hash(self):x}>"

    __int__ = __index__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __and__ = refuse
    _as_parameter_ = property(refuse)  # ctypes reads this from objects that are not numbers


class Storage(torch.UntypedStorage):
    """``untyped_storage()`` of a quantized tensor: its size is the bytes of all parts, its content is not accessible.

    It is on the meta device, so torch's C++ code refuses to read it.
    """

    _address: Address | int

    @classmethod
    def of(cls, nbytes: int, address: Address | int) -> Storage:
        """address: the tensor's address."""
        self: Storage = torch.UntypedStorage.__new__(cls, nbytes, device="meta")  # type: ignore[call-arg]
        self._address = address.of_storage() if isinstance(address, Address) else address
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def data_ptr(self) -> Any:
        """Equal for tensors that share the same parts."""
        return self._address

    __new__ = _new_shared = from_buffer = from_file = refuse  # would allocate another storage to copy into
    __getitem__ = __setitem__ = __iter__ = __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = refuse
    clone = copy_ = cpu = cuda = to = tolist = fill_ = resize_ = byteswap = pin_memory = share_memory_ = refuse
    _write_file = _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = refuse
