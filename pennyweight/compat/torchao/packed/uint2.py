"""torchao.prototype.dtypes.uint2: four 2-bit codes per byte, the first highest."""

from .bit_fields import down_size_uint2 as down_size
from .bit_fields import pack_uint2, unpack_uint2
from .bit_fields import up_size_uint2 as up_size

__all__ = ["down_size", "pack_uint2", "unpack_uint2", "up_size"]
