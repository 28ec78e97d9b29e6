"""What a quantized tensor answers to code that asks for its memory: which memory it is, never a way to read it.

Codes, scales and offsets lie in several places and in formats of their own, while dtype and shape say float. Code that
reads ``shape`` numbers of ``dtype`` from an address would get other numbers, and bytes past the end. But an address is
also asked for only to be compared: that is how libraries find tied weights, and weights that they moved before. So
``data_ptr()`` gives an :class:`Address`, which can be compared and looked up in a table, and refuses to be a number.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

REFUSAL = (
    "the memory of a quantized tensor holds codes and scales, not numbers of its dtype, so it cannot be read or "
    "written as such. A model is saved by pennyweight.save(model, folder) and filled by pennyweight.load(folder, "
    "model); a transformers or diffusers model that was quantized as a whole is saved by "
    "model.save_pretrained(folder), one of transformers that was quantized in part after "
    "pennyweight.integrations.transformers.attach_quantizer(model). For another writer, "
    "pennyweight.flatten(model.state_dict()) gives plain tensors and metadata. tensor.dequantize() is a float copy"
)


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError with the calls to use instead."""
    raise RuntimeError(REFUSAL)


class Address:
    """``data_ptr()`` of a quantized tensor: equal for tensors over the same parts, and not a number.

    where    addresses of all parts: tensors that share codes and differ in scales are not equal
    storage  it is that of the tensor's storage

    Raises RuntimeError where it is used as a number: by ctypes, by arithmetic, by order; and where the address of a
    tensor is compared with that of a storage, to find where in it the tensor begins.
    """

    __slots__ = ("_storage", "_where")

    def __init__(self, where: tuple[int | Address, ...], storage: bool = False) -> None:
        self._where, self._storage = where, storage

    def of_storage(self) -> Address:
        """The address of the storage of the tensor that this is the address of."""
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
    _as_parameter_ = property(refuse)  # what ctypes asks of an object that is not a number


class Storage(torch.UntypedStorage):
    """``untyped_storage()`` of a quantized tensor: the bytes of all parts are counted, and cannot be reached.

    It lies on the meta device, so what torch's C++ code would read of it is refused there.
    """

    _address: Address | int

    @classmethod
    def of(cls, nbytes: int, address: Address | int) -> Storage:
        """address: that of the tensor."""
        self: Storage = torch.UntypedStorage.__new__(cls, nbytes, device="meta")  # type: ignore[call-arg]
        self._address = address.of_storage() if isinstance(address, Address) else address
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def data_ptr(self) -> Any:
        """Equal for tensors over the same parts."""
        return self._address

    __new__ = _new_shared = from_buffer = from_file = refuse  # another of the same class, to copy this one to
    __getitem__ = __setitem__ = __iter__ = __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = refuse
    clone = copy_ = cpu = cuda = to = tolist = fill_ = resize_ = byteswap = pin_memory = share_memory_ = refuse
    _write_file = _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = refuse
